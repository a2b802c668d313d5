"""When is a number of an article met? When ours, rounded to the digits that it prints, is the same.

An article's figure is data: what it is of, the text as printed with its unit, and how ours is read from a row. Shared
by the groups of claims about numbers.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd

from results.claims.verdict import Evidence, of_count
from results.validation.rows import Printed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """What an article prints, and ours for it.

    Attributes:
        quantity: what it is of.
        printed: the digits, as in the article.
        unit: name of the unit behind them.
        scale: what one unit is worth in ours.
        ours: reads ours from a row of `counts`.
    """

    quantity: str
    printed: str
    unit: str
    scale: float
    ours: Callable[["pd.Series[Any]"], float]


def is_printed_as(value: float, text: str) -> bool:
    """Whether a number rounds to a printed one; half a last digit counts for both neighbours."""
    printed = Printed.of(text)
    return float(printed.low) <= value <= float(printed.high)


def compared(row: "pd.Series[Any]", figures: Iterable[Figure]) -> Iterator[Evidence]:
    """Evidence of each figure against one row of `counts`."""
    for figure in figures:
        ours = figure.ours(row)
        exact = f"{int(ours):,}" if float(ours).is_integer() else f"{ours:.6g}"
        scaled = ours / figure.scale
        yield Evidence(
            quantity=figure.quantity,
            value=f"{exact}, printed as {figure.printed} {figure.unit}".rstrip(),
            says=of_count(supports=is_printed_as(scaled, figure.printed)),
            basis="predicted",
            table="counts",
            cells=(str(row["point"]),),
            note=f"{scaled:.4g} {figure.unit}".rstrip(),
        )


def of_model(counts: pd.DataFrame, name: str) -> "pd.Series[Any] | None":
    """The row of a named model, None without one."""
    rows = counts[counts["point"] == name]
    return None if rows.empty else rows.iloc[0]


def met(evidence: Iterable[Evidence]) -> str:
    """The condition of claims of this kind: which figures are met and which are not, with ours."""
    rows = list(evidence)
    right = [row.quantity for row in rows if row.says == "supports"]
    wrong = [f"{row.quantity} ({row.value}: {row.note})" for row in rows if row.says == "contradicts"]
    return f"met: {', '.join(right) or 'none'}; not met: {', '.join(wrong) or 'none'}"
