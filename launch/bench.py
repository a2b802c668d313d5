"""Which engine is fastest, and which sends least? `twinshard bench`, all engines in turns on the same cells.

    run what is left of the experiment  ->  records  ->  every engine against the best other  ->  tables

It is `twinshard run` and then `results/benchmark.py`, which reads the records and is lent by the command line. Each
timed round runs every cell once, so that a slow minute falls on all engines alike. A cell that an engine refuses or
that fails is a row with its reason.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console

from launch.commands import RECORDS, fresh_option, output_option, swept
from launch.env import BackendChoice
from launch.rank_options import backend_option, timeout_option
from launch.sheets import Cell, Format, Sheet, format_option, show
from launch.sweep import Sweep

EXPERIMENT = Path(__file__).resolve().parent / "experiments" / "engines.toml"
TABLE = RECORDS.parent / "tables" / "bench.csv"
Row = Mapping[str, Cell]


class Comparing(Protocol):
    """Who holds records of engines against each other and writes the tables (`results/benchmark.py`)."""

    def __call__(self, records: Path, cells: Sequence[str], output: Path) -> Mapping[str, Sequence[Row]]: ...


@click.command("bench")
@click.argument("file", metavar="[EXPERIMENT]", type=click.Path(path_type=Path), default=EXPERIMENT)
@output_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=TABLE,
    show_default=True,
    help="CSV file of all rows; <name>_fastest.csv beside it has each engine at its best schedule.",
)
@fresh_option
@backend_option
@timeout_option
@format_option
@click.pass_obj
def bench_command(
    lent: Callable[[str], Comparing],
    *,
    file: Path,
    output: Path,
    out: Path,
    resumes: bool,
    backend: BackendChoice,
    timeout: float,
    form: Format,
) -> int:
    """Measure the engines of EXPERIMENT in turns, and hold each against the best other engine.

    EXPERIMENT is launch/experiments/engines.toml unless given: all engines, both architectures, two sizes, on two
    ranks. A ratio below 1 is better than every other engine; times have a 95 % bootstrap interval, bytes and counts are
    exact. Peak saved bytes are known of engines that can be looked into. The exit code is 1 when a cell failed.

    \b
    Examples:
      twinshard bench
      twinshard bench launch/experiments/engines.toml --fresh --out bench.csv
      twinshard bench mine.toml --format markdown
    """  # noqa: D301 - click reads the character
    sweep = Sweep(file, output, backend=backend, timeout_seconds=timeout)
    outcome = swept(sweep, output, Console(stderr=True, markup=False), fresh=not resumes)
    if outcome is None:
        return 130
    cells = [cell.name for cell in sweep.experiment.cells]
    told = lent("benchmark")(output / sweep.experiment.name, cells, out)
    rows, document = told["bench"], {name: list(table) for name, table in told.items()}
    sheets = [*_sheets(rows), *_fastest_sheet(told["fastest"])]
    show(form, sheets=sheets, columns=tuple(rows[0]), rows=rows, document=document)
    return 1 if outcome.failed else 0


def _sheets(rows: Sequence[Row]) -> list[Sheet]:
    """One a model, then why cells could not be run."""
    sheets = []
    of_compiled = ", of compiled blocks over those as written" if any(row["compiled"] for row in rows) else ""
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == model]
        sheets.append(
            Sheet(
                title=f"{model} ({mine[0]['architecture']}): x is over the best other engine{of_compiled}",
                headings=(
                    *("layout", "engine", "step seconds", "x", "from", "to", "of", "busy seconds", "x"),
                    *("sent bytes", "x", "collectives", "x", "sends", "peak saved bytes", "startup seconds"),
                ),
                rows=[_line(row) for row in mine if row["status"] == "ok"],
            )
        )
        if any(row["products_seconds"] is not None for row in mine):
            sheets.append(_parts_sheet(model, mine))
    reasons = {(_engine(row), row["status"], row["reason"]): row["layout"] for row in reversed(rows) if row["reason"]}
    if reasons:
        told = [[*key, layout] for key, layout in reasons.items()]
        sheets.append(Sheet(title="not run", headings=("engine", "", "reason", "such as"), rows=told))
    return sheets


def _fastest_sheet(rows: Sequence[Row]) -> list[Sheet]:
    """Engines at their best, where one of them has several ways to choose from."""
    if all(row["num_ways"] == 1 for row in rows):
        return []
    names = ("model", "engine", "layout", "num_ways", "step_seconds", "ratio", "ratio_low", "ratio_high", "against")
    headings = ("model", "engine", "its fastest layout", "of", "step seconds", "x", "from", "to", "of the best other")
    told = [[row[name] for name in names] for row in rows]
    return [Sheet(title="every engine with the schedule that suits it", headings=headings, rows=told)]


def _parts_sheet(model: Cell, rows: Sequence[Row]) -> Sheet:
    """Where a step goes, in seconds; the floor is products and messages, each alone."""
    names = (
        *("products_seconds", "copies_seconds", "other_operators_seconds", "dispatch_seconds", "waiting_seconds"),
        *("products_alone_seconds", "messages_alone_seconds", "floor_ratio"),
    )
    return Sheet(
        title=f"{model}: seconds of a step, means over ranks",
        headings=(
            *("layout", "engine", "products", "copies", "other operators", "dispatch", "waiting"),
            *("products alone", "messages alone", "step over both"),
        ),
        rows=[
            [row["layout"], _engine(row), *(row[name] for name in names)]
            for row in rows
            if row["products_seconds"] is not None
        ],
    )


def _engine(row: Row) -> str:
    return f"{row['engine']}{', compiled' if row['compiled'] else ''}{' again' if row['is_control'] else ''}"


def _line(row: Row) -> list[Cell]:
    names = (
        *("step_seconds", "step_seconds_ratio", "step_seconds_ratio_low", "step_seconds_ratio_high"),
        *("step_seconds_against", "busy_seconds", "busy_seconds_ratio", "sent_bytes", "sent_bytes_ratio"),
        *("num_collectives", "num_collectives_ratio", "num_sends", "peak_saved_bytes", "startup_seconds"),
    )
    return [row["layout"], _engine(row), *(row[name] for name in names)]
