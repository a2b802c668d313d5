"""How is an experiment run from the command line, and how does it look meanwhile?"""

import contextlib
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from launch.env import BackendChoice, launched_rank
from launch.experiment import Experiment, load
from launch.outside import measure
from launch.rank_options import backend_option, timeout_option
from launch.sweep import Outcome, Sweep
from results.schema import Status

RECORDS = Path("results/records")

_file = click.argument("file", type=click.Path(path_type=Path))
output_option = click.option(
    "--output", type=click.Path(path_type=Path), default=RECORDS, show_default=True, help="Folder of all records."
)
fresh_option = click.option(
    "--resume/--fresh",
    "resumes",
    default=True,
    help="Keep the cells that are measured already [default], or measure all of them again.",
)


class Bar:
    """Shows a sweep as a bar of steps, with the cells done and the one under way."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._cells = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("cells"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            # Seldom, because who draws takes time from who is measured.
            refresh_per_second=2,
            disable=not console.is_terminal,
        )
        self._task = self._cells.add_task("starting", total=None)
        self._num_steps = self._num_cells = self._num_done = 0

    def __enter__(self) -> Self:
        self._cells.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._cells.stop()

    def planned(self, num_steps: int, num_cells: int) -> None:
        self._num_steps, self._num_cells = num_steps, num_cells
        self._cells.update(self._task, total=num_cells)

    def moved(self, num_steps: int, cell: str, phase: str) -> None:
        share = num_steps / max(1, self._num_steps)
        self._cells.update(self._task, completed=share * self._num_cells, description=f"{phase:8} {cell}")

    def settled(self, cell: str, status: Status, reason: str) -> None:
        self._num_done += 1
        if status != "ok" or not self._console.is_terminal:
            told = f"{self._num_done}/{self._num_cells} {status} {cell}" + (f": {reason}" if reason else "")
            self._console.print(told, style="red" if status != "ok" else None, highlight=False, soft_wrap=True)


@click.command("run")
@_file
@output_option
@fresh_option
@backend_option
@timeout_option
@click.option("--compile", "compiled_too", is_flag=True, help="Run each cell with compiled blocks too.")
@click.option("--list", "lists", is_flag=True, help="Show the cells of FILE and run nothing.")
def run_command(
    file: Path,
    output: Path,
    resumes: bool,
    backend: BackendChoice,
    timeout: float,
    compiled_too: bool,
    lists: bool,
) -> int:
    """Measure the cells of the experiment FILE, one record a cell.

    Every cell is first proved equal to one process, then counted, then timed in turns with the others. What is recorded
    already is kept, so that a run that was stopped goes on where it stopped; a cell that failed is tried again, and its
    record says why it failed. The exit code is 1 when any did.

    \b
    Examples:
      twinshard run launch/experiments/quick.toml
      twinshard run launch/experiments/articles.toml --list
      twinshard run launch/experiments/articles.toml --fresh --backend gloo
    """  # noqa: D301 - click reads the character
    console = Console(stderr=True, markup=False)
    if lists:
        Console(markup=False).print(_listed(load(file, compiled_too=compiled_too)))
        return 0
    sweep = Sweep(file, output, backend=backend, timeout_seconds=timeout, compiled_too=compiled_too)
    outcome = swept(sweep, output, console, fresh=not resumes)
    if outcome is None:
        return 130
    return 1 if outcome.failed else 0


def swept(sweep: Sweep, output: Path, console: Console, *, fresh: bool) -> Outcome | None:
    """Runs a sweep with a bar and tells how it ended; None when it was stopped, which is told too."""
    try:
        with _stoppable(), Bar(console) as bar:
            outcome = sweep.run(bar, fresh=fresh)
    except KeyboardInterrupt:
        console.print(
            f"stopped: what was measured stays in {output / sweep.experiment.name}; "
            "the same command goes on from there",
            highlight=False,
            soft_wrap=True,
        )
        return None
    _summarise(outcome, output / sweep.experiment.name, console)
    return outcome


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Takes a request to end (a scheduler's, or Ctrl-C in a shell that lets its children ignore it) for a Ctrl-C."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _summarise(outcome: Outcome, folder: Path, console: Console) -> None:
    told = [
        f"{len(names)} {word}"
        for word, names in (
            ("measured", outcome.measured),
            ("kept", outcome.kept),
            ("unsupported", outcome.unsupported),
            ("failed", outcome.failed),
        )
        if names or word == "measured"
    ]
    console.print(f"{', '.join(told)}; records are in {folder}", highlight=False, soft_wrap=True)
    for reason, count in Counter(outcome.unsupported.values()).items():
        console.print(f"{count} unsupported: {reason}", highlight=False, soft_wrap=True)
    if outcome.strangers:
        console.print(
            f"{len(outcome.strangers)} records there belong to no cell of this experiment, such as "
            f"{outcome.strangers[0]}: --fresh removes them",
            highlight=False,
            soft_wrap=True,
        )
    if outcome.failed:
        console.print(f"what the ranks printed: {outcome.logs}/*/log", highlight=False, soft_wrap=True)


def _listed(experiment: Experiment) -> Table:
    table = Table("ranks", "cell", "why not", title=f"{len(experiment.cells)} cells of {experiment.name}")
    for cell in experiment.cells:
        table.add_row(str(cell.world_size), cell.name, cell.refusal)
    return table


@click.command("measure", hidden=True)
@_file
@output_option
@fresh_option
@backend_option
@timeout_option
def measure_command(file: Path, output: Path, resumes: bool, backend: BackendChoice, timeout: float) -> int:
    """Measure the cells of FILE that have as many ranks as torchrun started.

    \b
    Examples:
      torchrun --standalone --nproc-per-node 4 -m launch launch/experiments/quick.toml
      torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m launch FILE
    """  # noqa: D301 - click reads the character
    try:
        num_measured, num_failed = measure(file, output, backend=backend, timeout_seconds=timeout, fresh=not resumes)
    except ValueError:
        # All ranks see the same mistake; one of them tells it.
        if launched_rank() == 0:
            raise
        return 2
    if launched_rank() == 0:
        click.echo(f"{num_measured} measured, {num_failed} failed; records are in {output}")
    return 1 if num_failed else 0
