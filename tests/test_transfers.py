"""Does every message have two ends in one order, and is a table that hangs told apart from one that ends?"""

import itertools
import random
import sys
from collections import defaultdict
from collections.abc import Sequence

import pytest

from parallel.edges import Edge, chain
from parallel.schedule import Action, Direction, Table, parse, ranks_of
from parallel.schedules import gpipe, named, one_forward_one_backward, zb_h1
from parallel.transfers import (
    Steps,
    Transfer,
    acknowledged,
    channels,
    check,
    fewest_buffers,
    with_transfers,
)

SIZES = list(itertools.product(range(1, 5), range(1, 7)))
"""Ranks and microbatches; looped over inside the tests, because a test costs more than a table."""


def text(steps: Steps) -> str:
    return " ".join(map(str, steps))


def tables(pp: int, microbatches: int) -> list[Table]:
    """All named tables on all placements."""
    ranks = [range(pp), (*range(pp), *reversed(range(pp))), [*range(pp)] * 2, [*range(pp)] * 3]
    return [table for holders in ranks for table in named(holders, microbatches).values()]


def with_memory(num_stages: int, maker: int) -> tuple[Edge, ...]:
    """Edges of an encoder-decoder whose memory travels directly."""
    direct = (Edge(first=maker, last=last, carries=("memory",)) for last in range(maker + 2, num_stages))
    return tuple(sorted((*chain(num_stages), *direct), key=lambda edge: (edge.first, edge.last)))


# ---- where transfers stand -----------------------------------------------------------------------------------------


def test_a_send_follows_its_maker_and_a_receive_is_posted_an_action_ahead_of_its_user() -> None:
    first, last = with_transfers(one_forward_one_backward(range(2), 2))
    assert text(first) == "0F0 >0-1F0 <1-0B0 0F1 >0-1F1 <1-0B1 0B0 0B1"
    assert text(last) == "<0-1F0 1F0 <0-1F1 1B0 >1-0B0 1F1 1B1 >1-0B1"


def test_stages_of_one_rank_send_nothing() -> None:
    assert [text(steps) for steps in with_transfers(gpipe((0, 0), 1))] == ["0F0 1F0 1B0 0B0"]
    first, last = with_transfers(gpipe((0, 1, 1, 0), 1))
    assert text(first) == "<2-3F0 0F0 >0-1F0 3F0 <1-0B0 3B0 >3-2B0 0B0"
    assert text(last) == "<0-1F0 1F0 <3-2B0 2F0 >2-3F0 2B0 1B0 >1-0B0"


def test_weight_gradients_send_nothing_and_let_no_one_wait() -> None:
    first, last = with_transfers(zb_h1(range(2), 1))
    assert text(first) == "<1-0B0 0F0 >0-1F0 0I0 0W0"
    assert text(last) == "<0-1F0 1F0 1I0 >1-0B0 1W0"


def test_memory_that_travels_directly_has_edges_of_its_own() -> None:
    first, middle, last = with_transfers(gpipe(range(3), 1), with_memory(3, maker=0))
    assert text(first) == "<2-0B0 <1-0B0 0F0 >0-1F0 >0-2F0 0B0"
    assert text(middle) == "<2-1B0 <0-1F0 1F0 >1-2F0 1B0 >1-0B0"
    assert text(last) == "<1-2F0 <0-2F0 2F0 2B0 >2-0B0 >2-1B0"


def test_a_forward_tells_which_gradients_have_been_used() -> None:
    known = acknowledged(one_forward_one_backward(range(2), 3))
    assert known["forward", 0, 2] == (0,)
    assert known["forward", 1, 2] == (1,)
    assert known["forward", 0, 1] == ()


def test_receives_keep_the_order_of_sends_where_use_differs() -> None:
    """Microbatch 1 is used first, but microbatch 0 is sent first: both are posted before."""
    _, receiver = with_transfers(parse("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0"))
    assert text(receiver).startswith("<0-1F0 <0-1F1 1F1")


def test_a_channel_is_told_once() -> None:
    edges = (*chain(4), Edge(first=0, last=2, carries=("memory",)))
    assert channels(edges, (0, 1, 0, 1)) == (
        (0, 1, "forward"),
        (1, 0, "forward"),
        (1, 0, "backward"),
        (0, 1, "backward"),
    )


def test_every_send_has_its_receive_on_the_other_side_in_the_order_of_the_channel() -> None:
    for pp, microbatches in SIZES:
        for table in tables(pp, microbatches):
            ranks, full = ranks_of(table), with_transfers(table)
            ends: dict[tuple[object, ...], dict[str, list[Transfer]]] = defaultdict(lambda: {"send": [], "receive": []})
            for steps in full:
                for step in steps:
                    if isinstance(step, Transfer):
                        sent = step if step.operation == "send" else step.other_end
                        ends[ranks[sent.stage], ranks[sent.peer], sent.direction][step.operation].append(sent)
            assert all(channel["send"] == channel["receive"] for channel in ends.values())
            assert set(ends) == set(channels(chain(len(ranks)), ranks))
            crossings = sum(one != other for one, other in itertools.pairwise(ranks))
            assert sum(len(channel["send"]) for channel in ends.values()) == 2 * microbatches * crossings


# ---- hanging and ending --------------------------------------------------------------------------------------------


