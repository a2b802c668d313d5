"""How does each engine do against the best of the others on the same cell?

Runs are side by side when engine alone tells them apart: model, data, layout and machine are equal. Of every quantity
the best other engine is the one with the least of it, so that a ratio below 1 beats all others:

    seconds            median over that of the best other, with its bootstrap interval      from the samples
    bytes, counts      of all ranks in one step, over those of the best other               exact
    parts              where a step goes: `results/step_parts.py`
    startup            seconds of the slowest rank until it can step                        one sample: no interval

Compiled blocks are held against the same engine without: their ratio is what compiling changes. A control is the same
again: it is held against its first run, and its ratio is the noise of the machine. What did not end well is a row with
its status and reason. Times of busy threads leave out what is waited for. Left out: what a ratio means
(`results/claims`), engines at the schedules that suit them (`results/fastest.py`), and running (`launch/bench.py`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from parallel.engines.choice import EngineChoice
from results.fastest import COLUMNS as FASTEST
from results.fastest import fastest
from results.files import write_table
from results.intervals import median, ratio
from results.load import load_records
from results.runs import from_text, run_row
from results.schema import Record
from results.step_parts import COLUMNS as PARTS
from results.step_parts import step_parts

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A record, and its row of `runs.csv`."""

    record: Record
    row: Mapping[str, Any]

    @property
    def cell(self) -> tuple[str, str]:
        """What runs that are side by side share: the machine, and the name of the cell without who runs it how."""
        name = self.record.cell.removesuffix(".control").removesuffix(self.engine.suffix)
        return self.record.provenance.hostname, name

    @property
    def engine(self) -> EngineChoice:
        return EngineChoice.parse(self.record.engine, compiled=self.record.compiled)


def _startup_seconds(run: Run) -> list[float]:
    told = [rank.startup_seconds for rank in run.record.ranks]
    known = [seconds for seconds in told if seconds is not None]
    return [max(known)] if known else []


TIMES: dict[str, Callable[[Run], list[float]]] = {
    "step_seconds": lambda run: from_text(run.row["step_seconds"]),
    "busy_seconds": lambda run: from_text(run.row["busy_seconds"]),
    "startup_seconds": _startup_seconds,
}
"""Quantities with samples."""
COUNTS = ("sent_bytes", "num_collectives", "num_sends", "peak_saved_bytes")
"""Quantities of `runs.csv` that are exact."""

IDENTITY = (
    *("machine", "experiment", "cell", "architecture", "model", "layout", "engine", "compiled", "is_control"),
    *("status", "reason"),
)
COLUMNS = (
    *IDENTITY,
    *(
        f"{name}{end}"
        for name in TIMES
        for end in ("", "_low", "_high", "_ratio", "_ratio_low", "_ratio_high", "_against")
    ),
    *(f"{name}{end}" for name in COUNTS for end in ("", "_ratio", "_against")),
    *PARTS,
)


def benchmark(records: Path, cells: Sequence[str], output: Path) -> dict[str, list[Row]]:
    """Compare the engines in a folder of records, write two tables, and return their rows; what is not known is None.

    Args:
        records: the folder.
        cells: that are compared, in the order of the rows; records of others are left aside.
        output: CSV file of `COLUMNS`; what is fastest stands beside it, in `<name>_fastest.csv`.

    Returns:
        `bench`: one row a record; `fastest`: those of `results/fastest.py`.

    Raises:
        ValueError: no such folder, or no record of these cells in it.
    """
    order = {name: index for index, name in enumerate(cells)}
    found = [record for record in load_records(records).records if record.cell in order]
    if not found:
        raise ValueError(f"no record of these cells in {records}")
    found.sort(key=lambda record: order[record.cell])
    rows, best = compared(found), fastest(found)
    # As objects: a count with blanks stays a whole number.
    write_table(output, pd.DataFrame(rows, columns=list(COLUMNS), dtype=object))
    beside = output.with_name(f"{output.stem}_fastest.csv")
    write_table(beside, pd.DataFrame(best, columns=list(FASTEST), dtype=object))
    return {"bench": rows, "fastest": best}


def compared(records: Sequence[Record]) -> list[Row]:
    """One row a record, in `COLUMNS`; engines of one cell next to each other."""
    cells: dict[tuple[str, str], list[Run]] = {}
    for record in records:
        run = Run(record=record, row=run_row(record))
        cells.setdefault(run.cell, []).append(run)
    return [_row(run, _rivals(run, runs)) for runs in cells.values() for run in runs]


def _rivals(run: Run, runs: Sequence[Run]) -> list[Run]:
    """What a run is held against: the other engines, itself with blocks as written, or its own first run."""
    first = [other for other in runs if other.record.status == "ok" and not other.record.is_control]
    if run.record.is_control:
        return [other for other in first if other.engine == run.engine]
    as_written = [other for other in first if not other.record.compiled]
    return [other for other in as_written if (other.record.engine == run.record.engine) == run.record.compiled]


def _row(run: Run, rivals: Sequence[Run]) -> Row:
    record = run.record
    row: Row = dict.fromkeys(COLUMNS) | {
        "machine": record.provenance.hostname,
        "experiment": record.experiment,
        "cell": record.cell,
        "architecture": record.model.get("architecture", ""),
        "model": record.model.get("name", ""),
        "layout": record.layout_label,
        **run.engine.to_dict(),
        "is_control": record.is_control,
        "status": record.status,
        "reason": record.reason,
    }
    if record.status != "ok":
        return row
    for name, samples_of in TIMES.items():
        row |= _time(name, samples_of(run), {one.record.engine: samples_of(one) for one in rivals})
    row |= step_parts(record)
    for name in COUNTS:
        row |= _count(name, run.row[name], {one.record.engine: one.row[name] for one in rivals})
    return row


def _time(name: str, samples: list[float], others: Mapping[str, list[float]]) -> Row:
    row: Row = dict(median(samples).columns(name))
    medians = {engine: median(theirs).value for engine, theirs in others.items() if theirs}
    if samples and medians:
        best = min(medians, key=lambda engine: medians[engine])
        row |= ratio(others[best], samples).columns(f"{name}_ratio") | {f"{name}_against": best}
    return row


def _count(name: str, count: int | None, others: Mapping[str, int | None]) -> Row:
    known = {engine: theirs for engine, theirs in others.items() if theirs is not None}
    row: Row = {name: count}
    if count is not None and known:
        best = min(known, key=lambda engine: known[engine])
        row[f"{name}_against"] = best
        if known[best]:
            row[f"{name}_ratio"] = count / known[best]
        elif not count:
            row[f"{name}_ratio"] = 1.0
    return row
