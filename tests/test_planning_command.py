"""Does `twinshard plan` answer both of its questions, and tell a contradiction in one line?"""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from launch import experiment
from launch.cli import answer
from launch.machine_files import FOLDER, load_machine
from launch.plan_sheets import COLUMNS
from launch.simulation import simulated

SEARCH = ("plan", "tiny-t5", "--machine", "a100", "--devices", "4", "--sequences", "8", "--recompute", "none")
SMALL = (*SEARCH, "--source-length", "24", "--target-length", "16", "--zero", "0", "--microbatch", "2")


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = answer([*map(str, arguments)])
    written = capsys.readouterr()
    return code, written.out, written.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a mistake."""
    code, out, error = told(capsys, *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A search as a document, and its experiment."""
    folder = tmp_path_factory.mktemp("plan")
    file, out = folder / "plan.toml", io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        assert answer([*SMALL, "--pp", "2", "--format", "json", "--out", str(file)]) == 0
    return json.loads(out.getvalue()), file


# ---- searching ------------------------------------------------------------------------------------------------------


def test_a_model_and_its_twin_are_told_side_by_side(planned: tuple[dict[str, Any], Path]) -> None:
    pair, single = planned[0]["models"]
    assert (pair["model"], single["model"]) == ("tiny-t5", "tiny-t5-decoder-only-twin")
    assert pair["goals"]["best"]["source_length"] == 24
    assert single["goals"]["best"]["target_length"] == 24 + 16
    assert {"even cut", "aligned cut", "1f1b only", "memory relayed", "memory sent directly", "as others do"} <= set(
        pair["goals"]
    )
    assert "aligned cut" not in single["goals"]
    for model in (pair, single):
        best = model["goals"]["best"]
        assert best["pp"] == 2
        assert best["seconds_per_exaflop"] == pytest.approx(best["step_seconds"] / best["model_flops"] * 1e18)
        assert all(goal["slowdown"] >= 1 for goal in model["goals"].values())


def test_the_experiment_that_is_written_takes_the_time_that_was_told(planned: tuple[dict[str, Any], Path]) -> None:
    document, file = planned
    assert document["experiment"] == file.read_text(encoding="utf-8")
    cells = experiment.load(file).cells
    assert len(cells) == 2
    for cell, model in zip(cells, document["models"], strict=True):
        again, best = simulated(cell, load_machine("a100"), "bfloat16"), model["goals"]["best"]
        assert again.time is not None
        assert again.time.step_seconds == best["step_seconds"]
        assert again.peak_bytes == best["peak_bytes"]


def test_a_csv_has_a_row_for_every_goal_of_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, *SMALL, "--tp", "2", "--sp", "--format", "csv", "--twin", "parameters")
    table = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert tuple(table[0]) == COLUMNS
    assert {row["goal"] for row in table} >= {"best", "even cut", "1f1b only"}
    assert {(row["tp"], row["sp"], row["zero"], row["microbatch"]) for row in table} == {("2", "True", "0", "2")}


def test_a_table_tells_layouts_restrictions_and_an_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, *SMALL, "--twin", "none", "--pp", "4", "--schedule", "1f1b", "--format", "markdown")
    assert code == 0
    for title in ("fastest layouts", "tiny-t5: what restrictions cost", "experiment"):
        assert f"### {title}" in out
    assert "tiny-t5: blocks of the fastest layout's stages" in out
    assert "twin" not in out


def test_what_fits_nowhere_is_told_with_the_bytes_that_lack(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    text = (FOLDER / "a100.toml").read_text(encoding="utf-8")
    small.write_text(text.replace("capacity_bytes = 80e9", "capacity_bytes = 10e3"), encoding="utf-8")
    code, out, _ = told(capsys, "plan", "tiny-t5", "--machine", small, "--devices", 2, "--twin", "none")
    assert code == 1
    assert "fits nowhere on 2 devices of 10,000 bytes: closest is tp" in out
    assert "too many" in out


# ---- showing --------------------------------------------------------------------------------------------------------


def test_without_a_machine_one_layout_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "plan", "tiny-t5", "--pp", 2, "--dp", 2, "--zero", 1, "--microbatches", 2)
    assert code == 0
    assert "on 4 ranks: tp1 pp2(even) dp2 zero1 m2 1f1b" in out
    assert "schedule, a line a rank" in out


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--devices", 8), "give --machine too, such as --machine a100"),
        (("--machine", "a100"), "give --devices too, such as --devices 64"),
        (("--sequences", 8), "--sequences belongs to a search"),
        (("--format", "csv"), "--format belongs to a search"),
        (("--machine", "a10", "--devices", 8), "no machine 'a10'; did you mean a100?"),
        (("--machine", "none.toml", "--devices", 8), "cannot read none.toml"),
        (("--machine", "a100", "--devices", 0), "devices = 0; it must be at least 1"),
        (("--machine", "a100", "--devices", 8, "--sequences", 0), "sequences = 0"),
        (("--machine", "a100", "--devices", 8, "--microbatch", 0), "microbatch = 0"),
        (("--machine", "a100", "--devices", 4, "--sequences", 6, "--dp", 4), "try 8"),
        (("--machine", "a100", "--devices", 8, "--cut", "2,3"), "cut = [2, 3] is not searched"),
        (("--machine", "a100", "--devices", 8, "--tp", 3), "no tp x pp x dp makes that many"),
        (("--machine", "a100", "--devices", 8, "--target-length", 10**6), "target_length = 1000000"),
        (("--zero", 1), "zero = 1 shards over the dp ranks"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[object, ...], message: str) -> None:
    assert message in refused(capsys, "plan", "tiny-t5", *arguments)


def test_a_broken_machine_file_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "broken.toml"
    text = (FOLDER / "a100.toml").read_text(encoding="utf-8")
    file.write_text(text.replace("bytes_per_second = 25e9", "bytes_per_second = -25e9"), encoding="utf-8")
    assert "cluster_link: bytes_per_second = -2.5e+10" in refused(
        capsys, "plan", "tiny-t5", "--machine", file, "--devices", 8
    )
