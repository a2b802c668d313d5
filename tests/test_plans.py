"""Does a plan say the right thing for every module, and do the parts of all ranks make the whole model?"""

import itertools
from collections import Counter

import pytest
import torch
from torch import nn

from models.architectures import build
from models.config import Architecture, ModelConfig
from models.costs import parameter_counts
from models.initial import canonical_name
from parallel.gradients import Gradients
from parallel.layouts import Layout
from parallel.parallelize import take
from parallel.plan import WHOLE, Entry, Part, Plan, Shard
from parallel.plans import plan
from tests.one_rank import part_of, rank_of
from tests.small_models import ARCHITECTURES, small_config

TP = Layout(tp=2)
SP = Layout(tp=2, sp=True)


def wide_config(architecture: Architecture, **changes: object) -> ModelConfig:
    """Twelve heads, so that many degrees divide them."""
    return small_config(architecture, **({"num_heads": 12, "num_kv_heads": 12, "width": 24} | changes))


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
    ],
    ids=["tp per_stage", "tp per_block", "sp per_stage", "sp per_block"],
)
def test_the_memory_enters_once_a_stage_or_once_a_block(layout: Layout, kv: str, entry: list[str]) -> None:
    planned = plan(small_config("encoder_decoder"), layout)
    assert told(planned, "decoder.memory.") == entry
    entering, leaving = ("gather", "scatter") if layout.sp else ("copy", "reduce")
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
        "stage 0: blocks 0 to 1, sends source",
        "stage 1: blocks 2 to 3, sends target, memory",
        "stage 2: blocks 4 to 4, sends nothing",
        "encoder.embedding.token: vocabulary_embedding stream=source leaving=reduce parts=29x1",
    ]
    assert len(lines) == 3 + len(planned.entries)


# ---- shards -------------------------------------------------------------------------------------------------------


SHARDED = [
    ({}, (1, 2, 3, 4, 6)),
    ({"num_kv_heads": 1}, (1, 2, 3, 4)),
    ({"num_kv_heads": 2}, (1, 2, 4)),
    ({"num_kv_heads": 3, "head_width": 4}, (1, 3, 6)),
    ({"vocabulary": 11, "activation": "geglu"}, (1, 2, 3, 4)),
    ({"vocabulary": 13, "positions": "relative", "qkv_bias": False}, (1, 2, 3, 4)),
]
CASES = [(changes, tp) for changes, degrees in SHARDED for tp in degrees]


def whole_parameters(config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every parameter's elements numbered, by name."""
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in build(config).named_parameters()}
    return {name: torch.arange(torch.Size(shape).numel()).reshape(shape) for name, shape in shapes.items()}


def parts_of(planned: Plan, name: str, rows: int) -> tuple[Part, ...]:
    entry = planned.entry_of(name)
    return entry.parts if entry is not None and entry.parts else (Part(count=rows, width=1),)


@pytest.mark.parametrize(("changes", "tp"), CASES)
def test_the_shards_of_every_parameter_make_the_whole(changes: dict[str, object], tp: int) -> None:
    config = wide_config("encoder_decoder", **changes)
    planned = plan(config, Layout(tp=tp))
    for name, whole in whole_parameters(config).items():
        shards = [planned.shard(name, coordinate) for coordinate in range(tp)]
        taken = [take(whole, shard) for shard in shards]
        for shard, piece in zip(shards, taken, strict=True):
            assert tuple(piece.shape) == shard.shape(tuple(whole.shape))
        if shards[0].is_whole:
            assert all(piece is whole for piece in taken)
            continue
        dim = shards[0].dim
        parts = parts_of(planned, name, whole.shape[dim])
        assert sum(part.count * part.width for part in parts) == whole.shape[dim]
        pieces = [piece.split([part.share(tp, r)[1] - part.share(tp, r)[0] for part in parts], dim)
                  for r, piece in enumerate(taken)]  # fmt: skip
        # Every replica of a unit is the same; one of each, in the order of the ranks, is the part of the whole.
        rebuilt = [
            torch.cat([pieces[rank][index] for rank in range(0, tp, part.replicas(tp))], dim)
            for index, part in enumerate(parts)
        ]
        assert torch.equal(torch.cat(rebuilt, dim), whole), name
        for (index, part), rank in itertools.product(enumerate(parts), range(tp)):
            assert torch.equal(pieces[rank][index], pieces[rank - rank % part.replicas(tp)][index]), name


@pytest.mark.parametrize(("changes", "tp"), CASES)
def test_every_query_head_finds_its_key_value_head_on_its_own_rank(changes: dict[str, object], tp: int) -> None:
    config = wide_config("decoder_only", **changes)
    heads = Part(count=config.num_heads, width=1)
    kv_heads = Part(count=config.num_kv_heads, width=1)
    grouped = config.num_heads // config.num_kv_heads
    for rank in range(tp):
        (first, last), (first_kv, last_kv) = heads.share(tp, rank), kv_heads.share(tp, rank)
        local_group = (last - first) // (last_kv - first_kv)
        for head in range(first, last):
            assert head // grouped == first_kv + (head - first) // local_group


def test_an_uneven_vocabulary_is_dealt_without_padding() -> None:
    rows = Part(count=11, width=1)
    assert [rows.share(4, rank) for rank in range(4)] == [(0, 2), (2, 5), (5, 8), (8, 11)]
    assert [rows.share(3, rank) for rank in range(3)] == [(0, 3), (3, 7), (7, 11)]


def test_fewer_units_than_ranks_are_held_by_neighbours() -> None:
    units = Part(count=2, width=4)
    assert [units.share(4, rank) for rank in range(4)] == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert [units.replicas(tp) for tp in (1, 2, 4, 8)] == [1, 1, 2, 4]


