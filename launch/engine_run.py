"""What can be measured of any engine? Steps from outside, and what the recorder saw.

    counting     the third step, under the recorder: the first finds partners and shapes, and compiles blocks if they
                 are to be; the second settles buckets; compiled blocks are counted as they are written
    timed        wall time, and on CPUs the thread's CPU time as busy time; GPUs tell no busy time from outside, nor do
                 engines that compute on threads of their own; a step in which something is compiled ends the cell

What needs a look inside stays empty, not zero: spans of actions and blocks, kept bytes, FLOPs, the sites of a
communication. The native engine is looked into by `launch/measure.py`.
"""

import contextlib
import dataclasses
import time
from collections.abc import Iterator

import torch

from launch.cell import Cell
from launch.clock import BusyClock
from launch.env import World
from launch.parts import TimedParts, timed_parts
from models.batch import Batch
from parallel.comm import Comm, Groups
from parallel.compiled import as_written, compilations
from parallel.engines.engine import Engine, StepFacts, build
from parallel.engines.settings import EngineSettings
from parallel.figures import RankFigures
from parallel.ledger import Event
from parallel.operators import Operator
from parallel.plans import plan
from parallel.recorder import Observed, Recorder
from parallel.schedule import Action
from parallel.sequence import deal

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What one step is made of, on one rank."""

    step: StepFacts
    figures: RankFigures | None
    """None where no meter can watch the engine."""
    events: tuple[Event, ...]
    difference: str | None
    """First place where ledger and recorder differ, or what the recorder does not know; None when all is well."""
    operators: dict[Operator, int]
    """Count of each (operator, shapes, phase); none where no meter can watch."""
    forward_flops: dict[tuple[int, int], int]
    """By stage and block of the flat list, `NO_BLOCK` for what is in none."""
    peak_allocated_bytes: int
    """By the device's allocator, other cells in memory left out; 0 on CPUs."""
    peak_saved_bytes: int | None
    """Most that waited for the backward; None where no meter can watch."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedAction:
    """One action of one step on one rank: seconds since the step began there, and how many of them it was busy."""

    action: Action
    start: float
    end: float
    busy: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """Seconds of one step on one rank."""

    begun: float
    """By a clock that all processes of a host share."""
    actions: tuple[TimedAction, ...]
    """In the order in which they ran; none of an engine that is not looked into."""
    wall: float
    forward: dict[int, float]
    """By stage."""
    backward: dict[int, float]
    """By stage; both halves of a split one."""
    busy: float | None
    """All that the rank's thread did, on a GPU all that its stream did; None where that is not known."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedBlocks:
    """Busy seconds of the blocks of one rank's stage in one step, by block of the flat list."""

    forward: dict[int, float]
    backward: dict[int, float]


class EngineRun:
    """One run of one cell by any engine, as one rank sees it. Every method is collective.

    Attributes:
        plan, comm, engine: what runs.
        startup_seconds: that the engine took to be ready.
        share: this data-parallel rank's part of the batch.
    """

    engine: Engine

    def __init__(self, cell: Cell, batch: Batch, here: World, groups: Groups) -> None:
        self.cell = cell
        self._device = here.device
        self._clock = BusyClock(here.device)
        self._others_bytes = torch.cuda.memory_allocated(self._device) if self._on_gpu else 0
        self.plan = plan(cell.model, cell.layout, cell.profile)
        self.comm = Comm.create(plan=self.plan, rank=here.rank, groups=groups, device=here.device)
        settings = EngineSettings(
            seed=cell.settings.seed,
            dtype=DTYPES[cell.settings.dtype],
            device=here.device,
            optimizer=cell.settings.optimizer,
            learning_rate=cell.settings.learning_rate,
        )
        began = time.perf_counter()
        self.engine = build(cell.engine, plan=self.plan, comm=self.comm, settings=settings)
        self._clock.finish()
        self.startup_seconds = time.perf_counter() - began
        self.share = deal(batch, cell.layout, self.comm.coordinate.dp)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def count(self) -> Counted:
        """What one step sends; the facts are those of the first step, as of every engine."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        began = time.perf_counter()
        first = self.engine.step(self.share)
        self._clock.finish()
        self.startup_seconds += (time.perf_counter() - began) * self.cell.engine.compiled
        self.engine.step(self.share)
        with as_written() if self.cell.engine.compiled else contextlib.nullcontext(), Recorder() as recorder:
            self.engine.step(self.share)
        return Counted(
            step=first,
            figures=None,
            events=tuple(map(_event, recorder.events)),
            difference=recorder.first_unknown(),
            operators={},
            forward_flops={},
            peak_allocated_bytes=self._peak_allocated_bytes(),
            peak_saved_bytes=None,
        )

    def _peak_allocated_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._others_bytes if self._on_gpu else 0

    def time_blocks(self) -> TimedBlocks:
        """Nothing: blocks of an engine are not told apart from outside, and no step is run."""
        return TimedBlocks(forward={}, backward={})

    def settle(self) -> None:
        """One step that nobody looks at."""
        self.comm.ledger.clear()
        self.engine.step(self.share)

    @property
    def _tells_busy_time(self) -> bool:
        """Whether this thread's CPU time is all that the rank computes."""
        return not (self._on_gpu or self.engine.has_own_threads)

    def time_parts(self) -> TimedParts | None:
        """The operators of one step, under torch's profiler.

        None of an engine on whose threads it does not look, and of blocks that are compiled into what has no name.
        """
        if self.cell.engine.compiled:
            return None
        self.comm.barrier()
        if self.engine.has_own_threads:
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            self.engine.step(self.share)
        return timed_parts(profile.key_averages())

    def time_step(self) -> TimedStep:
        """One step, from outside; all ranks begin together."""
        self.comm.barrier()
        self._clock.finish()
        start, began = time.perf_counter(), time.thread_time()
        with self._uncompiling():
            self.engine.step(self.share)
            self._clock.finish()
            wall, busy = time.perf_counter() - start, time.thread_time() - began
        return TimedStep(
            begun=start, actions=(), wall=wall, forward={}, backward={}, busy=busy if self._tells_busy_time else None
        )

    @contextlib.contextmanager
    def _uncompiling(self) -> Iterator[None]:
        """Around what is timed. Raises RuntimeError when something is compiled inside."""
        if not self.cell.engine.compiled:
            yield
            return
        with compilations() as told:
            yield
        if told:
            raise RuntimeError(f"blocks were compiled again in a timed step ({', '.join(told)}): its seconds are none")


def _event(seen: Observed) -> Event:
    """What the recorder alone can tell of a communication."""
    return Event(
        operation=seen.operation,
        axis="unknown",
        group_size=seen.group_size,
        payload_bytes=seen.payload_bytes,
        site="unknown",
        stream="unknown",
        phase="unknown",
    )
