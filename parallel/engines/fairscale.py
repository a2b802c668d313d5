"""The fairscale engine: Megatron's layers for tensor parallelism, sharded states, gradients and weights for data.

    tp        fairscale.nn.model_parallel: what stands where is told in `parallel/engines/fairscale_layers.py`
    zero 0    torch's DistributedDataParallel over fairscale's data-parallel group: fairscale has none of its own
    zero 1    OSS, an optimizer that keeps the states of some parameters, with DistributedDataParallel
    zero 2    OSS with ShardedDataParallel: a gradient is reduced to the rank that keeps the parameter's states
    zero 3    FullyShardedDataParallel, on GPUs only: `parallel/engines/fairscale_sharded.py`
    pp        Pipe, one process for all stages: `parallel/engines/fairscale_pipe.py`

All wrappers average over the ranks, and a mean of means is not the mean: each rank's sum of cross-entropy is divided
by the labels of the whole step and multiplied by dp, so that the average is the sum that was meant. Up to zero 2 only
the last microbatch sends gradients.

fairscale is no longer developed; 0.4.13 is its last release. What it cannot do is told in
`parallel/engines/fairscale_limits.py`. Left out: its AsyncPipe, which has a process a stage, but sends through CUDA and
updates between microbatches. Source: fairscale 0.4.13; ZeRO: arXiv 1910.02054.
"""

import contextlib
import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from models.architectures import build
from models.batch import Batch
from models.config import ModelConfig
from models.initial import canonical_name
from models.slicing import tie
from parallel.comm import Comm
from parallel.engines.engine import Engine, Quantity, StepFacts
from parallel.engines.fairscale_layers import Topology, swap_modules, topology
from parallel.engines.fairscale_limits import unsupported as unsupported_anywhere
from parallel.engines.fairscale_pipe import PipeEngine, unsupported_size
from parallel.engines.fairscale_sharded import no_streams, pieces, shard
from parallel.engines.foreign import ForeignEngine, unchecked_groups
from parallel.engines.gathered import Gathered, Held, joined
from parallel.engines.scored_model import ScoredModel
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.parallelize import choose_attention, materialise
from parallel.pipeline import Observer, Unobserved
from parallel.plan import WHOLE, Plan, Shard
from parallel.recompute import apply_recompute
from parallel.schedule import Action
from parallel.sequence import microbatches

# What is asked of the module of every engine, some of it told in files of its own.
__all__ = ["FairscaleEngine", "fairscale_engine", "unsupported", "unsupported_size"]


def unsupported(config: ModelConfig, layout: Layout) -> str | None:
    """Why fairscale cannot run a model on a layout, or not on this machine, as one line; None when it can."""
    return unsupported_anywhere(config, layout) or (no_streams() if layout.zero == 3 else None)


def fairscale_engine(*, plan: Plan, comm: Comm, settings: EngineSettings, partition: str = "") -> Engine:
    """One rank of one layout: by fairscale's Pipe where there are stages."""
    if plan.layout.pp > 1:
        return PipeEngine(plan=plan, comm=comm, settings=settings, partition=partition)
    return FairscaleEngine(plan=plan, comm=comm, settings=settings)


