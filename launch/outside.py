"""How does a rank that somebody else started measure? `torchrun ... -m launch FILE`, on one node or several.

Rank 0 takes the lock and tells the others which cells of the world's size are left; then all do what `launch/worker.py`
does. Nobody watches from outside: the first rank that raises records the failure itself, and a later launch goes on
with the rest. On several nodes the output folder must be one that all of them see.
"""

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from launch.cell import Cell
from launch.data import Batches
from launch.env import BackendChoice, World, launched_rank, launched_world_size, naming_errors, world
from launch.experiment import Experiment, load
from launch.failure import culprit, read_notes
from launch.lock import locked
from launch.progress import Place
from launch.record import make_record, write_record
from launch.resume import left_to_run
from launch.sides import expect
from launch.sweep import LAUNCH_FOLDER
from launch.worker import Worker, noting


@naming_errors
def measure(
    file: Path, output: Path, *, backend: BackendChoice, timeout_seconds: float, fresh: bool
) -> tuple[int, int]:
    """Measures the cells of this world's size; returns how many were measured, and how many failed.

    Raises:
        ValueError: a mistake in the experiment, no cell of this size, or another run into the same folder.
    """
    experiment = load(file)
    if launched_world_size() not in experiment.world_sizes:
        raise ValueError(
            f"{file} has no cell for {launched_world_size()} ranks; its world sizes are "
            f"{', '.join(map(str, experiment.world_sizes))}"
        )
    batches = Batches(file.parent)
    batches.check(experiment)
    folder = _folder(output, experiment.name)
    possible = [cell for cell in experiment.cells if cell.world_size == launched_world_size()]
    expected = expect(possible, batches, launched_rank())
    with world(backend, timeout_seconds=timeout_seconds) as here, contextlib.ExitStack() as stack:
        names = _agree(experiment, batches, output, here, stack, fresh=fresh)
        cells = [cell for cell in experiment.cells if cell.name in names]
        place = Place(folder, is_writer=here.rank == 0)
        worker = Worker(here, batches, expected, output, place, timeout_seconds)
        try:
            with noting(place, rank=here.rank, folder=folder):
                worker.measure(cells)
        except Exception:
            # Whatever a rank may raise becomes the cell's failed record before it goes on.
            _record_culprit(cells, batches, output, here)
            raise
    return len(cells) - worker.num_failed, worker.num_failed


def _folder(output: Path, experiment: str) -> Path:
    """Where the ranks of this launch leave notes and progress."""
    return output / experiment / LAUNCH_FOLDER / "1"


def _agree(
    experiment: Experiment, batches: Batches, output: Path, here: World, stack: contextlib.ExitStack, *, fresh: bool
) -> tuple[str, ...]:
    """Names of the cells to run, as rank 0 found them. What keeps rank 0 from it is raised on every rank."""
    names: tuple[str, ...] = ()
    refusal = ""
    if here.rank == 0:
        try:
            stack.enter_context(locked(output / experiment.name))
            folder = _folder(output, experiment.name)
            shutil.rmtree(folder.parent, ignore_errors=True)
            folder.mkdir(parents=True)
            mine = [cell for cell in experiment.cells if cell.refusal or cell.world_size == here.world_size]
            left = left_to_run(mine, batches, output, backends={here.world_size: here.backend}, fresh=fresh)
            names = tuple(cell.name for cell in left)
        except ValueError as error:
            refusal = str(error)
    names, refusal = here.share((names, refusal))
    if refusal:
        raise ValueError(refusal)
    return names


def _record_culprit(cells: Sequence[Cell], batches: Batches, output: Path, here: World) -> None:
    """Records the failure that the notes tell; ranks that come later know more, and their record replaces this one."""
    if not cells:
        return
    notes = read_notes(_folder(output, cells[0].experiment))
    note = culprit(notes, {}, world_size=here.world_size, num_kills=0, cell="", phase="")
    for cell in cells:
        if note is not None and cell.name == note.cell:
            record = make_record(
                cell,
                fingerprint=batches.fingerprint(cell),
                status="out_of_memory" if note.kind == "out_of_memory" else "failed",
                reason=note.reason,
                device=here.device.type,
                backend=here.backend,
                oversubscribed=here.is_oversubscribed,
            )
            write_record(output, cell, record)