def test_named_tables_end_with_few_buffers_whoever_runs_first() -> None:
    """Played by the player of this file, which takes ranks in random order."""
    chance = random.Random(0)
    for pp, microbatches in SIZES:
        for table in tables(pp, microbatches):
            edges = chain(len(ranks_of(table)))
            buffers = max(2, microbatches // pp - 1)
            check(table, microbatches, buffers=buffers)
            assert fewest_buffers(table) <= buffers
            assert not stuck(with_transfers(table), edges, buffers, chance)


def test_the_fewest_buffers_are_the_fewest_with_memory_that_travels_directly_too() -> None:
    """One less, and both players stop, whoever runs first."""
    chance, hung = random.Random(0), 0
    for pp, microbatches in itertools.product((2, 3), (2, 4)):
        for table in tables(pp, microbatches):
            num_stages = len(ranks_of(table))
            edges = with_memory(num_stages, maker=num_stages // 2 - 1)
            fewest = fewest_buffers(table, edges)
            check(table, microbatches, edges, buffers=fewest)
            full = with_transfers(table, edges)
            assert not stuck(full, edges, fewest, chance)
            if fewest > 1:
                hung += 1
                assert stuck(full, edges, fewest - 1, chance)
                with pytest.raises(ValueError, match=r"^the schedule deadlocks: rank \d waits at "):
                    check(table, microbatches, edges, buffers=fewest - 1)
    assert hung


def stuck(full: Sequence[Steps], edges: Sequence[Edge], buffers: int, chance: random.Random) -> list[str]:
    """Where ranks wait for ever; written apart from the product, by counting the messages of every channel."""
    player = Player(full, edges, buffers)
    while able := [rank for rank in range(len(full)) if player.can_go_on(rank)]:
        player.go_on(chance.choice(able))
    return [str(steps[index]) for index, steps in zip(player.at, full, strict=True) if index < len(steps)]


class Player:
    def __init__(self, full: Sequence[Steps], edges: Sequence[Edge], buffers: int) -> None:
        self.full, self.edges, self.buffers = full, edges, buffers
        self.ranks = ranks_of(tuple(tuple(step for step in steps if isinstance(step, Action)) for steps in full))
        self.at = [0] * len(full)
        self.done: set[str] = set()
        self.counts: dict[tuple[object, ...], int] = defaultdict(int)
        self.places: dict[str, int] = {}

    def channel(self, transfer: Transfer) -> tuple[object, ...]:
        ends = (self.ranks[transfer.stage], self.ranks[transfer.peer])
        return (*(ends if transfer.operation == "send" else ends[::-1]), transfer.direction)

    def is_there(self, edge: Edge, direction: Direction, microbatch: int) -> bool:
        """What an edge carries has been made on this rank, or has been sent and has a buffer."""
        maker = edge.first if direction == "forward" else edge.last
        if self.ranks[edge.first] == self.ranks[edge.last]:
            return any(f"{maker}{mark}{microbatch}" in self.done for mark in ("F" if direction == "forward" else "BI"))
        receive = Transfer(operation="receive", direction=direction, edge=edge, microbatch=microbatch)
        return self.places.get(str(receive), sys.maxsize) < self.counts["send", *self.channel(receive)]

    def can_go_on(self, rank: int) -> bool:
        if self.at[rank] == len(self.full[rank]):
            return False
        step = self.full[rank][self.at[rank]]
        if isinstance(step, Transfer):
            key = self.channel(step)
            return (
                step.operation == "receive" or self.counts["send", *key] < self.counts["receive", *key] + self.buffers
            )
        if step.kind == "forward":
            return all(
                self.is_there(edge, "forward", step.microbatch) for edge in self.edges if edge.last == step.stage
            )
        if step.kind == "backward_weight":
            return True
        return all(self.is_there(edge, "backward", step.microbatch) for edge in self.edges if edge.first == step.stage)

    def go_on(self, rank: int) -> None:
        step = self.full[rank][self.at[rank]]
        self.at[rank] += 1
        if isinstance(step, Action):
            self.done.add(str(step))
            return
        count = (step.operation, *self.channel(step))
        if step.operation == "receive":
            self.places[str(step)] = self.counts[count]
        self.counts[count] += 1


@pytest.mark.parametrize(
    ("broken", "told"),
    [
        # Stage 1 wants microbatch 1 first, which stage 0 sends only after it has microbatch 0 back.
        (parse("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), "rank 0 waits at 0B0; rank 1 waits at 1F1"),
        # Each rank wants what the other one makes later.
        (parse("2F0 0F0 2B0 0B0", "3F0 1F0 3B0 1B0"), "rank 0 waits at 2F0; rank 1 waits at 3F0"),
        # Stage 0 wants the gradient of microbatch 1 before it has sent what that is made of.
        (parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"), "rank 0 waits at 0B0; rank 1 waits at 1F1"),
        # A rank that hands over to itself, in the wrong order.
        (parse("1F0 0F0 1B0 0B0"), "rank 0 waits at 1F0"),
    ],
    ids=["order", "ring", "early", "handed over"],
)
def test_a_table_that_hangs_with_any_number_of_buffers_is_refused_and_told_where(broken: Table, told: str) -> None:
    microbatches = 1 + max(action.microbatch for row in broken for action in row)
    with pytest.raises(ValueError, match=rf"^the schedule deadlocks: {told}$"):
        check(broken, microbatches)
    with pytest.raises(ValueError, match=rf"^the schedule deadlocks: {told}$"):
        fewest_buffers(broken)


def test_a_table_that_is_not_complete_is_refused_before_it_is_played() -> None:
    with pytest.raises(ValueError, match=r"^stage 1 runs 1F0 of microbatch 0 of 1; "):
        check(parse("0F0 0B0", "1F0"), 1)
