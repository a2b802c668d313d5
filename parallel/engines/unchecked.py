"""Which groups are not compared, collective by collective, with the partners'?

Under TORCH_DISTRIBUTED_DEBUG=DETAIL every group made is wrapped, so that a collective that differs from the partners'
is named. In torch 2.13 a wrapped gloo group crashes DistributedDataParallel, and counts sends and receives as
collectives: between ranks with different numbers of neighbours the counts differ, and the next collective is refused.
"""

import contextlib
from collections.abc import Iterator

from torch._C._distributed_c10d import DebugLevel, get_debug_level, set_debug_level


@contextlib.contextmanager
def unchecked_groups() -> Iterator[None]:
    """Groups made inside are not wrapped."""
    level = get_debug_level()
    set_debug_level(DebugLevel.OFF)
    try:
        yield
    finally:
        set_debug_level(level)
