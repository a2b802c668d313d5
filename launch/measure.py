"""What does one rank do to measure a cell?

    parity       a small relative on the same layout, in float64, against one process      or the cell is not timed
    counting     one step under the recorder, counted bytes and operators                  no clock runs
    blocks       steps under module hooks, one clock reading before and after each block   not timed as steps
    warm-up      steps that are timed apart
    timed        steps with a reading of both clocks at the ends of each action and nothing else

All passes are steps of the same engine on the same batch. Who calls them in which order, so that cells take turns, is
`launch/worker.py`; what becomes of the numbers, `launch/facts.py`.
"""

import dataclasses
import time
from collections import Counter
from typing import Any

import torch

from launch.case import case_of
from launch.clock import ActionClock, BlockClock, BusyClock, numbered_blocks
from launch.env import World
from launch.experiment import Cell
from launch.parity import Parity, check_parity
from models.batch import Batch
from parallel.comm import Comm, Groups
from parallel.engines.engine import StepFacts
from parallel.engines.native import NativeEngine
from parallel.figures import RankFigures
from parallel.ledger import Event
from parallel.meter import Meter
from parallel.operators import Operator
from parallel.plans import plan
from parallel.recorder import Recorder
from parallel.schedule import Action
from parallel.sequence import deal

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What one step is made of, on one rank."""

    step: StepFacts
    figures: RankFigures
    events: tuple[Event, ...]
    difference: str | None
    """First place where ledger and recorder differ, None when they agree."""
    operators: dict[Operator, int]
    """Count of each (operator, shapes, phase)."""
    forward_flops: dict[tuple[int, int], int]
    """By stage and block of the flat list, `NO_BLOCK` for what is in none."""
    peak_allocated_bytes: int
    """By the device's allocator, other cells in memory left out; 0 on CPUs."""


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
    """In the order in which they ran."""
    wall: float
    forward: dict[int, float]
    """By stage."""
    backward: dict[int, float]
    """By stage; both halves of a split one."""
    busy: float
    """Forward, backward, synchronisation and update."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedBlocks:
    """Busy seconds of the blocks of one rank's stage in one step, by block of the flat list."""

    forward: dict[int, float]
    backward: dict[int, float]


class Parities:
    """Whether layouts equal one process, each proved once: cells whose small relatives are alike share the proof."""

    def __init__(self, here: World, groups: Groups) -> None:
        self._here, self._groups = here, groups
        self._proved: dict[Any, Parity] = {}

    def parity(self, cell: Cell) -> tuple[Parity, str]:
        """The proof for a cell, and the name of the model that it was made with. Collective."""
        case = case_of(cell.model, cell.layout, cell.profile)
        key = dataclasses.replace(case, name="", config=case.config.replace(name=""))
        if key not in self._proved:
            self._proved[key] = check_parity(
                case, groups=self._groups, rank=self._here.rank, device=self._here.device, seed=cell.settings.seed
            )
        return self._proved[key], case.config.name


class Run:
    """One run of one cell, as one rank sees it. Every method is collective.

    Attributes:
        plan, comm, engine: what runs.
        share: this data-parallel rank's part of the batch.
    """

    def __init__(self, cell: Cell, batch: Batch, here: World, groups: Groups) -> None:
        self.cell = cell
        self._device = here.device
        self._clock = BusyClock(here.device)
        self._others_bytes = torch.cuda.memory_allocated(self._device) if self._on_gpu else 0
        self.plan = plan(cell.model, cell.layout, cell.profile)
        self.comm = Comm.create(plan=self.plan, rank=here.rank, groups=groups, device=here.device)
        self.engine = NativeEngine(
            plan=self.plan,
            comm=self.comm,
            seed=cell.settings.seed,
            dtype=DTYPES[cell.settings.dtype],
            device=here.device,
            optimizer=cell.settings.optimizer,
            learning_rate=cell.settings.learning_rate,
        )
        self.share = deal(batch, cell.layout, self.comm.coordinate.dp)
        self.blocks = numbered_blocks(self.engine.model, cell.model)

    @property
    def _on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def count(self) -> Counted:
        """One step, counted in every respect."""
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        self.comm.ledger.clear()
        with Recorder() as recorder, Meter(self.engine) as meter:
            step = self.engine.step(self.share, observer=meter)
        events = tuple(self.comm.ledger)
        return Counted(
            step=step,
            figures=meter.figures(),
            events=events,
            difference=recorder.first_difference(events),
            operators=dict(meter.operators.counts),
            forward_flops=self._forward_flops(meter),
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device) - self._others_bytes
            if self._on_gpu
            else 0,
        )

    def _forward_flops(self, meter: Meter) -> dict[tuple[int, int], int]:
        flops: Counter[tuple[int, int]] = Counter()
        for figures in meter.actions:
            for segment in figures.segments:
                flops[figures.action.stage, self.plan.block_number(segment.block)] += segment.flops.forward
        return dict(flops)

    def time_blocks(self) -> TimedBlocks:
        """One step with a clock on every block."""
        self.comm.ledger.clear()
        with BlockClock(self.blocks, self._clock) as clock:
            self.engine.step(self.share)
            self._clock.finish()
        return TimedBlocks(forward=clock.seconds(clock.forward), backward=clock.seconds(clock.backward))

    def time_step(self) -> TimedStep:
        """One step with a clock on every action; all ranks begin together."""
        self.comm.ledger.clear()
        self.comm.barrier()
        self._clock.finish()
        start = time.perf_counter()
        observer = ActionClock(self._clock)
        self.engine.step(self.share, observer=observer)
        self._clock.finish()
        wall = time.perf_counter() - start
        assert observer.order == self.plan.table[self.comm.coordinate.pp], "actions ran in another order"
        forward = observer.by_stage("forward")
        backward = observer.by_stage("backward", "backward_input", "backward_weight")
        return TimedStep(
            begun=start,
            actions=tuple(
                TimedAction(
                    action=ran.action,
                    start=observer.wall_seconds(ran.start),
                    end=observer.wall_seconds(ran.end),
                    busy=observer.busy_seconds(ran),
                )
                for ran in observer.ran
            ),
            wall=wall,
            forward=forward,
            backward=backward,
            busy=sum(forward.values()) + sum(backward.values()) + observer.synchronise_seconds(),
        )
