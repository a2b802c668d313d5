"""How does one rank of any world run without the world? The native engine on tensors without data, alone.

    fake process group    collectives of every group return at once and move nothing
    fake tensors          shapes, dtypes, strides and the kernels that a CPU would choose, but no memory
    dry numbers           where the code reads a number off a tensor, it reads 1

Nothing of the engine is replaced: `parallelize`, pipeline, gradients and their collectives are the code of a real run.
One process has one process group, so ranks are run one after the other, each in a group made for it and ended after it.
Left out: values. A loss is never right here, a shape never wrong.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.architectures import build
from models.batch import Batch
from models.config import ModelConfig
from models.slicing import tie
from parallel.comm import Comm, Group, Groups
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.figures import StepShape
from parallel.parallelize import parallelize
from parallel.plan import Plan

DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
CPU = torch.device("cpu")


@contextlib.contextmanager
def dry_engine(plan: Plan, rank: int, dtype_bytes: int) -> Iterator[NativeEngine]:
    """The native engine of one rank, to be used inside the context.

    Raises ValueError when this process already has a process group.
    """
    if dist.is_available() and dist.is_initialized():
        raise ValueError("a dry run needs a process without a process group: this one has joined another")
    dist.init_process_group("fake", rank=rank, world_size=plan.layout.world_size, store=FakeStore())
    try:
        comm = Comm.create(plan=plan, rank=rank, groups=_OwnGroups(timeout_seconds=60.0), device=CPU)
        with torch.device("meta"):
            model = build(plan.config)
        parallelize(model, plan, comm)
        dtype = DTYPES[dtype_bytes]
        with _DryTensors():
            _fill(model, dtype)
            tie(model, plan.config)
            settings = EngineSettings(seed=0, dtype=dtype, device=CPU)
            yield NativeEngine(plan=plan, comm=comm, settings=settings, model=model)
    finally:
        dist.destroy_process_group()


def dry_batch(config: ModelConfig, shape: StepShape) -> Batch:
    """A batch of the shape of one data-parallel rank's step; to be made inside `dry_engine`."""
    count, source_length, target_length = shape.num_sequences, shape.source_length, shape.target_length
    first_length = source_length if config.has_encoder else target_length
    source = None
    if config.has_encoder:
        source = _ids(count, source_length)
        if config.feature_width:
            source = torch.zeros(count, source_length, config.feature_width, dtype=DTYPES[shape.dtype_bytes])
    return Batch(
        labels=_ids(count, target_length if config.has_decoder else source_length),
        source=source,
        source_lengths=(source_length - shape.is_ragged,) * count if config.has_encoder else (),
        target=_ids(count, target_length) if config.has_decoder else None,
        target_lengths=(target_length,) * count if config.has_decoder else (),
        token_types=_ids(count, first_length) if config.num_token_types else None,
    )


def _ids(num_sequences: int, length: int) -> torch.Tensor:
    return torch.zeros(num_sequences, length, dtype=torch.int64)


def _fill(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives every parameter a fake tensor in the place of values."""
    for module in model.modules():
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, leaf, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=CPU)))


class _OwnGroups(Groups):
    """Groups of this rank only: nobody waits for the others'."""

    def make(
        self,
        rank_lists: Sequence[tuple[int, ...]],
        rank: int,
        *,
        carries: str = "collectives",
    ) -> tuple[Group, tuple[int, ...]]:
        return super().make([ranks for ranks in rank_lists if rank in ranks], rank, carries=carries)


class _DryTensors(FakeTensorMode):
    """Fake tensors that answer 1 to whoever asks for a number: counts of labels, the loss, the norm."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:  # noqa: SLF001, operators have such names
            return 1
        return super().dispatch(func, types, args, kwargs)
