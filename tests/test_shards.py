"""Do the parts that all ranks hold make the whole model, every parameter once?"""

import itertools

import pytest
import torch
from torch import nn

from models.architectures import build
from models.config import Architecture, ModelConfig
from models.costs import parameter_counts
from models.initial import canonical_name
from parallel.deferral import Deferral
from parallel.gradients import Gradients
from parallel.layouts import Layout
from parallel.parallelize import take
from parallel.plan import WHOLE, Entry, Part, Plan, Shard
from parallel.plans import plan
from tests.one_rank import part_of, rank_of
from tests.small_models import small_config

TP = Layout(tp=2)
SP = Layout(tp=2, sp=True)


def wide_config(architecture: Architecture, **changes: object) -> ModelConfig:
    """Twelve heads, so that many degrees divide them."""
    return small_config(architecture, **({"num_heads": 12, "num_kv_heads": 12, "width": 24} | changes))


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
            gradients = Gradients(model, planned, comm, Deferral(), {}, [model])
            counted += sum(part.numel() for part in gradients.counted)
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
