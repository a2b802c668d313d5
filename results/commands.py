"""What can be typed to read results: `compare`, `report` and `claims`.

What a command needs is imported when it runs, so that the command line answers before pandas, scipy and matplotlib are
there. A mistake is one line and exit code 2. Left out: the top-level command (`launch/cli.py`).
"""

# ruff: noqa: PLC0415 - the command line answers before the heavy libraries are loaded: each command imports what it runs

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

    from results.claims.verdict import Claim, Verdict

RECORDS = Path("results/records")
RESULTS = Path("results")
MAX_ROWS = 60
"""Rows of a comparison that are printed; its file holds them all."""

_records = click.option(
    "--records",
    type=click.Path(path_type=Path),
    default=RECORDS,
    show_default=True,
    help="Folder of all records.",
)


class Mistake(click.ClickException):
    """What the user can put right, in one line."""

    exit_code = 2


@click.command("compare")
@click.argument("a")
@click.argument("b")
@_records
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=RESULTS / "tables" / "comparison.csv",
    show_default=True,
    help="CSV file to write.",
)
def compare_command(a: str, b: str, records: Path, output: Path) -> None:
    """Divide what B holds by what A holds: times with intervals, counts and bytes exactly.

    A and B are each the name of a cell (`cell` or `experiment/cell`), a record, a folder of records, or a table. One
    run on each side makes a pair; else runs of the same cell are paired. Pairs whose steps compute on different numbers
    of tokens say so.

    \b
    Examples:
      twinshard compare t5.short.tp2 gpt.short.tp2
      twinshard compare results/reference/runs.csv results/tables/runs.csv
      twinshard compare before/records after/records --output change.csv
    """  # noqa: D301 - click reads the character
    with _mistakes(), _progress() as step:
        step("comparing")
        from results.compare import compare
        from results.files import write_table

        compared = compare(a, b, records=records)
        write_table(output, compared)
    _print_comparison(compared, output)


@click.command("report")
@click.argument("records", type=click.Path(path_type=Path), default=RECORDS)
@click.argument("output", type=click.Path(path_type=Path), default=RESULTS)
@click.option("--timeline", "timelines", metavar="CELL", multiple=True, help="Draw this pipeline too.")
def report_command(records: Path, output: Path, timelines: tuple[str, ...]) -> None:
    """Write tables, pictures and a verdict on every claim from the folder RECORDS into the folder OUTPUT.

    RECORDS is results/records and OUTPUT is results unless given. The report is OUTPUT/report.md; every number in it
    stands in a table under OUTPUT/tables. Files that are no records are listed in it with the reason. Of pipelines, the
    cells that the simulator meets as well as most and worst are drawn, measured above simulated, and those named.

    \b
    Examples:
      twinshard report
      twinshard report results/reference/records build
      twinshard report --timeline pair.text.tp1-pp4_even-dp1-m4-1f1b-per_stage
    """  # noqa: D301 - click reads the character
    with _mistakes(), _progress() as step:
        step("loading libraries")
        from results.report import report

        written = report(records, output, on_step=step, timelines=timelines)
    refused = f", {written.num_refused} files refused" if written.num_refused else ""
    click.echo(f"{written.path}: {written.num_records} records{refused}")
    for verdict in written.verdicts:
        click.echo(f"{verdict.claim.id:4} {verdict.outcome}")


