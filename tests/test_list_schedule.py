"""Is a listed table as fast as the best named one, clearly faster where stages are unequal, and within its limit?"""

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.bounds import least_seconds
from parallel.edges import Edge
from parallel.list_schedule import list_schedule, most_kept, usual_limit
from parallel.pieces import Pieces
from parallel.placement import Placement, stage_ranks
from parallel.schedule import Action, Direction, Row, Table, is_split
from parallel.schedules import named
from parallel.simulate import StageSeconds, TransferSeconds, simulate
from parallel.transfers import check

RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Encoder seconds over decoder seconds of a rank."""
PLACES: tuple[tuple[Placement, int], ...] = (("linear", 1), ("interleaved", 2), ("interleaved", 3), ("v", 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    ranks: tuple[int, ...]
    microbatches: int
    seconds: StageSeconds
    latency: float
    occupancy: float
    kept: tuple[float, ...]
    kept_for_weights: tuple[float, ...]
    limit: tuple[float, ...]
    split: bool

    def cost(self, _edge: Edge, _direction: Direction) -> TransferSeconds:
        return TransferSeconds(latency=self.latency, occupancy=self.occupancy)

    def table(self) -> Table:
        return list_schedule(
            self.ranks,
            self.microbatches,
            self.seconds,
            transfer_seconds=self.cost,
            kept=self.kept,
            kept_for_weights=self.kept_for_weights,
            limit=self.limit,
            split=self.split,
        )

    def pieces(self, split: bool) -> Pieces:
        return Pieces(
            self.ranks,
            self.seconds,
            split=split,
            transfer_seconds=self.cost,
            kept=self.kept,
            kept_for_weights=self.kept_for_weights,
        )

    def makespan(self, table: Table) -> float:
        return simulate(table, self.seconds, transfer_seconds=self.cost).makespan_seconds

    def fits(self, table: Table) -> bool:
        most = most_kept(table, self.kept, self.kept_for_weights)
        return all(now <= limit for now, limit in zip(most, self.limit, strict=True))

    def comparable(self) -> list[Table]:
        """Named tables that keep to what is asked for."""
        tables = named(self.ranks, self.microbatches).values()
        return [table for table in tables if self.fits(table) and (self.split or not is_split(table))]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    placement, chunks = draw(st.sampled_from(PLACES))
    ranks = stage_ranks(placement, draw(st.integers(2, 4)), chunks)
    split = draw(st.booleans())

    def by_stage(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in ranks)

    case = Case(
        ranks=ranks,
        microbatches=draw(st.integers(1, 7)),
        seconds=StageSeconds(
            forward=by_stage((0.25, 0.5, 1.0, 1.5, 2.25)),
            backward_input=by_stage((0.25, 0.5, 1.0, 1.5, 2.25)),
            backward_weight=by_stage((0.0, 0.5, 1.0, 1.5)),
        ),
        latency=draw(st.sampled_from((0.0, 0.25, 1.0))),
        occupancy=draw(st.sampled_from((0.0, 0.25, 1.0))),
        kept=by_stage((1, 2, 5)),
        kept_for_weights=by_stage((0, 1, 2, 7)),
        limit=(math.inf,) * (max(ranks) + 1),
        split=split,
    )
    # What one microbatch needs if backwards are whole, or more.
    spare = draw(st.none() | st.integers(0, 20))
    if spare is None:
        return case
    needs = [case.pieces(split=False).room(rank)[1] for rank in range(max(ranks) + 1)]
    return dataclasses.replace(case, limit=tuple(need + spare for need in needs))


# ---- never worse than the named ones -------------------------------------------------------------------------------


@given(cases())
@settings(max_examples=100, deadline=None)
def test_no_named_table_within_the_limit_is_faster(case: Case) -> None:
    table = case.table()
    check(table, case.microbatches)
    assert case.fits(table)
    makespan = case.makespan(table)
    assert all(makespan <= case.makespan(other) * (1 + 1e-9) for other in case.comparable())
    bounds = [least_seconds(case.pieces(split), case.microbatches, case.limit) for split in {False, case.split}]
    assert makespan >= min(bounds) * (1 - 1e-9)
    assert case.split or not is_split(table)


@given(cases())
@settings(max_examples=40, deadline=None)
def test_however_short_the_search_is_no_named_table_is_faster(case: Case) -> None:
    with mock.patch("parallel.list_schedule.NUM_ACTIONS", 0):
        makespan = case.makespan(case.table())
    assert all(makespan <= case.makespan(other) * (1 + 1e-9) for other in case.comparable())


@given(cases())
@settings(max_examples=15, deadline=None)
def test_the_same_question_has_the_same_answer(case: Case) -> None:
    assert case.table() == case.table()


def test_leave_to_split_backwards_costs_no_time() -> None:
    for ratio in RATIOS:
        seconds = folded(4, ratio)
        for limit in (math.inf, 8.0):
            whole, split = (
                simulate(list_schedule((0, 1, 2, 3) * 2, 16, seconds, limit=limit, split=split), seconds)
                for split in (False, True)
            )
            assert split.makespan_seconds <= whole.makespan_seconds


# ---- faster where stages are unequal -------------------------------------------------------------------------------


def folded(pp: int, ratio: float) -> StageSeconds:
    """A chunk of the encoder and one of the decoder on every rank; two seconds of forward a rank in all."""
    encoder, decoder = 2 * ratio / (1 + ratio), 2 / (1 + ratio)
    forward = (encoder,) * pp + (decoder,) * pp
    return StageSeconds(forward=forward, backward_input=forward, backward_weight=forward)


@pytest.mark.parametrize("pp", [4, 8])
@pytest.mark.parametrize("ratio", RATIOS)
def test_folded_encoder_decoders_come_near_the_bound_in_the_memory_of_the_interleaved_table(
    pp: int, ratio: float
) -> None:
    """Where one side costs four times the other, the interleaved order takes a seventh to four tenths longer."""
    ranks, microbatches, seconds = (*range(pp),) * 2, 4 * pp, folded(pp, ratio)
    limit = usual_limit(ranks, microbatches)
    assert limit == (3 * pp - 1,) * pp
    interleaved = simulate(named(ranks, microbatches)["interleaved"], seconds).makespan_seconds
    for split, gap, gain in ((False, 1.04, 1.14), (True, 1.001, 1.25)):
        table = list_schedule(ranks, microbatches, seconds, limit=limit, split=split)
        makespan = simulate(table, seconds).makespan_seconds
        assert max(most_kept(table)) <= limit[0]
        assert makespan <= gap * least_seconds(Pieces(ranks, seconds, split=split), microbatches)
        if ratio in {0.25, 4.0}:
            assert interleaved >= gain * makespan


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("cut", ["even", "aligned"])
def test_linear_encoder_decoders_reach_the_bound(cut: str, ratio: float) -> None:
    """Nothing can be faster: what is left of the bubble is the fault of the cut."""
    pp, microbatches = 4, 16
    num_encoder = 2 if cut == "even" else min(3, max(1, round(pp * ratio / (1 + ratio))))
    forward = (ratio / num_encoder,) * num_encoder + (1 / (pp - num_encoder),) * (pp - num_encoder)
    seconds = StageSeconds(forward=forward, backward_input=forward, backward_weight=forward)
    for split in (False, True):
        table = list_schedule(range(pp), microbatches, seconds, limit=math.inf, split=split)
        bound = least_seconds(Pieces(range(pp), seconds, split=split), microbatches)
        assert simulate(table, seconds).makespan_seconds == pytest.approx(bound)


@pytest.mark.parametrize(("ranks", "split"), [((0, 1), True), ((0, 1, 0, 1), False), ((0, 1, 1, 0), False)])
def test_small_tables_are_as_fast_as_the_fastest_of_all(ranks: tuple[int, ...], split: bool) -> None:
    """All tables whose ranks take microbatches in order are compared; the rest only renames them."""
    chance = random.Random(0)
    microbatches = 3 if len(ranks) == 2 else 2
    rows = [
        list(all_rows([s for s, holder in enumerate(ranks) if holder == rank], microbatches, split)) for rank in (0, 1)
    ]
    for _ in range(3):
        durations = [tuple(chance.choice((0.5, 1.0, 2.0, 3.0)) for _ in ranks) for _ in range(3)]
        seconds = StageSeconds(forward=durations[0], backward_input=durations[1], backward_weight=durations[2])
        fastest = math.inf
        for table in itertools.product(*rows):
            try:
                fastest = min(fastest, simulate(table, seconds).makespan_seconds)
            except ValueError:
                # Its ranks wait for each other.
                continue
        listed = simulate(
            list_schedule(ranks, microbatches, seconds, limit=math.inf, split=split), seconds
        ).makespan_seconds
        assert listed == pytest.approx(fastest)
        assert listed >= least_seconds(Pieces(ranks, seconds, split=split), microbatches) * (1 - 1e-9)


def all_rows(stages: Sequence[int], microbatches: int, split: bool) -> Iterator[Row]:
    """Every order of a rank's actions in which each microbatch goes its way, and none overtakes another."""
    way = [f"{stage}F" for stage in stages]
    for stage in reversed(stages):
        way += [f"{stage}I", f"{stage}W"] if split else [f"{stage}B"]

    def orders(done: tuple[int, ...]) -> Iterator[Row]:
        if done == (len(way),) * microbatches:
            yield ()
        for index, count in enumerate(done):
            if count < len(way) and (index == 0 or count < done[index - 1]):
                action = Action.parse(f"{way[count]}{index}")
                for rest in orders((*done[:index], count + 1, *done[index + 1 :])):
                    yield (action, *rest)

    return orders((0,) * microbatches)


