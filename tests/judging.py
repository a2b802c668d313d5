"""What do tests of claims need? Tables with some rows changed, and the verdict on them."""

from typing import Any

import pandas as pd

from results.claims import chosen
from results.claims.verdict import Verdict, judge
from results.tables import Tables


def verdict(claim: str, tables: Tables) -> Verdict:
    return judge(chosen([claim])[0], tables)


def outcome(claim: str, tables: Tables) -> str:
    return verdict(claim, tables).outcome


def without(tables: Tables, **values: Any) -> Tables:
    """The tables without the runs that have all these values."""
    gone = pd.Series(data=True, index=tables.runs.index)
    for name, value in values.items():
        gone &= tables.runs[name] == value
    return tables.replace(runs=tables.runs[~gone])


def with_cells(table: pd.DataFrame, where: "pd.Series[bool]", **values: Any) -> pd.DataFrame:
    changed = table.copy()
    for name, value in values.items():
        changed.loc[where, name] = value
    return changed


def is_own(table: pd.DataFrame) -> "pd.Series[bool]":
    return table["architecture"] == "encoder_decoder"
