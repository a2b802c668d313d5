"""Does a cut place every block once, and do edges and shared parameters follow from it?"""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.architectures import build
from models.config import Architecture, ModelConfig, Tying
from models.slicing import slice_model, tie
from parallel.layouts import Cut, Layout
from parallel.partition import Stage, crossing, first_blocks, shared_parameters, stages, stages_of
from parallel.plans import plan
from tests.small_models import ARCHITECTURES, small_config

SMALL = settings(deadline=None, max_examples=12)
"""For what builds modules: milliseconds a block, and slow when the machine is busy."""
PURE = settings(deadline=None, max_examples=50)


def encoder_decoder(num_encoder_blocks: int, num_decoder_blocks: int, **changes: object) -> ModelConfig:
    return small_config(
        "encoder_decoder", num_encoder_blocks=num_encoder_blocks, num_decoder_blocks=num_decoder_blocks, **changes
    )


@st.composite
def configs(draw: st.DrawFn, most: int = 9) -> ModelConfig:
    """Any architecture with up to `most` blocks a stack and any tying that it can have."""
    architecture = draw(st.sampled_from(ARCHITECTURES))
    tyings: list[Tying] = ["none", "head"]
    if architecture == "encoder_decoder":
        tyings += ["source_target", "all"]
    return small_config(
        architecture,
        num_encoder_blocks=draw(st.integers(1, most)) if architecture != "decoder_only" else 0,
        num_decoder_blocks=draw(st.integers(1, most)) if architecture != "encoder_only" else 0,
        tying=draw(st.sampled_from(tyings)),
        positions=draw(st.sampled_from(["rope", "relative"])),
    )


@st.composite
def cuts(draw: st.DrawFn, config: ModelConfig) -> tuple[Stage, ...]:
    """Stages of any explicit cut."""
    possible = range(1, config.num_blocks)
    first = draw(st.sets(st.sampled_from(possible))) if possible else set()
    return stages_of(config, tuple(sorted(first)))


def dealt(data: st.DataObject, num_stages: int) -> list[int]:
    """Stages on fewer ranks than stages, in any way."""
    return data.draw(st.lists(st.integers(0, max(0, num_stages - 2)), min_size=num_stages, max_size=num_stages))


def blocks_of(cut: tuple[Stage, ...]) -> list[int]:
    return [block for stage in cut for block in range(stage.first, stage.last)]


# ---- every block once ---------------------------------------------------------------------------------------------


@PURE
@given(st.data())
def test_every_block_is_on_exactly_one_stage_of_any_explicit_cut(data: st.DataObject) -> None:
    config = data.draw(configs())
    cut = data.draw(cuts(config))
    assert blocks_of(cut) == list(range(config.num_blocks))
    assert [stage.index for stage in cut] == list(range(len(cut)))


@PURE
@given(configs(), st.data())
def test_even_stages_hold_every_block_once_and_differ_by_one_at_most(config: ModelConfig, data: st.DataObject) -> None:
    pp = data.draw(st.integers(1, config.num_blocks))
    cut = stages(config, Layout(pp=pp))
    sizes = [stage.num_blocks for stage in cut]
    assert blocks_of(cut) == list(range(config.num_blocks))
    assert len(cut) == pp
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@PURE
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_an_aligned_stage_is_encoder_or_decoder_and_no_split_has_a_smaller_largest_stage(
    num_encoder_blocks: int, num_decoder_blocks: int, data: st.DataObject
) -> None:
    config = encoder_decoder(num_encoder_blocks, num_decoder_blocks)
    pp = data.draw(st.integers(2, config.num_blocks))
    cut = stages(config, Layout(pp=pp, cut="aligned"))
    assert blocks_of(cut) == list(range(config.num_blocks))
    assert len(cut) == pp
    for stage in cut:
        assert (stage.first < num_encoder_blocks) != (stage.last > num_encoder_blocks)
    largest = max(stage.num_blocks for stage in cut)
    for other in itertools.combinations(range(1, config.num_blocks), pp - 1):
        if num_encoder_blocks in other:
            assert largest <= max(stage.num_blocks for stage in stages_of(config, other))
        if pp > 4:
            break


@pytest.mark.parametrize(
    ("num_encoder_blocks", "num_decoder_blocks", "pp", "expected"),
    [
        (4, 4, 2, (4,)),
        (4, 4, 3, (4, 6)),
        (6, 2, 4, (2, 4, 6)),
        (3, 5, 4, (2, 3, 6)),
        (1, 3, 3, (1, 3)),
        (1, 1, 2, (1,)),
    ],
)
def test_aligned_cuts_written_out(
    num_encoder_blocks: int, num_decoder_blocks: int, pp: int, expected: tuple[int, ...]
) -> None:
    config = encoder_decoder(num_encoder_blocks, num_decoder_blocks)
    assert first_blocks(config, Layout(pp=pp, cut="aligned")) == expected


