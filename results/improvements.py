"""What does a cut or a schedule gain over what others do? Ratios with intervals, and noise beside them.

    baseline   the same model, step and number of ranks, one stage a rank, 1F1B: cut `even`, and cut `aligned`
    ratio      median of the cell / median of the baseline, with its bootstrap interval; below 1 is a gain
    noise      how far two identical runs (A/A controls) of so many ranks are apart, at the far bound of their intervals

    quantity                what it tells
    step_seconds            wall time of a step, told where no ranks shared a core
    busiest_rank_seconds    busy time of the busiest rank: the cut alone
    played_seconds          the schedule with busy times, every rank on a core of its own: cut and schedule
    rank_imbalance          busiest rank over the mean of all, in the same step
    over_ideal              played time over busy time dealt evenly, in the same step

The last two ask how work is dealt, whatever the machine's speed was while a step ran; they pass over what a schedule
itself adds to the work, such as backwards in two halves, which the others hold. A gain counts when its whole interval
is below 1 by more than the noise. Left out: verdicts.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from results.intervals import Interval, ratio
from results.runs import from_text
from results.twins import select

QUANTITIES = ("step_seconds", "busiest_rank_seconds", "played_seconds", "rank_imbalance", "over_ideal")
BASELINES = ("even", "aligned")
GROUP = (
    *("machine", "experiment", "engine", "compiled", "model", "tp", "pp", "dp", "cp", "sp", "zero"),
    *("gradient_bucket_bytes", "microbatches", "recompute", "saved_input", "layout_vocabulary", "attention"),
    *("source_length", "target_length", "tokens_per_step", "dtype", "device", "backend"),
)
"""What a cell and its baseline have in common."""
COLUMNS = (
    *("machine", "experiment", "architecture", "model", "pp", "source_length", "target_length", "cell"),
    *("layout_label", "baseline", "baseline_cell", "quantity", "ratio", "ratio_low", "ratio_high", "noise", "outcome"),
)


def build(pipelines: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """A row a cell, baseline and quantity; A/A rows have the baseline `itself`."""
    rows: list[dict[str, Any]] = []
    if not pipelines.empty:
        for _, group in pipelines.groupby(list(GROUP), sort=False, dropna=False):
            rows += _rows(group, runs)
    found = pd.DataFrame(rows, columns=list(COLUMNS))
    found["noise"] = [_noise(found, row) for _, row in found.iterrows()]
    found["outcome"] = [_outcome(row) for _, row in found.iterrows()]
    return found


def _rows(group: pd.DataFrame, runs: pd.DataFrame) -> Iterator[dict[str, Any]]:
    originals = group[~group["is_control"].astype(bool)]
    plain = originals[(originals["schedule"] == "1f1b") & (originals["chunks"] == 1)]
    for baseline in BASELINES:
        for _, before in plain[plain["cut"] == baseline].iterrows():
            for _, after in originals.iterrows():
                if after["cell"] != before["cell"]:
                    yield from _ratios(before, after, baseline, runs)
    for _, control in group[group["is_control"].astype(bool)].iterrows():
        for _, before in originals[originals["layout_label"] == control["layout_label"]].iterrows():
            yield from _ratios(before, control, "itself", runs)


def _ratios(
    before: "pd.Series[Any]", after: "pd.Series[Any]", baseline: str, runs: pd.DataFrame
) -> Iterator[dict[str, Any]]:
    named = {name: after[name] for name in COLUMNS if name in after.index}
    for quantity in QUANTITIES:
        if quantity == "step_seconds" and (before["oversubscribed"] or after["oversubscribed"]):
            continue
        samples = [from_text(_row(one, quantity, runs)[quantity]) for one in (before, after)]
        told = ratio(*samples)
        yield named | {
            "baseline": baseline,
            "baseline_cell": before["cell"],
            "quantity": quantity,
            "ratio": told.value,
            "ratio_low": told.low,
            "ratio_high": told.high,
        }


def _row(run: "pd.Series[Any]", quantity: str, runs: pd.DataFrame) -> "pd.Series[Any]":
    return run if quantity in run.index else select(runs, run).iloc[0]


def _noise(found: pd.DataFrame, row: "pd.Series[Any]") -> float:
    """Of the controls on as many ranks, the worst; NaN without one."""
    same = found[found["baseline"] == "itself"]
    for name in ("machine", "experiment", "pp", "quantity"):
        same = same[same[name] == row[name]]
    factors = [max(high, 1 / low) for low, high in zip(same["ratio_low"], same["ratio_high"], strict=True) if low > 0]
    return max(factors, default=float("nan"))


def _outcome(row: "pd.Series[Any]") -> str:
    """`less`, `more`, or `undecided` where the interval or the noise reaches across 1."""
    if row["baseline"] == "itself":
        return "control"
    if pd.isna(row["noise"]) or pd.isna(row["ratio_low"]):
        return "undecided"
    told = Interval(value=row["ratio"], low=row["ratio_low"], high=row["ratio_high"]).widened(row["noise"])
    return "less" if told.high < 1 else "more" if told.low > 1 else "undecided"
