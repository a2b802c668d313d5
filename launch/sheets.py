"""How is an answer printed: for a reader, for a spreadsheet, for a program, or for a page?

    table      sheets in columns, for a terminal        csv    one row a figure, nothing rounded
    markdown   the same sheets, for a page              json   one document, nothing rounded

Left out: what is told (each command makes its own sheets, rows and document).
"""

import csv
import dataclasses
import io
import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import click

Format = Literal["table", "csv", "json", "markdown"]
Cell = str | int | float | bool | None

format_option = click.option(
    "--format", "form", type=click.Choice(get_args(Format)), default="table", show_default=True, help="How it is told."
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """One table for a reader; numbers stand to the right, whole ones in groups of three digits."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[Cell]]


def show(
    form: Format,
    *,
    sheets: Sequence[Sheet] = (),
    columns: Sequence[str] = (),
    rows: Sequence[Mapping[str, Cell]] = (),
    document: Mapping[str, Any],
) -> None:
    """Write an answer to standard output in the form that was asked for.

    Args:
        form: which of the others is written.
        sheets: for `table` and `markdown`.
        columns: of `csv`, in order.
        rows: for `csv`; what a row lacks is left empty.
        document: for `json`.
    """
    if form == "json":
        click.echo(json.dumps(document, indent=2))
    elif form == "csv":
        click.echo(csv_text(columns, rows), nl=False)
    else:
        click.echo("\n".join(map(_markdown if form == "markdown" else _plain, sheets)), nl=False)


def csv_text(columns: Sequence[str], rows: Sequence[Mapping[str, Cell]]) -> str:
    """Rows as CSV, nothing rounded; what a row lacks is left empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _markdown(sheet: Sheet) -> str:
    sides = ["---:" if is_number else "---" for is_number in _numeric(sheet)]
    lines = [sheet.headings, sides, *([_text(cell) for cell in row] for row in sheet.rows)]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
    return f"### {sheet.title}\n\n{table}\n"


def _plain(sheet: Sheet) -> str:
    """Columns as wide as their cells; longer headings are broken between words, and stand at the bottom."""
    cells = [[_text(cell) for cell in row] for row in sheet.rows]
    columns = list(zip(*cells, strict=True)) or [()] * len(sheet.headings)
    heads, widths = [], []
    for heading, column in zip(sheet.headings, columns, strict=True):
        width = max(map(len, (*column, *heading.split())), default=0)
        heads.append(textwrap.wrap(heading, width) if heading else [])
        widths.append(width)
    depth = max(map(len, heads))
    above = list(zip(*([""] * (depth - len(head)) + head for head in heads), strict=True))
    is_number = _numeric(sheet)
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, is_number, strict=True)
        )
        for line in (*above, *cells)
    ]
    return "\n".join([sheet.title, *(f"  {line}".rstrip() for line in lines)]) + "\n"


def _numeric(sheet: Sheet) -> list[bool]:
    return [
        bool(sheet.rows) and all(isinstance(row[index], int | float | None) for row in sheet.rows)
        for index in range(len(sheet.headings))
    ]


def _text(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    return f"{cell:.4g}" if isinstance(cell, float) else cell
