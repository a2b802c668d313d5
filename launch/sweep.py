"""How does a whole experiment run? One launch a world size, and another one after each failure.

    load, check  ->  lock  ->  cells left  ->  for each world size: launch, watch, settle  ->  outcome

Starting ranks costs seconds, so all cells of a world size share a launch. When a rank fails, the launch ends, the cell
at which it failed gets a record that says why, and the cells without a record go on in a new launch. A cell that ran
out of memory while others were held is tried once more on its own. Left out: what ranks do (`launch/worker.py`), and
how progress is shown.
"""

import dataclasses
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from launch.cell import Cell
from launch.data import Batches
from launch.env import DEFAULT_TIMEOUT_SECONDS, Backend, BackendChoice, local_backend, num_cores
from launch.experiment import AS_THE_FILE_SAYS, COMPILED_TOO, load
from launch.failure import Note, culprit, num_memory_kills, read_notes
from launch.lock import locked
from launch.progress import NOWHERE, Line, num_steps, read_lines
from launch.record import make_record, read_record, write_record
from launch.resume import left_to_run, strangers
from launch.torchrun import Launch, launched
from results.schema import Status

WORKER = "launch.worker"
LAUNCH_FOLDER = ".launch"
"""Below the experiment's records: a folder a launch of the last run, with its log, notes and progress."""
_POLL_SECONDS = 0.2


class Spectator(Protocol):
    """Is told how a sweep goes."""

    def planned(self, num_steps: int, num_cells: int) -> None:
        """So many steps of so many cells are left."""

    def moved(self, num_steps: int, cell: str, phase: str) -> None:
        """So many steps are done; steps that a failure undid are not among them."""

    def settled(self, cell: str, status: Status, reason: str) -> None:
        """A cell has its record."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a sweep ended: names of cells, each in one list."""

    kept: tuple[str, ...]
    unsupported: dict[str, str]
    """Reason by cell."""
    measured: tuple[str, ...]
    failed: dict[str, str]
    """Reason by cell; those that ran out of memory are among them."""
    strangers: tuple[str, ...]
    """Names of records in the same folder that belong to no cell."""
    logs: Path
    """Folder with what the ranks printed, a folder a launch."""


