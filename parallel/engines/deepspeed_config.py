"""What does DeepSpeed read of a cell? The `ds_config.json` that the engine runs with, and a user without us.

    train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x dp

has to hold exactly, so a step whose last microbatch is ragged has no such file. A pipeline's stages and cut are
arguments of `PipelineModule`, not of the file. Ranks that share sequences are told by an mpu: the file has their number
for who reads it without one. What AutoTP shards is named here, by patterns of the plan's modules; without an mpu it
counts tensor-parallel ranks among those that batches are for, so that only parts of the product are given. Keys that
are not there have DeepSpeed's defaults.
Source: deepspeed 0.19, docs/_pages/config-json. Torch-free.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parallel.engines.engine import OptimizerName
from parallel.layouts import Layout, microbatch_sizes
from parallel.plan import Entry

NEVER = 10**9
"""Steps between two reports."""

BUCKET_ELEMENTS = 50_000_000
"""Of a reduction. A tenth of DeepSpeed's default: zero 3 sets a whole bucket aside, however small the model."""


def ds_config(
    layout: Layout,
    *,
    optimizer: OptimizerName,
    learning_rate: float,
    sequences_per_microbatch: int = 1,
    entries: Sequence[Entry] = (),
) -> dict[str, Any]:
    """The configuration of a layout.

    Args:
        layout: its tp, dp, cp, zero and microbatches are read.
        optimizer: `sgd` or `adamw`, torch's own.
        learning_rate: its step size.
        sequences_per_microbatch: of each data-parallel rank.
        entries: of the plan, which AutoTP needs.
    """
    parameters: dict[str, Any] = {"lr": learning_rate}
    if optimizer == "adamw":
        # Else DeepSpeed compiles an Adam of its own.
        parameters["torch_adam"] = True
    config: dict[str, Any] = {
        "train_batch_size": sequences_per_microbatch * layout.microbatches * layout.dp,
        "train_micro_batch_size_per_gpu": sequences_per_microbatch,
        "gradient_accumulation_steps": layout.microbatches,
        "optimizer": {"type": "AdamW" if optimizer == "adamw" else "SGD", "params": parameters},
        "zero_optimization": {"stage": layout.zero, "reduce_bucket_size": BUCKET_ELEMENTS},
        "zero_allow_untested_optimizer": True,
        # Its default clips to a norm of 1 without a word.
        "gradient_clipping": 0.0,
        "steps_per_print": NEVER,
    }
    if layout.zero == 3:
        # Its default keeps every parameter of fewer than 100000 elements whole on all ranks.
        config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    if layout.cp > 1:
        config["sequence_parallel_size"] = layout.cp
    if layout.tp > 1:
        del config["train_batch_size"]
        config["tensor_parallel"] = {
            "autotp_size": layout.tp,
            "partition_config": {"use_default_specs": False, "layer_specs": layer_specs(entries)},
        }
    return config


def layer_specs(entries: Sequence[Entry]) -> list[dict[str, Any]]:
    """What AutoTP does to which parameters: all blocks alike, and nothing outside of them."""
    specs: dict[str, dict[str, Any]] = {}
    for entry in entries:
        name = entry.module.split(".block.")[-1].partition(".")[2]
        spec: dict[str, Any] = {"patterns": [rf".*\.{re.escape(name)}\.weight$"]}
        if entry.style == "colwise":
            widths = [part.count * part.width for part in entry.parts]
            specs[name] = {**spec, "partition_type": "column", "shape": [widths, -1]}
        elif entry.style == "rowwise":
            specs[name] = {**spec, "partition_type": "row"}
        elif entry.style == "head_bias_table":
            # A rank's gradient is that of its heads.
            specs[name] = {**spec, "partition_type": "skip", "grad_allreduce": True}
    return list(specs.values())


def write_ds_config(
    path: Path,
    layout: Layout,
    *,
    num_sequences: int,
    optimizer: OptimizerName,
    learning_rate: float,
    entries: Sequence[Entry] = (),
) -> None:
    """Writes the file of a cell.

    Args:
        path: where to.
        layout: of the cell.
        num_sequences: of the step, all data-parallel ranks together.
        optimizer: `sgd` or `adamw`.
        learning_rate: its step size.
        entries: of the plan, which AutoTP needs.

    Raises:
        ValueError: the sequences cannot be dealt to the ranks, or leave a ragged last microbatch.
    """
    layout.check_sequences(num_sequences)
    sizes = microbatch_sizes(num_sequences // layout.dp, layout.microbatches)
    if len(set(sizes)) > 1:
        nearest = sizes[0] * layout.microbatches * layout.dp
        raise ValueError(
            f"{num_sequences} sequences over dp = {layout.dp} in {layout.microbatches} microbatches are "
            f"{', '.join(map(str, sizes))}: a ds_config.json has one size; try {nearest} sequences"
        )
    config = ds_config(
        layout,
        optimizer=optimizer,
        learning_rate=learning_rate,
        sequences_per_microbatch=sizes[0],
        entries=entries,
    )
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
