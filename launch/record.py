"""How does a run become a file? One JSON record a cell, written so that nobody ever reads half of it.

    <output>/<experiment>/<cell>.json

A record is written beside its place and moved there in one step. A record that says nothing about measurements
(refused, failed, out of memory) is made here too, from the cell and a reason. Left out: what was measured
(`launch/facts.py`).
"""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from launch.cell import Cell
from launch.provenance import provenance
from results.schema import COMPLETE_SINCE, SCHEMA_VERSION, Record, Status


def record_path(output: Path, cell: Cell) -> Path:
    """Where the record of a cell stands."""
    return output / cell.experiment / f"{cell.name}.json"


def write_record(output: Path, cell: Cell, record: Record) -> None:
    """Puts a record in its place, whole or not at all."""
    path = record_path(output, cell)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            json.dump(record.to_dict(), file, indent=1, allow_nan=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_record(output: Path, cell: Cell) -> Record | None:
    """The record of a cell, None when there is none or when what is there is no record."""
    try:
        fields = json.loads(record_path(output, cell).read_text(encoding="utf-8"))
        return Record.from_dict(fields)
    except (OSError, ValueError, TypeError, AttributeError):
        # Cut in half, of another version, or no record at all: the cell is run again and its record replaced.
        return None


def is_measured(output: Path, cell: Cell, *, fingerprint: str, backend: str) -> bool:
    """Whether a cell has a good record of just this cell, so that it need not be run again."""
    record = read_record(output, cell)
    if record is None or record.fingerprint != fingerprint or record.schema_version < COMPLETE_SINCE:
        return False
    return record.status == "unsupported" if cell.refusal else record.status == "ok" and record.backend == backend


def make_record(cell: Cell, *, fingerprint: str, status: Status, reason: str = "", **measured: Any) -> Record:
    """The record of a cell; what is not given stays empty. `measured` are fields of `Record`."""
    empty: dict[str, Any] = {
        "device": "none",
        "backend": "none",
        "oversubscribed": False,
        "data": None,
        "parity": None,
        "ledger_matches_recorder": False if cell.engine.name == "native" else None,
        "loss": None,
        "gradient_norm": None,
        "warmup_seconds": [],
        "step_seconds": [],
        "typical_step": -1,
        "plan": [],
        "ranks": [],
        "stages": [],
        "blocks": [],
        "actions": [],
        "spans": [],
        "profile": None,
        "communication": [],
        "edges": [],
        "operators": [],
        "parts": [],
        "figures": [],
    }
    unknown = set(measured) - {field.name for field in dataclasses.fields(Record)}
    assert not unknown, f"no fields of a record: {unknown}"
    return Record(
        schema_version=SCHEMA_VERSION,
        experiment=cell.experiment,
        cell=cell.name,
        fingerprint=fingerprint,
        status=status,
        reason=reason,
        twins=cell.member.family,
        match=cell.member.match,
        match_mismatch=cell.member.mismatch,
        is_control=cell.is_control,
        model=cell.model.to_dict(),
        layout=cell.layout.to_dict(),
        layout_label=cell.layout.label,
        world_size=cell.world_size,
        dtype=cell.settings.dtype,
        seed=cell.settings.seed,
        provenance=provenance(),
        **cell.engine.to_dict(),
        **{**empty, **measured},
    )
