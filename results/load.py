"""Which records does a folder hold, and which of its files are none, and why?

    records/<machine>/<experiment>/<cell>.json      any depth; every *.json file below the folder is taken for a record

A file that is no record (cut in half, another version, other keys or types, samples that do not add up, a model that
is none) is refused with a reason and harms no other; nothing is dropped in silence. Of several records of one cell on
one machine the newest counts. Left out: what the records say (`results/tables.py`).
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from models.config import ModelConfig
from parallel.layouts import Layout
from parallel.schedule import Action
from results.schema import Record


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A record and the file it was read from."""

    path: Path
    record: Record


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A file that is not taken for a record."""

    path: Path
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a folder holds, in the order of the paths."""

    folder: Path
    found: tuple[Found, ...]
    refused: tuple[Refused, ...]

    @property
    def records(self) -> tuple[Record, ...]:
        return tuple(entry.record for entry in self.found)


def load_records(folder: Path) -> Loaded:
    """Read every record below a folder.

    Raises:
        ValueError: there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"no folder {folder}: records are written by a run, or give another folder")
    found: list[Found] = []
    refused: list[Refused] = []
    for path in sorted(path for path in folder.rglob("*") if ".json" in path.name and path.is_file()):
        if path.suffix != ".json" or path.name.startswith("."):
            refused.append(Refused(path=path, reason="unfinished: its writer never gave it its final name"))
            continue
        try:
            found.append(Found(path=path, record=read_record(path)))
        except (OSError, ValueError) as error:
            refused.append(Refused(path=path, reason=str(error)))
    kept, older = _newest(found)
    return Loaded(folder=folder, found=kept, refused=tuple(sorted((*refused, *older), key=lambda entry: entry.path)))


def read_record(path: Path) -> Record:
    """Read one record.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no record; the message says why, in one line.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"no text: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"cut off or no JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"a record is a JSON object, this is a {type(fields).__name__}")  # noqa: TRY004 (a file)
    try:
        record = Record.from_dict(fields)
    except TypeError as error:
        raise ValueError(f"a list or object of the record is none: {error}") from error
    _check_types(record, type(record), "record")
    _check_samples(record)
    _check_spans(record)
    _check_data(record)
    _check_configuration(record)
    return record


def _newest(found: Iterable[Found]) -> tuple[tuple[Found, ...], list[Refused]]:
    """Keep the newest record of each cell on each machine; the later path when two are equally new."""
    newest: dict[tuple[str, str, str], Found] = {}
    older: list[tuple[Found, tuple[str, str, str]]] = []
    for entry in found:
        key = (entry.record.provenance.hostname, entry.record.experiment, entry.record.cell)
        before = newest.get(key)
        if before is None:
            newest[key] = entry
        elif before.record.provenance.created <= entry.record.provenance.created:
            newest[key] = entry
            older.append((before, key))
        else:
            older.append((entry, key))
    refused = [
        Refused(
            path=entry.path,
            reason=f"older than {newest[key].path.name} of the same cell {key[2]}: "
            f"{entry.record.provenance.created} and {newest[key].record.provenance.created}",
        )
        for entry, key in older
    ]
    return tuple(sorted(newest.values(), key=lambda entry: entry.path)), refused


def _check_types(value: Any, expected: Any, where: str) -> None:
    """Check a value against an annotation, part by part. Raises ValueError naming the place."""
    if dataclasses.is_dataclass(expected):
        if not isinstance(value, typing.cast("type", expected)):
            raise _mismatch(where, expected, value)
        for name, annotation in _annotations(typing.cast("type", expected)).items():
            part = getattr(value, name)
            if type(part) is not annotation:  # most parts are plain numbers and words: look no further at these
                _check_types(part, annotation, f"{where}.{name}")
    else:
        for part, annotation, place in _parts(value, expected, where):
            _check_types(part, annotation, place)


