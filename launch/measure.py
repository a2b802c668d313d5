"""What does one rank do to measure a cell?

    parity       a small relative on the same layout, in float64, against one process      or the cell is not timed
    counting     one step under the recorder, counted bytes and operators                  no clock runs
    blocks       steps under module hooks, one clock reading before and after each block   not timed as steps
    warm-up      steps that are timed apart
    timed        steps with a reading of both clocks at the ends of each action and nothing else

All passes are steps of the same engine on the same batch. Compiled blocks are counted twice: as they are written, which
is what is predicted and traced, and compiled, which must send the same and may keep less. Only then do clocks run; a
timed step in which something is compiled ends the cell. Other engines than the native one cannot be looked into: of
them `launch/engine_run.py` tells less. Who calls them in which order, so that cells take turns, is
`launch/worker.py`; what becomes of the numbers, `launch/facts.py`.
"""

import dataclasses
import time
from collections import Counter
from typing import Any

import torch

from launch.alone import Floor
from launch.case import case_of
from launch.cell import Cell
from launch.clock import ActionClock, BlockClock, numbered_blocks
from launch.engine_run import Counted, EngineRun, TimedAction, TimedBlocks, TimedStep
from launch.env import World
from launch.parity import Parity, check_parity
from launch.parts import TimedParts
from models.batch import Batch
from parallel.comm import Groups
from parallel.compiled import as_written
from parallel.engines.native import NativeEngine
from parallel.meter import Meter
from parallel.recorder import Recorder
from parallel.saved import SavedBytes


class Parities:
    """Whether layouts equal one process, each proved once: cells whose small relatives are alike share the proof."""

    def __init__(self, here: World, groups: Groups) -> None:
        self._here, self._groups = here, groups
        self._proved: dict[Any, Parity] = {}

    def parity(self, cell: Cell) -> tuple[Parity, str]:
        """The proof for a cell, and the name of the model that it was made with. Collective."""
        case = case_of(cell.model, cell.layout, cell.profile, engine=cell.engine)
        key = dataclasses.replace(case, name="", config=case.config.replace(name=""))
        if key not in self._proved:
            self._proved[key] = check_parity(
                case, groups=self._groups, rank=self._here.rank, device=self._here.device, seed=cell.settings.seed
            )
        return self._proved[key], case.config.name


class Run(EngineRun):
    """One run of one cell by the native engine, as one rank sees it, looked into. Every method is collective."""

    engine: NativeEngine

    def __init__(self, cell: Cell, batch: Batch, here: World, groups: Groups) -> None:
        super().__init__(cell, batch, here, groups)
        self.blocks = numbered_blocks(self.engine.model, cell.model)

    def count(self) -> Counted:
        """One step, counted in every respect; of compiled blocks two, with the one that compiles between them."""
        if not self.cell.engine.compiled:
            return self._count()
        with as_written():
            counted = self._count()
        began = time.perf_counter()
        self.engine.step(self.share)
        self._clock.finish()
        self.startup_seconds += time.perf_counter() - began
        self.comm.ledger.clear()
        with SavedBytes(self.engine.model) as saved:
            self.engine.step(self.share)
        difference = counted.difference
        if tuple(self.comm.ledger) != counted.events:
            difference = f"compiled blocks send {len(self.comm.ledger)} messages, as written {len(counted.events)}"
        return dataclasses.replace(counted, difference=difference, peak_saved_bytes=saved.peak_bytes)

    def _count(self) -> Counted:
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats(self._device)
        self.comm.ledger.clear()
        with Recorder() as recorder, Meter(self.engine) as meter:
            step = self.engine.step(self.share, observer=meter)
        events, figures = tuple(self.comm.ledger), meter.figures()
        return Counted(
            step=step,
            figures=figures,
            events=events,
            difference=recorder.first_difference(events),
            operators=dict(meter.operators.counts),
            forward_flops=self._forward_flops(meter),
            peak_allocated_bytes=self._peak_allocated_bytes(),
            peak_saved_bytes=figures.peak_saved_bytes,
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
        with BlockClock(self.blocks, self._clock) as clock, self._uncompiling():
            self.engine.step(self.share)
            self._clock.finish()
        return TimedBlocks(forward=clock.seconds(clock.forward), backward=clock.seconds(clock.backward))

    def time_parts(self) -> TimedParts | None:
        """A profile of one step, and what the products and the messages of another take alone."""
        parts = super().time_parts()
        if parts is None:
            return None
        with Floor() as floor:
            self.engine.step(self.share)
        self.comm.barrier()
        products = floor.time_products()
        self.comm.barrier()
        return dataclasses.replace(parts, products_alone=products, messages_alone=floor.time_messages())

    def time_step(self) -> TimedStep:
        """One step with a clock on every action; all ranks begin together."""
        self.comm.ledger.clear()
        self.comm.barrier()
        self._clock.finish()
        start, began = time.perf_counter(), time.thread_time()
        observer = ActionClock(self._clock)
        with self._uncompiling():
            self.engine.step(self.share, observer=observer)
            self._clock.finish()
            wall, busy = time.perf_counter() - start, time.thread_time() - began
        if self._on_gpu:
            # What occupied the stream; on CPUs, all that the thread did, as of every engine.
            busy = sum(map(observer.busy_seconds, observer.ran)) + observer.synchronise_seconds()
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
            busy=busy,
        )


def run_of(cell: Cell, batch: Batch, here: World, groups: Groups) -> EngineRun:
    """The run of a cell, looked into where its engine can be. Collective."""
    return (Run if cell.engine.name == "native" else EngineRun)(cell, batch, here, groups)
