"""Do the tables say what the records hold, in numbers worked out by hand?"""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest

from parallel.layouts import Layout
from results import tables
from results.files import replacing, write_text
from results.runs import IDENTITY, from_text, to_text
from results.sites import Place, place_of
from tests.records import DECODER_ONLY, ENCODER_DECODER, record, study, unsuccessful

TP = Layout(tp=2, microbatches=2)


@pytest.fixture(scope="module")
def told() -> tables.Tables:
    return tables.build(study())


def test_every_record_is_one_row_of_runs_failed_ones_too(told: tables.Tables) -> None:
    assert len(told.runs) == len(study())
    assert told.runs["status"].value_counts().to_dict() == {
        "ok": 15,
        "unsupported": 1,
        "out_of_memory": 1,
        "failed": 1,
        "skipped": 1,
    }
    failed = told.runs[told.runs["status"] == "unsupported"].iloc[0]
    assert failed["reason"] == "4 heads over tp=8: tp must divide 4; try 1, 2, 4"
    assert failed[["step_seconds_median", "sent_bytes", "tokens_per_step", "imbalance_forward_flops"]].isna().all()


@pytest.mark.parametrize("name", tables.RECORDED)
def test_every_table_begins_with_the_columns_that_name_the_run(told: tables.Tables, name: str) -> None:
    table = getattr(told, name)
    assert tuple(table.columns[: len(IDENTITY)]) == IDENTITY
    assert not table.columns.duplicated().any()


@pytest.mark.parametrize("name", tables.RECORDED)
def test_a_table_without_rows_has_the_columns_of_one_with_rows(told: tables.Tables, name: str) -> None:
    if name == "runs":
        with pytest.raises(ValueError, match="no records"):
            tables.build([])
    else:
        empty = getattr(tables.build([unsuccessful("failed", "", Layout())]), name)
        assert list(empty.columns) == list(getattr(told, name).columns)
        assert empty.empty


def test_rows_of_the_vocabulary_stand_beside_who_holds_them_which_older_records_do_not_tell() -> None:
    sharded, whole = (record(ENCODER_DECODER, TP.replace(vocabulary=held)) for held in ("sharded", "whole"))
    older = {name: value for name, value in sharded.layout.items() if name != "vocabulary"}
    for entry, held in (
        (sharded, "sharded"),
        (dataclasses.replace(sharded, layout=older), "sharded"),
        (whole, "whole"),
    ):
        run = tables.build([entry]).runs.iloc[0]
        assert run[["vocabulary", "layout_vocabulary"]].tolist() == [ENCODER_DECODER.vocabulary, held]


def test_a_run_is_described_by_its_model_layout_and_text() -> None:
    run = tables.build([record(ENCODER_DECODER, Layout(pp=2, cut=(3,), microbatches=4))]).runs.iloc[0]
    assert run[["architecture", "model", "twins", "match"]].tolist() == [
        "encoder_decoder",
        "tiny-encoder-decoder",
        "tiny",
        "none",
    ]
    assert run[["tp", "pp", "dp", "sp", "cut", "schedule", "microbatches"]].tolist() == [1, 2, 1, False, "3", "1f1b", 4]
    assert run[["source_length", "target_length", "tokens_per_step"]].tolist() == [24, 12, 8 * (22 + 11)]


def test_medians_are_those_of_the_samples() -> None:
    steps = [0.4, 0.1, 0.2, 0.3, 0.9, 0.2, 0.2, 0.3, 0.3]
    run = tables.build([dataclasses.replace(record(), step_seconds=steps)]).runs.iloc[0]
    assert run["step_seconds_median"] == 0.3
    assert run["step_seconds_low"] <= 0.3 <= run["step_seconds_high"]
    assert from_text(run["step_seconds"]) == steps
    assert run["num_timed_steps"] == 9


def test_bytes_of_tensor_parallelism_are_worked_out_by_hand() -> None:
    """Decoder-only, 4 blocks, 2 microbatches of 4 sequences of 36 positions of 32 floats: M = 18,432 bytes, tp = 2.

    An all-reduce over two ranks sends M. A block has 2 forward and 2 backward, the embedding 1, the head 1, so 18 M;
    the loss gathers two numbers a position, 576 bytes each, from every rank: 2 x 576. All of it for 2 microbatches on
    2 ranks.
    """
    run = tables.build([record(DECODER_ONLY, TP)]).runs.iloc[0]
    assert run["sent_bytes"] == 2 * 2 * (18 * 18432 + 2 * 576)
    assert run["sent_bytes_busiest_rank"] == run["sent_bytes"] / 2
    assert run["num_collectives"] == 2 * 2 * (18 + 1)
    assert run["num_collectives_busiest_rank"] == 38
    assert run["num_sends"] == 0


def test_sends_are_no_collectives_and_receives_send_nothing() -> None:
    """Two stages: 4 microbatches of 2 x 36 x 32 floats each way; tied embeddings reduce 8,192 bytes on both ranks."""
    run = tables.build([record(DECODER_ONLY, Layout(pp=2, microbatches=4))]).runs.iloc[0]
    assert run["num_sends"] == 2 * 4
    assert run["num_collectives"] == 2
    assert run["sent_bytes"] == 2 * 4 * (2 * 36 * 32 * 4) + 2 * 8192


