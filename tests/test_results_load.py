"""Is every record read, and is every other file refused with its reason, harming no other?"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from parallel.layouts import Layout
from results.load import load_records
from results.schema import Record
from tests.records import DECODER_ONLY, record, unsuccessful, write

GOOD = record(DECODER_ONLY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, [GOOD])
    return tmp_path


def add(folder: Path, text: str, name: str = "other.json") -> None:
    (folder / "bench" / "synthetic" / name).write_text(text, encoding="utf-8")


def changed(**changes: Any) -> str:
    return json.dumps(record().to_dict() | changes)


def refused(folder: Path) -> list[str]:
    """Reasons of the refused files; the good record must have been read all the same."""
    loaded = load_records(folder)
    assert loaded.records == (GOOD,)
    return [entry.reason for entry in loaded.refused]


def test_a_record_reads_back_as_it_was_written(folder: Path) -> None:
    assert refused(folder) == []


def test_a_run_that_did_not_end_well_is_a_record(tmp_path: Path) -> None:
    failed = unsuccessful("out_of_memory", "rank 1", Layout(tp=2))
    write(tmp_path, [failed])
    assert load_records(tmp_path).records == (failed,)


def test_a_cell_that_was_refused_may_tell_of_any_layout(tmp_path: Path) -> None:
    odd = dataclasses.replace(unsuccessful("unsupported", "sp needs tp", Layout()), layout={"tp": 1, "sp": True})
    write(tmp_path, [odd])
    assert load_records(tmp_path).records == (odd,)


def test_a_missing_folder_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no folder .*nowhere"):
        load_records(tmp_path / "nowhere")


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.999])
def test_a_record_cut_off_anywhere_is_refused(folder: Path, share: float) -> None:
    text = changed()
    add(folder, text[: int(len(text) * share)])
    (reason,) = refused(folder)
    assert reason.startswith("cut off or no JSON")
    assert "\n" not in reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1, 2]", "a record is a JSON object, this is a list"),
        ('"words"', "a record is a JSON object, this is a str"),
        (changed(schema_version=99), "schema_version 99 of a record"),
        (changed(status="perhaps"), "status 'perhaps' of a record"),
        (changed(surplus=1), "unknown keys surplus, missing keys none"),
        (json.dumps({"schema_version": 3, "status": "ok"}), "missing keys actions, backend, blocks"),
        (changed(ranks=None), "a list or object of the record is none"),
        (changed(ranks=[7]), "a list or object of the record is none"),
        (changed(seed="one"), "record.seed must be int, not 'one'"),
        (changed(seed=True), "record.seed must be int, not True"),
        (changed(loss="low"), "record.loss must be float"),
        (changed(step_seconds=0.5), "record.step_seconds must be list[float], not 0.5"),
        (changed(step_seconds=["fast"] * 9), "record.step_seconds[0] must be float, not 'fast'"),
        (changed(step_seconds=[0.1, 0.2]), "rank 0: step_seconds has 9 samples, but 2 steps were timed"),
        (changed(warmup_seconds=[-1.0]), "warmup_seconds holds a sample that is no time"),
        (changed(warmup_seconds=[float("nan")]), "warmup_seconds holds a sample that is no time"),
        (changed(model={"architecture": "recurrent"}), "its model is none: the model lacks"),
        (changed(model=record().model | {"width": "wide"}), "its model is none:"),
        (changed(layout={"tp": 0}), "its layout is none: tp = 0"),
        (changed(layout={"sp": True}), "its layout is none: sp shards the sequence"),
    ],
)
def test_what_is_no_record_is_refused_with_its_reason(folder: Path, text: str, reason: str) -> None:
    add(folder, text)
    (told,) = refused(folder)
    assert reason in told
    assert "\n" not in told


def test_a_record_of_the_first_version_is_read_and_has_no_spans(folder: Path) -> None:
    first = record().to_dict() | {"schema_version": 1, "cell": "older"}
    for name in ("typical_step", "actions", "spans", "profile"):
        del first[name]
    for rank in first["ranks"]:
        del rank["pipeline_seconds"], rank["startup_seconds"]
    add(folder, json.dumps(first))
    (older,) = (entry for entry in load_records(folder).records if entry.cell == "older")
    assert (older.schema_version, older.typical_step, older.spans, older.actions) == (1, -1, [], [])
    assert older.ranks[0].pipeline_seconds == []
    assert older.ranks[0].busy_seconds == record().ranks[0].busy_seconds


def test_a_record_of_the_second_version_is_read_and_has_its_spans(folder: Path) -> None:
    second = record().to_dict() | {"schema_version": 2, "cell": "older"}
    for rank in second["ranks"]:
        del rank["startup_seconds"]
    add(folder, json.dumps(second))
    (older,) = (entry for entry in load_records(folder).records if entry.cell == "older")
    assert (older.schema_version, older.spans) == (2, record().spans)
    assert older.ranks[0].startup_seconds is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"action": "2X0"}, "'2X0' is no action"),
        ({"start_seconds": 5.0}, "rank 0 ran 0F0 from 5.0 to"),
        ({"end_seconds": -1.0}, "rank 0 ran 0F0 from 0.0 to -1.0 seconds"),
        ({"busy_seconds": float("nan")}, "rank 0 ran 0F0"),
    ],
)
def test_spans_that_no_rank_can_have_run_are_refused(folder: Path, changes: dict[str, Any], reason: str) -> None:
    fields = record().to_dict()
    fields["spans"][0] |= changes
    add(folder, json.dumps(fields))
    (told,) = refused(folder)
    assert reason in told


def test_spans_of_a_step_that_was_not_timed_are_refused(folder: Path) -> None:
    add(folder, changed(typical_step=9))
    assert refused(folder) == ["spans of step 9, but 9 steps were timed"]


def test_a_wrong_type_deep_inside_is_named_by_its_place(folder: Path) -> None:
    fields = record().to_dict()
    fields["stages"][0]["forward_flops"] = "many"
    add(folder, json.dumps(fields))
    assert refused(folder) == ["record.stages[0].forward_flops must be int, not 'many'"]


def test_more_valid_tokens_than_positions_are_refused(folder: Path) -> None:
    fields = record().to_dict()
    fields["data"]["target_valid_tokens"] = 1000
    add(folder, json.dumps(fields))
    assert refused(folder) == ["1000 valid target tokens in 8 sequences of 12 and 0 of padding"]


def test_bytes_that_are_no_text_are_refused(folder: Path) -> None:
    (folder / "bench" / "synthetic" / "other.json").write_bytes(b'{"a": "\xff"}')
    assert refused(folder) == ["no text: byte 7 is not UTF-8"]


@pytest.mark.parametrize("name", [".other.json.4711", "other.json.tmp", ".other-0.partial.json"])
def test_what_a_dead_writer_left_is_listed_as_unfinished(folder: Path, name: str) -> None:
    add(folder, changed(), name)
    assert refused(folder) == ["unfinished: its writer never gave it its final name"]


def test_other_files_are_no_business_of_the_reader(folder: Path) -> None:
    add(folder, "words", "README.md")
    add(folder, "a,b\n", "table.csv")
    assert refused(folder) == []


def created(text: str) -> Record:
    return dataclasses.replace(GOOD, provenance=dataclasses.replace(GOOD.provenance, created=text))


def test_the_newest_record_of_a_cell_counts_and_the_others_are_listed(tmp_path: Path) -> None:
    dates = ("2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z", "2026-01-01T00:00:00Z")
    write(tmp_path, [created(date) for date in dates])
    loaded = load_records(tmp_path)
    assert [entry.record.provenance.created for entry in loaded.found] == ["2026-01-03T00:00:00Z"]
    assert [(entry.path.name, entry.reason.startswith("older than 001.json")) for entry in loaded.refused] == [
        ("000.json", True),
        ("002.json", True),
    ]


def test_the_same_cell_on_two_machines_is_two_records(tmp_path: Path) -> None:
    elsewhere = dataclasses.replace(GOOD, provenance=dataclasses.replace(GOOD.provenance, hostname="other"))
    write(tmp_path, [GOOD, elsewhere])
    assert len(load_records(tmp_path).found) == 2
