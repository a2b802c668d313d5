"""Is a record a file that is whole, and kept only where it says what is asked?"""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from launch.record import is_measured, make_record, read_record, record_path, write_record
from tests.small_cells import cells


def test_the_record_of_a_refused_cell_is_kept(tmp_path: Path) -> None:
    cell = dataclasses.replace(cells()[0], refusal="no")
    write_record(tmp_path, cell, make_record(cell, fingerprint="f", status="unsupported", reason="no"))
    assert is_measured(tmp_path, cell, fingerprint="f", backend="gloo")


def test_only_a_good_record_of_just_this_cell_and_backend_is_kept(tmp_path: Path) -> None:
    cell = cells()[0]
    assert not is_measured(tmp_path, cell, fingerprint="f", backend="gloo")
    write_record(tmp_path, cell, make_record(cell, fingerprint="f", status="ok", backend="gloo"))
    assert is_measured(tmp_path, cell, fingerprint="f", backend="gloo")
    assert not is_measured(tmp_path, cell, fingerprint="g", backend="gloo")
    assert not is_measured(tmp_path, cell, fingerprint="f", backend="nccl")
    write_record(tmp_path, cell, make_record(cell, fingerprint="f", status="failed", backend="gloo"))
    assert not is_measured(tmp_path, cell, fingerprint="f", backend="gloo")


@pytest.mark.parametrize("text", ["", "{}", "[1, 2]", '{"schema_version": 1}', "half"])
def test_a_file_that_is_no_record_is_not_kept(text: str, tmp_path: Path) -> None:
    cell = cells()[0]
    write_record(tmp_path, cell, make_record(cell, fingerprint="f", status="ok", backend="gloo"))
    path = record_path(tmp_path, cell)
    whole = path.read_text(encoding="utf-8")
    path.write_text(whole[: len(whole) // 2] if text == "half" else text, encoding="utf-8")
    assert read_record(tmp_path, cell) is None
    assert not is_measured(tmp_path, cell, fingerprint="f", backend="gloo")


def test_a_record_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    cell = cells()[0]
    write_record(tmp_path, cell, make_record(cell, fingerprint="f", status="ok"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_record(tmp_path, cell, make_record(cell, fingerprint="g", status="ok", loss=math.nan))
    assert json.loads(record_path(tmp_path, cell).read_text(encoding="utf-8"))["fingerprint"] == "f"
    assert list(record_path(tmp_path, cell).parent.iterdir()) == [record_path(tmp_path, cell)]
