"""The fairscale engine: Megatron's layers for tensor parallelism, sharded optimizer states and gradients for data.

    tp        fairscale.nn.model_parallel: what stands where is told in `parallel/engines/fairscale_layers.py`
    zero 0    torch's DistributedDataParallel over fairscale's data-parallel group: fairscale has none of its own
    zero 1    OSS, an optimizer that keeps the states of some parameters, with DistributedDataParallel
    zero 2    OSS with ShardedDataParallel: a gradient is reduced to the rank that keeps the parameter's states
    pp        Pipe, one process for all stages: `parallel/engines/fairscale_pipe.py`

Both wrappers average over the ranks, and a mean of means is not the mean: each rank's sum of cross-entropy is divided
by the labels of the whole step and multiplied by dp, so that the average is the sum that was meant. Only the last
microbatch sends gradients.

fairscale is no longer developed; 0.4.13 is its last release. Left out, with reasons in
`parallel/engines/fairscale_limits.py`: its FullyShardedDataParallel; and its AsyncPipe, which has a process a stage,
but sends through CUDA and updates between microbatches. Source: fairscale 0.4.13; ZeRO: arXiv 1910.02054.
"""

import contextlib
import dataclasses
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models.architectures import build
from models.batch import Batch
from models.initial import canonical_name
from models.slicing import tie
from parallel.comm import Comm
from parallel.engines.engine import Engine, Quantity, StepFacts
from parallel.engines.fairscale_layers import Topology, swap_modules, topology
from parallel.engines.fairscale_limits import unsupported
from parallel.engines.fairscale_pipe import PipeEngine, unsupported_size
from parallel.engines.foreign import ForeignEngine
from parallel.engines.gathered import Gathered, put_together
from parallel.engines.scored_model import ScoredModel
from parallel.engines.settings import EngineSettings
from parallel.parallelize import choose_attention, materialise
from parallel.pipeline import Observer, Unobserved
from parallel.plan import Plan
from parallel.recompute import apply_recompute
from parallel.schedule import Action
from parallel.sequence import microbatches

# What is asked of the module of every engine, some of it told in files of its own.
__all__ = ["FairscaleEngine", "fairscale_engine", "unsupported", "unsupported_size"]


def fairscale_engine(*, plan: Plan, comm: Comm, settings: EngineSettings, partition: str = "") -> Engine:
    """One rank of one layout: by fairscale's Pipe where there are stages."""
    if plan.layout.pp > 1:
        return PipeEngine(plan=plan, comm=comm, settings=settings, partition=partition)
    return FairscaleEngine(plan=plan, comm=comm, settings=settings)


