"""Is every engine held against the best of the others, and are the cells of the experiment fit for that?"""

import csv
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch import bench
from launch.cli import answer
from launch.experiment import load
from launch.sweep import Outcome
from parallel.engines.choice import PARTITIONING_ENGINES
from parallel.layouts import Layout
from results.benchmark import COLUMNS, COUNTS, TIMES, Run, benchmark, compared
from results.runs import run_row
from results.schema import Record, Status
from tests.records import by_another_engine, record, unsuccessful

NATIVE = record(layout=Layout(tp=2), noise=0.0, cell="tiny.text.tp2")


def by(engine: str, factor: float, *, native: Record = NATIVE, **changes: Any) -> Record:
    """The native run by an engine that takes `factor` as long."""
    ranks = [
        dataclasses.replace(
            rank,
            startup_seconds=0.25 * factor,
            busy_seconds=[factor * seconds for seconds in rank.busy_seconds],
        )
        for rank in by_another_engine(native).ranks
    ]
    fields: dict[str, Any] = {
        "engine": engine,
        "cell": f"{native.cell}.{engine}",
        "step_seconds": [factor * seconds for seconds in native.step_seconds],
        "ranks": ranks,
    }
    return dataclasses.replace(by_another_engine(native), **{**fields, **changes})


def refused(engine: str, status: Status, reason: str) -> Record:
    return dataclasses.replace(
        unsuccessful(status, reason, Layout(tp=2)), engine=engine, cell=f"{NATIVE.cell}.{engine}"
    )


def rows_of(*records: Record) -> dict[str, dict[str, Any]]:
    return {f"{row['engine']}{' again' * row['is_control']}": row for row in compared(records)}