@functools.cache
def _annotations(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _parts(value: Any, expected: Any, where: str) -> list[tuple[Any, Any, str]]:
    """What is left to check of a value that is no dataclass: (part, its annotation, its place)."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin is types.UnionType:
        return [] if value is None else [(value, arguments[0], where)]
    if origin is list and isinstance(value, list):
        return [(part, arguments[0], f"{where}[{index}]") for index, part in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        return [(part, arguments[1], f"{where}[{key!r}]") for key, part in value.items()]
    if not _is_scalar(value, expected):
        raise _mismatch(where, expected, value)
    return []


def _is_scalar(value: Any, expected: Any) -> bool:
    if expected is Any:
        return True
    if typing.get_origin(expected) is Literal:
        return value in typing.get_args(expected)
    if not isinstance(expected, type) or (isinstance(value, bool) and expected is not bool):
        return False
    return isinstance(value, (int, float) if expected is float else expected)


def _mismatch(where: str, expected: Any, value: Any) -> ValueError:
    name = expected.__name__ if isinstance(expected, type) else str(expected)
    return ValueError(f"{where} must be {name}, not {value!r:.60}")


def _check_samples(record: Record) -> None:
    """Every list of samples has one entry a timed step, or none; a sample is a finite time."""
    num_steps = len(record.step_seconds)
    lists: list[tuple[str, list[float]]] = [("warmup_seconds", record.warmup_seconds)]
    lists.append(("step_seconds", record.step_seconds))
    per_step: list[tuple[str, list[float]]] = []
    for rank in record.ranks:
        per_step += _samples(
            f"rank {rank.rank}", rank, ("step_seconds", "busy_seconds", "wait_seconds", "pipeline_seconds")
        )
    for stage in record.stages:
        per_step += _samples(f"stage {stage.stage}", stage, ("forward_busy_seconds", "backward_busy_seconds"))
    for block in record.blocks:
        per_step += _samples(f"block {block.block}", block, ("forward_busy_seconds", "backward_busy_seconds"))
    for action in record.actions:
        where = f"{action.kind} of stage {action.stage} on rank {action.rank}"
        per_step += _samples(where, action, ("busy_seconds", "wall_seconds"))
    for where, samples in per_step:
        if len(samples) not in (0, num_steps):
            raise ValueError(f"{where} has {len(samples)} samples, but {num_steps} steps were timed")
    for where, samples in (*lists, *per_step):
        if not all(math.isfinite(sample) and sample >= 0 for sample in samples):
            raise ValueError(f"{where} holds a sample that is no time")


def _check_spans(record: Record) -> None:
    """Every rank's spans are actions, one after the other, of one of the timed steps."""
    if record.spans and not 0 <= record.typical_step < len(record.step_seconds):
        raise ValueError(f"spans of step {record.typical_step}, but {len(record.step_seconds)} steps were timed")
    ends: dict[int, float] = {}
    for span in record.spans:
        Action.parse(span.action)
        times = (ends.get(span.rank, 0.0), span.start_seconds, span.end_seconds)
        if not (all(map(math.isfinite, (*times, span.busy_seconds))) and list(times) == sorted(times)):
            raise ValueError(
                f"rank {span.rank} ran {span.action} from {times[1]} to {times[2]} seconds, after an end at {times[0]}"
            )
        ends[span.rank] = span.end_seconds


def _samples(where: str, row: Any, names: tuple[str, ...]) -> list[tuple[str, list[float]]]:
    return [(f"{where}: {name}", getattr(row, name)) for name in names]


def _check_data(record: Record) -> None:
    data = record.data
    if data is None:
        return
    streams = (
        ("source", data.source_valid_tokens, data.source_length, data.source_sharding_padding_tokens),
        ("target", data.target_valid_tokens, data.target_length, data.target_sharding_padding_tokens),
    )
    for stream, valid, length, padding in streams:
        if not 0 <= valid <= data.num_sequences * length + padding:
            raise ValueError(
                f"{valid} valid {stream} tokens in {data.num_sequences} sequences of {length} and {padding} of padding"
            )


def _check_configuration(record: Record) -> None:
    """A cell that ran had a model and a layout; one that was refused may tell of any."""
    if record.status != "ok":
        return
    readers: Mapping[str, tuple[Any, dict[str, Any]]] = {
        "model": (ModelConfig, record.model),
        "layout": (Layout, record.layout),
    }
    for name, (reader, fields) in readers.items():
        try:
            reader.from_dict(fields)
        except TypeError as error:
            raise ValueError(f"its {name} is none: {error}") from error
        except ValueError as error:
            raise ValueError(f"its {name} is none: {error}") from error
