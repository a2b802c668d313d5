"""The native engine: plain tensors, explicit collectives, one executor.

    plan + comm  ->  this rank's stages, sharded  ->  step(batch): pad, cut, run the schedule, synchronise, update

The loss of a step is the sum of the cross-entropy over all microbatches and data-parallel ranks, divided by the labels
of the whole step. Gradients, their global norm and the weights after an update equal one process's at every layout.
Left out: learning-rate schedules, clipping, checkpoints.
"""

import torch
from torch import Tensor

from models.architectures import build
from models.batch import Batch
from models.config import ModelConfig
from models.initial import canonical_name
from models.model import Model
from parallel.comm import Comm, Site
from parallel.compiled import not_compiled
from parallel.deferral import Deferral
from parallel.edges import not_run
from parallel.engines.engine import Quantity, StepFacts, labelled
from parallel.engines.gathered import Gathered, put_together
from parallel.engines.settings import EngineSettings
from parallel.flat_weights import FlatWeights
from parallel.gradients import Gradients
from parallel.layouts import Layout
from parallel.parallelize import materialise, parallelize, split_backward
from parallel.pipeline import Observer, Pipeline, Unobserved
from parallel.plan import Plan, Shard
from parallel.schedule import is_split
from parallel.sequence import microbatches, pad


def unsupported(_config: ModelConfig, layout: Layout) -> str | None:
    """Why this engine cannot run a layout, as one line; None when it can."""
    if layout.cp > 1:
        return f"the native engine does not run context parallelism yet: cp = {layout.cp}; use cp = 1"
    if layout.zero > 1:
        return f"the native engine deals optimizer states, nothing else: zero = {layout.zero}; use zero <= 1"
    return not_run(layout)


class NativeEngine:
    """One rank of one layout of one model.

    Args:
        plan: the partitioning. Its world must be the one `comm` was made for.
        comm: this rank's groups.
        settings: seed, dtype, device and optimizer.
        compiled: whether blocks are compiled; the first step does it.
        model: this rank's part, partitioned and with its values; None builds it and draws the values from the seed.

    Raises ValueError for a layout that `unsupported` names, or `not_compiled` where blocks are to be compiled.
    """

    has_own_threads = False

    def __init__(
        self, *, plan: Plan, comm: Comm, settings: EngineSettings, compiled: bool = False, model: Model | None = None
    ) -> None:
        reason = unsupported(plan.config, plan.layout) or (not_compiled(plan.layout) if compiled else None)
        if reason is not None:
            raise ValueError(reason)
        self.plan, self.comm, self.dtype, self.device = plan, comm, settings.dtype, settings.device
        self.deferral = Deferral()
        if model is None:
            with torch.device("meta"):
                model = build(plan.config)
            parallelize(model, plan, comm, compiled=compiled)
            materialise(model, plan, comm, seed=settings.seed, dtype=self.dtype, device=self.device)
        self.model: Model = model
        # Elsewhere autograd's own products are quicker; a compiled block has products of its own.
        is_told = (plan.layout.tp > 1 or is_split(plan.table)) and not compiled
        writers = split_backward(model, self.deferral) if is_told else {}
        self.model.mask_key.seed = settings.seed
        self.model.train()
        self._pipeline = Pipeline(model=self.model, plan=plan, comm=comm, deferral=self.deferral, dtype=self.dtype)
        self.gradients = Gradients(self.model, plan, comm, self.deferral, writers, self.parts.values())
        self._flat_weights = FlatWeights(self.model, self.gradients, comm) if plan.layout.zero else None
        parameters = list(self.model.parameters()) if self._flat_weights is None else [self._flat_weights.own]
        self.optimizer = settings.optimizer_of(parameters)

    def step(self, batch: Batch, *, update: bool = True, observer: Observer | None = None) -> StepFacts:
        """Forward, backward, synchronisation and (unless `update` is false) one optimizer step.

        Args:
            batch: this data-parallel rank's share of the step, on the host; see `parallel.sequence.deal`.
            update: whether the weights change.
            observer: entered around every action.
        """
        watch = observer or Unobserved()
        comm = self.comm
        comm.phase = "step"
        count = torch.tensor(batch.num_loss_tokens(), device=self.device)
        counted = comm.all_reduce(count, "dp", site=Site(name="loss.tokens"), phase="step")
        self.gradients.zero()
        padded = pad(batch, self.plan).to(self.device, self.dtype)
        counted.wait()
        loss_tokens = labelled(int(count.item()))
        loss = self._pipeline.run(microbatches(padded, self.plan.layout), loss_tokens, watch)
        comm.phase = "step"
        with watch.synchronise():
            self.gradients.synchronise()
            # Nobody needs the two scalars before the step ends: they are on their way while weights are updated.
            norm = self.gradients.start_norm()
            comm.all_reduce(loss, "dp", site=Site(name="loss.sum"), phase="step").wait()
            summed = comm.all_reduce(loss, "pp", site=Site(name="loss.sum"), phase="step")
            if update:
                self.optimizer.step()
                if self._flat_weights is not None:
                    self._flat_weights.gather()
                self.model.mask_key.step += 1
            summed.wait()
            facts = StepFacts(loss=loss.item(), loss_tokens=loss_tokens, gradient_norm=norm.wait())
        return facts

    @property
    def parts(self) -> dict[int, Model]:
        """This rank's stages by number, each a model of its own; they share their modules with `model`."""
        return self._pipeline.parts

    # ---- what this rank holds ---------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> tuple[int, ...]:
        return self.plan.blocks_of(self.comm.coordinate.pp)

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """Of the gradients that this rank holds, padding aside."""
        return self.gradients.num_elements * self.gradients.flat.element_size()

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state tensors as they are; zero before its first step."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))

    def named_shards(self, quantity: Quantity) -> dict[str, tuple[Shard, Tensor]]:
        """This rank's gradients or weights with the part of the whole that each is, by canonical name."""
        shards = {}
        for name, parameter in self.model.named_parameters():
            tensor = self.gradients.views[name] if quantity == "gradient" else parameter.detach()
            shards[canonical_name(self.plan.config, name)] = (self.plan.shard(name, self.comm.coordinate.tp), tensor)
        return shards

    def gather(self, quantity: Quantity) -> Gathered | None:
        """Whole gradients or weights on rank 0, None elsewhere. Collective; for checks, not for speed."""
        if quantity == "gradient":
            self.gradients.gather()
        # Copies: a gradient is a view of one flat buffer, and a view travels with all of what it is a view of.
        shards = self.named_shards(quantity).items()
        local = {name: (shard, tensor.to("cpu", copy=True)) for name, (shard, tensor) in shards}
        everyone = self.comm.collect_objects(local)
        return None if everyone is None else put_together(everyone)
