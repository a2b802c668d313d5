"""Does `twinshard simulate` tell every cell of an experiment on a machine, and a mistake in one line?"""

import csv
import dataclasses
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from launch.cli import answer
from launch.experiment import load
from launch.machine_files import FOLDER, load_machine
from launch.simulation import COLUMNS, FILE_NAME, simulated

EXPERIMENT = """
name = "clusters"
dtype = "bfloat16"
controls = ["pair.text.tp1-pp2_even-dp1-m4-1f1b-per_stage"]

[models.pair]
like = "tiny-t5"
[models.single]
twin_of = "pair"
architecture = "decoder_only"
match = "depth"

[data.text]
text = "synthetic"
sequences = 32
source_length = 16
target_length = 8

[[layouts]]
pp = 2
microbatches = 4

[[layouts]] # a world that nobody here has
dp = 8
zero = 3
microbatches = 4

[[layouts]] # refused: 32 sequences over 5 replicas
dp = 5
models = ["single"]
"""
PICTURED = "pair.text.tp1-pp2_even-dp1-m4-1f1b-per_stage"


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    file = tmp_path / "clusters.toml"
    file.write_text(EXPERIMENT, encoding="utf-8")
    return file


def told(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = answer(["simulate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_every_cell_is_a_row(capsys: pytest.CaptureFixture[str], experiment: Path) -> None:
    code, out, _ = told(capsys, experiment, "--machine", "a100", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert tuple(rows[0]) == COLUMNS
    # Controls repeat a cell, and are none here.
    assert [row["cell"] for row in rows] == [cell.name for cell in load(experiment).cells if not cell.is_control]
    for row in rows:
        if row["status"] == "ok":
            parts = (row["pipeline_seconds"], row["gradient_seconds"], row["update_seconds"])
            assert float(row["step_seconds"]) == pytest.approx(sum(map(float, parts)))
            assert row["capacity_bytes"] == "80000000000"
            assert row["fits"] == "True"
            assert 0 < float(row["model_flops_utilisation"]) < 1
        else:
            assert row["step_seconds"] == ""


def test_what_no_engine_here_runs_is_simulated_and_what_is_forbidden_says_why(
    capsys: pytest.CaptureFixture[str], experiment: Path
) -> None:
    _, out, _ = told(capsys, experiment, "--machine", "a100", "--format", "json")
    cells = {row["cell"]: row for row in json.loads(out)["cells"]}
    sharded = [row for row in cells.values() if row["zero"] == 3]
    assert [row["status"] for row in sharded] == ["ok", "ok"]
    (refused,) = (row for row in cells.values() if row["dp"] == 5)
    assert refused["status"] == "unsupported"
    assert refused["reason"].startswith("32 sequences over dp=5")
    _, table, _ = told(capsys, experiment, "--machine", "a100")
    assert "clusters: 4 of 5 cells simulated" in table
    assert "32 sequences over dp=5" in table


def test_the_dtype_is_the_experiments_unless_told(capsys: pytest.CaptureFixture[str], experiment: Path) -> None:
    def seconds(*options: str) -> float:
        _, out, _ = told(capsys, experiment, "--machine", "h100", "--format", "json", *options)
        return float(json.loads(out)["cells"][0]["step_seconds"])

    assert seconds() == seconds("--dtype", "bfloat16") < seconds("--dtype", "float32")


def test_files_hold_the_table_and_the_pictures(
    capsys: pytest.CaptureFixture[str], experiment: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "folder"
    arguments = (experiment, "--machine", "h200", "--out", out, "--timeline", PICTURED, "--format", "csv")
    code, printed, _ = told(capsys, *arguments)
    assert code == 0
    assert (out / FILE_NAME).read_text(encoding="utf-8") == printed
    assert sorted(path.name for path in out.iterdir()) == [
        f"{PICTURED}.png",
        f"{PICTURED}.svg",
        f"{PICTURED}.trace.json",
        FILE_NAME,
    ]
    events = json.loads((out / f"{PICTURED}.trace.json").read_text(encoding="utf-8"))["traceEvents"]
    # Two ranks, four microbatches, forward and backward.
    assert sum(event["ph"] == "X" for event in events) == 16
    assert {event["pid"] for event in events if event["ph"] == "C"} == {0, 1}


def test_a_machine_of_a_file_is_taken(capsys: pytest.CaptureFixture[str], experiment: Path, tmp_path: Path) -> None:
    text = (FOLDER / "a100.toml").read_text(encoding="utf-8")
    slow = tmp_path / "slow.toml"
    slow.write_text(text.replace("flops_efficiency = 0.7", "flops_efficiency = 0.07"), encoding="utf-8")
    assert tomllib.loads(slow.read_text(encoding="utf-8"))["device"]["flops_efficiency"] == 0.07

    def first(machine: object) -> dict[str, Any]:
        _, out, _ = told(capsys, experiment, "--machine", machine, "--format", "json")
        cell: dict[str, Any] = json.loads(out)["cells"][0]
        return cell

    assert first(slow)["pipeline_seconds"] > first("a100")["pipeline_seconds"]
    assert first(slow)["peak_bytes"] == first("a100")["peak_bytes"]


def test_thousands_of_ranks_are_a_row_like_any_other(experiment: Path) -> None:
    big = EXPERIMENT.replace("sequences = 32", "sequences = 8192").replace("dp = 8", "dp = 2048")
    experiment.write_text(big, encoding="utf-8")
    cell = next(cell for cell in load(experiment).cells if cell.layout.dp == 2048)
    few, many = (
        simulated(dataclasses.replace(cell, layout=cell.layout.replace(dp=dp)), load_machine("b200"), "bfloat16")
        for dp in (1024, 2048)
    )
    assert (many.row()["num_ranks"], many.row()["status"]) == (2048, "ok")
    assert few.time is not None
    assert many.time is not None
    # Twice the replicas have half as much to do each, and more hops to sum their gradients over.
    assert few.time.timeline.makespan_seconds > many.time.timeline.makespan_seconds
    assert few.time.gradient_seconds < many.time.gradient_seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--machine'"),
        (("--machine", "a10"), "no machine 'a10'; did you mean a100?"),
        (("--machine", "nothing.toml"), "cannot read nothing.toml: No such file or directory"),
        (("--machine", "a100", "--timeline", PICTURED), f"--timeline {PICTURED} needs a folder"),
        (
            ("--machine", "a100", "--timeline", "pair", "--out", "x"),
            "--timeline 'pair' is no cell; the nearest is 'pair.",
        ),
        (("--machine", "a100", "--dtype", "float8"), "Invalid value for '--dtype'"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], experiment: Path, arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = told(capsys, experiment, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_cell_that_cannot_run_has_no_picture(
    capsys: pytest.CaptureFixture[str], experiment: Path, tmp_path: Path
) -> None:
    refused = next(cell.name for cell in load(experiment).cells if cell.layout.dp == 5)
    code, out, err = told(capsys, experiment, "--machine", "a100", "--out", tmp_path / "x", "--timeline", refused)
    assert (code, out) == (2, "")
    assert "there is nothing to draw: 32 sequences over dp=5" in err
