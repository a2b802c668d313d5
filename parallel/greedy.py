"""What happens when every rank always does the most urgent thing it can? A table of actions, made by playing time.

Of all ranks, the one that can start something earliest starts it. Of what it can start at that moment, in this order:

    backward   whole, or the input's half: others wait for it, and it frees memory
    forward    while the limit allows: of the deepest stage first, or of the oldest microbatch first
    weight     where there is nothing else to do

A microbatch is kept from its forward to the end of its backward. Before a rank starts a forward, room for one more of
each of its later stages must be left, so that what has begun can always end. Left out: which order and limit is best
(`parallel/list_schedule.py`).
"""

import heapq
from collections.abc import Sequence
from typing import Literal, TypeAlias

from parallel.edges import Edge, chain
from parallel.schedule import Action, Direction, Kind, Table
from parallel.simulate import StageSeconds, TransferCost

Order: TypeAlias = Literal["deepest", "oldest"]
_Ready: TypeAlias = list[tuple[float, int, int]]
"""(arrival, microbatch, stage) of what may run, the earliest arrival first."""


def greedy(
    ranks: Sequence[int],
    microbatches: int,
    seconds: StageSeconds,
    *,
    limit: float | Sequence[float],
    split: bool,
    order: Order = "deepest",
    kept: Sequence[float] | None = None,
    edges: Sequence[Edge] | None = None,
    transfer_seconds: TransferCost | None = None,
) -> Table:
    """A table for stages of any cost.

    Args:
        ranks: rank of every stage.
        microbatches: of a step.
        seconds: durations, by stage.
        limit: most that a rank keeps, one number for all or one each, in the unit of `kept`.
        split: whether backwards come in two halves.
        order: which forward goes first.
        kept: what a stage keeps of one microbatch; 1 by default.
        edges: as for `simulate`.
        transfer_seconds: as for `simulate`; a message waits for no other here.

    Raises:
        ValueError: a rank that cannot keep one microbatch of each of its stages.
    """
    return _Play(ranks, microbatches, seconds, limit, split, order, kept, edges, transfer_seconds).table()


