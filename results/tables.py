"""Which tables do the records make?

    runs.csv            one row a run, failed ones too: medians with intervals, bytes, counts, balance, padding
    ranks.csv           one row a rank                          stages.csv    one row a pipeline stage
    blocks.csv          one row a block of the model            edges.csv     one row an edge and tensor
    communication.csv   one row a rank, operation, axis, site, stream and phase, of one step
    plan.csv            one row a module the layout changes     operators.csv one row an operator and its shapes
    figures.csv         one row a rank and quantity: predicted, traced and measured side by side
    actions.csv         one row a rank, stage and kind of action: what one took
    parts.csv           one row a rank whose steps were taken apart: products, copies, other operators
    pipelines.csv       one row a pipeline's run: simulated against measured (`results/pipelines.py`)
    improvements.csv    one row a pipeline, baseline and quantity: ratios (`results/improvements.py`)
    predicted.csv       one row a point of the closed forms (`results/predicted.py`), which no record stands behind
    counts.csv, caches.csv, lengths.csv, structure.csv    of named models (`results/model_counts.py`), likewise
    fits.csv            one row a model, device and way to divide it (`results/smallest.py`), likewise
    variation.csv       one row a model and lengths: how much its blocks differ (`results/variation.py`), likewise
    penalty.csv         one row a simulated pipeline of twins (`results/penalty.py`), likewise
    space.csv           one row a layout of twins, with its predicted step (`results/space.py`), likewise
    capabilities.csv    one row an engine, architecture and feature: what runs gave (`results/capabilities.py`)

Every other table begins with the columns that name the run (`results/runs.py`); what follows are the fields of the
record's rows under their own names, units included. Lists of samples are JSON lists with their median beside them. A
table is made again from the records whenever it is wanted and holds nothing that they do not.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from results import capabilities, improvements, model_counts, penalty, pipelines, predicted, smallest, space, variation
from results.files import write_table
from results.runs import IDENTITY, Row, identity, run_row, to_text
from results.schema import (
    ActionFacts,
    BlockFacts,
    EdgeFacts,
    FigureFacts,
    OperatorFacts,
    PartFacts,
    PlanFacts,
    RankFacts,
    Record,
    StageFacts,
)
from results.sites import place_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tables:
    """The tables of a study; a field is a table and the name of its file."""

    runs: pd.DataFrame
    ranks: pd.DataFrame
    stages: pd.DataFrame
    blocks: pd.DataFrame
    communication: pd.DataFrame
    edges: pd.DataFrame
    plan: pd.DataFrame
    operators: pd.DataFrame
    parts: pd.DataFrame
    figures: pd.DataFrame
    actions: pd.DataFrame
    pipelines: pd.DataFrame
    improvements: pd.DataFrame
    predicted: pd.DataFrame
    counts: pd.DataFrame
    caches: pd.DataFrame
    lengths: pd.DataFrame
    structure: pd.DataFrame
    fits: pd.DataFrame
    variation: pd.DataFrame
    penalty: pd.DataFrame
    space: pd.DataFrame
    capabilities: pd.DataFrame

    @property
    def native(self) -> "Tables":
        """Rows of the native engine, its blocks as written: claims rest on what it alone lets be looked into."""
        recorded = {name: getattr(self, name) for name in RECORDED}
        return self.replace(
            **{
                name: frame[(frame["engine"] == "native") & ~frame["compiled"].astype(bool)]
                for name, frame in recorded.items()
                if "engine" in frame
            }
        )

    def replace(self, **tables: pd.DataFrame) -> "Tables":
        """The same tables with some of them changed."""
        return dataclasses.replace(self, **tables)


TABLE_NAMES = tuple(field.name for field in dataclasses.fields(Tables))

CLOSED_FORMS: dict[str, Callable[[], pd.DataFrame]] = {
    "predicted": predicted.build,
    "counts": model_counts.counts,
    "caches": model_counts.caches,
    "lengths": model_counts.lengths,
    "structure": model_counts.structure,
    "fits": smallest.build,
    "variation": variation.build,
    "penalty": penalty.build,
    "space": space.build,
    "capabilities": capabilities.build,
}
"""Tables that are the same for every study, and how each is made."""

RECORDED = tuple(name for name in TABLE_NAMES if name not in (*CLOSED_FORMS, "improvements"))
"""Tables that stand on records, row by row; `improvements` stands on two of them."""

_RENAMED = {"dp": "dp_coordinate", "pp": "pp_coordinate", "tp": "tp_coordinate"}
"""A rank's coordinates, which the degrees of the layout would otherwise hide."""

