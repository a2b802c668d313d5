"""What does the environment tell a process, and what does the process set up there? The only reader of `os.environ`.

Under torchrun every process learns its rank, its place on the node and the size of the world from the environment. From
these and from the GPUs of the node follow the backend and the device:

    backend    when                                                  device
    nccl       every rank of the node has a GPU of its own           cuda:<local rank>
    gloo       otherwise, or asked for                               cpu, one thread a rank

A process that was not started by torchrun is a world of its own. Left out: the mesh (`parallel/mesh.py`) and what is
sent.
"""

import ctypes
import dataclasses
import datetime
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar, cast, get_args

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

Backend = Literal["gloo", "nccl"]
BackendChoice = Literal["auto", "gloo", "nccl"]
Value = TypeVar("Value")
Given = ParamSpec("Given")

DEFAULT_TIMEOUT_SECONDS = 120.0
"""How long a collective waits for its partners. torch's own default of half an hour hides a dead partner."""

RanksFailed = ChildFailedError
"""What torchrun raises when a rank ended badly; `failures` holds the exit code of each such rank."""


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_AGENT = "TWINSHARD_AGENT"
"""Variable with the process id of the torchrun that `announce_agent` was called in."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """One process among those that were started together."""

    rank: int
    world_size: int
    local_rank: int
    """Rank among the processes of this node."""
    local_world_size: int
    backend: Backend
    device: torch.device

    @property
    def is_oversubscribed(self) -> bool:
        """More ranks on this node than cores (gloo) or GPUs (nccl) to run them."""
        slots = torch.cuda.device_count() if self.backend == "nccl" else num_cores()
        return self.local_world_size > slots

    def share(self, value: Value) -> Value:
        """The value of rank 0, on every rank. Collective."""
        if self.world_size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]


def naming_errors(main: Callable[Given, Value]) -> Callable[Given, Value]:
    """Decorate a rank's main function, so that torchrun's summary holds the error of the rank that failed first."""
    # torch's decorator returns None where the function ends in an exit with code 0; ours return.
    return cast(Callable[Given, Value], record(main))


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_world_size() -> int:
    """Number of ranks that torchrun started, 1 outside of torchrun."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else 1


def launched_rank() -> int:
    """Rank that torchrun gave this process, 0 outside of torchrun; known before the process group starts."""
    return int(os.environ["RANK"]) if is_launched() else 0


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def choose_backend(choice: BackendChoice, *, num_local_ranks: int, num_gpus: int) -> Backend:
    """The backend for the ranks of one node.

    Raises:
        ValueError: an unknown choice, or nccl with fewer GPUs than ranks.
    """
    if choice not in get_args(BackendChoice):
        raise ValueError(f"backend = {choice!r}; choose one of {', '.join(get_args(BackendChoice))}")
    if choice == "nccl" and num_local_ranks > num_gpus:
        raise ValueError(
            f"{num_local_ranks} ranks on a node with {num_gpus} GPUs: nccl needs a GPU for every rank; "
            f"start at most {num_gpus} ranks, or take --backend gloo"
            if num_gpus
            else f"{num_local_ranks} ranks on a node without GPUs: nccl needs one for every rank; take --backend gloo"
        )
    if choice == "auto":
        return "nccl" if num_local_ranks <= num_gpus else "gloo"
    return choice


def local_backend(choice: BackendChoice, num_local_ranks: int) -> Backend:
    """The backend for so many ranks on this machine. Raises ValueError as `choose_backend` does."""
    return choose_backend(choice, num_local_ranks=num_local_ranks, num_gpus=torch.cuda.device_count())


@contextmanager
def world(choice: BackendChoice = "auto", *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> Iterator[World]:
    """Join the other ranks, and leave them at the end.

    Inside, this process computes on one thread, ends when torchrun ends, and has a process group whose collectives give
    up after `timeout_seconds`. Outside of torchrun there is no process group and a world of one.

    Raises:
        ValueError: the backend cannot serve the ranks of this node.
    """
    torch.set_num_threads(1)
    here = _here(choice)
    if here.backend == "nccl":
        torch.cuda.set_device(here.device)
    if not is_launched():
        yield here
        return
    end_with_parent()
    announce_place(here.local_rank, here.device)
    dist.init_process_group(
        here.backend,
        timeout=datetime.timedelta(seconds=timeout_seconds),
        device_id=here.device if here.backend == "nccl" else None,
    )
    # Left only when all goes well: a rank that raised must end at once, and leaving waits for what is under way.
    yield here
    dist.destroy_process_group()


def _here(choice: BackendChoice) -> World:
    local_rank, local_world_size = (
        (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])) if is_launched() else (0, 1)
    )
    backend = local_backend(choice, local_world_size)
    return World(
        rank=launched_rank(),
        world_size=launched_world_size(),
        local_rank=local_rank,
        local_world_size=local_world_size,
        backend=backend,
        device=torch.device("cuda", local_rank) if backend == "nccl" else torch.device("cpu"),
    )


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when the one that started it ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    # One that ended before this call sends no signal: then somebody else is the parent by now.
    if _AGENT in os.environ and int(os.environ[_AGENT]) != os.getppid():
        os.kill(os.getpid(), number)


def announce_place(local_rank: int, device: torch.device) -> None:
    """Tell DeepSpeed which rank of this node this is and what it computes on; else it takes a GPU wherever one is."""
    os.environ["LOCAL_RANK"] = str(local_rank)
    os.environ["DS_ACCELERATOR"] = device.type


def announce_agent() -> None:
    """Tell the ranks that this process will start who their parent is."""
    os.environ[_AGENT] = str(os.getpid())


def torchrun_environment(*, names_mismatches: bool = False) -> dict[str, str]:
    """The environment for a torchrun of our own: one thread a rank, and this project on the path.

    With `names_mismatches`, torch compares every collective with its partners' and names the one that differs. That
    costs time: it is for proofs, never for measurements.
    """
    environment = {
        key: value for key, value in os.environ.items() if key != _AGENT and not key.startswith("TORCHELASTIC_")
    }
    root = str(Path(__file__).resolve().parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    environment["OMP_NUM_THREADS"] = "1"
    environment["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL" if names_mismatches else "OFF"
    return environment
