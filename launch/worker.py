"""What does each rank of a launch do? Measure the cells of its world size, and leave a record of each.

    predict and trace every cell, alone  ->  join the other ranks
    `interleave` cells:  build, prove, count each  ->  warm up  ->  blocks  ->  timed rounds  ->  records

Cells of a group take turns: a round runs each of them once, in an order of its own, so that a slow minute of the
machine falls on all alike. A timed step comes right after one that is not, as in a training run. Rank 0 writes records.
A cell that is not equal to one process, or whose ledger is not what was recorded, becomes a failed record and is not
timed. A rank that raises leaves a note (`launch/failure.py`), and the launch ends.

    python -m launch.worker FILE COMPILED OUTPUT FOLDER BACKEND TIMEOUT [CELL ...]     started by `launch/sweep.py`
    torchrun ... -m launch FILE                                               from outside, by `launch/outside.py`
"""

import contextlib
import dataclasses
import gc
import math
import random
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from launch.cell import Cell
from launch.data import Batches, data_facts
from launch.engine_run import Counted, EngineRun, TimedBlocks, TimedStep
from launch.env import BackendChoice, World, launched_rank, naming_errors, world
from launch.experiment import COMPILED_TOO, load
from launch.facts import (
    Report,
    block_facts,
    communication_facts,
    edge_facts,
    operator_facts,
    part_facts,
    plan_facts,
    report,
    stage_facts,
)
from launch.failure import leave_note, note_of
from launch.measure import Parities, run_of
from launch.parity import Parity
from launch.parts import TimedParts
from launch.progress import Place
from launch.record import make_record, write_record
from launch.settings import NUM_PART_STEPS
from launch.sides import Expected, disagreements, expect, figure_facts
from launch.spans import action_facts, profile_facts, span_facts, typical_step
from parallel.comm import Groups
from parallel.plan import Plan
from results.schema import FigureFacts, ParityFacts, Record

T = TypeVar("T")


class Trial:
    """A cell under way: its run, and what was measured so far."""

    def __init__(self, run: EngineRun, counted: Counted, parity: ParityFacts) -> None:
        self.run, self.counted, self.parity = run, counted, parity
        self.warmup: list[float] = []
        self.steps: list[TimedStep] = []
        self.block_steps: list[TimedBlocks] = []
        self.parts: list[TimedParts] = []


class Worker:
    """One rank and the cells that it measures, together with all others."""

    def __init__(
        self,
        here: World,
        batches: Batches,
        expected: Mapping[str, Expected],
        output: Path,
        place: Place,
        timeout_seconds: float,
    ) -> None:
        self._here, self._batches, self._output, self._place = here, batches, output, place
        self._expected = expected
        self._groups = Groups(timeout_seconds)
        self._parities = Parities(here, self._groups)
        self.num_failed = 0

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measures cells of one experiment, all of this world's size, in groups."""
        size = cells[0].settings.interleave if cells else 1
        for start in range(0, len(cells), size):
            self._measure_group(cells[start : start + size])

    def _measure_group(self, cells: Sequence[Cell]) -> None:
        trials = [trial for cell in cells if (trial := self._begin(cell)) is not None]
        settings = cells[0].settings
        # A collection of garbage in the middle of a step would be taken for work.
        gc.collect()
        gc.disable()
        for phase, rounds in (
            ("warm-up", settings.warmup),
            ("blocks", settings.repeats),
            ("timing", settings.repeats),
            ("parts", NUM_PART_STEPS if settings.parts else 0),
        ):
            for index in range(rounds):
                for trial in shuffled(trials, f"{phase} {index}"):
                    with self._at(trial.run.cell, phase):
                        self._step(trial, phase)
        gc.enable()
        for trial in trials:
            self._end(trial)

    @staticmethod
    def _step(trial: Trial, phase: str) -> None:
        if phase in ("timing", "parts"):
            # The turns of others have emptied caches and moved the allocator's memory about.
            trial.run.settle()
        if phase == "blocks":
            trial.block_steps.append(trial.run.time_blocks())
        elif phase == "timing":
            trial.steps.append(trial.run.time_step())
        elif phase == "parts":
            parts = trial.run.time_parts()
            trial.parts += [] if parts is None else [parts]
            # A profile is a circle of objects; hundreds of them fill the memory.
            gc.collect()
        else:
            trial.warmup.append(trial.run.time_step().wall)

    @contextlib.contextmanager
    def _at(self, cell: Cell, phase: str) -> Iterator[None]:
        self._place.begin(cell.name, phase, _coordinate(cell, self._here.rank))
        yield
        self._place.end()

    def _begin(self, cell: Cell) -> Trial | None:
        """Proves and counts a cell; None when that fails, with the failure recorded."""
        with self._at(cell, "parity"):
            proof, model = self._parities.parity(cell)
        facts = proof.facts(model)
        if proof.failures:
            self._fail(cell, f"not equal to one process: {'; '.join(proof.failures)}", _finite(proof, facts))
            return None
        with self._at(cell, "counting"):
            run = run_of(cell, self._batches.batch(cell), self._here, self._groups)
            counted = run.count()
            lines = [f"ledger and recorder differ: {counted.difference}"] if counted.difference else []
            if counted.figures is not None:
                lines += disagreements(self._expected[cell.name], counted.figures)
            told = run.comm.gather_objects(lines[:1])
        difference = next((f"rank {rank}: {line}" for rank, first in enumerate(told) for line in first), None)
        if difference:
            self._fail(cell, difference, facts)
            return None
        if not math.isfinite(counted.step.loss) or not math.isfinite(counted.step.gradient_norm):
            self._fail(cell, f"loss {counted.step.loss}, gradient norm {counted.step.gradient_norm}", facts)
            return None
        return Trial(run, counted, facts)

    def _fail(self, cell: Cell, reason: str, parity: ParityFacts | None) -> None:
        self.num_failed += 1
        if self._here.rank == 0:
            record = make_record(
                cell,
                fingerprint=self._batches.fingerprint(cell),
                status="failed",
                reason=reason,
                parity=parity,
                device=self._here.device.type,
                backend=self._here.backend,
                oversubscribed=self._here.is_oversubscribed,
            )
            write_record(self._output, cell, record)
        self._place.recorded("failed")

    def _end(self, trial: Trial) -> None:
        """Puts the reports of all ranks together and records the cell."""
        cell = trial.run.cell
        self._place.begin(cell.name, "recording", _coordinate(cell, self._here.rank))
        mine = report(trial.run, trial.counted, trial.steps, trial.block_steps, trial.parts)
        reports: list[Report] = trial.run.comm.gather_objects(mine)
        rows = []
        if trial.counted.figures is not None:
            rows = figure_facts(self._here.rank, self._expected[cell.name], trial.counted.figures)
        figures: list[list[FigureFacts]] = trial.run.comm.gather_objects(rows)
        warmup: list[list[float]] = trial.run.comm.gather_objects(trial.warmup)
        if self._here.rank == 0:
            record = self._record(trial, reports, warmup)
            record = dataclasses.replace(record, figures=[row for rows in figures for row in rows])
            write_record(self._output, cell, record)
        self._place.recorded("ok")

    def _record(self, trial: Trial, reports: list[Report], warmup: list[list[float]]) -> Record:
        cell, plan = trial.run.cell, trial.run.plan
        step_seconds = _slowest([one.facts.step_seconds for one in reports])
        has_ledger = cell.engine.name == "native"
        return make_record(
            cell,
            fingerprint=self._batches.fingerprint(cell),
            status="ok",
            device=self._here.device.type,
            backend=self._here.backend,
            oversubscribed=self._here.is_oversubscribed,
            data=data_facts(cell, self._batches.batch(cell), plan),
            parity=trial.parity,
            ledger_matches_recorder=True if has_ledger else None,
            loss=trial.counted.step.loss,
            gradient_norm=trial.counted.step.gradient_norm,
            warmup_seconds=_slowest(warmup),
            step_seconds=step_seconds,
            ranks=[one.facts for one in reports],
            communication=communication_facts(reports),
            parts=part_facts(reports),
            **(self._looked_into(cell, plan, reports, typical_step(step_seconds)) if has_ledger else {}),
        )

    def _looked_into(self, cell: Cell, plan: Plan, reports: list[Report], typical: int) -> dict[str, Any]:
        """The fields of a record that only the native engine fills."""
        return {
            "typical_step": typical,
            "plan": plan_facts(plan),
            "stages": stage_facts(plan, reports),
            "blocks": block_facts(plan, reports),
            "actions": action_facts(reports),
            "spans": span_facts(reports, typical, is_one_host=self._here.local_world_size == self._here.world_size),
            "profile": profile_facts(None if cell.engine.compiled else cell.measured_profile, plan),
            "edges": edge_facts(reports),
            "operators": operator_facts(reports),
        }