def test_even_cuts_written_out() -> None:
    assert first_blocks(encoder_decoder(3, 2), Layout(pp=2)) == (3,)
    assert first_blocks(encoder_decoder(5, 5), Layout(pp=4)) == (3, 6, 8)
    assert first_blocks(encoder_decoder(5, 5), Layout(pp=1)) == ()
    chunks = Layout(pp=2, chunks=3, placement="interleaved", schedule="interleaved")
    assert first_blocks(encoder_decoder(5, 5), chunks) == (2, 4, 6, 8, 9)


@pytest.mark.parametrize("cut", ["even", "aligned"])
def test_folded_stages_are_the_encoder_then_the_decoder(cut: Cut) -> None:
    folded = Layout(pp=2, chunks=2, placement="folded", schedule="interleaved", cut=cut)
    assert first_blocks(encoder_decoder(2, 7), folded) == (1, 2, 6)
    # Where encoder and decoder need not have as many stages, the larger side gets more.
    unfolded = folded.replace(placement="interleaved", cut="aligned")
    assert first_blocks(encoder_decoder(2, 7), unfolded) == (2, 5, 7)


@pytest.mark.parametrize("architecture", ["decoder_only", "encoder_only"])
def test_aligned_is_even_where_there_is_one_stack(architecture: Architecture) -> None:
    config = small_config(architecture)
    assert stages(config, Layout(pp=2, cut="aligned")) == stages(config, Layout(pp=2))


@SMALL
@given(st.data())
def test_stages_built_from_a_cut_hold_every_parameter_of_the_model_once(data: st.DataObject) -> None:
    config = data.draw(configs(most=4)).replace(tying="none", positions="rope")
    cut = data.draw(cuts(config))
    held: Counter[str] = Counter()
    with torch.device("meta"):
        for stage in cut:
            held.update(
                name for name, _ in slice_model(build(config), config, (stage.first, stage.last)).named_parameters()
            )
        whole = Counter(name for name, _ in build(config).named_parameters())
    assert held == whole


# ---- edges --------------------------------------------------------------------------------------------------------


def test_what_crosses_a_cut_follows_from_where_it_falls() -> None:
    config = encoder_decoder(2, 3)
    assert [crossing(config, cut) for cut in range(6)] == [
        (),
        ("source",),
        ("memory",),
        ("target", "memory"),
        ("target", "memory"),
        (),
    ]


@pytest.mark.parametrize(("architecture", "stream"), [("decoder_only", "target"), ("encoder_only", "source")])
def test_one_stream_crosses_every_cut_of_one_stack(architecture: Architecture, stream: str) -> None:
    config = small_config(architecture)
    assert {crossing(config, cut) for cut in range(1, config.num_blocks)} == {(stream,)}


@PURE
@given(st.data())
def test_what_leaves_a_stage_enters_the_next(data: st.DataObject) -> None:
    config = data.draw(configs())
    cut = data.draw(cuts(config))
    assert cut[0].inputs == ()
    assert cut[-1].outputs == ()
    for stage, following in itertools.pairwise(cut):
        assert stage.outputs
        assert stage.outputs == following.inputs


# ---- shared parameters --------------------------------------------------------------------------------------------


@SMALL
@given(st.data())
def test_the_holders_of_a_shared_parameter_are_the_ranks_that_build_it(data: st.DataObject) -> None:
    config = data.draw(configs(most=4))
    cut = data.draw(cuts(config))
    ranks = data.draw(st.permutations(range(len(cut)))) if data.draw(st.booleans()) else dealt(data, len(cut))
    canonical = {name: group[0] for group in config.tie_groups for name in group}
    holders: dict[str, list[tuple[int, str]]] = {}
    with torch.device("meta"):
        for rank in dict.fromkeys(ranks):
            ranges = [(stage.first, stage.last) for stage in cut if ranks[stage.index] == rank]
            model = slice_model(build(config), config, *ranges)
            tie(model, config)
            for name, _ in model.named_parameters():
                holders.setdefault(canonical.get(name, name), []).append((rank, name))
    expected = {name: sorted(held) for name, held in holders.items() if len(held) > 1}
    shared = shared_parameters(config, cut, ranks)
    assert {parameter.name: sorted(parameter.holders) for parameter in shared} == expected
    owners: dict[str, int] = {}
    with torch.device("meta"):
        for stage in cut:
            for name, _ in slice_model(build(config), config, (stage.first, stage.last)).named_parameters():
                owners.setdefault(canonical.get(name, name), ranks[stage.index])
    assert all(parameter.ranks[0] == owners[parameter.name] for parameter in shared)


