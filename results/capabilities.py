"""What can each engine do with each architecture: the matrix that real runs gave, and the section that shows it.

One row an engine, architecture, feature and axis, as CSV because runs made it:

    twinshard capabilities --out results/capabilities.csv

`equal` to one process, `wrong` with the error, `unsupported` and `failed` with a reason. A test repeats some of its
runs, and asks every engine again what it refuses.
"""

import functools
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from results import markdown

PATH = Path(__file__).with_name("capabilities.csv")
COMMAND = "twinshard capabilities --out results/capabilities.csv"


@functools.cache
def build() -> pd.DataFrame:
    """The table; `point` names a row, and `reason` is empty where there is nothing to tell."""
    table = pd.read_csv(PATH, dtype={"reason": str}).fillna({"reason": ""})
    names = table[["engine", "architecture", "feature", "axis"]]
    table.insert(0, "point", names.agg(" ".join, axis="columns"))
    return table


def section(capabilities: pd.DataFrame) -> Iterator[str]:
    """A row a feature and axis, a column an engine, all architectures together; then every reason once."""
    yield "## What each engine can do"
    yield (
        "Loss, gradients, their norm and the weights after a step on two ranks, against one process, in float64: "
        "`equal` to 1e-10 relative, with the worst error of all architectures. What an engine refuses or gets wrong "
        f"stands below, with its reason. Made by `{COMMAND}`."
    )
    engines = list(dict.fromkeys(capabilities["engine"]))
    rows = []
    for (feature, axis), told in capabilities.groupby(["feature", "axis"], sort=False):
        cells = [_cell(told[told["engine"] == engine]) for engine in engines]
        rows.append((feature, axis, *cells))
    yield markdown.table(("feature", "on", *engines), rows)
    reasons = capabilities[capabilities["reason"] != ""]
    if not reasons.empty:
        keys = ["engine", "status", "reason"]
        counts = reasons.groupby(keys, sort=False)["point"].agg(["size", "first"])
        yield markdown.table(
            ("engine", "status", "reason", "#cases", "first of them"),
            [(*key, num_cases, first) for key, num_cases, first in counts.itertuples(name=None)],
        )


def _cell(rows: pd.DataFrame) -> str:
    """One status where all architectures have the same; else each status with the architectures that have it."""
    told = [
        (_with_error(str(status), group), ", ".join(group["architecture"]))
        for status, group in rows.groupby("status", sort=False)
    ]
    return told[0][0] if len(told) == 1 else "; ".join(f"{words} ({names})" for words, names in told)


def _with_error(status: str, rows: pd.DataFrame) -> str:
    worst = rows["worst_relative_error"].max()
    return status if pd.isna(worst) else f"{status} {worst:.0e}"