def test_a_fused_projection_keeps_the_rows_of_each_of_its_parts() -> None:
    entry = Entry(module="m", style="colwise", parts=(Part(count=4, width=2), Part(count=2, width=2)))
    assert entry.shard("weight", 2, 1) == Shard(dim=0, ranges=((4, 8), (10, 12)), replicated_rows=(6, 6), replicas=1)
    assert entry.shard("weight", 4, 3) == Shard(dim=0, ranges=((6, 8), (10, 12)), replicated_rows=(2, 4), replicas=2)
    row = Entry(module="m", style="rowwise", parts=(Part(count=4, width=2),))
    assert row.shard("weight", 2, 1) == Shard(dim=1, ranges=((4, 8),), replicated_rows=(4, 4), replicas=1)
    assert row.shard("bias", 2, 1) == WHOLE


def test_gradients_summed_over_the_sequence_are_those_of_what_every_rank_holds_whole() -> None:
    config = small_config("encoder_decoder", num_encoder_blocks=1, num_decoder_blocks=1, positions="relative")
    names = list(whole_parameters(config))
    summed = {name for name in names if plan(config, SP).sums_over_sequence(name)}
    assert summed == {
        f"{place}.{leaf}"
        for place in (
            "encoder.block.0.self_attention.norm",
            "encoder.block.0.ffn.norm",
            "encoder.norm",
            "decoder.block.0.self_attention.norm",
            "decoder.block.0.cross_attention.norm",
            "decoder.block.0.ffn.norm",
            "decoder.norm",
        )
        for leaf in ("weight", "bias")
    } | {
        "encoder.block.0.self_attention.output.bias",
        "encoder.block.0.ffn.down.bias",
        "decoder.block.0.self_attention.output.bias",
        "decoder.block.0.cross_attention.output.bias",
        "decoder.block.0.ffn.down.bias",
    }
    assert not [name for name in names if plan(config, TP).sums_over_sequence(name)]


def test_front_end_and_head_transform_see_a_shard_of_the_sequence() -> None:
    config = small_config("encoder_decoder", feature_width=3, head_transform=True)
    planned = plan(config, SP)
    for name in ("encoder.embedding.features.weight", "encoder.embedding.features.bias", "head.transform.dense.weight"):
        assert planned.sums_over_sequence(name)
    assert not planned.sums_over_sequence("head.weight")
    assert planned.sums_over_sequence("decoder.embedding.position.weight")


@pytest.mark.parametrize(("tp", "length", "padded"), [(2, 7, 8), (2, 8, 8), (4, 9, 12), (4, 1, 4)])
def test_a_stream_is_padded_to_a_length_that_divides_under_sp_only(tp: int, length: int, padded: int) -> None:
    config = small_config("decoder_only")
    assert plan(config, Layout(tp=tp, sp=True)).sharded_length(length) == padded
    assert plan(config, Layout(tp=tp)).sharded_length(length) == length


# ---- conservation -------------------------------------------------------------------------------------------------


def elements_held(model: nn.Module, planned: Plan, tp: int) -> dict[str, set[tuple[int, int]]]:
    """Which rows (or columns) of which parameter a rank holds, by canonical name."""
    held = {}
    for name, parameter in model.named_parameters():
        shard = planned.shard(name, tp)
        ranges = shard.ranges or ((0, parameter.shape[0]),)
        assert sum(stop - start for start, stop in ranges) == parameter.shape[shard.dim]
        held[canonical_name(planned.config, name)] = set(ranges)
    return held


@pytest.mark.parametrize(
    ("architecture", "changes", "layout"),
    [
        ("decoder_only", {"tying": "head"}, Layout(tp=2, pp=2)),
        ("decoder_only", {"num_kv_heads": 1, "vocabulary": 11}, Layout(tp=4, sp=True)),
        ("encoder_only", {"head_transform": True, "head_bias": True, "num_token_types": 2}, Layout(tp=3, pp=3)),
        ("encoder_decoder", {"tying": "all"}, Layout(tp=2, pp=3, cut=(2, 4))),
        ("encoder_decoder", {"tying": "all", "num_kv_heads": 2, "positions": "relative"}, Layout(tp=4, pp=5, sp=True)),
        ("encoder_decoder", {"tying": "source_target", "activation": "swiglu"}, Layout(tp=2, pp=2, cut="aligned")),
        ("encoder_decoder", {"positions": "relative", "norm": "rmsnorm"}, Layout(tp=6, pp=4, dp=2)),
        ("encoder_decoder", {"feature_width": 5, "head_bias": True}, Layout(tp=2, pp=2, sp=True)),
        ("encoder_decoder", {"tying": "head"}, Layout()),
    ],
)
def test_the_parameters_that_all_ranks_count_add_up_to_the_model(
    architecture: Architecture, changes: dict[str, object], layout: Layout
) -> None:
    config = wide_config(architecture, **changes)
    planned = plan(config, layout)
    counted = 0
    rows: dict[str, set[tuple[int, int]]] = {}
    for rank in range(layout.world_size // layout.dp):
        with rank_of(planned, rank) as comm:
            model = part_of(planned, comm)
            counted += sum(part.numel() for part in Gradients(model, planned, comm).counted)
            for name, held in elements_held(model, planned, comm.coordinate.tp).items():
                rows.setdefault(name, set()).update(held)
    assert counted == parameter_counts(config).total
    whole = {canonical_name(config, name): parameter for name, parameter in whole_parameters(config).items()}
    assert set(rows) == set(whole)
    for name, ranges in rows.items():
        dim = planned.shard(name, 0).dim
        covered = sorted(ranges)
        assert all(stop == start for (_, stop), (start, _) in itertools.pairwise(covered)), name
        assert (covered[0][0], covered[-1][1]) == (0, whole[name].shape[dim]), name
