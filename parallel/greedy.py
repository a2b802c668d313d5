"""What happens when every rank always does the most urgent thing it can? Tables of actions, made by playing time.

How urgent an action is, a number for its piece (`parallel/pieces.py`) and one for its microbatch tell; the least of all
goes first:

    urgency(piece, microbatch) = period x microbatch + offset(piece)

With the seconds that the busiest rank needs for a microbatch as period, offsets of 0 finish the oldest microbatch first
and hold few; offsets that grow along the way of a microbatch let the next ones come forward, as on a conveyor belt, and
hold more. A patient rank does not start something if something more urgent is known to arrive soon enough.

What has begun must be able to end within the limit of what a rank keeps. A rank starts an action that takes room only
if afterwards its microbatches could still end one after the other, the oldest first, each in the room that is left plus
that of those before it (the banker's rule, Dijkstra 1965). So the oldest microbatch of all can go on on every rank, and
nothing ever hangs.

Left out: which offsets are good (`parallel/list_schedule.py`), microbatches of different size.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from typing import TypeAlias

from parallel.pieces import Pieces
from parallel.schedule import Action, Table


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """What came of it.

    Attributes:
        pieces: what there was to do.
        rows: of every rank, (piece, microbatch) in order.
        makespan_seconds: when the last rank was done; it may be sooner for a rank that need not wait in vain.
        most: what each rank kept at most.
    """

    pieces: Pieces
    rows: tuple[tuple[tuple[int, int], ...], ...]
    makespan_seconds: float
    most: tuple[float, ...]

    @property
    def table(self) -> Table:
        kinds, num_stages = self.pieces.kinds, len(self.pieces.ranks)
        return tuple(
            tuple(
                Action(kind=kinds[piece // num_stages], stage=piece % num_stages, microbatch=microbatch)
                for piece, microbatch in row
            )
            for row in self.rows
        )


def play(
    pieces: Pieces,
    microbatches: int,
    offsets: Sequence[float],
    *,
    patience: float = 0.0,
    limit: Sequence[float] | None = None,
) -> Played:
    """The table of what is most urgent.

    Args:
        pieces: what there is to do.
        microbatches: of a step.
        offsets: of every piece, in seconds; a microbatch adds a period for each that came before it.
        patience: a rank waits for something more urgent up to this share of what it could start now.
        limit: most that each rank may keep, at least `pieces.room(rank)[1]`.
    """
    playing = _Play(pieces, microbatches, offsets, patience, limit)
    playing.run()
    return Played(
        pieces=pieces,
        rows=tuple(tuple(rank.row) for rank in playing.ranks),
        makespan_seconds=max(rank.free for rank in playing.ranks),
        most=tuple(rank.most for rank in playing.ranks),
    )


_Choice: TypeAlias = tuple[float, int, int]
"""Urgency, microbatch, piece."""


class _Rank:
    """What a rank has done, when it is free, and what it keeps."""

    __slots__ = (
        "_done",
        "_oldest",
        "_pieces",
        "_rank",
        "_rooms",
        "_whole",
        "_youngest",
        "free",
        "limit",
        "mine",
        "most",
        "now",
        "row",
    )

    def __init__(self, pieces: Pieces, rank: int, microbatches: int, limit: float) -> None:
        self._pieces, self._rank, self.limit = pieces, rank, limit * (1 + 1e-9)
        self.mine, self._rooms = pieces.of_rank[rank], pieces.rooms[rank]
        self.row: list[tuple[int, int]] = []
        self.free = self.now = self.most = 0.0
        self._done, self._whole = [0] * microbatches, sum(1 << piece for piece in self.mine)
        """By microbatch, a bit for every piece; and all of them."""
        self._oldest, self._youngest = 0, -1

    def may(self, piece: int, microbatch: int) -> bool:
        """Whether everything could still end after this; what takes no room always may."""
        takes = self._pieces.takes[piece]
        if takes <= 0 or self.limit == math.inf:
            return True
        left = self.limit - self.now - takes
        if left < 0:
            return False
        done = self._done[self._oldest : max(self._youngest, microbatch) + 1]
        done[microbatch - self._oldest] |= 1 << piece
        for begun in done:
            held, on_top = self._rooms.get(begun) or self._pieces.room(self._rank, begun)
            if on_top > left:
                return False
            left += held
        return True

    def start(self, piece: int, microbatch: int, end: float) -> None:
        """Books an action that runs until `end`."""
        self.row.append((piece, microbatch))
        self.free = end
        self.now += self._pieces.takes[piece]
        self.most = max(self.most, self.now)
        self._done[microbatch] |= 1 << piece
        self._youngest = max(self._youngest, microbatch)
        while self._oldest <= self._youngest and self._done[self._oldest] == self._whole:
            self._oldest += 1


class _Play:
    def __init__(
        self,
        pieces: Pieces,
        microbatches: int,
        offsets: Sequence[float],
        patience: float,
        limit: Sequence[float] | None,
    ) -> None:
        self._pieces, self._offsets, self._patience = pieces, offsets, patience
        self._period_seconds = pieces.period_seconds
        limits = [math.inf] * pieces.num_ranks if limit is None else limit
        self.ranks = [_Rank(pieces, rank, microbatches, most) for rank, most in enumerate(limits)]
        self._ready: list[list[_Choice]] = [[] for _ in pieces.rank]
        """By piece: what is there, the most urgent first."""
        self._coming: list[list[tuple[float, _Choice]]] = [[] for _ in pieces.rank]
        """By piece: what is known to arrive, the earliest first."""
        self._ports = [0.0] * pieces.num_ports
        needs = [0] * len(pieces.rank)
        for links in pieces.links:
            for link in links:
                needs[link.piece] += 1
        self._missing = [[count] * microbatches for count in needs]
        self._arrived = [[0.0] * microbatches for _ in needs]
        self._wakes = [(0.0, rank) for rank in range(pieces.num_ranks)]
        """When a rank may find something to do."""
        for piece, count in enumerate(needs):
            if count == 0:
                for microbatch in range(microbatches):
                    self._arrive(piece, microbatch, 0.0)

    def run(self) -> None:
        """Plays until nothing is left."""
        while self._wakes:
            now, index = heapq.heappop(self._wakes)
            rank = self.ranks[index]
            if rank.free > now:
                continue
            choice = self._choose(rank, now)
            later = self._later(rank, now, choice)
            if later < math.inf:
                heapq.heappush(self._wakes, (later, index))
            elif choice is not None:
                self._start(rank, now, choice)
        assert all(not piece for piece in self._ready), "no rank can go on"

    def _choose(self, rank: _Rank, now: float) -> _Choice | None:
        """The most urgent of what a rank can start now."""
        best: _Choice | None = None
        for piece in rank.mine:
            ready, coming = self._ready[piece], self._coming[piece]
            while coming and coming[0][0] <= now:
                heapq.heappush(ready, heapq.heappop(coming)[1])
            if not ready or (best is not None and best < ready[0]):
                continue
            # Of one piece, the oldest microbatch is the most urgent: if it may not start, no other one may.
            if rank.may(piece, ready[0][1]):
                best = ready[0]
        return best

    def _later(self, rank: _Rank, now: float, choice: _Choice | None) -> float:
        """When to look again, instead of starting the choice; never, when it is to be started or nothing is known."""
        until, best = math.inf, choice
        if choice is not None:
            if not self._patience:
                return until
            until = now + self._patience * self._pieces.seconds[choice[2]]
        found = math.inf
        for piece in rank.mine:
            coming = self._coming[piece]
            if coming and coming[0][0] < min(until, found):
                arrival, other = coming[0]
                if best is None or (other < best and rank.may(piece, other[1])):
                    found = arrival
        return found

    def _start(self, rank: _Rank, now: float, choice: _Choice) -> None:
        _, microbatch, piece = choice
        heapq.heappop(self._ready[piece])
        end = now + self._pieces.seconds[piece]
        rank.start(piece, microbatch, end)
        heapq.heappush(self._wakes, (end, self._pieces.rank[piece]))
        for link in self._pieces.links[piece]:
            there = end
            if link.port is not None:
                self._ports[link.port] = max(end, self._ports[link.port]) + link.occupancy
                there = self._ports[link.port] + link.latency
            arrived = self._arrived[link.piece]
            arrived[microbatch] = max(arrived[microbatch], there)
            self._missing[link.piece][microbatch] -= 1
            if not self._missing[link.piece][microbatch]:
                self._arrive(link.piece, microbatch, arrived[microbatch])

    def _arrive(self, piece: int, microbatch: int, seconds: float) -> None:
        urgency = microbatch * self._period_seconds + self._offsets[piece]
        heapq.heappush(self._coming[piece], (seconds, (urgency, microbatch, piece)))
        index = self._pieces.rank[piece]
        heapq.heappush(self._wakes, (max(seconds, self.ranks[index].free), index))
