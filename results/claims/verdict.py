"""What is a claim, what decides it, and how do many rows become one verdict?

A claim is data: where it stands, what it says, the quantity and the rule that decide it, and a function that reads the
tables. The function returns evidence: a row read, what it holds, and whether it supports the claim, contradicts it, is
undecided (an interval that straddles the rule) or is context, which decides nothing (shares, rows that may not be
compared).
`conclude` makes the verdict from the evidence alone; nobody types one:

    required rows missing                        undecided
    every quantity supports / contradicts        supported / contradicted
    some support, some contradict                conditional, with the condition computed from the rows
    else (a quantity of which nothing is known)  undecided

Counts and bytes are compared exactly. A time supports or contradicts only when its whole interval, widened by the noise
of the control, lies on one side of the rule; without interval or control it is undecided (`of_time`).
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pandas as pd

from results.intervals import Interval
from results.tables import Tables

Outcome = Literal["supported", "contradicted", "conditional", "undecided"]
Says = Literal["supports", "contradicts", "undecided", "context"]
Basis = Literal["predicted", "traced", "measured"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Rows that were read, and what they say of a claim."""

    quantity: str
    """Evidence of one quantity is judged together: its name is the same for all of it."""
    value: str
    """What the rows hold, with unit, for a reader."""
    says: Says
    basis: Basis
    table: str
    """Name of the table that the rows stand in, without its ending."""
    cells: tuple[str, ...]
    """`experiment/cell` of the rows, or the rows' own names in a table that no record stands behind."""
    note: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What a claim's function returns."""

    evidence: tuple[Evidence, ...]
    missing: tuple[str, ...] = ()
    """Rows that the rule needs and the tables lack."""
    condition: str = ""
    """What separates the rows that support from those that contradict; used only when both exist."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A claim of an article, in the project's words."""

    id: str
    article: str
    """Key of the article, A to D; `ARTICLES` holds the titles."""
    section: str
    statement: str
    quantity: str
    rule: str
    find: Callable[[Tables], Findings] = dataclasses.field(repr=False)
    needs_records: bool = True
    """Whether records decide it, or closed forms alone do."""

    @property
    def source(self) -> str:
        return f"{self.article} {self.section}".strip()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the rows say of a claim."""

    claim: Claim
    outcome: Outcome
    reason: str
    """One sentence, computed."""
    evidence: tuple[Evidence, ...]
    missing: tuple[str, ...]


ARTICLES = {
    "A": "Transformer全貌及代码实现",
    "B": "Transformer 架构详解：从原理到实践全面解析大模型核心架构",  # noqa: RUF001 (a title keeps its punctuation)
    "C": "一行行读透 Transformer 源码：Decoder-Only 经典实现完全拆解",  # noqa: RUF001
    "D": "【Transformer 与注意力机制】20｜Transformer 整体架构：一张图看懂",  # noqa: RUF001
}


def basis_of(run: "pd.Series[Any]") -> Basis:
    """Whether a run of `runs.csv` was executed for real, or dry."""
    return "traced" if run["device"] == "meta" or run["backend"] == "fake" else "measured"


def judge(claim: Claim, tables: Tables) -> Verdict:
    """Read the tables and conclude."""
    return conclude(claim, claim.find(tables))


def conclude(claim: Claim, findings: Findings) -> Verdict:
    """The verdict that follows from evidence."""
    outcome, reason = _outcome(findings)
    return Verdict(claim=claim, outcome=outcome, reason=reason, evidence=findings.evidence, missing=findings.missing)


def of_count(*, supports: bool) -> Says:
    """What an exact count says."""
    return "supports" if supports else "contradicts"


def of_time(interval: Interval, limit: float, noise: float | None) -> Says:
    """Whether a time, or a ratio of times, is at most `limit` beyond noise.

    `noise` is the factor by which two identical runs differ, None when no control says.
    """
    if noise is None or not interval.has_bounds:
        return "undecided"
    sure = interval.widened(noise)
    if sure.high <= limit:
        return "supports"
    return "contradicts" if sure.low > limit else "undecided"


def opposite(says: Says) -> Says:
    """What a row says of a claim that is the contrary of the rule it was held against."""
    if says == "supports":
        return "contradicts"
    return "supports" if says == "contradicts" else says


def why_undecided(interval: Interval, noise: float | None) -> str:
    """The note of a time that decides nothing."""
    if not interval.has_bounds:
        return "fewer than two samples: no interval"
    if noise is None:
        return "no control run: noise unknown"
    return f"the interval, widened by the control's noise of {noise:.3g}, straddles the rule"


def shown(interval: Interval) -> str:
    """An interval as text."""
    if math.isnan(interval.value):
        return "not measured"
    return f"{interval.value:.3f}" + (f" [{interval.low:.3f}, {interval.high:.3f}]" if interval.has_bounds else "")


def _outcome(findings: Findings) -> tuple[Outcome, str]:
    if findings.missing:
        return "undecided", f"rows are missing: {'; '.join(findings.missing)}"
    decided = [row.says for row in findings.evidence if row.says in ("supports", "contradicts")]
    if not decided:
        return "undecided", "no row decides: every one is undecided or context"
    num_supporting, num_contradicting = decided.count("supports"), decided.count("contradicts")
    if num_supporting and num_contradicting:
        told = f"{num_supporting} rows support, {num_contradicting} contradict"
        return "conditional", f"{findings.condition}; {told}" if findings.condition else told
    open_quantities = _undecided_quantities(findings.evidence)
    if open_quantities:
        kind = "support" if num_supporting else "contradict"
        return "undecided", f"{len(decided)} rows {kind}, but nothing is known of {', '.join(open_quantities)}"
    if num_supporting:
        return "supported", f"all {num_supporting} rows that decide support it"
    return "contradicted", f"all {num_contradicting} rows that decide contradict it"


def _undecided_quantities(evidence: Sequence[Evidence]) -> list[str]:
    """Quantities whose every judged row is undecided."""
    says: dict[str, set[Says]] = {}
    for row in evidence:
        if row.says != "context":
            says.setdefault(row.quantity, set()).add(row.says)
    return [quantity for quantity, told in says.items() if told == {"undecided"}]
