"""How are tables, numbers and links written in Markdown, so that they read well as plain text too?"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import pandas as pd


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table; columns whose name begins with `#` hold numbers and stand to the right, without the sign."""
    names = [column.removeprefix("#") for column in columns]
    marks = ["---:" if column.startswith("#") else "---" for column in columns]
    lines = [names, marks, *([cell(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    """Text of a cell: one line, no bar; whole numbers in groups of three, a blank for nothing."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (hasattr(value, "dtype") and "int" in str(value.dtype)):
        return f"{int(value):,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return " ".join(str(value).split()).replace("|", "\\|")


def link(text: str, target: str) -> str:
    """A link to a place in the document (`#p1`) or to a file beside it."""
    return f"[{text}]({target.replace(' ', '%20')})"


def bounds(value: float, low: float, high: float) -> str:
    """A number with its interval; blank when nothing was measured, without bounds when they are unknown."""
    if math.isnan(value):
        return ""
    return f"{value:.4g}" + ("" if math.isnan(low) or math.isnan(high) else f" [{low:.4g}, {high:.4g}]")
