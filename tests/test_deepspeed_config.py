"""Is the ds_config.json that is written what the engine runs with?"""

import csv
import io
import json
from pathlib import Path

import pytest

from launch.cli import answer
from launch.experiment import load
from parallel.engines.deepspeed_config import ds_config, write_ds_config
from parallel.layouts import Layout


def test_a_written_config_is_what_the_engine_runs_with(tmp_path: Path) -> None:
    layout, path = Layout(dp=2, zero=3, microbatches=3), tmp_path / "ds_config.json"
    write_ds_config(path, layout, num_sequences=24, optimizer="adamw", learning_rate=0.5)
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written == ds_config(layout, optimizer="adamw", learning_rate=0.5, sequences_per_microbatch=4)
    assert written["train_batch_size"] == 24
    assert written["train_micro_batch_size_per_gpu"] == 4
    assert written["gradient_accumulation_steps"] == 3
    assert written["zero_optimization"]["stage"] == 3
    assert written["optimizer"] == {"type": "AdamW", "params": {"lr": 0.5, "torch_adam": True}}


def test_a_ragged_step_has_no_config(tmp_path: Path) -> None:
    message = (
        r"^20 sequences over dp = 2 in 3 microbatches are 4, 4, 2: a ds_config.json has one size; try 24 sequences$"
    )
    with pytest.raises(ValueError, match=message):
        write_ds_config(
            tmp_path / "ds_config.json",
            Layout(dp=2, microbatches=3),
            num_sequences=20,
            optimizer="sgd",
            learning_rate=0.5,
        )


EXPERIMENT = """
name = "one"
engine = ["native", "deepspeed", "deepspeed:uniform"]
learning_rate = 0.5
models.pair = {architecture = "encoder_decoder", width = 8, num_heads = 2, ffn_width = 16, num_encoder_blocks = 2, \
num_decoder_blocks = 3, vocabulary = 40, max_length = 16}
data.text = {text = "synthetic", sequences = 14, source_length = 6, target_length = 4}
layouts = [{pp = 2, microbatches = 7}, {dp = 2, zero = 2, microbatches = 7}, {dp = 2, microbatches = 4},
{tp = 2, sp = true}, {tp = 2, microbatches = 7}, {cp = 2, dp = 2, zero = 1, microbatches = 7}]
"""


def test_every_cell_of_an_experiment_is_a_file_or_a_row_that_says_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.toml").write_text(EXPERIMENT, encoding="utf-8")
    arguments = [str(tmp_path / "one.toml"), "--out", str(tmp_path / "made" / "configs"), "--format", "csv"]
    assert answer(["ds-config", *arguments]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["status"] for row in rows] == ["ok", "ok", "unsupported", "unsupported", "ok", "ok"]
    assert [row["cell"] for row in rows] == [
        cell.name for cell in load(tmp_path / "one.toml").cells if cell.engine.name == "native"
    ]
    assert (rows[0]["num_stages"], rows[0]["first_blocks"]) == ("2", "0 3")
    assert "are 2, 2, 2, 1: a ds_config.json has one size" in rows[2]["reason"]
    assert rows[3]["reason"].startswith("deepspeed's AutoTP keeps whole sequences")
    written = [json.loads(Path(row["file"]).read_text(encoding="utf-8")) for row in rows if row["file"]]
    # AutoTP's ranks would be counted among those that share a batch.
    assert [config.get("train_batch_size") for config in written] == [14, 14, None, 14]
    assert [config["train_micro_batch_size_per_gpu"] for config in written] == [2, 1, 2, 1]
    assert [config["zero_optimization"]["stage"] for config in written] == [0, 2, 0, 1]
    assert [config.get("sequence_parallel_size") for config in written] == [None, None, None, 2]
    assert len(list((tmp_path / "made" / "configs").iterdir())) == 4
    specs = written[2]["tensor_parallel"]["partition_config"]["layer_specs"]
    shapes = {spec["patterns"][0]: (spec["partition_type"], spec.get("shape")) for spec in specs}
    assert shapes == {
        r".*\.self_attention\.qkv\.weight$": ("column", [[8, 8, 8], -1]),
        r".*\.self_attention\.output\.weight$": ("row", None),
        r".*\.cross_attention\.query\.weight$": ("column", [[8], -1]),
        r".*\.cross_attention\.kv\.weight$": ("column", [[8, 8], -1]),
        r".*\.cross_attention\.output\.weight$": ("row", None),
        r".*\.ffn\.up\.weight$": ("column", [[16], -1]),
        r".*\.ffn\.down\.weight$": ("row", None),
    }