@pytest.mark.parametrize(
    ("tying", "cut", "expected"),
    [
        ("all", (1, 4), [(0, "encoder"), (1, "decoder"), (2, "head")]),
        ("all", (2,), [(0, "encoder"), (1, "decoder")]),
        ("all", (1,), [(0, "encoder"), (1, "decoder")]),
        ("all", (3,), [(0, "encoder"), (1, "head")]),
        ("source_target", (1, 4), [(0, "encoder"), (1, "decoder")]),
        ("source_target", (3,), []),
        ("head", (1, 4), [(1, "decoder"), (2, "head")]),
        ("head", (2,), []),
        ("none", (1, 4), []),
    ],
)
def test_a_tied_embedding_is_shared_by_up_to_three_stages(
    tying: str, cut: tuple[int, ...], expected: list[tuple[int, str]]
) -> None:
    names = {side: f"{side}.embedding.token.weight" for side in ("encoder", "decoder")} | {"head": "head.weight"}
    config = encoder_decoder(2, 3, tying=tying)
    shared = shared_parameters(config, stages_of(config, cut), range(len(cut) + 1))
    assert [parameter.holders for parameter in shared] == (
        [tuple((rank, names[side]) for rank, side in expected)] if expected else []
    )


@pytest.mark.parametrize(
    ("ranks", "encoder", "decoder"),
    [((0, 1, 2, 3), (0, 1, 2), (2, 3)), ((0, 1, 0, 1), (0, 1), (0, 1)), ((0, 1, 1, 0), (0, 1), (1, 0))],
)
def test_a_relative_bias_is_shared_by_every_rank_of_its_stack(
    ranks: tuple[int, ...], encoder: tuple[int, ...], decoder: tuple[int, ...]
) -> None:
    config = encoder_decoder(3, 3, positions="relative")
    cut = stages_of(config, (1, 2, 4))
    shared = {parameter.name: parameter.ranks for parameter in shared_parameters(config, cut, ranks)}
    assert shared == {"encoder.relative_bias.weight": encoder, "decoder.relative_bias.weight": decoder}


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # The encoder's and the head's stage on one rank: one copy, under the first of its names.
        ((0, 1, 0), ((0, "encoder.embedding.token.weight"), (1, "decoder.embedding.token.weight"))),
        ((0, 0, 0), ()),
    ],
)
def test_stages_of_one_rank_share_one_copy(ranks: tuple[int, ...], expected: tuple[tuple[int, str], ...]) -> None:
    config = encoder_decoder(2, 3, tying="all")
    shared = shared_parameters(config, stages_of(config, (1, 4)), ranks)
    assert tuple(holder for parameter in shared for holder in parameter.holders) == expected


# ---- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        ((0,), r"^stage 0 would hold blocks 0 to 0 of 5: cuts must rise from 1 to 4, got \[0\]$"),
        ((5,), r"^stage 1 would hold blocks 5 to 5 of 5: cuts must rise from 1 to 4, got \[5\]$"),
        ((3, 2), r"^stage 1 would hold blocks 3 to 2 of 5: cuts must rise from 1 to 4, got \[3, 2\]$"),
        ((2, 2), r"^stage 1 would hold blocks 2 to 2 of 5: cuts must rise from 1 to 4, got \[2, 2\]$"),
        ((2, 9), r"^stage 2 would hold blocks 9 to 5 of 5: cuts must rise from 1 to 4, got \[2, 9\]$"),
        ((-1,), r"^stage 0 would hold blocks 0 to -1 of 5: cuts must rise from 1 to 4, got \[-1\]$"),
    ],
)
def test_a_stage_without_blocks_is_refused(cut: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(encoder_decoder(3, 2), Layout(pp=len(cut) + 1, cut=cut))


@pytest.mark.parametrize("cut", ["even", "aligned"])
def test_more_stages_than_blocks_are_refused(cut: Cut) -> None:
    with pytest.raises(ValueError, match=r"^pp = 6 stages over 5 blocks: try pp <= 5$"):
        stages(encoder_decoder(3, 2), Layout(pp=6, cut=cut))


def test_an_aligned_cut_of_one_stage_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^cut = 'aligned' needs pp >= 2: an encoder stage and a decoder stage"):
        stages(encoder_decoder(3, 2), Layout(cut="aligned"))


def test_more_chunks_than_blocks_are_refused() -> None:
    chunks = Layout(pp=2, chunks=3, placement="interleaved", schedule="interleaved")
    with pytest.raises(ValueError, match=r"^pp = 2 x chunks = 3 stages over 5 blocks: try chunks <= 2$"):
        stages(encoder_decoder(3, 2), chunks)


@pytest.mark.parametrize("cut", ["parameters", "flops", "times", "memory"])
def test_a_cut_that_balances_costs_is_refused_without_a_profile(cut: Cut) -> None:
    with pytest.raises(ValueError, match=f"^cut = '{cut}' balances what blocks cost, and there is no profile"):
        stages(encoder_decoder(3, 2), Layout(pp=2, cut=cut))
