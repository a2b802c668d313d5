"""Is a cut really the best one, and does each name balance what it says?"""

import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from parallel import cuts
from parallel.balance import Balance, fullest
from parallel.cuts import Cutting, best, least_maximum, order
from parallel.edges import edges
from parallel.figures import StepShape
from parallel.layouts import Cut, Layout, NamedCut, Schedule, Transport
from parallel.partition import first_blocks, stages_of
from parallel.placement import stage_ranks
from parallel.plans import plan
from parallel.predict import predict
from parallel.profile import Profile
from parallel.schedule import parse
from tests.small_models import ARCHITECTURES, small_config

SOURCE_LENGTH, TARGET_LENGTH = 12, 3
MOST_BLOCKS = 9


def model(num_encoder_blocks: int = 5, num_decoder_blocks: int = 4, **changes: Any) -> ModelConfig:
    return small_config(
        "encoder_decoder", num_encoder_blocks=num_encoder_blocks, num_decoder_blocks=num_decoder_blocks, **changes
    )


def profile_of(config: ModelConfig, layout: Layout, target_length: int = TARGET_LENGTH) -> Profile:
    return Profile.of_flops(config, layout, shape_of(config, layout, target_length))


def shape_of(config: ModelConfig, layout: Layout, target_length: int = TARGET_LENGTH) -> StepShape:
    return StepShape(
        num_sequences=2 * layout.microbatches,
        source_length=SOURCE_LENGTH * config.has_encoder,
        target_length=target_length * config.has_decoder,
    )


def balance_of(config: ModelConfig, layout: Layout, profile: Profile) -> Balance:
    return Balance(
        config=config,
        layout=layout,
        shape=profile.shape,
        work=lambda first, last: round(profile.slice(first, last).total),
        message=len,
    )


# ---- the search -----------------------------------------------------------------------------------------------------


@st.composite
def cuttings(draw: st.DrawFn) -> Cutting:
    """Blocks of any cost, ends, stages that weigh differently, messages, several stages a rank, fixed boundaries."""
    pp, chunks = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (2, 2), (2, 3), (3, 2), (2, 4)]))
    num_stages = pp * chunks
    num_blocks = draw(st.integers(num_stages, max(num_stages, MOST_BLOCKS)))
    is_v = chunks == 2 and draw(st.booleans())
    ranks = stage_ranks("v" if is_v else "interleaved", pp, chunks) if chunks > 1 else tuple(range(pp))
    # Few different costs, so that there are ties to break.
    costs = draw(st.lists(st.integers(0, 4), min_size=num_blocks, max_size=num_blocks))
    weights = draw(st.lists(st.integers(1, 3), min_size=num_stages, max_size=num_stages))
    messages = draw(st.lists(st.integers(0, 3), min_size=num_blocks + 1, max_size=num_blocks + 1))
    fixed = {}
    if num_stages > 1 and draw(st.booleans()):
        stage = draw(st.integers(1, num_stages - 1))
        fixed = {stage: draw(st.integers(stage, num_blocks - num_stages + stage))}
    return Cutting(
        num_blocks=num_blocks,
        ranks=ranks,
        held=lambda stage, first, last: weights[stage] * sum(costs[first:last]),
        sent=lambda _, first, last: messages[first] + messages[last],
        fixed=fixed,
        per_rank=draw(st.sampled_from([0, 0, 1, 3])),
        per_stage=draw(st.integers(1, 2)),
    )


def all_cuts(cutting: Cutting) -> list[tuple[int, ...]]:
    """Every cut without an empty stage, written down without any cleverness."""
    inner = itertools.combinations(range(1, cutting.num_blocks), cutting.num_stages - 1)
    return [cut for cut in inner if all((0, *cut)[stage] == block for stage, block in cutting.fixed.items())]


def judged(cutting: Cutting, cut: tuple[int, ...]) -> tuple[int, int, int, int, tuple[int, ...]]:
    """The criteria, computed without the code under test."""
    starts = (0, *cut, cutting.num_blocks)
    costs = [
        cutting.held(stage, *slice_) + cutting.sent(stage, *slice_)
        for stage, slice_ in enumerate(itertools.pairwise(starts))
    ]
    ranks = [
        sum(cost for cost, holder in zip(costs, cutting.ranks, strict=True) if holder == rank) for rank in range(9)
    ]
    weighted = cutting.per_rank * max(ranks) + cutting.per_stage * max(costs)
    return weighted, max(ranks), max(costs), sum(cost**2 for cost in costs), cut


@settings(deadline=None, max_examples=400)
@given(cuttings())
def test_the_best_cut_is_that_of_brute_force(cutting: Cutting) -> None:
    expected = min(all_cuts(cutting), key=lambda cut: judged(cutting, cut))
    assert best(cutting) == expected
    worst_stage = min(max(cutting.costs((0, *cut, cutting.num_blocks))) for cut in all_cuts(cutting))
    assert least_maximum(cutting) == worst_stage
    starts = (0, *expected, cutting.num_blocks)
    assert order(cutting, starts)[:4] == judged(cutting, expected)[:4]


