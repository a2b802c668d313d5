"""What do engines share that partition and communicate by their own means: place, sums, labels, groups without checks?

Under TORCH_DISTRIBUTED_DEBUG=DETAIL every group made is wrapped, so that a collective that differs from the partners'
is named. In torch 2.13 a wrapped gloo group crashes DistributedDataParallel, and counts sends and receives as
collectives: between ranks with different numbers of neighbours the counts differ, and the next collective is refused.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level

from models.batch import Batch
from parallel.comm import Comm
from parallel.engines.engine import labelled
from parallel.engines.settings import EngineSettings
from parallel.mesh import Axis
from parallel.plan import Plan


class ForeignEngine:
    """One rank of a layout under an engine other than the native one.

    Args:
        plan, comm, settings: as for every engine.
        reason: why the engine cannot run this layout, None where it can.

    Raises ValueError with the reason, if there is one.
    """

    has_own_threads = False

    def __init__(self, *, plan: Plan, comm: Comm, settings: EngineSettings, reason: str | None) -> None:
        if reason is not None:
            raise ValueError(reason)
        self.plan, self.comm, self.dtype, self.device = plan, comm, settings.dtype, settings.device

    @property
    def held_blocks(self) -> tuple[int, ...]:
        return self.plan.blocks_of(self.comm.coordinate.pp)

    def _group(self, axis: str) -> Any:
        """The process group that sums over an axis go over; None over one rank."""
        return self.comm.group(axis)

    def _sum(self, tensor: Tensor, axis: str) -> Tensor:
        """The tensor itself, summed in place over an axis."""
        group = self._group(axis)
        if group is not None:
            dist.all_reduce(tensor, group=group)
        return tensor

    def _all_loss_tokens(self, batch: Batch) -> int:
        """Labels of the whole step. Raises ValueError where there are none."""
        count = self._sum(torch.tensor(batch.num_loss_tokens(), device=self.device), "dp")
        return labelled(int(count.item()))


@contextlib.contextmanager
def unchecked_groups() -> Iterator[None]:
    """Groups made inside are not wrapped."""
    level = get_debug_level()
    set_debug_level(DebugLevel.OFF)
    try:
        yield
    finally:
        set_debug_level(level)


def unchecked_group(comm: Comm, axis: Axis) -> Any:
    """The group along an axis without those checks; `comm.group` itself where there are none. Collective."""
    if get_debug_level() != DebugLevel.DETAIL:
        return comm.group(axis)
    with unchecked_groups():
        return comm.another_group(axis, carries="unchecked")
