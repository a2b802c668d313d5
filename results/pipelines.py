"""How close is the simulator to what was measured, and how well was each pipeline filled: the rows of `pipelines.csv`.

    measured         wall time of a step's pipeline, to the last action of all ranks
    simulated        the executed table with the run's own wall seconds of actions, messages and gaps: their medians,
                     and step by step, which keeps apart what was slow at different times
    profiled         the same table with the costs and messages of a profile that was measured apart
    played           the same table with the run's busy seconds, every rank on a core of its own, messages free
    profiled, busy   the same with the profile's costs
    profiled, shape  both over their busy seconds dealt evenly: whatever the machine's speed was at the time

Errors are simulated / measured - 1; those of the last two are against what was played. Where more ranks than cores ran,
wall time tells how many shared a core: those rows say so, and only what is compared with `played` means anything.
`over_ideal` is what was played over busy seconds dealt evenly to the ranks: 1 is a pipeline without bubble and
imbalance, whatever the architecture. Ranks, not stages, are compared: a rank with several stages works for all of them.
Left out: gradient sums and update, which follow.
"""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from parallel.timeline import Timeline
from results.intervals import median
from results.measured_steps import MeasuredStep, is_pipeline
from results.runs import Row, bounded, identity, to_text
from results.schema import Record

SAMPLED = (
    "stepwise_error",
    "measured_seconds",
    "played_seconds",
    "played_bubble",
    "rank_imbalance",
    "busiest_rank_seconds",
    "over_ideal",
)
"""One value a timed step, as text, with its median and bounds."""
SINGLE = (
    *("simulated_seconds", "simulated_error", "profiled_seconds", "profiled_error"),
    *(
        "profiled_busy_seconds",
        "profiled_busy_error",
        "profiled_shape_error",
        "measured_bubble",
        "simulated_bubble",
        "profiled_busy_bubble",
    ),
    *("profiled_rank_imbalance", "message_seconds", "gap_seconds", "profiled_message_seconds"),
)
COLUMNS = (
    "oversubscribed",
    *(column for name in SAMPLED for column in (name, f"{name}_median", f"{name}_low", f"{name}_high")),
    *SINGLE,
)
"""Of the table, after those that name the run."""


def rows(record: Record) -> list[Row]:
    """The row of a run; none of one that is no pipeline or tells no spans."""
    if not is_pipeline(record):
        return []
    step = MeasuredStep(record)
    row: Row = identity(record) | {"oversubscribed": record.oversubscribed}
    for name, samples in _samples(step).items():
        row[name] = to_text(samples)
        row |= bounded(name, median(samples))
    return [row | _single(step, row)]


def _samples(step: MeasuredStep) -> dict[str, list[float]]:
    played = [step.played(index) for index in range(step.num_steps)]
    pairs = zip(map(step.simulated_step, range(step.num_steps)), step.pipeline_seconds, strict=True)
    return {
        "stepwise_error": [simulated.makespan_seconds / measured - 1 for simulated, measured in pairs],
        "measured_seconds": step.pipeline_seconds,
        "played_seconds": [one.makespan_seconds for one in played],
        "played_bubble": [one.bubble for one in played],
        "rank_imbalance": [one.imbalance for one in played],
        "busiest_rank_seconds": [max(one.busy_seconds) for one in played],
        "over_ideal": [_over_ideal(one) for one in played],
    }


def _over_ideal(timeline: Timeline) -> float:
    return timeline.makespan_seconds * len(timeline.spans) / math.fsum(timeline.busy_seconds)


def _single(step: MeasuredStep, row: Row) -> Row:
    simulated, profile = step.simulated, step.record.profile
    told: Row = dict.fromkeys(SINGLE)
    told |= {
        "simulated_seconds": simulated.makespan_seconds,
        "simulated_error": simulated.makespan_seconds / row["measured_seconds_median"] - 1,
        "measured_bubble": step.measured.bubble,
        "simulated_bubble": simulated.bubble,
        "message_seconds": step.message_seconds,
        "gap_seconds": step.gap_seconds,
    }
    sent, free = step.profiled(with_messages=True), step.profiled(with_messages=False)
    if profile is None or sent is None or free is None:
        return told
    return told | {
        "profiled_seconds": sent.makespan_seconds,
        "profiled_error": sent.makespan_seconds / row["measured_seconds_median"] - 1,
        "profiled_busy_seconds": free.makespan_seconds,
        "profiled_busy_error": free.makespan_seconds / row["played_seconds_median"] - 1,
        "profiled_shape_error": _over_ideal(free) / row["over_ideal_median"] - 1,
        "profiled_busy_bubble": free.bubble,
        "profiled_rank_imbalance": free.imbalance,
        "profiled_message_seconds": profile.latency_seconds,
    }


ERRORS = {
    "simulated_error": ("medians of the run's own costs", "wall time, median"),
    "stepwise_error_median": ("the costs of each step", "wall time of the same step"),
    "profiled_error": ("a profile's costs", "wall time, median"),
    "profiled_busy_error": ("a profile's costs", "busy time, played"),
    "profiled_shape_error": ("a profile's costs", "busy time, played, both over evenly dealt work"),
}
"""Column, what was simulated with, and what it is held against."""


def error_summary(pipelines: pd.DataFrame) -> pd.DataFrame:
    """A row an error and number of ranks: cells, median and largest size of the error; wall time where it means one."""
    found: list[dict[str, Any]] = []
    for column, (costs, against) in ERRORS.items():
        told = pipelines[pipelines[column].notna()]
        if against.startswith("wall time"):
            told = told[~told["oversubscribed"].astype(bool)]
        for pp, group in told.groupby("pp"):
            sizes = group[column].astype(float).abs()
            found.append(
                {
                    "pp": pp,
                    "costs": costs,
                    "against": against,
                    "num_cells": len(group),
                    "median_error": float(sizes.median()),
                    "largest_error": float(sizes.max()),
                    "within_10_percent": float((sizes <= 0.1).mean()),
                }
            )
    names = ("pp", "costs", "against", "num_cells", "median_error", "largest_error", "within_10_percent")
    return pd.DataFrame(found, columns=list(names))


def telling(pipelines: pd.DataFrame) -> dict[str, "pd.Series[Any]"]:
    """Cells worth a picture, by what they show: of each number of ranks the median error and the largest.

    Of wall time where that means one; else of busy time, told by a profile, both over evenly dealt work.
    """
    found: dict[str, pd.Series[Any]] = {}
    has_several = len(set(pipelines["machine"])) > 1
    for (machine, pp), group in pipelines[~pipelines["is_control"].astype(bool)].groupby(["machine", "pp"]):
        trusted = group[~group["oversubscribed"].astype(bool)]
        column = "simulated_error" if len(trusted) else "profiled_shape_error"
        told = (trusted if len(trusted) else group).dropna(subset=[column])
        # What differs by the rounding of sums alone is equal.
        order = told[column].astype(float).abs().round(6).sort_values(kind="stable").index
        if len(order):
            what = "error" if len(trusted) else "error of busy time"
            words = f"{what}, {pp} ranks, {machine}" if has_several else f"{what}, {pp} ranks"
            found[f"median {words}"] = told.loc[order[(len(order) - 1) // 2]]
            found[f"largest {words}"] = told.loc[order[-1]]
    return found


def order_of(pipelines: pd.DataFrame) -> pd.DataFrame:
    """Rows as a reader wants them: by twins, lengths and ranks; as others do it first."""
    keys: Sequence[str] = ("architecture", "pp", "source_length", "chunks")
    return pipelines.sort_values(list(keys), kind="stable")