@settings(deadline=None, max_examples=150)
@given(cuttings())
def test_where_cuts_are_too_many_to_compare_stages_are_best_and_ranks_no_worse(cutting: Cutting) -> None:
    exact = best(cutting)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "MOST_COMPARED", 0)
        found = best(cutting, candidates=[exact])
        alone = best(cutting)
    assert judged(cutting, found)[:3] == judged(cutting, exact)[:3]
    assert judged(cutting, alone) >= judged(cutting, exact)
    if not cutting.per_rank or not cutting.shares_ranks:
        assert judged(cutting, alone)[0] == judged(cutting, exact)[0]


def equal_blocks(num_blocks: int, ranks: tuple[int, ...]) -> Cutting:
    return Cutting(num_blocks=num_blocks, ranks=ranks, held=lambda _, first, last: last - first, sent=lambda *_: 0)


def test_ties_are_broken_by_variance_and_then_in_order() -> None:
    # 7 blocks on 3 stages: every cut with a largest stage of 3 has the same maximum; 2 + 2 + 3 varies least.
    assert best(equal_blocks(7, (0, 1, 2))) == (2, 4)
    # 10 blocks on 4 chunks of 2 ranks: 5 a rank.
    assert best(equal_blocks(10, (0, 1, 0, 1))) == (2, 4, 7)
    assert best(equal_blocks(10, (0, 1, 1, 0))) == (2, 4, 7)


def test_many_blocks_are_cut_at_once() -> None:
    generator = random.Random(1)
    sums = [0, *itertools.accumulate(generator.randint(1, 9) for _ in range(200))]
    by_stage = Cutting(
        num_blocks=200,
        ranks=stage_ranks("interleaved", 16, 4),
        held=lambda _, first, last: sums[last] - sums[first],
        sent=lambda *_: 0,
    )
    starts = (0, *best(by_stage), 200)
    assert max(by_stage.costs(starts)) == least_maximum(by_stage)
    assert max(by_stage.rank_costs(starts)) < 1.15 * sums[-1] / 16
    by_rank = dataclasses.replace(by_stage, per_rank=1, per_stage=0)
    assert max(by_rank.rank_costs((0, *best(by_rank), 200))) < 1.03 * sums[-1] / 16


# ---- what a name balances -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", ["parameters", "flops", "memory"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_named_cut_is_the_best_of_all(architecture: str, cut: Cut) -> None:
    blocks = {"encoder_only": (7, 0), "decoder_only": (0, 7), "encoder_decoder": (4, 3)}[architecture]
    config = small_config(
        architecture,  # type: ignore[arg-type]
        num_encoder_blocks=blocks[0],
        num_decoder_blocks=blocks[1],
        tying="head",
    )
    layout = Layout(pp=3, cut=cut, microbatches=4, tp=2)
    profile = profile_of(config, layout)
    read: dict[str, Callable[[Layout], float]] = {
        "parameters": lambda one: max(_parameters(config, one)),
        "flops": lambda one: max(profile.stage(stage).total for stage in plan(config, one).stages),
        "memory": lambda one: max(rank.peak_bytes for rank in predict(plan(config, one), shape_of(config, one))),
    }
    largest = read[str(cut)]
    explicit = (layout.replace(cut=one) for one in itertools.combinations(range(1, config.num_blocks), 2))
    assert largest(layout.replace(cut=first_blocks(config, layout, profile))) == min(map(largest, explicit))


def _parameters(config: ModelConfig, layout: Layout) -> list[int]:
    return [rank.figures.parameters.total for rank in predict(plan(config, layout), shape_of(config, layout))]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("changes", [{}, {"positions": "relative", "tying": "all"}, {"positions": "rope"}])
def test_the_memory_that_is_balanced_is_what_is_predicted(schedule: Schedule, changes: dict[str, Any]) -> None:
    config = model(**changes)
    layout = Layout(pp=3, tp=2, cut="memory", microbatches=5, schedule=schedule, recompute="selective")
    cutting = balance_of(config, layout, profile_of(config, layout)).cutting()
    for cut in itertools.combinations(range(1, config.num_blocks), 2):
        told = predict(plan(config, layout.replace(cut=cut)), shape_of(config, layout))
        expected = [max(one.peak_bytes for one in told if one.figures.coordinate.pp == pp) for pp in range(3)]
        assert cutting.costs((0, *cut, config.num_blocks)) == expected


