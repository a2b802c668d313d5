"""Does the matrix of capabilities hold every engine, architecture and feature, and is it what runs give?

After a wanted change: `twinshard capabilities --out results/capabilities.csv`.
"""

import csv
import importlib.util
import io
from pathlib import Path
from typing import get_args

import pytest
import torch

from launch import capabilities as command
from launch.cli import answer
from launch.features import FEATURES, Capability, capabilities
from launch.parity import KINDS, LARGEST_ERROR, Parity, Worst, case_batch
from launch.proof import Verdict
from models.config import Architecture
from parallel.engines.choice import PARTITIONING_ENGINES, EngineName
from parallel.engines.engine import unsupported
from parallel.sequence import deal
from results import capabilities as stored
from tests.judging import with_cells

KEYS = ("engine", "architecture", "feature", "axis")
ALL = list(capabilities())
FIRST = ALL[0]


def stored_rows() -> dict[tuple[str, ...], dict[str, str]]:
    with stored.PATH.open(encoding="utf-8", newline="") as file:
        return {tuple(row[key] for key in KEYS): row for row in csv.DictReader(file)}


def place(capability: Capability) -> tuple[str, ...]:
    return tuple(getattr(capability, key) for key in KEYS)


def verdict(error: float, *failures: str) -> Verdict:
    worst = {kind: Worst(error=error, name="w") for kind in KINDS}
    parity = Parity(**worst, missing=(), extra=(), ledger=None)
    return Verdict(case=FIRST.case, parity=parity, failures=failures)


def test_the_table_has_every_engine_architecture_and_feature() -> None:
    rows = stored_rows()
    assert list(rows) == list(map(place, ALL))
    assert {place(one)[:3] for one in ALL} == {
        (engine, architecture, feature)
        for engine in PARTITIONING_ENGINES
        for architecture in get_args(Architecture)
        for feature in FEATURES
    }
    for key, row in rows.items():
        assert row["status"] in ("equal", "wrong", "unsupported", "failed"), key
        assert bool(row["reason"]) == (row["status"] != "equal"), key
        assert bool(row["worst_relative_error"]) == (row["status"] in ("equal", "wrong")), key
        assert row["status"] != "equal" or float(row["worst_relative_error"]) <= LARGEST_ERROR, key


@pytest.mark.parametrize("engine", PARTITIONING_ENGINES)
def test_the_table_tells_what_an_engine_refuses_today(engine: EngineName) -> None:
    if engine in ("deepspeed", "fairscale") and importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}: pip install 'twinshard[engines]'")
    rows = stored_rows()
    for one in (one for one in ALL if one.engine == engine):
        if (engine, one.feature) == ("fairscale", "zero3") and torch.cuda.is_available():
            continue  # the table was made where there is no GPU
        refusal = unsupported(one.case.engine, one.case.config, one.case.layout)
        row = rows[place(one)]
        assert row["layout"] == one.case.layout.label
        assert (row["reason"] if row["status"] == "unsupported" else None) == refusal, one.case.name


def test_runs_give_the_rows_that_are_stored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["--engine", "native", "--engine", "fairscale", "--architecture", "encoder_decoder"]
    asked += ["--feature", "tp", "--feature", "zero1", "--feature", "cp"]
    out = tmp_path / "some.csv"
    assert answer(["capabilities", *asked, "--format", "csv", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.read_text(encoding="utf-8") == printed
    found = list(csv.DictReader(io.StringIO(printed)))
    assert len(found) == 2 * 3
    rows = stored_rows()
    for row in found:
        expected = rows[tuple(row[key] for key in KEYS)]
        if row["status"] == "equal":
            assert float(row.pop("worst_relative_error")) <= LARGEST_ERROR
            expected.pop("worst_relative_error")
        assert row == expected


def test_what_came_out_is_one_of_four_words() -> None:
    told = command.row(FIRST, verdict(3e-16), "")
    assert (told["status"], told["worst_relative_error"], told["reason"]) == ("equal", 3e-16, "")
    told = command.row(FIRST, verdict(0.5, "gradient w is off by 5.0e-01", "loss"), "")
    assert (told["status"], told["worst_relative_error"]) == ("wrong", 0.5)
    assert told["reason"] == "gradient w is off by 5.0e-01; loss"
    told = command.row(FIRST, Verdict(case=FIRST.case, parity=None, failures=("rank 1:\n killed",)), "")
    assert (told["status"], told["worst_relative_error"], told["reason"]) == ("failed", None, "rank 1: killed")
    told = command.row(FIRST, None, "it has no stages")
    assert (told["status"], told["worst_relative_error"], told["reason"]) == ("unsupported", None, "it has no stages")


def test_each_feature_is_the_plain_case_with_one_change() -> None:
    def changes(one: Capability) -> set[str]:
        plain = next(other.case for other in ALL if place(other) == (*place(one)[:2], one.axis, one.axis))
        case = one.case
        differs = {
            "tying": case.config.tying != plain.config.tying,
            "blocks": case.config.num_blocks != plain.config.num_blocks,
            "lengths": (case.source_length, case.target_length) != (plain.source_length, plain.target_length),
            "data": case.data != plain.data,
            "sequences": case.num_sequences != plain.num_sequences,
            "layout": case.layout != plain.layout,
        }
        return {name for name, is_so in differs.items() if is_so}

    expected: dict[str, set[str]] = {
        **{feature: set() for feature in ("tp", "pp", "dp", "cp")},
        **{feature: {"layout"} for feature in ("sp", "zero1", "zero2", "zero3")},
        "tied": {"tying"},
        "unequal_lengths": {"lengths", "data"},
        "uneven_blocks": {"blocks", "layout"},
        "ragged_microbatch": {"sequences"},
    }
    assert set(expected) == set(FEATURES)
    for one in ALL:
        assert changes(one) == expected[one.feature], one.case.name


def test_unequal_lengths_give_ranks_different_numbers_of_labels() -> None:
    for one in ALL:
        if one.engine == "native" and (one.feature, one.axis) == ("unequal_lengths", "dp"):
            batch = case_batch(one.case, seed=0)
            labels = [deal(batch, one.case.layout, dp).num_loss_tokens() for dp in range(2)]
            assert labels[0] != labels[1], one.architecture


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "horovod"], "'horovod' is not one of 'native', 'torch', 'deepspeed', 'fairscale'"),
        (["--feature", "zero"], "'zero' is not one of 'tp', 'sp'"),
        (["--out", "nowhere/table.csv"], "cannot write nowhere/table.csv: there is no folder nowhere"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["capabilities", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_the_report_tells_architectures_apart_only_where_they_differ() -> None:
    table = stored.build()
    where = (table["engine"] == "torch") & (table["feature"] == "pp") & (table["architecture"] == "encoder_decoder")
    table = with_cells(table, where, status="wrong", worst_relative_error=0.25, reason="the memory is stale")
    plain, changed = ("\n".join(stored.section(one)) for one in (stored.build(), table))
    (line,) = (line for line in changed.splitlines() if line.startswith("| pp | pp |"))
    assert "; wrong 2e-01 (encoder_decoder) |" in line
    assert "(decoder_only, encoder_only)" in line
    assert "| torch | wrong | the memory is stale | 1 | torch encoder_decoder pp pp |" in changed
    assert "encoder_decoder)" not in next(line for line in plain.splitlines() if line.startswith("| pp | pp |"))
    assert f"`{stored.COMMAND}`" in plain
