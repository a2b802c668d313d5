"""Does a plan say the right thing for every module of the three architectures?"""

from collections import Counter

import pytest
import torch

from models.architectures import build
from models.config import Architecture
from parallel.layouts import Layout
from parallel.plan import WHOLE, Plan
from parallel.plans import plan
from tests.small_models import ARCHITECTURES, small_config

TP = Layout(tp=2)
SP = Layout(tp=2, sp=True)
WHOLE_INPUTS = SP.replace(saved_input="whole")


def told(planned: Plan, module: str) -> list[str]:
    """The entries of one module and its children, the module's own name left out."""
    inside = [entry for entry in planned.entries if f"{entry.module}.".startswith(module)]
    return [f"{f'{e.module}.'.removeprefix(module)[:-1]} {e.style} {e.detail}".strip() for e in inside]


# ---- entries of each kind of block --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "block", "stream"),
    [
        ("encoder_only", "encoder.block.1.", "source"),
        ("decoder_only", "decoder.block.1.", "target"),
        ("encoder_decoder", "encoder.block.1.", "source"),
    ],
)
def test_a_block_of_two_sublayers_enters_and_leaves_tensor_parallelism_twice(
    architecture: Architecture, block: str, stream: str
) -> None:
    assert told(plan(small_config(architecture), TP), block) == [
        f"self_attention.qkv colwise stream={stream} entering=copy parts=4x4+2x4+2x4",
        f"self_attention.core_dropout sharded_dropout stream={stream}",
        f"self_attention.output rowwise stream={stream} leaving=reduce parts=4x4",
        f"ffn.up colwise stream={stream} entering=copy parts=24x1",
        f"ffn.inner_dropout sharded_dropout stream={stream}",
        f"ffn.down rowwise stream={stream} leaving=reduce parts=24x1",
    ]


@pytest.mark.parametrize(
    ("architecture", "block", "stream"),
    [
        ("encoder_only", "encoder.block.0.", "source"),
        ("decoder_only", "decoder.block.0.", "target"),
        ("encoder_decoder", "encoder.block.0.", "source"),
    ],
)
def test_sequence_parallelism_gathers_and_scatters_and_shards_what_lies_between(
    architecture: Architecture, block: str, stream: str
) -> None:
    assert told(plan(small_config(architecture, activation="swiglu"), SP), block) == [
        f"self_attention.qkv colwise stream={stream} entering=gather parts=4x4+2x4+2x4",
        f"self_attention.core_dropout sharded_dropout stream={stream}",
        f"self_attention.output rowwise stream={stream} leaving=scatter parts=4x4",
        f"self_attention.norm sequence_replicated stream={stream}",
        f"self_attention.dropout sharded_dropout stream={stream}",
        f"ffn.up colwise stream={stream} entering=gather parts=24x1+24x1",
        f"ffn.inner_dropout sharded_dropout stream={stream}",
        f"ffn.down rowwise stream={stream} leaving=scatter parts=24x1",
        f"ffn.norm sequence_replicated stream={stream}",
        f"ffn.dropout sharded_dropout stream={stream}",
    ]


@pytest.mark.parametrize(
    ("layout", "kv", "entry"),
    [
        (TP, "", ["memory_entry stream=memory entering=copy"]),
        (TP.replace(memory_gather="per_block"), "entering=copy ", []),
        (SP, "", ["memory_entry stream=memory entering=gather"]),
        (SP.replace(memory_gather="per_block"), "entering=gather ", []),
        (WHOLE_INPUTS, "", ["memory_entry stream=memory entering=gather"]),
        (WHOLE_INPUTS.replace(memory_gather="per_block"), "entering=gather_once ", []),
    ],
    ids=["tp per_stage", "tp per_block", "sp per_stage", "sp per_block", "whole per_stage", "whole per_block"],
)
def test_the_memory_enters_once_a_stage_or_once_a_block(layout: Layout, kv: str, entry: list[str]) -> None:
    planned = plan(small_config("encoder_decoder"), layout)
    assert told(planned, "decoder.memory.") == entry
    entering, leaving = ("gather", "scatter") if layout.sp else ("copy", "reduce")
    entering += "_once" if layout.saved_input == "whole" else ""
    ends = [
        "cross_attention.norm sequence_replicated stream=target",
        "cross_attention.dropout sharded_dropout stream=target",
    ]
    for block in ("decoder.block.0.", "decoder.block.1."):
        crossing = [line for line in told(planned, block) if line.startswith("cross_attention")]
        assert crossing == [
            f"cross_attention.query colwise stream=target entering={entering} parts=4x4",
            f"cross_attention.kv colwise stream=memory {kv}parts=2x4+2x4",
            "cross_attention.core_dropout sharded_dropout stream=target",
            f"cross_attention.output rowwise stream=target leaving={leaving} parts=4x4",
            *(ends if layout.sp else []),
        ]


