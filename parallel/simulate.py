"""How long does a step of a pipeline take: the same table of actions, with durations and with links between ranks.

Every rank runs its row in order. An action starts as soon as its rank is free and all that it needs is there: a forward
needs what every edge into its stage carries, a backward (whole, or its input half) what every edge out of its stage
carries back. Nothing else makes it wait: transfers overlap computation, and buffers are never short.

    producer ends -> waits until the port is free -> occupies it -> latency -> there
                                                     bytes / bandwidth

A port is what messages leave a rank by, one after the other in the order in which they were made: the channel (sending
rank, receiving rank, direction) unless `TransferSeconds` names a port of the sending rank, such as its network card,
that all of its channels share. Ports work both ways at once, and arriving messages never queue: a receiver's port is as
wide as the senders' together. An edge within one rank costs nothing, and orders all the same. Latency alone makes
nobody wait for another message: with pure latency the published bubble rates of 1f1b, zb_h1 and zb_h2 come out to 4
decimals (Qi et al. 2023, arXiv 2401.10241, tables 5 and 9).

What a rank sends is sent in the order of its row, so one pass over the rows decides everything; no clock has to tick.
Left out: collectives within a stage (they are a part of its seconds, `parallel/machine_profile.py`), and cores or links
that several ranks of a pipeline share.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TypeAlias, get_args

from parallel.edges import Edge, chain
from parallel.schedule import Direction, Kind, Table, ranks_of
from parallel.timeline import Message, Span, Timeline


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageSeconds:
    """Durations of every stage's actions on one microbatch, by stage; a whole backward is its two halves."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def __post_init__(self) -> None:
        counts = {field.name: len(getattr(self, field.name)) for field in dataclasses.fields(self)}
        if len(set(counts.values())) != 1:
            told = ", ".join(f"{count} of {name}" for name, count in counts.items())
            raise ValueError(f"durations of a different number of stages: {told}; give one each for every stage")
        for field in dataclasses.fields(self):
            for stage, seconds in enumerate(getattr(self, field.name)):
                if not 0.0 <= seconds < float("inf"):
                    raise ValueError(f"{field.name} of stage {stage} = {seconds}; a duration is a number, 0 or more")

    @classmethod
    def equal(
        cls, num_stages: int, *, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0
    ) -> "StageSeconds":
        """The same for every stage; in units of a forward when nothing is given."""
        return cls(
            forward=(forward,) * num_stages,
            backward_input=(backward_input,) * num_stages,
            backward_weight=(backward_weight,) * num_stages,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def backward(self) -> tuple[float, ...]:
        """Both halves, by stage."""
        return tuple(map(sum, zip(self.backward_input, self.backward_weight, strict=True)))

    @property
    def by_kind(self) -> dict[Kind, tuple[float, ...]]:
        """By the kind of action, then by stage."""
        return {
            "forward": self.forward,
            "backward": self.backward,
            "backward_input": self.backward_input,
            "backward_weight": self.backward_weight,
        }

    @property
    def total(self) -> tuple[float, ...]:
        """All work on one microbatch, by stage."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransferSeconds:
    """What a message costs.

    Attributes:
        latency: from the end of leaving to being there; takes nothing of the port.
        occupancy: how long it keeps its port, bytes / bandwidth.
        port: of the sending rank; None is a port of the channel's own.
    """

    latency: float = 0.0
    occupancy: float = 0.0
    port: str | None = None

    def __post_init__(self) -> None:
        for field in ("latency", "occupancy"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} = {getattr(self, field)} seconds; it is a number, 0 or more")


TransferCost: TypeAlias = Callable[[Edge, Direction], TransferSeconds]


def every_message(cost: TransferSeconds) -> TransferCost:
    """The same cost for all messages."""

    def transfer_seconds(_edge: Edge, _direction: Direction) -> TransferSeconds:
        return cost

    return transfer_seconds


_WAYS: dict[Kind, Direction | None] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": None,
}
"""Which way an action's tensors go; a weight gradient needs nobody and gives nobody anything."""


def simulate(
    table: Table,
    seconds: StageSeconds,
    *,
    edges: Sequence[Edge] | None = None,
    transfer_seconds: TransferCost | None = None,
    scale: Sequence[float] | None = None,
) -> Timeline:
    """Start and end of every action and message of a step that begins at 0.

    Args:
        table: actions only, one row a rank.
        seconds: durations, by stage.
        edges: of the partitioning; those of a model with one stack by default.
        transfer_seconds: cost of a message between two ranks, for a microbatch of scale 1; free by default.
        scale: factor of the durations and occupancies of each microbatch, where they differ in size; 1 by default.

    Raises:
        ValueError: durations of another number of stages, fewer scales than microbatches, a backward before its
            forward, or ranks that wait for each other.
    """
    ranks = ranks_of(table)
    if len(ranks) != seconds.num_stages:
        raise ValueError(f"durations of {seconds.num_stages} stages for a table of {len(ranks)}; give one a stage")
    num_microbatches = 1 + max((action.microbatch for row in table for action in row), default=-1)
    if scale is not None and len(scale) < num_microbatches:
        raise ValueError(f"{len(scale)} scales for {num_microbatches} microbatches; give one for each")
    needs, gives = _links(chain(len(ranks)) if edges is None else edges, ranks, transfer_seconds)
    return _run(table, seconds.by_kind, needs, gives, scale)


class _Link:
    """One direction of an edge: what it costs, and when each microbatch's message is there."""

    __slots__ = ("arrived", "direction", "edge", "latency", "occupancy", "port")

    def __init__(self, edge: Edge, direction: Direction, cost: TransferSeconds, port: list[float] | None) -> None:
        self.edge, self.direction = edge, direction
        self.latency, self.occupancy = cost.latency, cost.occupancy
        self.port = port
        """When it is free, shared by all links that leave by it; None within a rank."""
        self.arrived: dict[int, float] = {}

    def send(self, microbatch: int, ready: float, factor: float, messages: list[Message]) -> None:
        if self.port is None:
            self.arrived[microbatch] = ready
            return
        start = max(ready, self.port[0])
        self.port[0] = start + self.occupancy * factor
        self.arrived[microbatch] = end = self.port[0] + self.latency
        messages.append(Message(self.edge, self.direction, microbatch, start, end))


_Links: TypeAlias = list[list[_Link]]
"""By stage."""


def _links(
    edges: Sequence[Edge], ranks: Sequence[int], transfer_seconds: TransferCost | None
) -> tuple[dict[Direction, _Links], dict[Direction, _Links]]:
    """What each stage needs and what it gives, by direction."""
    needs: dict[Direction, _Links] = {way: [[] for _ in ranks] for way in get_args(Direction)}
    gives: dict[Direction, _Links] = {way: [[] for _ in ranks] for way in get_args(Direction)}
    ports: dict[tuple[int, int | str | None, str], list[float]] = {}
    for edge in edges:
        ways: tuple[tuple[Direction, int, int], ...] = (
            ("forward", edge.first, edge.last),
            ("backward", edge.last, edge.first),
        )
        for way, source, target in ways:
            sender, receiver = ranks[source], ranks[target]
            if sender == receiver:
                link = _Link(edge, way, TransferSeconds(), None)
            else:
                cost = TransferSeconds() if transfer_seconds is None else transfer_seconds(edge, way)
                # Which port: one of the sender's, by name, or the channel's own.
                key = (sender, receiver, way) if cost.port is None else (sender, None, cost.port)
                link = _Link(edge, way, cost, ports.setdefault(key, [0.0]))
            gives[way][source].append(link)
            needs[way][target].append(link)
    return needs, gives


def _run(
    table: Table,
    durations: dict[Kind, tuple[float, ...]],
    needs: dict[Direction, _Links],
    gives: dict[Direction, _Links],
    scale: Sequence[float] | None,
) -> Timeline:
    """Lets every rank go on until it lacks something; whoever makes that wakes it up."""
    spans: list[list[Span]] = [[] for _ in table]
    messages: list[Message] = []
    clocks = [0.0] * len(table)
    waiting: dict[tuple[_Link, int], int] = {}
    forwarded: set[tuple[int, int]] = set()
    runnable = list(range(len(table)))
    while runnable:
        rank = runnable.pop()
        row, done, clock = table[rank], spans[rank], clocks[rank]
        while len(done) < len(row):
            action = row[len(done)]
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            way = _WAYS[kind]
            start = clock
            lacking = None
            for link in needs[way][stage] if way is not None else ():
                arrived = link.arrived.get(microbatch)
                if arrived is None:
                    lacking = link
                    break
                start = max(start, arrived)
            if lacking is not None:
                waiting[lacking, microbatch] = rank
                break
            if kind == "forward":
                forwarded.add((stage, microbatch))
            elif (stage, microbatch) not in forwarded:
                raise ValueError(f"rank {rank} runs {action} before {stage}F{microbatch}")
            factor = 1.0 if scale is None else scale[microbatch]
            clock = start + durations[kind][stage] * factor
            done.append(Span(action, start, clock))
            for link in gives[way][stage] if way is not None else ():
                link.send(microbatch, clock, factor, messages)
                woken = waiting.pop((link, microbatch), None)
                if woken is not None:
                    runnable.append(woken)
        clocks[rank] = clock
    stuck = [
        f"rank {rank} waits at {row[len(spans[rank])]}" for rank, row in enumerate(table) if len(spans[rank]) < len(row)
    ]
    if stuck:
        raise ValueError(f"the schedule deadlocks: {'; '.join(stuck)}")
    return Timeline(spans=tuple(map(tuple, spans)), messages=tuple(messages))
