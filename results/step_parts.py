"""Where does a step of each engine go, and how far is it above its floor?

    step  =  products + copies + other operators + dispatch + waiting          each the mean over ranks of the medians
    dispatch  =  busy time less the operators          waiting  =  step less busy time
    floor ratio  =  step / (products alone + messages alone)

Operators are timed in steps of their own, under a profiler, so that dispatch can come out a little too small. What is
hidden behind computation is in both terms of the floor: a ratio below 1 is possible.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean, median

from results.schema import Record

OPERATORS = ("products_seconds", "copies_seconds", "other_operators_seconds")
"""Columns that are measured."""
ALONE = ("products_alone_seconds", "messages_alone_seconds")
COLUMNS = (*OPERATORS, "dispatch_seconds", "waiting_seconds", *ALONE, "floor_ratio")


def step_parts(record: Record) -> dict[str, float | None]:
    """The columns of a run; None where its parts were not asked for, or its engine does not tell."""
    told: dict[str, float | None] = dict.fromkeys(COLUMNS)
    if not record.parts or not all(rank.busy_seconds for rank in record.ranks):
        return told
    measured = {name: _mean(getattr(part, name) for part in record.parts) for name in OPERATORS}
    busy = _mean(rank.busy_seconds for rank in record.ranks)
    told |= measured
    told["dispatch_seconds"] = busy - sum(measured.values())
    told["waiting_seconds"] = _mean(rank.wait_seconds for rank in record.ranks)
    if all(part.products_alone_seconds and part.messages_alone_seconds for part in record.parts):
        alone = {name: _mean(getattr(part, name) for part in record.parts) for name in ALONE}
        told |= alone
        told["floor_ratio"] = median(record.step_seconds) / sum(alone.values())
    return told


def _mean(samples_of_ranks: Iterable[Sequence[float]]) -> float:
    return fmean(median(samples) for samples in samples_of_ranks)