def test_only_an_encoder_decoder_has_entries_about_a_memory() -> None:
    streams = {
        architecture: {entry.stream for entry in plan(small_config(architecture), SP).entries}
        for architecture in ARCHITECTURES
    }
    assert streams == {
        "encoder_only": {"source"},
        "decoder_only": {"target"},
        "encoder_decoder": {"source", "target", "memory"},
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_whole_vocabulary_has_no_entry_and_is_whole_on_every_rank(architecture: Architecture) -> None:
    config = small_config(architecture, head_bias=True, head_transform=True, embedding_norm=True)
    sharded, whole = plan(config, TP), plan(config, TP.replace(vocabulary="whole"))
    ends = [entry for entry in sharded.entries if entry.style.startswith("vocabulary")]
    assert len(ends) == 2 + config.has_encoder + config.has_decoder
    assert whole.entries == tuple(entry for entry in sharded.entries if entry not in ends)
    for entry in ends[:-1]:
        assert not sharded.shard(f"{entry.module}.weight", 0).is_whole
        assert whole.shard(f"{entry.module}.weight", 0) == WHOLE
    assert whole.shard("head.bias", 1) == WHOLE


def test_embedding_and_head_under_tensor_parallelism() -> None:
    planned = plan(small_config("encoder_decoder", source_vocabulary=31), TP)
    assert told(planned, "encoder.embedding.") == ["token vocabulary_embedding stream=source leaving=reduce parts=31x1"]
    assert told(planned, "decoder.embedding.") == ["token vocabulary_embedding stream=target leaving=reduce parts=29x1"]
    assert told(planned, "head.") == ["vocabulary_head stream=target entering=copy parts=29x1"]
    assert told(planned, "loss.") == ["vocabulary_loss stream=target parts=29x1"]


def test_embedding_and_head_under_sequence_parallelism() -> None:
    planned = plan(small_config("encoder_only", num_token_types=2, embedding_norm=True, head_transform=True), SP)
    assert told(planned, "encoder.embedding.") == [
        "token vocabulary_embedding stream=source leaving=scatter parts=29x1",
        "position sequence_slice stream=source",
        "token_type sequence_slice stream=source",
        "norm sequence_replicated stream=source",
        "dropout sharded_dropout stream=source",
    ]
    assert told(planned, "encoder.norm.") == ["sequence_replicated stream=source"]
    assert told(planned, "head.") == ["vocabulary_head stream=source entering=gather parts=29x1"]


def test_features_are_sliced_under_sequence_parallelism_and_untouched_otherwise() -> None:
    config = small_config("encoder_decoder", feature_width=6)
    assert told(plan(config, TP), "encoder.embedding.") == []
    assert told(plan(config, SP), "encoder.embedding.")[0] == "features sequence_slice stream=source"


def test_a_relative_bias_is_dealt_out_by_head() -> None:
    planned = plan(small_config("encoder_decoder", positions="relative"), TP)
    assert told(planned, "encoder.relative_bias.") == ["head_bias_table stream=source parts=4x1"]
    assert told(planned, "decoder.relative_bias.") == ["head_bias_table stream=target parts=4x1"]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_degree_one_changes_no_module(architecture: Architecture) -> None:
    planned = plan(small_config(architecture), Layout(pp=2, dp=2))
    assert planned.entries == ()
    assert all(planned.shard(name, 0) == WHOLE for name in ("head.weight", "encoder.block.0.ffn.up.weight"))


@pytest.mark.parametrize("layout", [TP, SP], ids=["tp", "sp"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_entry_names_a_module_of_the_model_once(architecture: Architecture, layout: Layout) -> None:
    config = small_config(
        architecture, num_token_types=2, embedding_norm=True, head_transform=True, positions="learned"
    )
    with torch.device("meta"):
        modules = dict(build(config).named_modules())
    names = Counter(entry.module for entry in plan(config, layout).entries)
    assert set(names) <= set(modules)
    assert set(names.values()) == {1}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_matrix_of_a_block_and_the_vocabulary_is_sharded(architecture: Architecture) -> None:
    config = small_config(architecture, positions="relative")
    planned = plan(config, TP)
    with torch.device("meta"):
        whole = [name for name, p in build(config).named_parameters() if planned.shard(name, 0).is_whole]
    assert not [name for name in whole if name.endswith("weight") and "norm" not in name]


def test_the_plan_prints_a_line_a_stage_and_an_entry() -> None:
    planned = plan(small_config("encoder_decoder"), Layout(tp=2, pp=3))
    lines = planned.lines()
    assert lines[:4] == [
        "stage 0 on rank 0: blocks 0 to 1, sends source to 1",
        "stage 1 on rank 1: blocks 2 to 3, sends target, memory to 2",
        "stage 2 on rank 2: blocks 4 to 4, sends nothing",
        "encoder.embedding.token: vocabulary_embedding stream=source leaving=reduce parts=29x1",
    ]
    assert len(lines) == 3 + len(planned.entries)