def test_stages_that_keep_more_microbatches_get_fewer_blocks_by_memory() -> None:
    config = small_config("decoder_only", num_decoder_blocks=12, vocabulary=8, width=8, ffn_width=64)
    layout = Layout(pp=4, cut="memory", microbatches=8)
    sizes = [
        stage.num_blocks for stage in stages_of(config, first_blocks(config, layout, profile_of(config, layout, 12)))
    ]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_what_a_rank_keeps_is_told_at_its_fullest_moment() -> None:
    (row,) = parse("0F0 0F1 1F0 1I0 1W0 0I0 0W0 1F1 1I1 0I1 0W1 1W1")
    assert fullest(row) == {0: (2, 0), 1: (1, 0)}
    assert fullest(parse("0F0 0I0 0F1 0F2 0I1 0I2 0W0 0W1 0W2")[0]) == {0: (2, 1)}


@pytest.mark.parametrize("transport", ["relay", "direct", "kv"])
@pytest.mark.parametrize(("pp", "chunks"), [(4, 1), (2, 2)])
def test_stages_pay_for_every_tensor_that_is_sent(transport: Transport, pp: int, chunks: int) -> None:
    config = model(3, 4)
    names = ("linear", "1f1b") if chunks == 1 else ("interleaved", "interleaved")
    layout = Layout(pp=pp, chunks=chunks, placement=names[0], schedule=names[1], transport=transport, cut="flops")  # type: ignore[arg-type]
    ranks = stage_ranks(layout.placement, pp, chunks)
    balance = balance_of(config, layout, profile_of(config, layout))
    for cut in itertools.combinations(range(1, config.num_blocks), 3):
        stages = stages_of(config, cut)
        paid = sum(balance.sent(stage.index, stage.first, stage.last) for stage in stages)
        sent = [edge for edge in edges(config, stages, transport) if ranks[edge.first] != ranks[edge.last]]
        expected = 2 * sum(len(edge.carries) for edge in sent)
        # Who sends a memory's gradient back to a maker on its own rank is charged all the same.
        slack = 0 if transport == "relay" or chunks == 1 else len(stages)
        assert expected <= paid <= expected + slack


def test_dear_messages_move_a_cut_to_where_less_crosses() -> None:
    config = model(4, 4)
    layout = Layout(pp=2, cut="flops")
    profile = profile_of(config, layout, target_length=SOURCE_LENGTH)
    assert first_blocks(config, layout, profile) != (4,)
    dear = profile.model.total / profile.carried_bytes("memory")
    whole = Profile(**{name: getattr(profile, name) for name in profile.__slots__} | {"byte_cost": dear})
    # Inside the encoder or at its end one tensor crosses, inside the decoder two.
    assert first_blocks(config, layout, whole)[0] <= 4


def test_an_aligned_cut_with_a_profile_splits_the_stages_by_cost() -> None:
    config = model(6, 6)
    layout = Layout(pp=4, cut="aligned")
    assert first_blocks(config, layout) == (3, 6, 9)
    assert first_blocks(config, layout, profile_of(config, layout)) == (2, 4, 6)


def test_a_folded_cut_is_the_best_with_the_encoder_in_the_first_half() -> None:
    config = model(5, 4, vocabulary=400)
    layout = Layout(pp=2, chunks=2, placement="folded", schedule="interleaved", cut="flops", microbatches=2)
    profile = profile_of(config, layout)
    cutting = balance_of(config, layout, profile).cutting()
    halves = (cut for cut in itertools.combinations(range(1, 9), 3) if cut[1] == 5)
    assert first_blocks(config, layout, profile) == min(halves, key=lambda cut: judged(cutting, cut))


@pytest.mark.parametrize(
    ("cut", "schedule", "per_rank", "per_stage"),
    [("memory", "interleaved", 1, 0), ("flops", "list", 8, 1), ("flops", "interleaved", 0, 1)],
)
def test_memory_and_lists_weigh_ranks_where_named_schedules_weigh_stages(
    cut: NamedCut, schedule: Schedule, per_rank: int, per_stage: int
) -> None:
    config = model(5, 4, vocabulary=400)
    layout = Layout(pp=2, chunks=2, placement="interleaved", schedule=schedule, cut=cut, microbatches=4)
    profile = profile_of(config, layout)
    cutting = balance_of(config, layout, profile).cutting()

    def weighted(one: tuple[int, ...]) -> int:
        starts = (0, *one, config.num_blocks)
        return per_rank * max(cutting.rank_costs(starts)) + per_stage * max(cutting.costs(starts))

    assert (cutting.per_rank, cutting.per_stage) == (per_rank, per_stage)
    least = min(map(weighted, itertools.combinations(range(1, config.num_blocks), 3)))
    assert weighted(first_blocks(config, layout, profile)) == least


def test_no_stage_is_empty_however_costly_the_head() -> None:
    config = model(2, 2, vocabulary=100_000)
    layout = Layout(pp=4, cut="flops")
    assert first_blocks(config, layout, profile_of(config, layout)) == (1, 2, 3)