def test_communication_has_one_row_for_what_it_does_not_tell_apart() -> None:
    whole = record(DECODER_ONLY, TP)
    first = whole.communication[0]
    ragged = dataclasses.replace(first, count=1, payload_bytes=100, wire_bytes=100)
    table = tables.build([dataclasses.replace(whole, communication=[first, ragged])]).communication
    assert len(table) == 1
    row = table.iloc[0]
    assert row[["count", "payload_bytes", "wire_bytes"]].tolist() == [
        first.count + 1,
        first.payload_bytes + 100,
        first.wire_bytes + 100,
    ]


def test_bytes_of_the_tables_agree() -> None:
    told = tables.build([record(ENCODER_DECODER, TP)])
    assert told.communication["wire_bytes"].sum() == told.runs["sent_bytes"].sum()


def test_the_rows_of_a_rank_tell_coordinates_and_degrees_apart() -> None:
    table = tables.build([record(DECODER_ONLY, Layout(tp=2, pp=2, microbatches=4))]).ranks
    assert table["tp"].tolist() == [2, 2, 2, 2]
    assert table["tp_coordinate"].tolist() == [0, 1, 0, 1]
    assert table["pp_coordinate"].tolist() == [0, 0, 1, 1]


def test_balance_is_worked_out_by_hand() -> None:
    whole = record(DECODER_ONLY, Layout(pp=2, microbatches=2, schedule="gpipe"))
    stages = [
        dataclasses.replace(stage, forward_flops=flops, forward_busy_seconds=[a] * 9, backward_busy_seconds=[b] * 9)
        for stage, flops, a, b in zip(whole.stages, (100, 300), (2.0, 4.0), (6.0, 8.0), strict=True)
    ]
    run = tables.build([dataclasses.replace(whole, stages=stages)]).runs.iloc[0]
    assert run["imbalance_forward_flops"] == 1.5
    assert run["imbalance_busy_seconds_median"] == pytest.approx(12 / 10)
    # F0 on stage 0 takes 1, then F0 F1 on stage 1 2 each, B0 B1 there 4 each, and B1 on stage 0 3: 1 + 4 + 8 + 3.
    assert run["bubble_median"] == pytest.approx((1 - 8 / 16 + 1 - 12 / 16) / 2)
    assert run["bubble_definition"] == "schedule"


def test_the_bubble_on_gpus_is_that_of_the_wall() -> None:
    whole = record(DECODER_ONLY)
    ranks = [dataclasses.replace(rank, step_seconds=[1.0] * 9, busy_seconds=[0.75] * 9) for rank in whole.ranks]
    run = tables.build([dataclasses.replace(whole, device="cuda", ranks=ranks)]).runs.iloc[0]
    assert run["bubble_median"] == 0.25
    assert run["bubble_definition"] == "wall"


def test_padding_is_told_for_each_stream() -> None:
    run = tables.build([record(ENCODER_DECODER)]).runs.iloc[0]
    shares = [run[f"{name}padding_waste"] for name in ("source_", "target_", "")]
    assert shares == pytest.approx([2 / 24, 1 / 12, 3 / 36])


def test_counts_stay_whole_numbers_beside_cells_without_any(tmp_path: Path) -> None:
    tables.write(tables.build([record(), unsuccessful("failed", "", Layout(dp=2))]), tmp_path)
    lines = (tmp_path / "runs.csv").read_text(encoding="utf-8").splitlines()
    column = lines[0].split(",").index("tokens_per_step")
    assert [line.split(",")[column] for line in lines[1:]] == ["264", ""]


def test_the_same_records_make_the_same_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        tables.write(tables.build(study()), tmp_path / name)
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert {path.stem for path in (tmp_path / "a").iterdir()} == set(tables.TABLE_NAMES)


def test_samples_survive_their_text() -> None:
    samples = [0.1, 1e-9, 3.0]
    assert from_text(to_text(samples)) == samples
    assert from_text(None) == from_text("") == from_text(float("nan")) == []
    with pytest.raises(ValueError, match="no list of samples"):
        from_text(json.dumps({"a": 1}))


def test_numbers_survive_the_file(tmp_path: Path, told: tables.Tables) -> None:
    tables.write(told, tmp_path)
    read = pd.read_csv(tmp_path / "runs.csv")
    assert read["step_seconds_median"].dropna().tolist() == told.runs["step_seconds_median"].dropna().tolist()


def test_a_writer_that_dies_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    write_text(path, "old")

    def die() -> None:
        with replacing(path) as unfinished:
            unfinished.write_text("ha", encoding="utf-8")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        die()
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("site", "axis", "phase", "place"),
    [
        (
            "decoder.block.13.cross_attention.kv",
            "tp",
            "forward",
            Place(part="cross_attention", side="decoder", block_index=13, place="cross_attention.kv"),
        ),
        ("encoder.block.0.ffn.up", "tp", "backward", Place(part="ffn", side="encoder", block_index=0, place="ffn.up")),
        ("decoder.memory", "tp", "forward", Place(part="memory", place="decoder.memory")),
        ("encoder.embedding.token", "tp", "forward", Place(part="embedding", place="encoder.embedding.token")),
        ("head", "tp", "backward", Place(part="head", place="head")),
        ("loss", "tp", "forward", Place(part="loss", place="loss")),
        ("loss.sum", "pp", "step", Place(part="loss", place="loss.sum")),
        ("gradient.dp", "dp", "step", Place(part="gradients", place="gradient.dp")),
        ("edge.0>1", "pp", "forward", Place(part="edge", place="edge.0>1")),
        ("elsewhere", "tp", "forward", Place(part="other", place="elsewhere")),
    ],
)
def test_a_site_tells_its_part_of_the_model(site: str, axis: str, phase: str, place: Place) -> None:
    assert place_of(site, axis, phase) == place
