"""What does a message between two ranks of this machine cost: a latency, and so much for each byte?

Two ranks hand a tensor back and forth, as the executor sends (`parallel/comm.py`); half of a round trip is a message.
Sizes take turns, medians count:

    seconds per byte = (largest - smallest message) / (their bytes)         latency = smallest message - its bytes

Wall time, because a message is not a rank's busy time. On one machine this tells of its memory or of its links between
GPUs, nothing of a network.

    python -m launch.ping FILE BACKEND TIMEOUT
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from launch.env import BackendChoice, World, local_backend, naming_errors, world
from launch.torchrun import launched
from models.named import named_model
from parallel.comm import Comm, Groups, Message, Site
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.schedule import Direction

SIZES_BYTES = (1024, 65536, 1048576, 4194304)
WARMUP, REPEATS = 5, 25


def measure_message(backend: BackendChoice, timeout_seconds: float) -> tuple[float, float]:
    """Latency in seconds, and seconds for each byte.

    Raises:
        ValueError: the backend cannot serve two ranks here, or they failed.
    """
    chosen = local_backend(backend, 2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "seconds"
        with launched("launch.ping", [str(file), chosen, str(timeout_seconds)], num_ranks=2, folder=folder) as launch:
            code = launch.wait(timeout_seconds)
            if code is None or not file.exists():
                reason = "nothing was done in time" if code is None else launch.last_words()
                raise ValueError(f"two ranks over {chosen} did not exchange a message: {reason}")
            seconds = json.loads(file.read_text(encoding="utf-8"))
    return fit([(int(size), value) for size, value in seconds.items()])


def fit(seconds: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency and seconds per byte of messages of (bytes, seconds); neither below 0."""
    (least_bytes, least), (most_bytes, most) = min(seconds), max(seconds)
    per_byte = max(0.0, (most - least) / (most_bytes - least_bytes))
    return max(0.0, least - per_byte * least_bytes), per_byte


def _seconds(here: World, timeout_seconds: float) -> dict[int, float]:
    """Median seconds of a message, by size."""
    # The model does not matter: its two stages have the channels.
    made = plan(named_model("tiny-decoder"), Layout(pp=2))
    comm = Comm.create(plan=made, rank=here.rank, groups=Groups(timeout_seconds), device=here.device)
    tensors = {size: torch.zeros(size, dtype=torch.uint8, device=here.device) for size in SIZES_BYTES}
    samples: dict[int, list[float]] = {size: [] for size in SIZES_BYTES}
    for repetition in range(WARMUP + REPEATS):
        for size, tensor in tensors.items():
            _finish(here)
            start = time.perf_counter()
            _pass_on(comm, tensor, "forward")
            _pass_on(comm, tensor, "backward")
            _finish(here)
            if repetition >= WARMUP:
                samples[size].append((time.perf_counter() - start) / 2)
    return {size: statistics.median(values) for size, values in samples.items()}


def _pass_on(comm: Comm, tensor: Tensor, direction: Direction) -> None:
    """From the first rank to the second, or back."""
    sends = (direction == "forward") == (comm.coordinate.pp == 0)
    messages = [Message(tensor=tensor, site=Site(name="ping", stream="none"))]
    transfer = comm.send if sends else comm.receive
    for pending in transfer(messages, 1 - comm.coordinate.pp, direction=direction):
        pending.wait()


def _finish(here: World) -> None:
    if here.device.type == "cuda":
        torch.cuda.synchronize(here.device)


@naming_errors
def main(arguments: Sequence[str]) -> None:
    """One of two ranks, started by `measure_message`."""
    file, backend, timeout = arguments
    choice: BackendChoice = "nccl" if backend == "nccl" else "gloo"
    with world(choice, timeout_seconds=float(timeout)) as here:
        seconds = _seconds(here, float(timeout))
        if here.rank == 0:
            Path(file).write_text(json.dumps(seconds), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
