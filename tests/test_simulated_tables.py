"""What holds of every simulated step, whatever its table, durations and links?"""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.edges import Edge, chain
from parallel.placement import Placement, stage_ranks
from parallel.schedule import Action, Direction, Table
from parallel.schedules import BUILDERS
from parallel.simulate import StageSeconds, TransferSeconds, simulate
from parallel.timeline import Message, Timeline

PIPELINES: tuple[tuple[str, Placement, int], ...] = (
    ("gpipe", "linear", 1),
    ("1f1b", "linear", 1),
    ("zb_h1", "linear", 1),
    ("zb_h2", "linear", 1),
    ("interleaved", "interleaved", 2),
    ("interleaved", "folded", 2),
    ("gpipe", "v", 2),
    ("zb_v", "v", 2),
)
SECONDS = st.sampled_from((0.0, 0.25, 0.5, 1.0, 1.5, 2.25))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    table: Table
    seconds: StageSeconds
    edges: tuple[Edge, ...]
    costs: dict[tuple[str, Direction], TransferSeconds]

    def simulated(self) -> Timeline:
        return simulate(self.table, self.seconds, edges=self.edges, transfer_seconds=self.cost)

    def cost(self, edge: Edge, direction: Direction) -> TransferSeconds:
        return self.costs[edge.name, direction]


@st.composite
def cases(
    draw: st.DrawFn,
) -> Case:
    """A named table for stages of any cost, with extra edges and links of any speed."""
    name, placement, chunks = draw(st.sampled_from(PIPELINES))
    ranks = stage_ranks(placement, draw(st.integers(2, 4)), chunks)
    table = BUILDERS[name](ranks, draw(st.integers(1, 5)))
    durations = st.tuples(*[SECONDS] * len(ranks))
    seconds = StageSeconds(forward=draw(durations), backward_input=draw(durations), backward_weight=draw(durations))
    pairs = draw(st.sets(st.tuples(st.integers(0, len(ranks) - 1), st.integers(0, len(ranks) - 1)), max_size=3))
    extra = tuple(
        Edge(first=first, last=last, carries=("memory",)) for first, last in sorted(pairs) if last > first + 1
    )
    edges = (*chain(len(ranks)), *extra)
    ports = st.sampled_from((None, "card", "link"))
    directions: tuple[Direction, ...] = ("forward", "backward")
    costs = {
        (edge.name, way): TransferSeconds(latency=draw(SECONDS), occupancy=draw(SECONDS), port=draw(ports))
        for edge in edges
        for way in directions
    }
    return Case(table=table, seconds=seconds, edges=edges, costs=costs)


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_every_action_starts_as_soon_as_it_can(case: Case) -> None:
    """Neither before its rank, its own forward and its messages are there, nor any later."""
    timeline = case.simulated()
    assert timeline.order == case.table
    arrivals = arrived(timeline, case.edges)
    for row in timeline.spans:
        free = 0.0
        for action, start_seconds, end_seconds in row:
            assert start_seconds == max(free, *arrivals[action], 0.0)
            assert end_seconds == start_seconds + case.seconds.by_kind[action.kind][action.stage]
            free = end_seconds


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_a_port_sends_one_message_at_a_time_in_the_order_of_the_row(case: Case) -> None:
    timeline = case.simulated()
    ranks = {action.stage: rank for rank, row in enumerate(case.table) for action in row}
    ended = {span.action.gives: span.end_seconds for row in timeline.spans for span in row}
    ports: dict[object, list[tuple[float, float, float]]] = defaultdict(list)
    for message in timeline.messages:
        cost = case.costs[message.edge.name, message.direction]
        sender, receiver = ends(message)
        ready = ended[message.direction, sender, message.microbatch]
        key = (ranks[sender], cost.port) if cost.port else (ranks[sender], ranks[receiver], message.direction)
        ports[key].append((ready, message.start_seconds, message.start_seconds + cost.occupancy))
        assert message.end_seconds == message.start_seconds + cost.occupancy + cost.latency
    for sent in ports.values():
        free = 0.0
        for ready, start_seconds, left in sent:
            # First made, first sent; and no later than need be.
            assert start_seconds == max(ready, free)
            free = left
        assert [ready for ready, _, _ in sent] == sorted(ready for ready, _, _ in sent)


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_work_is_conserved_and_no_step_is_shorter_than_its_bounds(case: Case) -> None:
    timeline = case.simulated()
    microbatches = 1 + max(action.microbatch for row in case.table for action in row)
    for row, busy in zip(case.table, timeline.busy_seconds, strict=True):
        stages = {action.stage for action in row}
        assert busy == pytest.approx(microbatches * math.fsum(case.seconds.total[stage] for stage in stages))
    through = math.fsum(case.seconds.forward) + math.fsum(case.seconds.backward_input)
    assert timeline.makespan_seconds >= max(*timeline.busy_seconds, through) - 1e-9
    # Where there is no work, all time is spent on messages.
    assert 0.0 <= timeline.bubble <= 1.0
    assert timeline.bubble == 1.0 or any(timeline.busy_seconds) or timeline.makespan_seconds == 0.0


@settings(max_examples=60, deadline=None)
@given(case=cases(), slower=st.integers(0, 100))
def test_a_slower_link_never_ends_a_step_earlier(case: Case, slower: int) -> None:
    key = sorted(case.costs)[slower % len(case.costs)]
    one = case.costs[key]
    slow = TransferSeconds(latency=one.latency + 1, occupancy=one.occupancy + 1, port=one.port)
    after = dataclasses.replace(case, costs=case.costs | {key: slow})
    assert after.simulated().makespan_seconds >= case.simulated().makespan_seconds


def arrived(timeline: Timeline, edges: Sequence[Edge]) -> dict[Action, list[float]]:
    """When each thing that an action needs is there, found from the timeline alone."""
    ended = {span.action.gives: span.end_seconds for row in timeline.spans for span in row if span.action.gives}
    sent = {(one.edge.name, one.direction, one.microbatch): one.end_seconds for one in timeline.messages}
    found: dict[Action, list[float]] = {}
    for action in itertools.chain.from_iterable(timeline.order):
        found[action] = [0.0]
        if action.kind != "forward":
            found[action].append(ended["forward", action.stage, action.microbatch])
        if action.kind == "backward_weight":
            continue
        direction: Direction = "forward" if action.kind == "forward" else "backward"
        for edge in edges:
            here, there = (edge.last, edge.first) if direction == "forward" else (edge.first, edge.last)
            if here == action.stage:
                made = ended[direction, there, action.microbatch]
                found[action].append(sent.get((edge.name, direction, action.microbatch), made))
    return found


def ends(message: Message) -> tuple[int, int]:
    stages = (message.edge.first, message.edge.last)
    return stages if message.direction == "forward" else stages[::-1]
