"""Which engine takes a model through an axis in the least time, each with the schedule that suits it?

Cells of one model, its data and one machine that differ in schedule, chunks, placement, microbatches, cut or what is
kept are ways to do the same thing: tp 2, say, or pp 2. Of each engine the way with the least median counts:

    ratio    its seconds over those of the best other engine at its best, with the bootstrap interval of the two cells

Whoever has more ways to choose from has more luck: the number of ways is told. Runs of other engines on the very same
cell are held against each other in `results/benchmark.py`. Left out: compiled blocks and controls.
"""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from results.intervals import median, ratio
from results.runs import from_text, run_row
from results.schema import Record

DEGREES = ("tp", "sp", "pp", "dp", "cp", "zero")
"""Ways to do the same thing are equal in these."""
COLUMNS = (
    *("machine", "experiment", "model", "architecture", *DEGREES, "engine", "layout", "num_ways"),
    *("step_seconds", "step_seconds_low", "step_seconds_high"),
    *("ratio", "ratio_low", "ratio_high", "against", "against_layout"),
)

Row = dict[str, Any]


def fastest(records: Sequence[Record]) -> list[Row]:
    """A row for each engine of each model and set of degrees, in `COLUMNS`."""
    groups: dict[tuple[Any, ...], dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if record.status == "ok" and not record.is_control and not record.compiled:
            row = run_row(record)
            key = (record.provenance.hostname, record.experiment, record.model.get("name", ""), _data(row))
            groups[(*key, *(row[name] for name in DEGREES))][record.engine].append(row)
    return [row for engines in groups.values() for row in _rows(engines)]


def _data(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("source_length", "target_length", "tokens_per_step", "dtype", "device"))


def _rows(engines: Mapping[str, list[Mapping[str, Any]]]) -> list[Row]:
    best = {engine: min(rows, key=_seconds) for engine, rows in engines.items()}
    return [_row(engine, best, num_ways=len(rows)) for engine, rows in engines.items()]


def _row(engine: str, best: Mapping[str, Mapping[str, Any]], *, num_ways: int) -> Row:
    mine = best[engine]
    row: Row = dict.fromkeys(COLUMNS) | {name: mine[name] for name in COLUMNS if name in mine}
    row |= {"engine": engine, "layout": mine["layout_label"], "num_ways": num_ways}
    row |= median(_samples(mine)).columns("step_seconds")
    others = [other for other in best if other != engine]
    if others:
        against = min(others, key=lambda other: _seconds(best[other]))
        row |= ratio(_samples(best[against]), _samples(mine)).columns("ratio")
        row |= {"against": against, "against_layout": best[against]["layout_label"]}
    return row


def _samples(row: Mapping[str, Any]) -> list[float]:
    return from_text(row["step_seconds"])


def _seconds(row: Mapping[str, Any]) -> float:
    return statistics.median(_samples(row))
