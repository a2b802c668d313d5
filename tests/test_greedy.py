"""Does playing by urgency keep to its rules, and do the bounds hold that it is measured by?"""

import dataclasses
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.bounds import least_seconds
from parallel.edges import Edge, chain
from parallel.greedy import play
from parallel.list_schedule import most_kept
from parallel.pieces import Pieces
from parallel.schedule import Direction, Table, parse
from parallel.simulate import StageSeconds, TransferSeconds, simulate
from parallel.transfers import check


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    ranks: tuple[int, ...]
    microbatches: int
    seconds: StageSeconds
    edges: tuple[Edge, ...]
    port: str | None
    kept: tuple[float, ...]
    kept_for_weights: tuple[float, ...]
    split: bool
    spare: int | None
    seed: int

    @property
    def pieces(self) -> Pieces:
        return Pieces(
            self.ranks,
            self.seconds,
            split=self.split,
            edges=self.edges,
            transfer_seconds=self.cost,
            kept=self.kept,
            kept_for_weights=self.kept_for_weights,
        )

    @property
    def limit(self) -> tuple[float, ...] | None:
        if self.spare is None:
            return None
        return tuple(self.pieces.room(rank)[1] + self.spare for rank in range(self.pieces.num_ranks))

    @property
    def offsets(self) -> list[float]:
        chance = random.Random(self.seed)
        return [chance.choice((0, 1, 2)) * head + chance.random() for head in self.pieces.heads_seconds]

    def cost(self, edge: Edge, direction: Direction) -> TransferSeconds:
        occupancy = 1.5 if direction == "forward" else 0.5
        return TransferSeconds(latency=0.25 * (1 + edge.first % 2), occupancy=occupancy, port=self.port)

    def makespan(self, table: Table) -> float:
        return simulate(table, self.seconds, edges=self.edges, transfer_seconds=self.cost).makespan_seconds


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Stages on ranks in any order, memory that travels directly, any costs, and room for hardly one microbatch."""
    ranks = tuple(draw(st.permutations([*range(draw(st.integers(1, 4)))] * draw(st.integers(1, 3)))))
    last = len(ranks) - 1
    maker = draw(st.integers(0, last))
    direct = tuple(Edge(first=maker, last=later, carries=("memory",)) for later in range(maker + 2, last + 1))

    def by_stage(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(draw(st.sampled_from(values)) for _ in ranks)

    return Case(
        ranks=ranks,
        microbatches=draw(st.integers(1, 6)),
        seconds=StageSeconds(
            forward=by_stage((0.0, 0.5, 1.0, 2.25)),
            backward_input=by_stage((0.0, 0.5, 1.0, 2.25)),
            backward_weight=by_stage((0.0, 0.5, 1.0)),
        ),
        edges=(*chain(len(ranks)), *(direct if draw(st.booleans()) else ())),
        port=draw(st.sampled_from((None, "network"))),
        kept=by_stage((1, 2, 5)),
        kept_for_weights=by_stage((0, 1, 2, 7)),
        split=draw(st.booleans()),
        spare=draw(st.sampled_from((None, 0, 1, 4, 20))),
        seed=draw(st.integers(0, 99)),
    )


@given(cases(), st.sampled_from((0.0, 0.5, 2.0)))
@settings(max_examples=200, deadline=None)
def test_every_play_ends_in_a_table_that_keeps_to_its_limit_and_its_time(case: Case, patience: float) -> None:
    limit = case.limit
    played = play(case.pieces, case.microbatches, case.offsets, patience=patience, limit=limit)
    check(played.table, case.microbatches, case.edges)
    assert played.most == pytest.approx(most_kept(played.table, case.kept, case.kept_for_weights))
    assert limit is None or all(most <= given for most, given in zip(played.most, limit, strict=True))
    makespan = case.makespan(played.table)
    if patience:
        # Somebody may have waited for nothing, which the table does not repeat.
        assert makespan <= played.makespan_seconds + 1e-9
    else:
        assert makespan == pytest.approx(played.makespan_seconds)
    assert makespan >= least_seconds(case.pieces, case.microbatches, limit) * (1 - 1e-9)


def test_the_most_urgent_goes_first_and_the_others_follow_by_microbatch() -> None:
    pieces = Pieces((0, 0), StageSeconds.equal(2), split=False)
    assert play(pieces, 2, (0, 0, 0, 0)).table == parse("0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
    assert play(pieces, 2, (0, 99, 99, 99)).table == parse("0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1")
    assert play(pieces, 2, (0, 99, 199, 199)).table == parse("0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1")


def test_a_patient_rank_waits_for_something_more_urgent() -> None:
    """At 4, rank 0 could start a third forward; the gradients of the first microbatch are there at 4.5."""
    seconds = StageSeconds(forward=(2.0, 1.5), backward_input=(1.0, 1.0), backward_weight=(0.0, 0.0))
    pieces = Pieces((0, 1), seconds, split=False)
    hasty, patient = (play(pieces, 3, (9, 0, 0, 0), patience=patience) for patience in (0.2, 0.3))
    assert hasty.table[0] == parse("0F0 0F1 0F2 0B0 0B1 0B2")[0]
    assert patient.table[0] == parse("0F0 0F1 0B0 0F2 0B1 0B2")[0]


# ---- what one microbatch takes --------------------------------------------------------------------------------------


def test_a_lone_microbatch_takes_the_whole_way() -> None:
    seconds = StageSeconds(forward=(1, 2), backward_input=(3, 4), backward_weight=(5, 6))
    cost = TransferSeconds(latency=0.5, occupancy=0.25)
    whole = Pieces((0, 1), seconds, split=False, transfer_seconds=lambda *_: cost)
    assert whole.heads_seconds == [0, 1.75, 14.5, 3.75]
    assert whole.tails_seconds == [21.5, 18.75, 0, 8.75]
    split = Pieces((0, 1), seconds, split=True, transfer_seconds=lambda *_: cost)
    assert split.heads_seconds == [0, 1.75, 8.5, 3.75, 11.5, 7.75]
    assert split.tails_seconds == [15.5, 12.75, 5, 8.75, 0, 0]
    assert (whole.period_seconds, split.period_seconds) == (12, 12)


def test_room_is_what_is_held_and_what_the_rest_of_the_way_takes_on_top() -> None:
    pieces = Pieces((0, 0), StageSeconds.equal(2), split=True, kept=(4, 2), kept_for_weights=(1, 5))
    # 0F +4, 1F +2, 1I +3, 1W -5, 0I -3, 0W -1
    assert pieces.room(0) == (0, 9)
    assert pieces.room(0, done=0b000011) == (6, 3)
    assert pieces.room(0, done=0b001011) == (9, 0)
    assert pieces.room(0, done=0b101011) == (4, 0)
    assert pieces.room(0, done=0b111111) == (0, 0)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_bounds_are_those_worked_out_by_hand() -> None:
    # Path: one microbatch through all of it.
    lone = Pieces((0, 1), StageSeconds.equal(2), split=False)
    assert least_seconds(lone, 1) == 6
    # Rank: the last one begins after a forward and is followed by a backward.
    assert least_seconds(lone, 4) == 1 + 4 * 3 + 2
    # Its weights may come last.
    assert least_seconds(Pieces((0, 1), StageSeconds.equal(2), split=True), 4) == 1 + 4 * 3
    # Room: a microbatch stays on rank 0 for 6 seconds, and only one may.
    assert least_seconds(lone, 4, limit=(1, 9)) == 4 * 6


def test_a_lap_leaves_a_rank_idle_for_the_forwards_of_the_ranks_before_it() -> None:
    """Rank 3 has nothing but the encoder's forwards until the decoder's come round, behind all of these."""
    forward = (0.4,) * 4 + (1.6,) * 4
    seconds = StageSeconds(forward=forward, backward_input=forward, backward_weight=forward)
    dealt, work = (0, 1, 2, 3) * 2, 16 * 3 * (0.4 + 1.6)
    assert least_seconds(Pieces(dealt, seconds, split=False), 16) == pytest.approx(3 * 1.6 + work + 3 * 3.2)
    assert least_seconds(Pieces(dealt, seconds, split=True), 16) == pytest.approx(3 * 1.6 + work)