@click.command("claims")
@click.argument("ids", nargs=-1)
@_records
def claims_command(ids: tuple[str, ...], records: Path) -> None:
    """List the claims, how each is judged, and the verdict that the records give.

    With IDS, these claims only, with all their evidence. Without any record there are verdicts on what closed forms
    decide; the other claims and rules are listed alone.

    \b
    Examples:
      twinshard claims
      twinshard claims P2 P4
      twinshard claims --records results/reference/records
    """  # noqa: D301 - click reads the character
    with _mistakes(), _progress() as step:
        step("judging")
        from results import tables
        from results.claims import chosen, judge_all
        from results.load import load_records

        claims = chosen(ids)
        loaded = load_records(records) if records.is_dir() or records != RECORDS else None
        if loaded is not None and loaded.found:
            told, judged = tables.build(loaded.records), claims
        else:
            told, judged = tables.without_records(), tuple(claim for claim in claims if not claim.needs_records)
        verdicts = {verdict.claim.id: verdict for verdict in judge_all(told, judged)}
    for claim in claims:
        _print_claim(claim, verdicts.get(claim.id), with_evidence=bool(ids))
    if loaded is None or not loaded.found:
        click.echo(f"No record in {records}: no verdicts on what only runs can decide.")
    elif loaded.refused:
        click.echo(f"{len(loaded.refused)} files in {records} are no records: `twinshard report` lists them.")


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise Mistake(" ".join(str(error).split())) from error
    except OSError as error:
        raise Mistake(f"{error.filename}: {error.strerror}") from error


@contextlib.contextmanager
def _progress() -> Iterator[Any]:
    """Show on the error stream what is under way, where someone looks at it; gives a function that says it."""
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda words: status.update(f"{words} ...")


def _console() -> "Console":
    """Where tables are printed: as wide as the terminal, or wide enough when the output is kept."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, highlight=False)


def _print_comparison(compared: "pd.DataFrame", output: Path) -> None:
    """A table a pair of runs, without the columns that would be empty."""
    from rich.markup import escape
    from rich.table import Table

    shown = compared.head(MAX_ROWS).astype(object).where(compared.head(MAX_ROWS).notna(), "")
    for (cell_a, cell_b), rows in shown.groupby(["cell_a", "cell_b"], sort=False):
        told = rows.to_dict("records")
        columns = {
            "row": [row["row"] for row in told],
            "quantity": [row["quantity"] for row in told],
            "A": [_number(row["a"]) for row in told],
            "B": [_number(row["b"]) for row in told],
            "B / A": [_quotient(row) for row in told],
            "note": [row["note"] for row in told],
        }
        columns = {name: words for name, words in columns.items() if any(words)}
        title = f"A: {str(cell_a) or '-'}\nB: {str(cell_b) or '-'}"
        table = Table(title=escape(title), title_justify="left")
        for name in columns:
            table.add_column(name, justify="right" if name in ("A", "B", "B / A") else "left", overflow="fold")
        for words in zip(*columns.values(), strict=True):
            table.add_row(*map(escape, words))
        _console().print(table)
    if len(compared) > MAX_ROWS:
        click.echo(f"The first {MAX_ROWS} of {len(compared)} rows; all are in {output}.")
    else:
        click.echo(f"Written to {output}.")


def _number(value: Any) -> str:
    if value == "":
        return ""
    return f"{int(value):,}" if float(value).is_integer() else f"{float(value):.4g}"


def _quotient(row: dict[Any, Any]) -> str:
    if row["ratio"] == "":
        return ""
    told = f"{row['ratio']:.4g}"
    if row["ratio_low"] != "":
        return f"{told} [{row['ratio_low']:.4g}, {row['ratio_high']:.4g}]"
    return f"{told} = {row['ratio_exact']}" if "/" in row["ratio_exact"] else told


def _print_claim(claim: "Claim", verdict: "Verdict | None", *, with_evidence: bool) -> None:
    click.echo(f"{claim.id} ({claim.source}): {claim.statement}")
    click.echo(f"  decided by: {claim.quantity}")
    click.echo(f"  rule: {claim.rule}")
    if verdict is not None:
        click.echo(f"  {verdict.outcome}: {verdict.reason}")
        for row in verdict.evidence if with_evidence else ():
            note = f" ({row.note})" if row.note else ""
            click.echo(f"    {row.says:11} {row.basis:9} {row.quantity}: {row.value}{note}")
            click.echo(f"      {row.table}.csv: {'; '.join(row.cells)}")
    click.echo()