class _Play:
    def __init__(
        self,
        ranks: Sequence[int],
        microbatches: int,
        seconds: StageSeconds,
        limit: float | Sequence[float],
        split: bool,
        order: Order,
        kept: Sequence[float] | None,
        edges: Sequence[Edge] | None,
        transfer_seconds: TransferCost | None,
    ) -> None:
        num_ranks = max(ranks) + 1
        self._ranks, self._microbatches, self._split, self._order = ranks, microbatches, split, order
        self._seconds: dict[Kind, Sequence[float]] = {
            "forward": seconds.forward,
            "backward": seconds.backward,
            "backward_input": seconds.backward_input,
            "backward_weight": seconds.backward_weight,
        }
        self._kept = [1.0] * len(ranks) if kept is None else list(kept)
        self._limit = list(limit) if isinstance(limit, Sequence) else [limit] * num_ranks
        # What must be free for a forward: itself and one of each later stage of its rank.
        self._room = [
            sum(self._kept[other] for other in range(stage, len(ranks)) if ranks[other] == rank)
            for stage, rank in enumerate(ranks)
        ]
        self._check_room()
        self._links: dict[Direction, list[list[tuple[int, float]]]] = {"forward": [], "backward": []}
        self._num_needed: dict[Direction, list[int]] = {"forward": [0] * len(ranks), "backward": [0] * len(ranks)}
        links = chain(len(ranks)) if edges is None else edges
        for direction in self._links:
            self._links[direction] = [[] for _ in ranks]
        for edge in links:
            self._link("forward", edge, edge.first, edge.last, transfer_seconds)
            self._link("backward", edge, edge.last, edge.first, transfer_seconds)
        self._forward: list[_Ready] = [[] for _ in range(num_ranks)]
        self._backward: list[_Ready] = [[] for _ in range(num_ranks)]
        self._weight: list[_Ready] = [[] for _ in range(num_ranks)]
        self._arrivals: dict[tuple[Direction, int, int], list[float]] = {}
        self._free, self._now = [0.0] * num_ranks, [0.0] * num_ranks
        self._rows: list[list[Action]] = [[] for _ in range(num_ranks)]

    def _check_room(self) -> None:
        for stage, room in enumerate(self._room):
            rank = self._ranks[stage]
            if room > self._limit[rank]:
                raise ValueError(
                    f"rank {rank} keeps {room:g} of one microbatch of its stages, over the limit of "
                    f"{self._limit[rank]:g}; try a limit of {room:g} or more"
                )

    def _link(
        self, direction: Direction, edge: Edge, source: int, target: int, transfer_seconds: TransferCost | None
    ) -> None:
        is_free = transfer_seconds is None or self._ranks[source] == self._ranks[target]
        cost = None if is_free or transfer_seconds is None else transfer_seconds(edge, direction)
        self._links[direction][source].append((target, 0.0 if cost is None else cost.latency + cost.occupancy))
        self._num_needed[direction][target] += 1

    def table(self) -> Table:
        for stage, count in enumerate(self._num_needed["forward"]):
            if count == 0:
                for microbatch in range(self._microbatches):
                    self._put(self._forward, stage, microbatch, 0.0)
        num_left = len(self._ranks) * self._microbatches * (3 if self._split else 2)
        choices = [self._choose(rank) for rank in range(len(self._rows))]
        for _ in range(num_left):
            rank = min(range(len(choices)), key=lambda index: choices[index][0])
            start, kind, ready, entry = choices[rank]
            assert ready is not None, "no rank can go on"
            for touched in self._run(rank, start, kind, ready, entry):
                choices[touched] = self._choose(touched)
        return tuple(tuple(row) for row in self._rows)

    def _put(self, ready: list[_Ready], stage: int, microbatch: int, arrival: float) -> None:
        heapq.heappush(ready[self._ranks[stage]], (arrival, microbatch, stage))

    def _choose(self, rank: int) -> "tuple[float, Kind, _Ready | None, tuple[float, int, int]]":
        """When a rank can start what: start, kind, list and entry; never, when nothing is ready."""
        free = self._free[rank]
        backward, weight = self._backward[rank], self._weight[rank]
        room = self._limit[rank] - self._now[rank]
        forward = [entry for entry in self._forward[rank] if self._room[entry[2]] <= room + 1e-9]
        starts = [max(free, backward[0][0])] if backward else []
        starts += [max(free, min(entry[0] for entry in forward))] if forward else []
        starts += [free] if weight else []
        if not starts:
            return _NEVER, "forward", None, (0.0, 0, 0)
        start = min(starts)
        if backward and backward[0][0] <= start:
            here = [entry for entry in backward if entry[0] <= start]
            kind: Kind = "backward_input" if self._split else "backward"
            return start, kind, backward, min(here, key=lambda entry: (entry[1], -entry[2]))
        here = [entry for entry in forward if entry[0] <= start]
        if here:
            deepest = self._order == "deepest"
            entry = min(here, key=lambda one: (-one[2], one[1]) if deepest else (one[1], one[2]))
            return start, "forward", self._forward[rank], entry
        return start, "backward_weight", weight, weight[0]

    def _run(self, rank: int, start: float, kind: Kind, ready: _Ready, entry: tuple[float, int, int]) -> set[int]:
        """Does an action; the ranks for which something has changed."""
        ready.remove(entry)
        heapq.heapify(ready)
        _, microbatch, stage = entry
        end = self._free[rank] = start + self._seconds[kind][stage]
        self._rows[rank].append(Action(kind=kind, stage=stage, microbatch=microbatch))
        touched = {rank}
        if kind == "forward":
            self._now[rank] += self._kept[stage]
            if self._num_needed["backward"][stage] == 0:
                self._put(self._backward, stage, microbatch, end)
            touched |= self._give("forward", stage, microbatch, end)
        else:
            if kind == "backward_input":
                self._put(self._weight, stage, microbatch, end)
            else:
                self._now[rank] -= self._kept[stage]
            if kind != "backward_weight":
                touched |= self._give("backward", stage, microbatch, end)
        return touched

    def _give(self, direction: Direction, stage: int, microbatch: int, end: float) -> set[int]:
        touched = set()
        for target, cost in self._links[direction][stage]:
            arrived = self._arrivals.setdefault((direction, target, microbatch), [])
            arrived.append(end + cost)
            if len(arrived) == self._num_needed[direction][target]:
                ready = self._forward if direction == "forward" else self._backward
                self._put(ready, target, microbatch, max(arrived))
                touched.add(self._ranks[target])
        return touched


_NEVER = float("inf")
