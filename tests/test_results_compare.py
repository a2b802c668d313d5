"""Are two runs, tables or studies divided as asked, and is every doubt told in the row?"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from parallel.layouts import Layout
from results import tables
from results.compare import COLUMNS, compare
from tests.records import DECODER_ONLY, ENCODER_DECODER, record, unsuccessful, write

TP = Layout(tp=2, microbatches=2)
PER_BLOCK = TP.replace(sp=True, memory_gather="per_block")
PER_STAGE = TP.replace(sp=True)
OWN = record(ENCODER_DECODER, TP)
TWIN = record(DECODER_ONLY, TP)

Compare = Callable[[str, str], pd.DataFrame]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    entries = [OWN, TWIN, record(ENCODER_DECODER, PER_BLOCK), record(ENCODER_DECODER, PER_STAGE)]
    write(tmp_path / "records", entries)
    tables.write(tables.build(entries), tmp_path / "tables")
    return tmp_path


@pytest.fixture
def compared(folder: Path) -> Compare:
    return lambda before, after: compare(before, after, records=folder / "records")


def row(table: pd.DataFrame, quantity: str, where: str = "") -> "pd.Series[Any]":
    (found,) = [row for _, row in table[(table["quantity"] == quantity) & (table["row"] == where)].iterrows()]
    return found


def test_counts_and_bytes_are_divided_exactly(compared: Compare) -> None:
    told = row(compared(TWIN.cell, OWN.cell), "num_collectives")
    assert (told["a"], told["b"], told["ratio"], told["ratio_exact"]) == (76, 100, pytest.approx(25 / 19), "25/19")
    assert told["kind"] == "exact"


def test_times_have_an_interval_around_their_ratio(compared: Compare) -> None:
    told = row(compared(TWIN.cell, OWN.cell), "busy_seconds")
    assert told["ratio_low"] < told["ratio"] < told["ratio_high"]
    assert told["ratio"] == pytest.approx(told["b"] / told["a"])
    # The closed form that the samples were drawn around: FLOPs of one model over the other's.
    flops = row(compared(TWIN.cell, OWN.cell), "forward_flops")
    assert told["ratio_low"] * 0.99 < flops["ratio"] < told["ratio_high"] * 1.01


def test_a_cell_a_record_a_folder_and_a_table_say_the_same(folder: Path, compared: Compare) -> None:
    by_name = compared(TWIN.cell, OWN.cell)
    by_path = compared(f"synthetic/{TWIN.cell}", str(folder / "records" / "bench" / "synthetic" / "000.json"))
    pd.testing.assert_frame_equal(by_name, by_path)
    records, table = str(folder / "records"), str(folder / "tables" / "runs.csv")
    for before in (records, table):
        for after in (records, table):
            told = compared(before, after)
            assert set(told["cell_a"]) == set(told["cell_b"])
            assert set(told.loc[told["kind"] == "exact", "ratio"].dropna()) == {1}


def test_gathering_per_stage_saves_what_the_tables_of_communication_say(folder: Path, compared: Compare) -> None:
    communication = pd.read_csv(folder / "tables" / "communication.csv")
    only = {}
    for layout in (PER_BLOCK, PER_STAGE):
        rows = communication[communication["layout_label"] == layout.label]
        only[layout] = folder / f"{layout.memory_gather}.csv"
        rows.to_csv(only[layout], index=False)
    told = compared(str(only[PER_BLOCK]), str(only[PER_STAGE]))
    gathers = told[told["row"].str.contains("cross_attention.kv") & (told["quantity"] != "")]
    assert set(gathers["note"]) == {"only in A"}
    assert set(told.loc[told["row"].str.contains("decoder.memory"), "note"]) == {"only in B"}
    same = told[told["row"].str.contains("decoder.block.0.cross_attention.query")]
    assert set(same["ratio_exact"]) == {"1"}


def test_unequal_tokens_are_told_in_every_row(tmp_path: Path) -> None:
    longer = dataclasses.replace(record(DECODER_ONLY, TP, lengths=(40, 12)), cell="longer")
    write(tmp_path, [OWN, longer])
    told = compare(OWN.cell, "longer", records=tmp_path)
    assert told["note"].str.startswith("tokens per step differ: 264 and 392").all()


def test_a_run_that_did_not_end_well_says_why(tmp_path: Path) -> None:
    write(tmp_path, [OWN, dataclasses.replace(unsuccessful("failed", "rank 1 died", TP), cell="lost")])
    told = compare(OWN.cell, "lost", records=tmp_path)
    assert told["note"].tolist() == ["B: failed, rank 1 died"]
    assert told["ratio"].isna().all()


def test_runs_of_equal_cells_are_paired_and_the_others_named(tmp_path: Path) -> None:
    write(tmp_path / "before", [OWN, TWIN])
    write(tmp_path / "after", [OWN, record(ENCODER_DECODER, PER_STAGE)])
    told = compare(str(tmp_path / "before"), str(tmp_path / "after"), records=tmp_path)
    alone = told[told["quantity"].isna()]
    assert alone["note"].tolist() == ["no such cell in B", "no such cell in A"]
    assert set(told.loc[told["quantity"].notna(), "cell_a"]) == {OWN.cell}


def test_one_sample_gives_a_ratio_without_interval(tmp_path: Path) -> None:
    once = dataclasses.replace(
        OWN,
        cell="once",
        step_seconds=[0.5],
        ranks=[
            dataclasses.replace(rank, step_seconds=[], busy_seconds=[], wait_seconds=[], pipeline_seconds=[])
            for rank in OWN.ranks
        ],
        stages=[dataclasses.replace(stage, forward_busy_seconds=[], backward_busy_seconds=[]) for stage in OWN.stages],
        blocks=[],
        actions=[],
        spans=[],
    )
    write(tmp_path, [OWN, once])
    told = compare(OWN.cell, "once", records=tmp_path)
    step = row(told, "step_seconds")
    assert step["note"] == "fewer than two samples: no interval"
    assert pd.isna(step["ratio_low"])
    assert row(told, "busy_seconds")["note"] == "not timed"


def test_nothing_is_divided_by_zero(compared: Compare) -> None:
    told = compared(TWIN.cell, OWN.cell)
    assert row(told, "num_sends")["note"] == "both are 0"
    assert row(told, "bubble")["note"] == "both are 0"


def test_the_columns_are_always_the_same(compared: Compare) -> None:
    assert tuple(compared(TWIN.cell, OWN.cell).columns) == COLUMNS


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("nothing", OWN.cell, "nothing is no CSV table, record or folder, and no cell of the records in"),
        ("lost.csv", OWN.cell, "no file lost.csv"),
        ("{tables}/plan.csv", OWN.cell, "is none of the tables that can be compared"),
        ("{tables}/stages.csv", "{tables}/ranks.csv", "compare like with like"),
        ("{tables}", OWN.cell, "no record in"),
    ],
)
def test_mistakes_are_one_line(folder: Path, compared: Compare, before: str, after: str, message: str) -> None:
    sides = [side.format(tables=folder / "tables") for side in (before, after)]
    with pytest.raises(ValueError, match=message) as error:
        compared(*sides)
    assert "\n" not in str(error.value)


def test_a_cell_of_two_experiments_must_be_named_with_its_own(tmp_path: Path) -> None:
    write(tmp_path, [OWN, dataclasses.replace(OWN, experiment="second"), TWIN])
    with pytest.raises(ValueError, match="is told 2 times"):
        compare(OWN.cell, TWIN.cell, records=tmp_path)
    assert not compare(f"second/{OWN.cell}", TWIN.cell, records=tmp_path).empty
