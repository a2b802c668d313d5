"""By how much do two runs, or two studies, differ?

Each of the two is a cell, a record, a folder of records or a CSV table, and every quantity of the second is divided by
that of the first:

    times             ratio of medians with its bootstrap interval, from the samples in the rows
    counts and bytes  the exact ratio, as a fraction too
    shares            the ratio of two derived numbers (imbalance, padding waste), without interval

One run on each side makes a pair whatever their names; else runs of equal cell are paired. A pair whose steps compute
on different numbers of tokens says so in each of its rows, a run that did not end well says why, and a row that only
one side has is told. Left out: verdicts (`results/claims`).
"""

import dataclasses
import fractions
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from results.intervals import ratio
from results.load import load_records, read_record
from results.runs import from_text
from results.schema import Record
from results.tables import RECORDED, make

Row = Mapping[Any, Any]

COLUMNS = (
    "table",
    "cell_a",
    "cell_b",
    "row",
    "quantity",
    "kind",
    "a",
    "b",
    "ratio",
    "ratio_low",
    "ratio_high",
    "ratio_exact",
    "note",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Quantities:
    """What a table is compared by: the columns that name a row within a run, and the columns of each kind."""

    marker: str
    """A column that no other table has."""
    row: tuple[str, ...]
    times: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()


_BUSY = ("forward_busy_seconds", "backward_busy_seconds")
_STATE = (
    *("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes"),
    *("peak_saved_bytes", "peak_allocated_bytes"),
)

QUANTITIES = {
    "runs": Quantities(
        marker="num_collectives",
        row=(),
        times=("step_seconds", "busy_seconds", "wait_seconds", "bubble", "imbalance_busy_seconds"),
        exact=(
            "sent_bytes",
            "sent_bytes_busiest_rank",
            "num_collectives",
            "num_collectives_busiest_rank",
            "num_sends",
            "num_sends_busiest_rank",
            "forward_flops",
            *_STATE,
            "loss_tokens",
        ),
        shares=(
            "imbalance_forward_flops",
            "imbalance_parameters",
            "imbalance_peak_saved_bytes",
            "imbalance_valid_tokens",
            "padding_waste",
        ),
    ),
    "ranks": Quantities(
        marker="dp_coordinate",
        row=("rank",),
        times=("step_seconds", "busy_seconds", "wait_seconds"),
        exact=(*_STATE, "valid_tokens", "padded_tokens"),
    ),
    "stages": Quantities(
        marker="first_block", row=("stage",), times=_BUSY, exact=("forward_flops", "parameters", "peak_saved_bytes")
    ),
    "blocks": Quantities(marker="index", row=("side", "index"), times=_BUSY, exact=("forward_flops", "parameters")),
    "communication": Quantities(
        marker="wire_bytes",
        row=("rank", "operation", "axis", "site", "stream", "phase"),
        exact=("count", "payload_bytes", "wire_bytes"),
    ),
    "edges": Quantities(marker="edge", row=("edge", "tensor"), exact=("count", "payload_bytes")),
    "operators": Quantities(marker="operator", row=("operator", "shapes", "phase"), exact=("count",)),
    "figures": Quantities(marker="traced", row=("rank", "quantity"), exact=("predicted", "traced", "measured")),
    "actions": Quantities(marker="wall_seconds", row=("rank", "stage", "kind"), times=("busy_seconds", "wall_seconds")),
    "parts": Quantities(
        marker="copies_seconds",
        row=("rank",),
        times=("products_seconds", "copies_seconds", "other_operators_seconds"),
    ),
    "pipelines": Quantities(
        marker="over_ideal", row=(), times=("measured_seconds", "played_seconds", "busiest_rank_seconds")
    ),
}
assert set(QUANTITIES) == set(RECORDED) - {"plan"}, "every table with numbers is compared"


def compare(before: str, after: str, *, records: Path) -> pd.DataFrame:
    """Divide what `after` holds by what `before` holds, a row a quantity; `COLUMNS` are the columns.

    Both are a path (CSV table, record, folder of records) or the name of a cell, `cell` or `experiment/cell`, among the
    records of a folder.

    Raises:
        ValueError: a side is nothing of these, two tables are of different kinds, or a cell is told twice.
    """
    sides = [_Side.find(text, records) for text in (before, after)]
    kinds = {side.kind for side in sides if side.kind}
    if len(kinds) > 1:
        raise ValueError(
            f"{before} is a table of {sides[0].kind}, {after} one of {sides[1].kind}: compare like with like"
        )
    kind = next(iter(kinds), "runs")
    told = [row for pair in _paired(*(side.table(kind) for side in sides)) for row in _compared(kind, *pair)]
    return pd.DataFrame(told, columns=list(COLUMNS))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Side:
    """What one of the two texts names: records, or a table of a kind."""

    records: Sequence[Record] = ()
    frame: pd.DataFrame | None = None
    kind: str = ""

    @classmethod
    def find(cls, text: str, folder: Path) -> "_Side":
        path = Path(text)
        if path.is_dir():
            found = load_records(path).records
            if not found:
                raise ValueError(f"no record in {text}")
            return cls(records=found)
        if path.suffix in (".json", ".csv"):
            if not path.is_file():
                raise ValueError(f"no file {text}")
            if path.suffix == ".json":
                return cls(records=[read_record(path)])
            frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
            return cls(frame=frame, kind=_kind(frame, text))
        return cls(records=[_cell(text, folder)])

    def table(self, kind: str) -> pd.DataFrame:
        return make(kind, self.records) if self.frame is None else self.frame


def _kind(frame: pd.DataFrame, text: str) -> str:
    for kind, quantities in QUANTITIES.items():
        if quantities.marker in frame.columns and "cell" in frame.columns:
            return kind
    raise ValueError(f"{text} is none of the tables that can be compared: {', '.join(QUANTITIES)}")


def _cell(text: str, folder: Path) -> Record:
    found = [
        record for record in load_records(folder).records if text in (record.cell, f"{record.experiment}/{record.cell}")
    ]
    if len(found) == 1:
        return found[0]
    if found:
        where = ", ".join(sorted(f"{record.experiment} on {record.provenance.hostname}" for record in found))
        raise ValueError(f"cell {text} is told {len(found)} times ({where}): give its file instead")
    raise ValueError(f"{text} is no CSV table, record or folder, and no cell of the records in {folder}")


def _paired(before: pd.DataFrame, after: pd.DataFrame) -> Iterator[tuple[pd.DataFrame | None, pd.DataFrame | None]]:
    """The rows of each pair of runs; None where a run has no partner."""
    names = next(
        (
            names
            for names in (["cell"], ["experiment", "cell"])
            if _names_one(before, names) and _names_one(after, names)
        ),
        ["machine", "experiment", "cell"],
    )
    runs = [dict(iter(table.groupby(names, sort=False))) for table in (before, after)]
    if len(runs[0]) == len(runs[1]) == 1:
        yield next(iter(runs[0].values())), next(iter(runs[1].values()))
        return
    for key in dict.fromkeys((*runs[0], *runs[1])):
        yield runs[0].get(key), runs[1].get(key)


def _names_one(table: pd.DataFrame, names: list[str]) -> bool:
    return len(table[names].drop_duplicates()) == len(table[["machine", "experiment", "cell"]].drop_duplicates())


def _compared(kind: str, before: pd.DataFrame | None, after: pd.DataFrame | None) -> Iterator[dict[str, Any]]:
    quantities = QUANTITIES[kind]
    sides = [_by_row(table, quantities.row) for table in (before, after)]
    cells = [str(table["cell"].iloc[0]) if table is not None else "" for table in (before, after)]
    base = {"table": kind, "cell_a": cells[0], "cell_b": cells[1]}
    obstacle = _obstacle(before, after)
    if before is None or after is None or obstacle:
        yield base | {"note": obstacle}
        return
    trouble = _unequal_tokens(before, after)
    for key in dict.fromkeys((*sides[0], *sides[1])):
        row = base | {"row": " ".join(map(str, key)), "note": trouble}
        a, b = sides[0].get(key), sides[1].get(key)
        if a is None or b is None:
            yield row | {"note": "; ".join(filter(None, (f"only in {'A' if b is None else 'B'}", trouble)))}
            continue
        yield from (row | _time(name, a, b, trouble) for name in quantities.times)
        yield from (row | _exact(name, a, b, trouble) for name in quantities.exact)
        yield from (row | _share(name, a, b, trouble) for name in quantities.shares)


def _by_row(table: pd.DataFrame | None, names: tuple[str, ...]) -> dict[tuple[Any, ...], Row]:
    rows = [] if table is None else table.to_dict("records")
    return {tuple(row[name] for name in names): row for row in rows}


def _obstacle(before: pd.DataFrame | None, after: pd.DataFrame | None) -> str:
    """Why a pair cannot be compared; empty when nothing is wrong."""
    if before is None or after is None:
        return f"no such cell in {'A' if before is None else 'B'}"
    rows = [table.iloc[0] for table in (before, after)]
    ended = [
        f"{name}: {row['status']}" + (f", {row['reason']}" if row.get("reason") else "")
        for name, row in zip("AB", rows, strict=True)
        if row["status"] != "ok"
    ]
    return "; ".join(ended)


def _unequal_tokens(before: pd.DataFrame, after: pd.DataFrame) -> str:
    """Why the comparison of a pair means little; empty when its steps compute on as many tokens."""
    tokens = [table["tokens_per_step"].iloc[0] for table in (before, after)]
    if any(pd.isna(count) for count in tokens) or tokens[0] != tokens[1]:
        return f"tokens per step differ: {tokens[0]} and {tokens[1]}"
    return ""


def _time(name: str, before: Row, after: Row, note: str) -> dict[str, Any]:
    interval = ratio(from_text(before.get(name)), from_text(after.get(name)))
    notes = [note] if note else []
    a, b = before.get(f"{name}_median"), after.get(f"{name}_median")
    if pd.isna(a) or pd.isna(b):
        notes.append("not timed")
    elif math.isnan(interval.value):
        notes.append("A is 0" if b else "both are 0")
    elif not interval.has_bounds:
        notes.append("fewer than two samples: no interval")
    return {
        "quantity": name,
        "kind": "time",
        "a": a,
        "b": b,
        "ratio": interval.value,
        "ratio_low": interval.low,
        "ratio_high": interval.high,
        "note": "; ".join(notes),
    }


def _exact(name: str, before: Row, after: Row, note: str) -> dict[str, Any]:
    a, b = before.get(name), after.get(name)
    row = {"quantity": name, "kind": "exact", "a": a, "b": b, "note": note}
    if pd.isna(a) or pd.isna(b):
        return row | {"note": "; ".join(filter(None, (note, "not counted")))}
    if not a:
        return row | {"note": "; ".join(filter(None, (note, "A is 0" if b else "both are 0")))}
    exact = fractions.Fraction(int(b), int(a))
    return row | {"ratio": float(exact), "ratio_exact": str(exact)}


def _share(name: str, before: Row, after: Row, note: str) -> dict[str, Any]:
    a, b = (math.nan if pd.isna(value) else float(value) for value in (before.get(name), after.get(name)))
    quotient = b / a if a else math.nan
    return {"quantity": name, "kind": "share", "a": a, "b": b, "ratio": quotient, "note": note}
