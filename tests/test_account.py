"""Is every figure of an account what the model itself, its costs and its predictions say, and is a mistake one line?"""

import csv
import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from launch import dry_run
from launch.cli import answer
from models.architectures import build
from models.costs import parameter_counts
from models.named import named_model
from parallel.figures import StepShape
from parallel.flops import model_flops
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.predict import predict
from parallel.trace import RankTrace, trace

ROOT = Path(__file__).resolve().parent.parent
TINY = ("tiny-encoder-decoder", "tiny-decoder", "tiny-encoder", "tiny-llama", "tiny-t5", "tiny-bart", "tiny-speech")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = answer(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def accounted(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = told(capsys, "account", *arguments, "--format", "json")
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    return document


# ---- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_one_rank_holds_what_the_built_model_holds(capsys: pytest.CaptureFixture[str], name: str) -> None:
    document = accounted(capsys, name)
    with torch.device("meta"):
        model = build(named_model(name))
    total = sum(parameter.numel() for parameter in model.parameters())
    (rank,) = document["ranks"]
    assert document["parameters"]["total"] == rank["parameters"]["total"] == total
    assert document["parameters"]["by_component"] == rank["parameters"]["by_component"]
    assert sum(rank["parameters"]["by_component"].values()) == total
    assert rank["parameter_bytes"] == rank["gradient_bytes"] == 4 * total
    assert rank["optimizer_bytes"] == 8 * total + 4 * len(list(model.parameters()))
    assert rank["communication"] == []


@pytest.mark.parametrize("name", ["tiny-encoder-decoder", "tiny-llama", "tiny-encoder"])
def test_figures_of_ranks_are_those_of_the_prediction(capsys: pytest.CaptureFixture[str], name: str) -> None:
    options = "--tp 2 --sp --pp 2 --dp 2 --zero 1 --microbatches 3 --microbatch 2 --source-length 9 --target-length 7"
    document = accounted(capsys, name, *options.split(), "--master-weights", "--dtype", "bf16")
    config = named_model(name)
    shape = StepShape(
        num_sequences=6,
        source_length=9 * config.has_encoder,
        target_length=7 * config.has_decoder,
        dtype_bytes=2,
    )
    made = plan(config, Layout(tp=2, sp=True, pp=2, dp=2, zero=1, microbatches=3))
    predictions = predict(made, shape, master_weights=True)
    assert document["world_size"] == sum(rank["num_ranks"] for rank in document["ranks"]) == 8
    assert document["step"]["model_flops"] == 2 * model_flops(config, shape)
    assert len(predictions) == len(document["ranks"])
    for rank, prediction in zip(document["ranks"], predictions, strict=True):
        figures, states = prediction.figures, prediction.states
        assert rank["coordinates"] == {axis: getattr(figures.coordinate, axis) for axis in ("dp", "pp", "cp", "tp")}
        assert rank["state_bytes"] == states.total
        assert rank["master_weight_bytes"] == states.master_weights > 0
        assert rank["total_bytes"] == states.total + figures.peak_saved_bytes
        assert rank["activation_bytes_per_microbatch"] == figures.saved_bytes
        assert sum(rank["activation_bytes_per_microbatch_by_component"].values()) == figures.saved_bytes
        phases = [rank[f"{phase}_flops"] for phase in ("forward", "recompute", "backward")]
        assert sum(phases) == rank["hardware_flops"] == figures.flops.total
        told_events = [(event["site"], event["count"], event["payload_bytes"]) for event in rank["communication"]]
        assert told_events == [(total.event.site, total.count, total.payload_bytes) for total in figures.events]
        assert rank["communication_wire_bytes"] == sum(total.wire_bytes for total in figures.events)


@pytest.mark.parametrize("name", ["tiny-encoder-decoder", "tiny-decoder", "tiny-bert", "tiny-speech"])
def test_model_flops_of_the_ranks_of_a_replica_are_those_of_the_model(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    document = accounted(capsys, name, "--tp", "2", "--pp", "2", "--microbatches", "2")
    summed = sum(rank["num_ranks"] * rank["model_flops"] for rank in document["ranks"])
    assert summed == document["step"]["model_flops"]


def test_an_encoder_decoder_has_two_caches_and_an_encoder_none(capsys: pytest.CaptureFixture[str]) -> None:
    def caches(*arguments: str) -> list[dict[str, int]]:
        return [rank["kv_cache_bytes_per_sequence"] for rank in accounted(capsys, *arguments)["ranks"]]

    both = caches("tiny-encoder-decoder", "--source-length", "12", "--target-length", "5")
    assert both == [{"self_attention": 2 * 2 * 5 * 32 * 4, "cross_attention": 2 * 2 * 12 * 32 * 4, "total": 8704}]
    # Eight KV heads of 128 for 64 query heads: an eighth of what 64 would take.
    (cache,) = caches("llama-2-70b", "--dtype", "bfloat16")
    assert cache == {"self_attention": 80 * 2 * 4096 * 8 * 128 * 2, "cross_attention": 0, "total": 80 * 2**24}
    # With 16 ranks, each keeps one of 8 heads.
    assert caches("llama-2-70b", "--dtype", "bfloat16", "--tp", "16")[0]["total"] == cache["total"] // 8
    assert caches("tiny-encoder")[0]["total"] == 0


def test_the_rows_of_csv_are_the_figures_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("tiny-t5", "--tp", "2", "--pp", "2", "--microbatches", "2")
    document = accounted(capsys, *arguments)
    code, out, _ = told(capsys, "account", *arguments, "--format", "csv")
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    for rank in document["ranks"]:
        own = [row for row in rows if row["pp"] == str(rank["coordinates"]["pp"])]
        whole = {row["quantity"]: int(row["value"]) for row in own if not row["component"] and not row["site"]}
        for name in ("parameter_bytes", "peak_activation_bytes", "total_bytes", "hardware_flops"):
            assert whole[name] == rank[name]
        parts = {row["component"]: int(row["value"]) for row in own if row["quantity"] == "parameters"}
        assert parts == {"": rank["parameters"]["total"], **rank["parameters"]["by_component"]}
        sent = [int(row["value"]) for row in own if row["quantity"] == "communication_wire_bytes_of_events"]
        assert sum(sent) == whole["communication_wire_bytes"] == rank["communication_wire_bytes"]


def test_tables_and_markdown_say_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    for form in ("table", "markdown"):
        code, out, _ = told(capsys, "account", "tiny-bart", "--device-bytes", "1e5", "--format", form)
        assert code == 0
        assert f"{parameter_counts(named_model('tiny-bart')).total:,}" in out
        assert " no" in out
    assert "| component | parameters | share |\n| --- | ---: | ---: |" in out


# ---- twins ----------------------------------------------------------------------------------------------------------


def test_a_twin_reads_the_same_pair_as_one_sequence(capsys: pytest.CaptureFixture[str]) -> None:
    document = accounted(capsys, "tiny-encoder-decoder", "--source-length", "9", "--target-length", "5", "--twin")
    twin = document["twin"]
    assert (document["step"]["source_length"], document["step"]["target_length"]) == (9, 5)
    assert twin["architecture"] == "decoder_only"
    assert (twin["step"]["source_length"], twin["step"]["target_length"]) == (0, 14)
    assert twin["match"] == "depth"
    document = accounted(capsys, "tiny-decoder", "--target-length", "15", "--twin", "--match", "parameters")
    assert document["step"]["target_length"] == 15
    assert (document["twin"]["step"]["source_length"], document["twin"]["step"]["target_length"]) == (7, 8)
    assert abs(document["twin"]["parameter_mismatch"]) < 0.05


def test_twins_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "account", "tiny-encoder", "--twin", "--format", "markdown")
    assert code == 0
    assert "| quantity | tiny-encoder | tiny-encoder-encoder-decoder-twin | ratio |" in out


# ---- dry runs -------------------------------------------------------------------------------------------------------


def test_a_dry_run_equals_the_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    document = accounted(capsys, "tiny-t5", "--tp", "2", "--pp", "2", "--microbatches", "2", "--trace")
    for rank in document["ranks"]:
        assert rank["traced"]["differences"] == rank["traced"]["remarks"] == []
        for name in ("parameters", "parameter_bytes", "gradient_bytes", "forward_flops", "peak_activation_bytes"):
            assert rank["traced"][name] == rank[name]
        key = json.dumps
        assert sorted(rank["traced"]["communication"], key=key) == sorted(rank["communication"], key=key)


def test_a_dry_run_that_differs_fails_with_the_site(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks_an_event(*arguments: Any) -> tuple[RankTrace, ...]:
        return tuple(
            dataclasses.replace(traced, figures=dataclasses.replace(traced.figures, events=traced.figures.events[1:]))
            for traced in trace(*arguments)
        )

    monkeypatch.setattr(dry_run, "trace", lacks_an_event)
    code, _, err = told(capsys, "account", "tiny-decoder", "--tp", "2", "--trace", "--format", "json")
    assert code == 1
    assert err.startswith("differs: tiny-decoder: all_")
    assert "decoder." in err
    assert "0 times, expected 1" in err


# ---- size, speed, mistakes ------------------------------------------------------------------------------------------


def test_a_large_model_on_a_large_world_is_answered_without_torch() -> None:
    program = (
        "import sys; from launch.cli import answer\n"
        "line = 'account llama-2-70b --tp 8 --pp 16 --dp 8 --microbatches 16 --world-size 1024 --format json'\n"
        "code = answer(line.split()); sys.exit(code or 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["parameters"]["total"] == 68_976_648_192
    assert sum(rank["num_ranks"] for rank in document["ranks"]) == 1024
    held = sum(rank["num_ranks"] * rank["parameters"]["total"] for rank in document["ranks"])
    norms = document["parameters"]["by_component"]["norms"]
    assert held == 8 * (document["parameters"]["total"] + 7 * norms)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-t6",), "unknown model 'tiny-t6'; did you mean tiny-t5"),
        (("nothing.json",), "nothing.json: no such file; give a config.json"),
        (("no/config",), "no/config: no such file"),
        (("tiny-t5", "--tp", "0"), "tp = 0; it must be at least 1"),
        (("tiny-t5", "--dp", "-2"), "dp = -2; it must be at least 1"),
        (("tiny-t5", "--microbatch", "0"), "microbatch = 0; a microbatch has at least 1 sequence"),
        (("tiny-t5", "--tp", "3"), "4 heads over tp=3: tp must divide 4; try 1, 2, 4"),
        (("tiny-t5", "--tp", "2", "--world-size", "6"), "tp 2 x pp 1 x dp 1 x cp 1 = 2 ranks, but the world is 6"),
        (("tiny-t5", "--zero", "1"), "zero = 1 shards over the dp ranks: it needs dp >= 2"),
        (("tiny-t5", "--source-length", "129"), "source_length = 129: tiny-t5 reads 1 to 128 source positions"),
        (("tiny-t5", "--target-length", "-1"), "target_length = -1"),
        (("tiny-t5", "--device-bytes", "0"), "device-bytes = 0; a device has at least 1 byte"),
        (
            ("tiny-t5", "--dp", "2", "--zero", "2", "--trace"),
            "the native engine deals optimizer states, nothing else: zero = 2",
        ),
        (("tiny-decoder", "--target-length", "1", "--twin"), "a pair of 0 source and 1 target positions"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = told(capsys, "account", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


# ---- models ---------------------------------------------------------------------------------------------------------


def test_models_are_told_by_component(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "models", "t5", "--format", "json")
    assert code == 0
    for entry in json.loads(out)["models"]:
        counts = parameter_counts(named_model(entry["model"]))
        assert entry["parameters"]["total"] == counts.total == sum(entry["parameters"]["by_component"].values())
    code, out, _ = told(capsys, "models", "--format", "csv")
    rows = {row["model"]: row for row in csv.DictReader(io.StringIO(out))}
    assert int(rows["llama-2-70b"]["parameters"]) == 68_976_648_192