class FairscaleEngine(ForeignEngine):
    """One rank of one layout of one model.

    Raises ValueError for a layout that `unsupported` names, and for zero = 3 on another device than a GPU.
    """

    def __init__(self, *, plan: Plan, comm: Comm, settings: EngineSettings) -> None:
        layout = plan.layout
        reason = unsupported(plan.config, layout) or (no_streams(settings.device) if layout.zero == 3 else None)
        super().__init__(plan=plan, comm=comm, settings=settings, reason=reason)
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
            # What it shards has to be float32 at first; values are drawn in it.
            dtype = torch.float32 if layout.zero == 3 else self.dtype
            materialise(self.model, self._held_plan, comm, seed=settings.seed, dtype=dtype, device=self.device)
            tie(self.model, plan.config)
            choose_attention(self.model, plan)
            apply_recompute(self.model, layout.recompute)
            self.model.mask_key.seed = settings.seed
            self.model.train()
            self._shapes: dict[str, tuple[int, ...]] = {}
            self._shards: dict[str, Shard] = {}
            for name, parameter in self.model.named_parameters():
                canonical = canonical_name(plan.config, name)
                self._shapes[canonical] = tuple(parameter.shape)
                self._shards[canonical] = self._held_plan.shard(name, comm.coordinate.tp)
            if layout.zero == 3:
                self._wrapped = self._shard(ScoredModel(self.model))
                self.optimizer: Any = settings.optimizer_of(self._wrapped.parameters())
            else:
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
        held = {name: (place, values.to("cpu", copy=True)) for name, (place, values) in self._held(quantity).items()}
        everyone = self.comm.collect_objects((self.comm.coordinate.tp, held, self._shapes, self._shards))
        return None if everyone is None else joined(everyone)

    # ---- what this rank holds ---------------------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        return sum(values.numel() for _, values in self._held("weight").values())

    @property
    def parameter_bytes(self) -> int:
        """Between steps; padding aside."""
        return sum(values.numel() * values.element_size() for _, values in self._held("weight").values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the buffers that gradients stand in, other ranks' in the buckets of ShardedDataParallel included.

        Zero before the first step where nothing is bucketed.
        """
        storages = [
            parameter.grad.untyped_storage() for parameter in self._wrapped.parameters() if parameter.grad is not None
        ]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of this rank's state tensors as they are; zero before the first step."""
        own = self.optimizer.optim if isinstance(self.optimizer, OSS) else self.optimizer
        states = (value for state in own.state.values() for value in state.values())
        return sum(value.numel() * value.element_size() for value in states if isinstance(value, Tensor))

    # ---- inside -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _groups(self) -> Iterator[None]:
        """Its groups are this engine's, and what it calls by names that torch has renamed is not told."""
        with contextlib.ExitStack() as inside:
            if self._topology is not None:
                inside.enter_context(self._topology.current())
                inside.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore", FutureWarning)
                warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
            yield

    def _optimizer(self, settings: EngineSettings) -> Any:
        parameters = list(self.model.parameters())
        if not self.plan.layout.zero:
            return settings.optimizer_of(parameters)
        assert self._topology is not None
        return OSS(
            parameters, optim=settings.optimizer_class, group=self._topology.data_group, **settings.optimizer_options
        )

    def _wrap(self, module: nn.Module) -> nn.Module:
        """Data parallelism; every rank has drawn the same weights, so none are sent."""
        layout = self.plan.layout
        if layout.dp == 1 or self._topology is None:
            return module
        if layout.zero < 2:
            return DistributedDataParallel(
                module,
                process_group=self._topology.data_group,
                gradient_as_bucket_view=True,
                init_sync=False,
                # Its own default where the layout names none.
                bucket_cap_mb=layout.gradient_bucket_bytes / 2**20 or None,
            )
        wrapped: nn.Module = ShardedDataParallel(
            module,
            self.optimizer,
            process_group=self._topology.data_group,
            broadcast_buffers=False,
            sync_models_at_startup=False,
        )
        return wrapped

    def _shard(self, module: ScoredModel) -> nn.Module:
        assert self._topology is not None
        with unchecked_groups():
            gradient_group = self.comm.another_group("dp", carries="gradients")
        sharded: nn.Module = shard(
            module,
            group=self._topology.data_group,
            gradient_group=gradient_group,
            device=self.device,
            dtype=self.dtype,
        )
        return sharded

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

    def _held(self, quantity: Quantity) -> Held:
        """Weights, or reduced gradients, that this rank holds, flattened; not what another data-parallel rank keeps."""
        if self.plan.layout.zero == 3:
            return {
                canonical_name(self.plan.config, name): (Shard(ranges=((start, start + values.numel()),)), values)
                for name, start, values in pieces(self._wrapped, quantity)
            }
        held: Held = {}
        for name, parameter in self.model.named_parameters():
            tensor = parameter if quantity == "weight" else self._gradient(parameter)
            if tensor is not None:
                held[canonical_name(self.plan.config, name)] = (WHOLE, tensor.detach().reshape(-1))
        return held

    def _gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """A gradient that is whole here; None where another data-parallel rank keeps it."""
        if self.plan.layout.zero < 2:
            return parameter.grad
        own = {id(own) for group in self.optimizer.optim.param_groups for own in group["params"]}
        return parameter.grad if id(parameter) in own else None

    def _norm(self) -> float:
        """Global norm, every number counted once: replicated ones by the first rank of the tensor group."""
        square = torch.zeros((), dtype=torch.promote_types(self.dtype, torch.float32), device=self.device)
        for name, (_, gradient) in self._held("gradient").items():
            if self.comm.coordinate.tp == 0 or not self._shards[name].is_whole:
                square += torch.linalg.vector_norm(gradient, dtype=square.dtype).square()
        self._sum(square, "tp")
        if self.plan.layout.zero >= 2:
            self._sum(square, "dp")
        return square.sqrt().item()

    def _group(self, axis: str) -> Any:
        """Fairscale's group of an axis."""
        if self._topology is None or self.comm.size(axis) == 1:
            return None
        return self._topology.tensor_group if axis == "tp" else self._topology.data_group
