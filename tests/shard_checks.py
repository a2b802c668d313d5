"""What tests of sharded modules share: numbers that all ranks draw alike, shards of them, and a comparison."""

import torch
from torch import Tensor, nn

from parallel.comm import Comm, Groups, Site
from parallel.layouts import Layout
from parallel.parallelize import take
from parallel.plan import Entry
from parallel.plans import plan
from tests.rank import Worker
from tests.small_models import small_config
from tests.tolerances import EXACT_RTOL

CPU = torch.device("cpu")
LENGTH, SEQUENCES, WIDTH = 8, 3, 6
SITE = Site(name="here")


def close(found: Tensor | None, expected: Tensor | None) -> None:
    """Equal but for the order of sums."""
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=EXACT_RTOL, atol=1e-12)


def random(*shape: int, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensor_parallel(worker: Worker) -> Comm:
    planned = plan(small_config("decoder_only"), Layout(tp=worker.world_size))
    return Comm.create(plan=planned, rank=worker.rank, groups=worker.groups, device=CPU)


def alone() -> Comm:
    planned = plan(small_config("decoder_only"), Layout())
    return Comm.create(plan=planned, rank=0, groups=Groups(timeout_seconds=1.0), device=CPU)


def shard(entry: Entry, name: str, whole: Tensor, comm: Comm) -> nn.Parameter:
    return nn.Parameter(take(whole, entry.shard(name, comm.size("tp"), comm.position("tp"))).clone())


def shard_of(whole: Tensor | None, entry: Entry, name: str, comm: Comm) -> Tensor:
    assert whole is not None
    return take(whole, entry.shard(name, comm.size("tp"), comm.position("tp")))
