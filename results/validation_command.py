"""What can be typed to hold our closed forms against published figures: `validate`.

The figures and their rules stand in `results/validation`. Exit code 1 when one is not met, 2 for a mistake, as
everywhere.
"""

# ruff: noqa: PLC0415 - the command line answers before the heavy libraries are loaded: each command imports what it runs

import csv
import io
import itertools
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from results.validation.rows import Check


@click.command("validate")
@click.argument("tables", nargs=-1)
@click.option(
    "--figures",
    type=click.Path(path_type=Path, file_okay=False),
    default=None,
    help="Folder of CSV files with the published figures, instead of the project's own.",
)
@click.option("--failed", is_flag=True, help="Show only the figures that are not met.")
@click.option("--format", "style", type=click.Choice(["table", "csv", "markdown"]), default="table", show_default=True)
@click.option("--estimators", is_flag=True, help="Run public estimators on the same figures and show their errors.")
def validate_command(tables: tuple[str, ...], figures: Path | None, failed: bool, style: str, estimators: bool) -> int:
    """Compute every published figure again: parameters, stacks, states, activations, FLOPs, bubbles, measured memory.

    Prints ours, theirs, the difference and the rule that it has to meet; exit code 1 when one is not met. With TABLES,
    the figures of these tables alone. A row of one of these kinds may be added to the CSV files.

    \b
    Examples:
      twinshard validate
      twinshard validate parameters zero --failed
      twinshard validate --figures my-figures --format csv
      twinshard validate --estimators
    """  # noqa: D301 - click reads the character
    from results.validation import validate
    from results.validation.rows import FOLDER

    checks = list(validate(figures or FOLDER, tables))
    if estimators:
        _print(_beside(checks, _estimates(figures or FOLDER)), style)
        return 0
    shown = [check for check in checks if not (failed and check.passed)]
    if style == "table":
        for (table, convention), group in itertools.groupby(shown, key=lambda check: (check.table, check.convention)):
            click.echo(f"{table}, as counted by {convention}")
            _print([_HEADINGS[1:-1], *(_cells(check)[1:-1] for check in group)], style)
            click.echo()
    elif shown:
        _print([_HEADINGS, *map(_cells, shown)], style)
    num_failed = sum(not check.passed for check in checks)
    click.echo(f"{len(checks)} figures, {num_failed} not met", err=style != "table")
    return 1 if num_failed else 0


_HEADINGS = ("table", "met", "of", "quantity", "ours", "theirs", "difference", "rule", "convention")


def _cells(check: "Check") -> tuple[str, ...]:
    return (
        check.table,
        "yes" if check.passed else "NO",
        check.row,
        check.quantity,
        _number(check.ours),
        _number(check.theirs),
        _number(check.difference),
        check.rule,
        check.convention,
    )


def _number(value: Fraction) -> str:
    """Whole numbers in groups of three, others with seven digits."""
    if value.denominator == 1 and abs(value) < 10**15:
        return f"{value.numerator:,}"
    return f"{float(value):.7g}"


# ---- public estimators ----------------------------------------------------------------------------------------------


def _estimates(folder: Path) -> list[dict[str, str]]:
    """Run the estimators in a process of their own: they load torch, which nothing here does.

    Raises:
        ValueError: they ended with an error; the message holds its last line.
    """
    command = [sys.executable, "-m", "launch.estimators", str(folder)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the estimators ended with code {done.returncode}: {last}")
    return list(csv.DictReader(io.StringIO(done.stdout)))


def _beside(checks: "Sequence[Check]", estimates: Sequence[dict[str, str]]) -> list[tuple[str, ...]]:
    """Every estimate beside ours and the published figure, with the error of both."""
    published = {(check.table, check.row, check.quantity): check for check in checks}
    rows: list[tuple[str, ...]] = [
        ("table", "of", "quantity", "published", "ours", "our error", "estimator", "its figure", "its error", "note")
    ]
    for row in estimates:
        estimator = f"{row['estimator']} {row['version']}".strip()
        check = published.get((row["table"], row["row"], row["quantity"]))
        if not row["estimate"]:
            rows.append((row["table"], row["row"], row["quantity"], "", "", "", estimator, "", "", row["note"]))
        elif check is not None:
            estimate = Fraction(row["estimate"])
            error = float((estimate - check.theirs) / check.theirs)
            ours = (_number(check.theirs), _number(check.ours), f"{check.relative:+.3%}")
            its = (estimator, _number(estimate), f"{error:+.3%}")
            rows.append((check.table, check.row, check.quantity, *ours, *its, row["note"]))
    return rows


def _print(rows: Sequence[tuple[str, ...]], style: str) -> None:
    headings, *body = rows
    if style == "csv":
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
    elif style == "markdown":
        from results import markdown

        click.echo(markdown.table(headings, body))
    else:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 200, highlight=False)
        table = Table(box=None, pad_edge=False)
        numbers = ("ours", "theirs", "difference", "published", "our error", "its figure", "its error")
        for heading in headings:
            table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
        for row in body:
            table.add_row(*map(escape, row))
        console.print(table)