class Sweep:
    """One run of an experiment.

    Args:
        file: the experiment.
        output: folder of all records.
        backend: asked for.
        timeout_seconds: after which a collective without its partners fails.
        compiled_too: runs each cell with compiled blocks too.
        worker: module that each rank runs.

    Raises:
        ValueError: any mistake in the experiment, a text that cannot be read, a backend that this machine cannot serve.
    """

    def __init__(
        self,
        file: Path,
        output: Path,
        *,
        backend: BackendChoice = "auto",
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        compiled_too: bool = False,
        worker: str = WORKER,
    ) -> None:
        if timeout_seconds <= 0:
            raise ValueError(f"timeout = {timeout_seconds:g} s; it must be positive")
        self.experiment = load(file, compiled_too=compiled_too)
        self._compiled = COMPILED_TOO if compiled_too else AS_THE_FILE_SAYS
        self._file, self._output, self._worker, self._timeout = file, output, worker, timeout_seconds
        self._backends: dict[int, Backend] = {
            size: local_backend(backend, size) for size in self.experiment.world_sizes
        }
        self._batches = Batches(file.parent)
        self._batches.check(self.experiment)
        self._folder = output / self.experiment.name
        self._num_steps = num_steps(self.experiment.settings)
        self._done: dict[str, int] = {}
        self._statuses: dict[str, Status] = {}
        self._reasons: dict[str, str] = {}
        self._tried_alone: set[str] = set()
        self._num_launches = 0

    def run(self, spectator: Spectator, *, fresh: bool = False) -> Outcome:
        """Measures what is left, and with `fresh` everything.

        Raises:
            ValueError: another run writes to the same folder.
        """
        cells = self.experiment.cells
        with locked(self._folder):
            left = left_to_run(cells, self._batches, self._output, backends=self._backends, fresh=fresh)
            shutil.rmtree(self._folder / LAUNCH_FOLDER, ignore_errors=True)
            if fresh:
                for name in strangers(cells, self._output):
                    (self._folder / f"{name}.json").unlink()
            spectator.planned(len(left) * self._num_steps, len(left))
            for size in self.experiment.world_sizes:
                todo = [cell for cell in left if cell.world_size == size]
                while todo:
                    todo = self._launch(todo, spectator)
        return Outcome(
            kept=tuple(cell.name for cell in cells if not cell.refusal and cell not in left),
            unsupported={cell.name: cell.refusal for cell in cells if cell.refusal},
            measured=tuple(name for name, status in self._statuses.items() if status == "ok"),
            failed={name: self._reasons[name] for name, status in self._statuses.items() if status != "ok"},
            strangers=strangers(cells, self._output),
            logs=self._folder / LAUNCH_FOLDER,
        )

    def _launch(self, cells: Sequence[Cell], spectator: Spectator) -> list[Cell]:
        """Runs cells of one world size in one launch; returns those that still have no record."""
        self._num_launches += 1
        folder = self._folder / LAUNCH_FOLDER / str(self._num_launches)
        folder.mkdir(parents=True)
        size = cells[0].world_size
        place = [str(self._output), str(folder)]
        arguments = [str(self._file), self._compiled, *place, self._backends[size], str(self._timeout)]
        kills = num_memory_kills()
        with launched(
            self._worker, [*arguments, *(cell.name for cell in cells)], num_ranks=size, folder=folder
        ) as launch:
            at, is_stuck = self._watch(launch, spectator)
        left = [cell for cell in cells if cell.name not in self._statuses]
        if not left:
            return []
        note = culprit(
            read_notes(folder),
            launch.exits(),
            world_size=size,
            num_kills=num_memory_kills() - kills,
            cell=at.cell,
            phase=at.phase,
        )
        if note is None or is_stuck:
            error = f"nothing was done for {self._patience:.0f} s" if is_stuck else launch.last_words()
            note = Note(rank=-1, coordinate="", cell=at.cell, phase="", kind="error", error=error, seconds=time.time())
        return self._settle(left, note, spectator)

    @property
    def _patience(self) -> float:
        """Seconds without a line of progress after which a launch is stuck; a collective gives up long before."""
        return 2 * self._timeout + 60

    def _watch(self, launch: Launch, spectator: Spectator) -> tuple[Line, bool]:
        """Follows a launch to its end; returns where it was last, and whether it was ended for doing nothing."""
        position, last, alive_at = 0, NOWHERE, time.monotonic()
        while True:
            ended = launch.wait(_POLL_SECONDS) is not None
            lines, position = read_lines(launch.folder, position)
            for line in lines:
                last, alive_at = line, time.monotonic()
                self._note_line(line, spectator)
            if ended:
                return last, False
            if time.monotonic() - alive_at > self._patience:
                return last, True

    def _note_line(self, line: Line, spectator: Spectator) -> None:
        self._done[line.cell] = self._done.get(line.cell, 0) + (line.event != "begin")
        if line.event == "recorded":
            cell = next(cell for cell in self.experiment.cells if cell.name == line.cell)
            record = read_record(self._output, cell)
            reason = record.reason if record else "its record cannot be read back"
            self._conclude(cell, "ok" if line.phase == "ok" else "failed", reason, spectator)
        else:
            spectator.moved(sum(self._done.values()), line.cell, line.phase)

    def _conclude(self, cell: Cell, status: Status, reason: str, spectator: Spectator) -> None:
        self._statuses[cell.name], self._reasons[cell.name] = status, reason
        self._done[cell.name] = self._num_steps
        spectator.settled(cell.name, status, reason)
        spectator.moved(sum(self._done.values()), cell.name, status)

    def _settle(self, left: Sequence[Cell], note: Note, spectator: Spectator) -> list[Cell]:
        """Records what a failed launch leaves; returns the cells that go on."""
        for cell in left:
            self._done[cell.name] = 0
        guilty = [cell for cell in left if cell.name == note.cell]
        if not guilty:
            # Before the first cell or between two: whatever it was, it would meet the others too.
            guilty = list(left)
        if note.kind == "out_of_memory" and len(left) > 1 and note.cell not in self._tried_alone:
            self._tried_alone.add(note.cell)
            self._launch(guilty[:1], spectator)
        else:
            for cell in guilty:
                reason = _located(note, cell).reason
                self._record_failure(cell, _status(note), reason)
                self._conclude(cell, _status(note), reason, spectator)
        return [cell for cell in left if cell.name not in self._statuses]

    def _record_failure(self, cell: Cell, status: Status, reason: str) -> None:
        backend = self._backends[cell.world_size]
        record = make_record(
            cell,
            fingerprint=self._batches.fingerprint(cell),
            status=status,
            reason=reason,
            device="cuda" if backend == "nccl" else "cpu",
            backend=backend,
            # With nccl every rank has a GPU of its own.
            oversubscribed=backend == "gloo" and cell.world_size > num_cores(),
        )
        write_record(self._output, cell, record)


def _located(note: Note, cell: Cell) -> Note:
    """The note with the place of its rank, which a rank that was killed could not tell."""
    if note.rank < 0 or note.coordinate:
        return note
    return dataclasses.replace(note, coordinate=str(cell.layout.mesh.coordinate(note.rank)))


def _status(note: Note) -> Status:
    return "out_of_memory" if note.kind == "out_of_memory" else "failed"