# ---- limits --------------------------------------------------------------------------------------------------------


def test_more_room_makes_faster_tables_and_one_microbatch_a_rank_makes_the_slowest() -> None:
    ranks, seconds, makespans = (0, 1, 2, 0, 1, 2), folded(3, 0.25), []
    for most in (2, 3, 5, 8, 100):
        table = list_schedule(ranks, 9, seconds, limit=(most,) * 3, split=False)
        assert max(most_kept(table)) <= most
        makespans.append(simulate(table, seconds).makespan_seconds)
    assert makespans == sorted(makespans, reverse=True)
    alone = list_schedule(range(3), 9, StageSeconds.equal(3), limit=(1,) * 3, split=False)
    assert simulate(alone, StageSeconds.equal(3)).makespan_seconds == 9 * 9


def test_a_limit_below_one_microbatch_is_refused_with_the_least_that_works() -> None:
    seconds = StageSeconds.equal(4)
    with pytest.raises(
        ValueError,
        match=r"^rank 1 may keep 11 and needs 12 for one microbatch of stages 1, 3: no schedule fits; "
        r"try a limit of 12, smaller microbatches or more recomputation$",
    ):
        list_schedule((0, 1, 0, 1), 3, seconds, kept=(4, 5, 6, 7), limit=(10, 11))
    table = list_schedule((0, 1, 0, 1), 3, seconds, kept=(4, 5, 6, 7), limit=(10, 12))
    assert most_kept(table, (4, 5, 6, 7)) == (10, 12)