def test_each_quantity_is_held_against_the_engine_that_has_least_of_it() -> None:
    halved = [dataclasses.replace(event, wire_bytes=event.wire_bytes // 2) for event in NATIVE.communication]
    rows = rows_of(NATIVE, by("torch", 2.0), by("deepspeed", 4.0, communication=halved))
    assert (rows["native"]["step_seconds_against"], rows["native"]["step_seconds_ratio"]) == ("torch", 0.5)
    assert (rows["torch"]["step_seconds_against"], rows["torch"]["step_seconds_ratio"]) == ("native", 2.0)
    assert (rows["deepspeed"]["busy_seconds_against"], rows["deepspeed"]["busy_seconds_ratio"]) == ("native", 4.0)
    assert (rows["native"]["startup_seconds_against"], rows["native"]["startup_seconds_ratio"]) == ("torch", 0.5)
    assert (rows["native"]["sent_bytes_against"], rows["native"]["sent_bytes_ratio"]) == ("deepspeed", 2.0)
    assert (rows["native"]["num_collectives_against"], rows["native"]["num_collectives_ratio"]) == ("torch", 1.0)


def test_times_have_intervals_where_there_are_samples() -> None:
    uneven = by("torch", 2.0, step_seconds=[(2.0 + 0.1 * i) * s for i, s in enumerate(NATIVE.step_seconds)])
    row = rows_of(NATIVE, uneven)["native"]
    assert row["step_seconds_ratio_low"] < row["step_seconds_ratio"] < row["step_seconds_ratio_high"]
    # An engine starts once a run.
    assert row["startup_seconds"] == 0.25
    assert row["startup_seconds_low"] is row["startup_seconds_ratio_high"] is None


def test_what_only_one_engine_tells_has_no_ratio() -> None:
    rows = rows_of(NATIVE, by("torch", 2.0))
    assert rows["native"]["peak_saved_bytes"] > 0
    assert rows["native"]["peak_saved_bytes_ratio"] is None
    assert rows["torch"]["peak_saved_bytes"] is None
    alone = rows_of(NATIVE)["native"]
    assert alone["step_seconds"] > 0
    assert [alone[f"{name}_ratio"] for name in (*TIMES, *COUNTS)] == [None] * 7


def test_a_control_is_held_against_its_own_first_run_and_is_nobodys_rival() -> None:
    again = dataclasses.replace(
        NATIVE,
        cell=f"{NATIVE.cell}.control",
        is_control=True,
        step_seconds=[seconds / 10 for seconds in NATIVE.step_seconds],
    )
    rows = rows_of(NATIVE, again, by("torch", 2.0))
    assert (rows["native again"]["step_seconds_against"], rows["native again"]["step_seconds_ratio"]) == ("native", 0.1)
    assert rows["native"]["step_seconds_against"] == "torch"
    assert rows["torch"]["step_seconds_ratio"] == 2.0


def test_what_did_not_end_well_is_a_row_with_its_reason_and_nobodys_rival() -> None:
    rows = rows_of(
        NATIVE, by("torch", 2.0), refused("deepspeed", "unsupported", "no"), refused("fairscale", "failed", "it fell")
    )
    assert (rows["deepspeed"]["status"], rows["deepspeed"]["reason"]) == ("unsupported", "no")
    assert (rows["fairscale"]["status"], rows["fairscale"]["reason"]) == ("failed", "it fell")
    assert rows["fairscale"]["step_seconds"] is rows["deepspeed"]["sent_bytes"] is None
    assert rows["native"]["step_seconds_against"] == "torch"


def test_only_runs_of_one_cell_on_one_machine_stand_side_by_side() -> None:
    other_layout = by("torch", 2.0, cell="tiny.text.pp2.torch")
    elsewhere = by("torch", 2.0, provenance=dataclasses.replace(NATIVE.provenance, hostname="other"))
    for other in (other_layout, elsewhere):
        assert rows_of(NATIVE, other)["native"]["step_seconds_ratio"] is None
    assert Run(record=NATIVE, row=run_row(NATIVE)).cell == ("bench", "tiny.text.tp2")


def stored(folder: Path, records: Sequence[Record]) -> None:
    folder.mkdir(parents=True)
    for one in records:
        (folder / f"{one.cell}.json").write_text(json.dumps(one.to_dict()), encoding="utf-8")


def test_the_table_holds_what_was_asked_for_in_order_and_counts_stay_whole(tmp_path: Path) -> None:
    stored(tmp_path / "records", [NATIVE, by("torch", 2.0), by("fairscale", 3.0)])
    wanted = [f"{NATIVE.cell}.torch", NATIVE.cell]
    rows = benchmark(tmp_path / "records", wanted, tmp_path / "bench.csv")["bench"]
    assert [row["cell"] for row in rows] == wanted
    with (tmp_path / "bench.csv").open(encoding="utf-8", newline="") as file:
        told = list(csv.DictReader(file))
    assert tuple(told[0]) == COLUMNS
    for row, line in zip(rows, told, strict=True):
        assert line == {name: "" if value is None else str(value) for name, value in row.items()}
    with pytest.raises(ValueError, match="no record of these cells"):
        benchmark(tmp_path / "records", ["another"], tmp_path / "bench.csv")


TINY = """
name = "tiny"
engine = ["native", "torch", "fairscale"]
[models.pair]
architecture = "decoder_only"
width = 8
num_heads = 2
ffn_width = 8
num_decoder_blocks = 2
vocabulary = 8
max_length = 8
[data.text]
text = "synthetic"
sequences = 4
source_length = 4
target_length = 4
[[layouts]]
pp = 2
microbatches = 2
"""


def test_the_command_runs_an_experiment_and_tells_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY, encoding="utf-8")
    native, torch, fairscale = load(file).cells
    outcome = Outcome(
        kept=(),
        unsupported={fairscale.name: fairscale.refusal},
        measured=(native.name, torch.name),
        failed={},
        strangers=(),
        logs=tmp_path,
    )

    def sweep(*_: object, **__: object) -> Outcome:
        first = dataclasses.replace(NATIVE, cell=native.name)
        none = refused("fairscale", "unsupported", fairscale.refusal)
        runs = [first, by("torch", 2.0, native=first), dataclasses.replace(none, cell=fairscale.name)]
        stored(tmp_path / "records" / "tiny", runs)
        return outcome

    table = tmp_path / "bench.csv"
    with mock.patch.object(bench, "swept", side_effect=sweep):
        assert answer(["bench", str(file), "--output", str(tmp_path / "records"), "--out", str(table)]) == 0
    told = capsys.readouterr().out
    assert "x is over the best other engine" in told
    assert "fairscale  unsupported  fairscale's Pipe runs every forward" in told
    assert len(table.read_text(encoding="utf-8").splitlines()) == 1 + 3
    failed = dataclasses.replace(outcome, failed={torch.name: "it fell"})
    with mock.patch.object(bench, "swept", return_value=failed):
        assert answer(["bench", str(file), "--output", str(tmp_path / "records"), "--out", str(table)]) == 1


def test_the_engines_experiment_has_what_is_compared_in_one_group_of_turns() -> None:
    experiment = load(bench.EXPERIMENT)
    cells = [cell for cell in experiment.cells if not cell.refusal]
    assert len(cells) <= experiment.settings.interleave
    assert {cell.world_size for cell in cells} == {2}
    assert {cell.engine.name for cell in experiment.cells} == set(PARTITIONING_ENGINES)
    kinds = {
        (layout.tp, layout.sp, layout.saved_input, layout.pp, layout.dp, layout.zero)
        for layout in (cell.layout for cell in experiment.cells)
    }
    assert kinds == {
        (2, False, "shard", 1, 1, 0),
        (2, True, "shard", 1, 1, 0),
        (2, True, "whole", 1, 1, 0),
        (1, False, "shard", 2, 1, 0),
        (1, False, "shard", 1, 2, 0),
        (1, False, "shard", 1, 2, 1),
    }
    for architecture in ("encoder_decoder", "decoder_only"):
        assert len({cell.model.width for cell in cells if cell.model.architecture == architecture}) == 2
