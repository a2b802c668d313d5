"""What is there to do for one microbatch, how long does it take, and what does it wait for?

A piece is a kind of action of one stage: its forward, its backward, or one of the halves of that. Every microbatch goes
through all pieces once:

    0F -> 1F -> 2F -> 2B -> 1B -> 0B          0F -> 1F -> 1I -> 0I
                                                          1W    0W

Sent is what every edge carries, forward from the first to the last of its stages and backward the other way, as
`parallel/simulate.py` has it. Left out: how many microbatches there are, and when what is done (`parallel/greedy.py`).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from parallel.edges import Edge, chain
from parallel.schedule import Direction, Kind
from parallel.simulate import StageSeconds, TransferCost, TransferSeconds

WHOLE: tuple[Kind, ...] = ("forward", "backward")
SPLIT: tuple[Kind, ...] = ("forward", "backward_input", "backward_weight")


class Link(NamedTuple):
    """What a piece gives to another one; there is no port within a rank, and it costs nothing."""

    piece: int
    latency: float = 0.0
    occupancy: float = 0.0
    port: int | None = None

    @property
    def delay(self) -> float:
        return self.latency + self.occupancy


class Pieces:
    """All kinds of actions of all stages; a piece is a place in the lists: kind x stages + stage.

    Args:
        ranks: rank of every stage.
        seconds: durations, by stage.
        split: whether backwards come in two pieces.
        edges: as for `simulate`.
        transfer_seconds: as for `simulate`.
        kept: what a stage keeps of one microbatch from its forward on; 1 by default.
        kept_for_weights: of it, what is kept between the pieces of a backward; all of it by default.

    Attributes:
        kinds, ranks, num_ranks: as given.
        rank, seconds: of every piece.
        links: what every piece gives to whom.
        takes: room that a piece takes, or gives back if it is negative.
        along, of_rank: all pieces, and those of every rank, in the order in which a lone microbatch goes through them.
        rooms: of every rank, what `room` has told before.
        num_ports: by which messages leave their ranks.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        seconds: StageSeconds,
        *,
        split: bool,
        edges: Sequence[Edge] | None = None,
        transfer_seconds: TransferCost | None = None,
        kept: Sequence[float] | None = None,
        kept_for_weights: Sequence[float] | None = None,
    ) -> None:
        self.ranks, self.num_ranks, self.kinds = tuple(ranks), max(ranks) + 1, SPLIT if split else WHOLE
        num_stages = len(ranks)
        self.rank = list(ranks) * len(self.kinds)
        self.seconds = [duration for kind in self.kinds for duration in seconds.by_kind[kind]]
        kept = [1.0] * num_stages if kept is None else kept
        later = kept if kept_for_weights is None else kept_for_weights
        self.takes = list(kept)
        if split:
            self.takes += [after - before for before, after in zip(kept, later, strict=True)]
        self.takes += [-left for left in (later if split else kept)]
        self.along = list(range(num_stages))
        for stage in reversed(range(num_stages)):
            self.along += range(num_stages + stage, len(self.rank), num_stages)
        self.of_rank = tuple(
            tuple(piece for piece in self.along if self.rank[piece] == rank) for rank in range(self.num_ranks)
        )
        self.rooms: list[dict[int, tuple[float, float]]] = [{} for _ in self.of_rank]
        self.links: list[list[Link]] = [[] for _ in self.rank]
        self._link(chain(num_stages) if edges is None else edges, transfer_seconds)

    def _link(self, edges: Sequence[Edge], transfer_seconds: TransferCost | None) -> None:
        ranks, num_stages = self.ranks, len(self.ranks)
        ports: dict[tuple[int, int, Direction] | tuple[int, str], int] = {}
        for edge in edges:
            ways: tuple[tuple[Direction, int, int], ...] = (
                ("forward", edge.first, edge.last),
                ("backward", edge.last, edge.first),
            )
            for way, source, target in ways:
                shift = 0 if way == "forward" else num_stages
                sender, receiver = ranks[source], ranks[target]
                if sender == receiver:
                    self.links[shift + source].append(Link(shift + target))
                    continue
                cost = TransferSeconds() if transfer_seconds is None else transfer_seconds(edge, way)
                port = ports.setdefault(
                    (sender, receiver, way) if cost.port is None else (sender, cost.port), len(ports)
                )
                self.links[shift + source].append(Link(shift + target, cost.latency, cost.occupancy, port))
        self.num_ports = len(ports)
        # A stage's own forward comes before its backward; all but the last hear of it by the gradients that come back.
        here = [(num_stages - 1, 2 * num_stages - 1)]
        if len(self.kinds) == len(SPLIT):
            here += [(num_stages + stage, 2 * num_stages + stage) for stage in range(num_stages)]
        for source, target in here:
            self.links[source].append(Link(target))

    @property
    def period_seconds(self) -> float:
        """What the busiest rank works on one microbatch."""
        return max(math.fsum(self.seconds[piece] for piece in mine) for mine in self.of_rank)

    @property
    def heads_seconds(self) -> list[float]:
        """Of every piece: from the beginning to its start, for a lone microbatch."""
        heads = [0.0] * len(self.rank)
        for piece in self.along:
            for link in self.links[piece]:
                heads[link.piece] = max(heads[link.piece], heads[piece] + self.seconds[piece] + link.delay)
        return heads

    @property
    def tails_seconds(self) -> list[float]:
        """Of every piece: from its end to the end of everything that needs it, for a lone microbatch."""
        tails = [0.0] * len(self.rank)
        for piece in reversed(self.along):
            for link in self.links[piece]:
                tails[piece] = max(tails[piece], link.delay + self.seconds[link.piece] + tails[link.piece])
        return tails

    def room(self, rank: int, done: int = 0) -> tuple[float, float]:
        """What a microbatch holds on a rank, and the most that it takes on top on its way to the end.

        `done` has a bit set for every piece that is done.
        """
        known = self.rooms[rank].get(done)
        if known is not None:
            return known
        held = now = most = 0.0
        for piece in self.of_rank[rank]:
            if done >> piece & 1:
                held += self.takes[piece]
            else:
                now += self.takes[piece]
                most = max(most, now)
        self.rooms[rank][done] = held, most
        return held, most
