"""What does one rank of any layout hold and send, asked without starting the others?

A fake process group takes part in every collective and moves nothing: shapes, counts and the ledger are real, numbers
that should have come from other ranks are not.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from models.architectures import build
from models.batch import Batch
from models.model import Model
from parallel.comm import Comm, Groups
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.parallelize import parallelize
from parallel.plan import Plan
from parallel.sequence import deal

CPU = torch.device("cpu")


@contextlib.contextmanager
def rank_of(plan: Plan, rank: int) -> Iterator[Comm]:
    """A rank's communication; other ranks exist in name only. One at a time in a process."""
    size = plan.layout.world_size
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield Comm.create(plan=plan, rank=rank, groups=Groups(timeout_seconds=1.0), device=CPU)
    finally:
        dist.destroy_process_group()


def part_of(plan: Plan, comm: Comm) -> Model:
    """A rank's part of the model on the meta device."""
    with torch.device("meta"):
        whole = build(plan.config)
    return parallelize(whole, plan, comm)


def step_of(plan: Plan, comm: Comm, batch: Batch, *, dtype: torch.dtype = torch.float32) -> NativeEngine:
    """A rank's engine after one step whose ledger starts empty. `batch` is that of the whole step."""
    engine = NativeEngine(plan=plan, comm=comm, settings=EngineSettings(seed=0, dtype=dtype, device=CPU))
    comm.ledger.clear()
    engine.step(deal(batch, plan.layout, comm.coordinate.dp))
    return engine
