"""The DeepSpeed engine: ZeRO for data parallelism, its PipelineModule for stages.

    pp = 1    deepspeed.initialize on the model and its loss; zero 0, 1, 2, 3
    tp > 1    the same with AutoTP (`parallel/engines/deepspeed_tensor.py`)
    cp > 1    the same with Ulysses attention (`parallel/engines/deepspeed_sequence.py`); zero is over dp x cp
    pp > 1    a PipelineModule of the model's blocks; zero 0 and 1: it refuses the others

DeepSpeed divides a loss by the microbatches and averages gradients over the ranks; a mean of means is not the mean, so
each sum of cross-entropy is divided by the labels of the whole step and multiplied by what DeepSpeed will divide by.
The loss it tells other stages is rounded to float32, and so is the gradient norm it has under ZeRO: both are computed
here from what it holds. In bfloat16 its ZeRO updates a float32 copy of the parameters, with float32 moments: accounting
calls that master weights. Without ZeRO it updates them as they are. It keeps no gradient after a step, so references
to them are taken when they are reduced.

It prints, logs and warns a lot: nothing of that gets out. Its shared-memory operator, compiled on first use, is
declared incompatible before it is asked for. It wants LOCAL_RANK and DS_ACCELERATOR in the environment, which
`launch/env.py` sets, and a process group. Source: deepspeed 0.19; ZeRO: arXiv 1910.02054. What is left out is told in
`parallel/engines/deepspeed_limits.py`.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.architectures import build
from models.batch import Batch
from models.head import CrossEntropy
from models.initial import canonical_name, initialise
from parallel.comm import Comm
from parallel.engines.deepspeed_config import ds_config
from parallel.engines.deepspeed_limits import unsupported
from parallel.engines.deepspeed_pieces import Piece, of_partition, of_shards, of_weights, whole
from parallel.engines.engine import Quantity, StepFacts
from parallel.engines.foreign import ForeignEngine
from parallel.engines.gathered import Gathered, joined
from parallel.engines.listed_layers import BlockLayer, Current, Parts, qualified_name
from parallel.engines.scored_model import ScoredModel
from parallel.engines.settings import EngineSettings
from parallel.engines.silence import silence
from parallel.parallelize import choose_attention
from parallel.pipeline import Observer, Unobserved
from parallel.plan import Plan, Shard
from parallel.recompute import apply_recompute
from parallel.schedule import Action
from parallel.sequence import microbatches, pad

with silence():
    import deepspeed
    import deepspeed.ops

    from parallel.engines.deepspeed_double import admitting_double, keep_double
    from parallel.engines.deepspeed_groups import SequenceGroups, TensorGroups, take_over
    from parallel.engines.deepspeed_pipeline import OF_PLAN, Instructions, pipeline_module
    from parallel.engines.deepspeed_sequence import shard_sequence
    from parallel.engines.deepspeed_tensor import complete, held_plan

# Asked for at the first use of a process group: nothing is compiled for this.
vars(deepspeed.ops)["__compatible_ops__"] = {}


class DeepspeedEngine(ForeignEngine):
    """One rank of one layout of one model.

    Args:
        plan: of the layout.
        comm: this rank's place.
        settings: seed, dtype, device and optimizer.
        partition: DeepSpeed's partition method; others than this one make stages that are not the plan's.

    Raises ValueError for a layout that `unsupported` names.
    """

    def __init__(self, *, plan: Plan, comm: Comm, settings: EngineSettings, partition: str = OF_PLAN) -> None:
        reason = unsupported(plan.config, plan.layout)
        super().__init__(plan=plan, comm=comm, settings=settings, reason=reason)
        self._loss, self._loss_tokens, self._updates = torch.zeros(()), 0, True
        self._pieces: list[Piece] = []
        self._score = CrossEntropy()
        with torch.device("meta"):
            self.model = build(plan.config)
        self.model.mask_key.seed = settings.seed
        self.model.train()
        with silence():
            # The process group is there: this only tells DeepSpeed so.
            deepspeed.init_distributed(verbose=False)
            module = self._module(settings.seed, partition)
            self._names = self._named(module)
            self._shards = {name: held_plan(plan).shard(name, comm.coordinate.tp) for name in self._names.values()}
            self._shapes = {n: self._shards[n].shape(tuple(p.shape)) for p, n in self._names.items()}
            config = ds_config(
                plan.layout,
                optimizer=settings.optimizer,
                learning_rate=settings.learning_rate,
                entries=plan.entries,
            )
            self._engine = self._initialised(module, config)
            if plan.layout.tp > 1:
                complete(self.model, plan, comm)
                # It compares what two ranks are given by `==`, which a batch of tensors does not answer.
                self._engine.first_dataloader_check.remove()
            if plan.layout.zero:
                self._watch_partitions()
            if plan.layout.pp > 1:
                self._instructions = Instructions(self._engine, self._current, self._before_update)

    def step(self, batch: Batch, *, update: bool = True, observer: Observer | None = None) -> StepFacts:
        """Forward, backward, synchronisation and (unless `update` is false) one optimizer step; see `Engine`."""
        watch = observer or Unobserved()
        self._loss_tokens = self._all_loss_tokens(batch)
        self._loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        self._pieces, self._updates = [], update
        parts = microbatches(pad(batch.to(self.device, self.dtype), self.plan), self.plan.layout)
        take_over(self._grid)
        with silence():
            if self.plan.layout.pp > 1:
                self._instructions.run(parts, watch, self._enter)
            else:
                self._run(parts, watch)
        norm = self._norm()
        for axis in ("dp", "cp", "pp"):
            self._sum(self._loss, axis)
        self.model.mask_key.step += update
        return StepFacts(loss=self._loss.item(), loss_tokens=self._loss_tokens, gradient_norm=norm)

    def gather(self, quantity: Quantity) -> Gathered | None:
        """Whole gradients or weights on rank 0, None elsewhere. Collective; for checks, not for speed."""
        pieces = self._pieces if quantity == "gradient" else list(self._weights())
        held = {}
        for piece in pieces:
            shard = Shard(ranges=((piece.start, piece.start + piece.values.numel()),))
            held[self._names[piece.parameter]] = (shard, piece.values.to("cpu", copy=True))
        everyone = self.comm.collect_objects((self.comm.coordinate.tp, held, self._shapes, self._shards))
        return None if everyone is None else joined(everyone)

    # ---- what this rank holds ---------------------------------------------------------------------------------

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """Those of DeepSpeed's stage, which by a partition method of its own is not the plan's."""
        if self.plan.layout.pp == 1:
            return super().held_blocks
        layers = (layer for layer in self._engine.module.children() if isinstance(layer, BlockLayer))
        return tuple(self.plan.block_number(layer.prefixes["block"]) for layer in layers)

    @property
    def num_parameters(self) -> int:
        return sum(piece.values.numel() for piece in self._weights())

    @property
    def parameter_bytes(self) -> int:
        return sum(piece.values.numel() * piece.values.element_size() for piece in self._weights())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients that the optimizer reads, padding aside; zero before the first step."""
        return sum(piece.values.numel() * piece.values.element_size() for piece in self._pieces)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the state tensors and, under ZeRO, of the masters beside the weights, as they are."""
        optimizer = self._engine.optimizer
        own = optimizer.optimizer if self.plan.layout.zero else optimizer
        tensors = [value for state in own.state.values() for value in state.values() if isinstance(value, Tensor)]
        tensors += _masters(optimizer)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    # ---- inside -------------------------------------------------------------------------------------------------

    def _module(self, seed: int, partition: str) -> nn.Module:
        """The whole model with its loss, or this rank's stage."""
        layout = self.plan.layout
        if layout.pp == 1:
            initialise(self.model, self.plan.config, seed=seed, dtype=self.dtype, device=self.device)
            choose_attention(self.model, self.plan)
            apply_recompute(self.model, layout.recompute)
            if layout.cp > 1:
                # Around what is computed again, so that nothing is sent again.
                shard_sequence(self.model, self.plan.config, self.comm)
            return ScoredModel(self.model)
        self._current = Current()
        parts = Parts(self.model, self.plan, seed=seed, dtype=self.dtype, device=self.device)
        module: nn.Module = pipeline_module(parts, self._current, method=partition, score=self._scored)
        return module

    def _named(self, module: nn.Module) -> dict[nn.Parameter, str]:
        """Canonical name of every parameter of this rank."""
        if self.plan.layout.pp == 1:
            return {p: canonical_name(self.plan.config, name) for name, p in self.model.named_parameters()}
        return {p: qualified_name(self.plan, module.get_submodule, name) for name, p in module.named_parameters()}

    def _ranks(self, module: Any) -> tuple[Any, Any]:
        """What `take_over` is given, and what DeepSpeed is given as its mpu."""
        layout = self.plan.layout
        if layout.pp > 1:
            return module.mpu(), None
        if layout.cp > 1:
            groups = SequenceGroups(self.comm)
            return groups, groups
        if layout.tp > 1:
            tensor_groups = TensorGroups(layout.tp)
            return tensor_groups, tensor_groups.mpu
        return None, None

    def _initialised(self, module: Any, config: dict[str, Any]) -> Any:
        """DeepSpeed's engine."""
        layout = self.plan.layout
        is_double, is_zero = self.dtype == torch.float64, layout.zero > 0
        self._grid, mpu = self._ranks(module)
        with admitting_double(is_zero=is_zero) if is_double else contextlib.nullcontext():
            take_over(self._grid)
            linear = F.linear
            engine, *_ = deepspeed.initialize(
                model=module, model_parameters=list(module.parameters()), config=config, mpu=mpu
            )
            # ZeRO 3 puts its own in its place, for whoever else computes in this process; no layer here looks it up.
            F.linear = linear
        if is_double:
            keep_double(engine, is_zero=is_zero)
        return engine

    def _run(self, parts: Sequence[Batch], watch: Observer) -> None:
        """A step without stages."""
        engine = self._engine
        for index, part in enumerate(parts):
            self._enter(index)
            engine.set_gradient_accumulation_boundary(index == len(parts) - 1)
            with watch.action(Action(kind="forward", stage=0, microbatch=index)):
                loss = engine(part) / self._loss_tokens
            with watch.action(Action(kind="backward", stage=0, microbatch=index)):
                engine.backward(loss * self._divisor, scale_wrt_gas=False)
            self._loss += loss.detach()
        with watch.synchronise():
            if self._before_update():
                engine.step()
            else:
                engine.zero_grad()

    @property
    def _divisor(self) -> int:
        """What DeepSpeed divides a sum of gradients by: under ZeRO 3 it forgets that cp is no data parallelism."""
        layout = self.plan.layout
        return layout.dp * layout.cp if layout.zero == 3 else layout.dp

    @property
    def _replica(self) -> int:
        """This rank's place among those that hold the same parameters."""
        return self.comm.coordinate.dp * self.plan.layout.cp + self.comm.coordinate.cp

    def _scored(self, logits_LBV: Tensor, number: Tensor) -> Tensor:
        """The loss of a microbatch as a last stage has to give it: DeepSpeed divides by microbatches and by dp."""
        loss: Tensor = self._score(logits_LBV, self._current.batches[int(number)].labels) / self._loss_tokens
        self._loss += loss.detach()
        return loss * (self.plan.layout.microbatches * self.plan.layout.dp)

    def _enter(self, index: int) -> None:
        self.model.mask_key.microbatch = self.comm.coordinate.dp * self.plan.layout.microbatches + index

    def _before_update(self) -> bool:
        """Takes hold of reduced gradients; whether DeepSpeed's own step shall run."""
        if self.plan.layout.zero:
            # It has to run to let gradients go; `_watch_partitions` decides on the update.
            return True
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._names]
        self._pieces = list(whole(list(self._names), gradients))
        return self._updates

    def _watch_partitions(self) -> None:
        """ZeRO updates group by group: there the rank's part of the gradient stands beside its masters."""
        optimizer, rank = self._engine.optimizer, self._replica
        update = optimizer._optimizer_step  # noqa: SLF001, nothing public is called between reduction and update

        def watched(group: int) -> None:
            if self.plan.layout.zero == 3:
                flat = optimizer.fp32_partitioned_groups_flat[group].grad
                self._pieces += of_shards(optimizer.fp16_groups[group], flat, rank)
            else:
                partition = optimizer.single_partition_of_fp32_groups[group].grad
                self._pieces += of_partition(optimizer.round_robin_bit16_groups[group], partition, rank)
            if self._updates:
                update(group)

        optimizer._optimizer_step = watched  # noqa: SLF001

    def _weights(self) -> Iterator[Piece]:
        return of_weights(list(self._names), self._replica)

    def _norm(self) -> float:
        """Global norm, every number counted once: of copies on stages or tensor-parallel ranks the first."""
        square = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        for piece in self._pieces:
            is_first = self.comm.coordinate.tp == 0 or not self._shards[self._names[piece.parameter]].is_whole
            if is_first and not getattr(piece.parameter, "ds_pipe_replicated", False):
                square += torch.linalg.vector_norm(piece.values, dtype=square.dtype).square()
        self._sum(square, "pp")
        self._sum(square, "tp")
        if self.plan.layout.zero:
            self._sum(square, "dp")
            self._sum(square, "cp")
        return square.sqrt().item()


def _masters(optimizer: Any) -> list[Tensor]:
    """What ZeRO keeps of the weights beside them."""
    names = ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    return [master for name in names for master in getattr(optimizer, name, [])]