class FairscaleEngine(ForeignEngine):
    """One rank of one layout of one model.

    Raises ValueError for a layout that `unsupported` names.
    """

    def __init__(self, *, plan: Plan, comm: Comm, settings: EngineSettings) -> None:
        reason = unsupported(plan.config, plan.layout)
        super().__init__(plan=plan, comm=comm, settings=settings, reason=reason)
        layout = plan.layout
        # A world of one needs no process group, and then fairscale has nothing to do.
        self._topology: Topology | None = topology(layout.tp) if layout.world_size > 1 else None
        # Every rank holds whole bias tables, of which it reads its heads' columns.
        entries = tuple(entry for entry in plan.entries if entry.style != "head_bias_table")
        self._held_plan = dataclasses.replace(plan, entries=entries)
        with torch.device("meta"):
            self.model = build(plan.config)
        with self._groups():
            if self._topology is not None:
                swap_modules(self.model, plan, self._topology)
            materialise(self.model, self._held_plan, comm, seed=settings.seed, dtype=self.dtype, device=self.device)
            tie(self.model, plan.config)
            choose_attention(self.model, plan)
            apply_recompute(self.model, layout.recompute)
            self.model.mask_key.seed = settings.seed
            self.model.train()
            self.optimizer = self._optimizer(settings)
            self._wrapped = self._wrap(ScoredModel(self.model))

    def step(self, batch: Batch, *, update: bool = True, observer: Observer | None = None) -> StepFacts:
        """Forward, backward, synchronisation and (unless `update` is false) one optimizer step; see `Engine`."""
        watch = observer or Unobserved()
        with self._groups():
            loss_tokens = self._all_loss_tokens(batch)
            self._zero()
            parts = microbatches(batch.to(self.device, self.dtype), self.plan.layout)
            loss = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
            for index, part in enumerate(parts):
                with self._sending(index == len(parts) - 1):
                    loss += self._run(index, part, loss_tokens, watch)
            with watch.synchronise():
                norm = self._norm()
                self._sum(loss, "dp")
                if update:
                    self.optimizer.step()
                    self.model.mask_key.step += 1
        return StepFacts(loss=loss.item(), loss_tokens=loss_tokens, gradient_norm=norm)

    def gather(self, quantity: Quantity) -> Gathered | None:
        """Whole gradients or weights on rank 0, None elsewhere. Collective; for checks, not for speed."""
        held = {}
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach() if quantity == "weight" else self._gradient(parameter)
            if tensor is not None:
                shard = self._held_plan.shard(name, self.comm.coordinate.tp)
                held[canonical_name(self.plan.config, name)] = (shard, tensor.to("cpu", copy=True))
        everyone = self.comm.collect_objects(held)
        return None if everyone is None else put_together(everyone)

    # ---- what this rank holds ---------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.numel() * parameter.element_size() for parameter in self.model.parameters())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the buffers that gradients stand in, other ranks' in the buckets of ShardedDataParallel included.

        Zero before the first step where nothing is bucketed.
        """
        storages = [
            parameter.grad.untyped_storage() for parameter in self.model.parameters() if parameter.grad is not None
        ]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this rank's state tensors as they are; zero before the first step."""
        own = self.optimizer.optim if isinstance(self.optimizer, OSS) else self.optimizer
        states = (value for state in own.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))

    # ---- inside -------------------------------------------------------------------------------------------------

    def _groups(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self._topology is None else self._topology.current()

    def _optimizer(self, settings: EngineSettings) -> Any:
        parameters = list(self.model.parameters())
        if not self.plan.layout.zero:
            return settings.optimizer_of(parameters)
        assert self._topology is not None
        with warnings.catch_warnings():
            # It asks torch for ranks by a name that torch has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            return OSS(
                parameters,
                optim=settings.optimizer_class,
                group=self._topology.data_group,
                **settings.optimizer_options,
            )

    def _wrap(self, module: nn.Module) -> nn.Module:
        """Data parallelism; every rank has drawn the same weights, so none are sent."""
        layout = self.plan.layout
        if layout.dp == 1 or self._topology is None:
            return module
        if layout.zero < 2:
            return DistributedDataParallel(
                module, process_group=self._topology.data_group, gradient_as_bucket_view=True, init_sync=False
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            wrapped: nn.Module = ShardedDataParallel(
                module,
                self.optimizer,
                process_group=self._topology.data_group,
                broadcast_buffers=False,
                sync_models_at_startup=False,
            )
        return wrapped

    def _zero(self) -> None:
        # ShardedDataParallel sums into buckets of its own, which outlive a gradient that is set to None.
        sharded = isinstance(self._wrapped, ShardedDataParallel)
        self._wrapped.zero_grad(set_to_none=not sharded)

    def _sending(self, is_last: bool) -> AbstractContextManager[None]:
        if is_last or not isinstance(self._wrapped, DistributedDataParallel | ShardedDataParallel):
            return contextlib.nullcontext()
        silent: AbstractContextManager[None] = self._wrapped.no_sync()
        return silent

    def _run(self, index: int, batch: Batch, loss_tokens: int, watch: Observer) -> Tensor:
        """Forward and backward of a microbatch -> its share of the loss."""
        layout = self.plan.layout
        self.model.mask_key.microbatch = self.comm.coordinate.dp * layout.microbatches + index
        with watch.action(Action(kind="forward", stage=0, microbatch=index)):
            loss: Tensor = self._wrapped(batch) / loss_tokens
        with watch.action(Action(kind="backward", stage=0, microbatch=index)):
            torch.autograd.backward(loss * layout.dp)
        return loss.detach()

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """A gradient that is whole here; None where another data-parallel rank keeps it."""
        if self.plan.layout.zero < 2:
            return parameter.grad
        own = {id(own) for group in self.optimizer.optim.param_groups for own in group["params"]}
        return parameter.grad if id(parameter) in own else None

    def _norm(self) -> float:
        """Global norm, every number counted once: replicated ones by the first rank of the tensor group."""
        coordinate = self.comm.coordinate
        square = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        for name, parameter in self.model.named_parameters():
            gradient = self._gradient(parameter)
            is_counted = coordinate.tp == 0 or not self._held_plan.shard(name, coordinate.tp).is_whole
            if gradient is not None and is_counted:
                square += torch.linalg.vector_norm(gradient, dtype=square.dtype).square()
        self._sum(square, "tp")
        if self.plan.layout.zero == 2:
            self._sum(square, "dp")
        return square.sqrt().item()

    def _group(self, axis: str) -> Any:
        """Fairscale's group of an axis."""
        if self._topology is None or self.comm.size(axis) == 1:
            return None
        return self._topology.tensor_group if axis == "tp" else self._topology.data_group
