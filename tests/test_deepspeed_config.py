"""Is the ds_config.json that is written what the engine runs with?"""

import json
from pathlib import Path

import pytest

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