def shuffled(turns: Sequence[T], seed: str) -> list[T]:
    """In an order of its own for each round, the same on all ranks: nobody always comes after the same one."""
    return random.Random(seed).sample(turns, len(turns))


def _slowest(lists: list[list[float]]) -> list[float]:
    """A step lasts as long as its slowest rank."""
    return [max(samples) for samples in zip(*lists, strict=True)]


def _finite(proof: Parity, facts: ParityFacts) -> ParityFacts | None:
    """The errors when all are numbers: a record holds no infinity."""
    return facts if math.isfinite(proof.worst_error) else None


def _coordinate(cell: Cell, rank: int) -> str:
    return str(cell.layout.mesh.coordinate(rank))


@contextlib.contextmanager
def noting(place: Place, *, rank: int, folder: Path) -> Iterator[None]:
    """Leaves a note when this rank raises; the error goes on."""
    try:
        yield
    except BaseException as error:
        traceback.print_exc()
        note = note_of(error, rank=rank, coordinate=place.coordinate, cell=place.cell, phase=place.phase)
        leave_note(folder, note)
        raise


def expect_all(cells: Sequence[Cell], batches: Batches, *, rank: int, place: Place) -> dict[str, Expected]:
    """What this rank must measure of each cell, by its name; before the process joins a process group."""
    expected: dict[str, Expected] = {}
    for cell in cells:
        place.begin(cell.name, "tracing", _coordinate(cell, rank))
        expected |= expect([cell], batches, rank)
        place.end()
    return expected


@naming_errors
def main(arguments: Sequence[str]) -> None:
    """One rank of a launch by `launch/sweep.py`, which has checked the experiment and chosen the cells."""
    file, compiled, output, folder, backend, timeout, *names = arguments
    experiment = load(Path(file), compiled_too=compiled == COMPILED_TOO)
    cells = [cell for cell in experiment.cells if cell.name in names]
    choice: BackendChoice = "nccl" if backend == "nccl" else "gloo"
    batches = Batches(Path(file).parent)
    rank = launched_rank()
    place = Place(Path(folder), is_writer=rank == 0)
    with noting(place, rank=rank, folder=Path(folder)):
        expected = expect_all(cells, batches, rank=rank, place=place)
        with world(choice, timeout_seconds=float(timeout)) as here:
            Worker(here, batches, expected, Path(output), place, float(timeout)).measure(cells)


if __name__ == "__main__":
    main(sys.argv[1:])