_COMMUNICATION_KEY = ("rank", "operation", "axis", "group_size", "site", "stream", "phase")
_COMMUNICATION_PLACE = ("part", "side", "block_index", "place")
_COMMUNICATION_SUMS = ("count", "payload_bytes", "wire_bytes")


def build(records: Iterable[Record], on_record: Callable[[], None] = lambda: None) -> Tables:
    """Make the tables of a study; `on_record` is called after each record, for a display of progress.

    Raises:
        ValueError: there is no record, so there is nothing to make tables of.
    """
    rows: dict[str, list[Row]] = {name: [] for name in RECORDED}
    for record in records:
        for name in RECORDED:
            rows[name] += _rows(name, record)
        on_record()
    if not rows["runs"]:
        raise ValueError("no records: tables are made of at least one")
    recorded = {name: _frame(name, told) for name, told in rows.items()}
    compared = improvements.build(recorded["pipelines"], recorded["runs"])
    return without_records().replace(**recorded, improvements=compared)


def without_records() -> Tables:
    """The tables that are the same for every study; those that stand on records are empty."""
    closed = {name: make_one() for name, make_one in CLOSED_FORMS.items()}
    return Tables(**dict.fromkeys((*RECORDED, "improvements"), pd.DataFrame()), **closed)


def make(name: str, records: Iterable[Record]) -> pd.DataFrame:
    """Make one of the tables that stand on records."""
    return _frame(name, [row for record in records for row in _rows(name, record)])


def write(tables: Tables, folder: Path) -> tuple[Path, ...]:
    """Write every table into a folder; returns the files."""
    paths = tuple(folder / f"{name}.csv" for name in TABLE_NAMES)
    for name, path in zip(TABLE_NAMES, paths, strict=True):
        write_table(path, getattr(tables, name))
    return paths


def _rows(name: str, record: Record) -> list[Row]:
    if name == "runs":
        return [run_row(record)]
    if name == "pipelines":
        return pipelines.rows(record)
    named = identity(record)
    if name == "communication":
        return [named | row for row in _communication(record)]
    return [named | facts_row(facts) for facts in getattr(record, name)]


def facts_row(facts: Any) -> Row:
    """Fields of a row of a record as columns; samples become text, with their median beside them."""
    row: Row = {}
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        name = _RENAMED.get(field.name, field.name)
        if isinstance(value, list):
            row[name] = to_text(value) if value else None
            row[f"{name}_median"] = statistics.median(value) if value else None
        else:
            row[name] = value
    return row


def _communication(record: Record) -> list[Row]:
    """Events of one step, added up over what a row of the table does not tell apart."""
    sums: dict[tuple[Any, ...], list[int]] = {}
    for event in record.communication:
        key = tuple(getattr(event, name) for name in _COMMUNICATION_KEY)
        total = sums.setdefault(key, [0] * len(_COMMUNICATION_SUMS))
        for index, name in enumerate(_COMMUNICATION_SUMS):
            total[index] += getattr(event, name)
    rows = []
    for key, total in sums.items():
        row: Row = dict(zip(_COMMUNICATION_KEY, key, strict=True))
        place = place_of(row["site"], row["axis"], row["phase"])
        row |= {name: getattr(place, name) for name in _COMMUNICATION_PLACE}
        rows.append(row | dict(zip(_COMMUNICATION_SUMS, total, strict=True)))
    return rows


def _frame(name: str, rows: Sequence[Row]) -> pd.DataFrame:
    frame = pd.DataFrame(list(rows), columns=list(_columns(name)) if not rows else None)
    for column in frame.columns if rows else ():
        values = [row[column] for row in rows]
        told = [value for value in values if value is not None]
        if 0 < len(told) < len(values) and all(type(value) is int for value in told):
            frame[column] = pd.array(values, dtype="Int64")  # a count with blanks stays a whole number
    return frame


def _columns(name: str) -> tuple[str, ...]:
    """Columns of a table without rows."""
    if name == "communication":
        return (*IDENTITY, *_COMMUNICATION_KEY, *_COMMUNICATION_PLACE, *_COMMUNICATION_SUMS)
    if name == "pipelines":
        return (*IDENTITY, *pipelines.COLUMNS)
    columns: list[str] = list(IDENTITY)
    for field in dataclasses.fields(_FACTS[name]):
        column = _RENAMED.get(field.name, field.name)
        columns += [column, f"{column}_median"] if field.type == list[float] else [column]
    return tuple(columns)


_FACTS: dict[str, type] = {
    "ranks": RankFacts,
    "stages": StageFacts,
    "blocks": BlockFacts,
    "edges": EdgeFacts,
    "plan": PlanFacts,
    "operators": OperatorFacts,
    "parts": PartFacts,
    "figures": FigureFacts,
    "actions": ActionFacts,
}
