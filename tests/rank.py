"""What does a rank of the tests do? It joins the others once, then answers calls until the pipe closes.

Started by `tests/spawn.py`. Collectives are checked against the partners' (torch's DETAIL), so that a rank that does
something else is named at once instead of waited for.
"""

import contextlib
import dataclasses
import datetime
import faulthandler
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import DebugLevel, set_debug_level

from launch.env import announce_place, end_with_parent
from parallel.comm import Groups
from tests.spawn import START_SECONDS, Failure


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """What a function learns about the rank it runs on."""

    rank: int
    world_size: int
    groups: Groups
    """Kept over all calls of the process."""


def serve(rank: int, world_size: int, pipe: Connection, rendezvous: str, stack: str, timeout_seconds: float) -> None:
    """The main function of a rank; `stack` is where it writes where it stands when it gets SIGUSR1."""
    end_with_parent()
    announce_place(rank, torch.device("cpu"))
    torch.set_num_threads(1)
    set_debug_level(DebugLevel.DETAIL)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        # Ranks that start at the same time need not arrive at the same time.
        timeout=datetime.timedelta(seconds=START_SECONDS),
    )
    worker = Worker(rank=rank, world_size=world_size, groups=Groups(timeout_seconds))
    with Path(stack).open("w") as file, contextlib.suppress(EOFError):
        faulthandler.register(signal.SIGUSR1, file=file)
        pipe.send(None)
        while True:
            function, arguments, named = pipe.recv()
            pipe.send(_called(worker, function, arguments, named))


def _called(worker: Worker, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    try:
        return function(worker, *arguments, **named)
    except Exception:  # noqa: BLE001 - recorded: whoever called raises it
        return Failure(seconds=time.monotonic(), told=f"rank {worker.rank} raised\n{traceback.format_exc()}")