def test_backwards_stay_whole_where_their_halves_do_not_fit() -> None:
    """Full recomputation: much more is kept between the halves than before them."""
    kept, between, limit = (1.0,) * 2, (10.0,) * 2, (4.0,) * 2
    table = list_schedule((0, 1), 4, StageSeconds.equal(2), kept=kept, kept_for_weights=between, limit=limit)
    assert not is_split(table)
    assert max(most_kept(table, kept, between)) <= 4


def test_without_a_limit_it_is_the_usual_one() -> None:
    seconds = folded(4, 0.25)
    for ranks in ((0, 1, 2, 3, 0, 1, 2, 3), (0, 1, 2, 3, 3, 2, 1, 0)):
        limit = usual_limit(ranks, 8)
        assert list_schedule(ranks, 8, seconds) == list_schedule(ranks, 8, seconds, limit=limit)
        assert list_schedule(ranks, 8, seconds) == list_schedule(ranks, 8, seconds, limit=limit[0])
        assert max(most_kept(list_schedule(ranks, 8, seconds))) <= limit[0]


def test_the_usual_limit_is_that_of_the_named_tables_other_than_gpipe() -> None:
    assert usual_limit(range(4), 16, split=False) == (4,) * 4
    assert usual_limit(range(4), 16) == (7,) * 4
    assert usual_limit((0, 1, 1, 0), 16) == (4,) * 2
    assert usual_limit((0, 1, 1, 0), 16, kept=(1, 2, 3, 4), split=False) == (10,) * 2
    assert usual_limit((0, 1, 0, 1), 16, kept=(2, 2, 2, 2)) == (10,) * 2


@pytest.mark.parametrize(
    ("ranks", "microbatches", "told"),
    [
        ((0, 1), 0, r"^microbatches = 0; a step has at least 1$"),
        ((0, 1, 2), 4, r"^durations of 2 stages for 3; give one a stage$"),
        ((0, 1), 4, r"^limits of 3 ranks for 2; give one a rank, or one for all$"),
    ],
)
def test_questions_without_sense_are_refused(ranks: tuple[int, ...], microbatches: int, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        list_schedule(ranks, microbatches, StageSeconds.equal(2), limit=(9, 9, 9))
