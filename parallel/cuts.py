"""Which contiguous cut of a pipeline is best, when blocks cost different amounts?

A cut is good when no stage is much more costly than the others: in the steady state of a schedule every stage waits for
the most costly one. So, in this order, least

    1. most costly stage                    the length of a slot of the schedule
    2. most costly rank, over its stages    only where ranks have several: what a rank must do in any case
    3. sum of squares over the stages       the variance, where all cuts cost the same in total
    4. first blocks, compared in order      so that one cut is the answer

Stages come before ranks because the named orders of chunks are made for stages of equal cost. Others choose their own
weights, and least is first of all `per_rank` x most costly rank + `per_stage` x most costly stage:

    named schedules    0     1          a slot
    memory             1     0          the stages of a rank share it
    list schedules     2 m   p - 1      m microbatches of a rank, and half of what filling and draining p ranks takes

On a T5-large at length ratios 1/4 to 4 (480 + 480 positions, counted in FLOPs, 2 or 4 chunks on 4 to 16 ranks) list
schedules were up to 9 % faster with their own weights than with those of named ones, never slower; interleaved ones
took up to 21 % longer with the weights of lists, and at best 3 % less.

Costs are whole numbers, so that ties are ties. They may depend on the stage: of memory, the first stages keep more
microbatches. A stage costs what its blocks and ends cost, and what it sends: forward over its end, gradients over its
start.

With one stage a rank the answer is exact: dynamic programming over (stage, first block). With several, the most costly
stage is exact where ranks have no weight; else cuts are compared one by one where they are few, and where not, blocks
move from the most costly stages and ranks to others as long as that helps. No stage is empty.

Left out: what blocks cost (`parallel/balance.py`), and cuts inside of blocks (`parallel/grain.py`).
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

Cost: TypeAlias = Callable[[int, int, int], int]
"""Stage, first block, last block -> cost, 0 or more."""
Starts: TypeAlias = tuple[int, ...]
"""First block of every stage, and the number of blocks: 0, ..., n."""

MOST_COMPARED = 4096
"""Cuts that are compared one by one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cutting:
    """A flat list of blocks that is to be cut.

    Attributes:
        num_blocks: of the list, at least one for each stage.
        ranks: pipeline rank of every stage.
        held: what a stage costs for blocks [first, last); never less for more blocks.
        sent: what it costs besides, for what it sends.
        fixed: stage -> its first block, where that is decided already.
        per_rank: weight of the most costly rank in what is to be least.
        per_stage: weight of the most costly stage.
    """

    num_blocks: int
    ranks: Sequence[int]
    held: Cost
    sent: Cost
    fixed: Mapping[int, int] = dataclasses.field(default_factory=dict)
    per_rank: int = 0
    per_stage: int = 1

    def __post_init__(self) -> None:
        assert self.num_blocks >= self.num_stages >= 1, f"{self.num_stages} stages of {self.num_blocks} blocks"

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @property
    def shares_ranks(self) -> bool:
        """Whether a rank has several stages."""
        return len(set(self.ranks)) < self.num_stages

    @functools.cached_property
    def _costs(self) -> dict[tuple[int, int, int], int]:
        return {}

    def cost(self, stage: int, first: int, last: int) -> int:
        """Of one stage."""
        key = (stage, first, last)
        if key not in self._costs:
            self._costs[key] = self.held(*key) + self.sent(*key)
        return self._costs[key]

    def costs(self, starts: Starts) -> list[int]:
        """Of every stage of a cut."""
        return [self.cost(stage, first, last) for stage, (first, last) in enumerate(itertools.pairwise(starts))]

    def rank_costs(self, starts: Starts) -> list[int]:
        """Of every rank, over its stages."""
        return self.summed(self.costs(starts))

    def summed(self, costs: Sequence[int]) -> list[int]:
        """Costs of stages, summed over those of each rank."""
        sums = [0] * (max(self.ranks) + 1)
        for rank, cost in zip(self.ranks, costs, strict=True):
            sums[rank] += cost
        return sums

    def firsts(self, stage: int) -> range:
        """Blocks that a stage may begin with; `num_stages` stands for the end of the list."""
        least = max((block + stage - at for at, block in self._decided.items() if at <= stage))
        most = min((block - (at - stage) for at, block in self._decided.items() if at >= stage))
        return range(least, most + 1)

    @functools.cached_property
    def _decided(self) -> dict[int, int]:
        return {0: 0, **self.fixed, self.num_stages: self.num_blocks}


def best(cutting: Cutting, candidates: Iterable[Sequence[int]] = ()) -> tuple[int, ...]:
    """First blocks of stages 1, 2, ... of the best cut.

    Args:
        cutting: what to cut.
        candidates: cuts from which blocks are moved too, where not all can be compared.
    """
    limit = None if cutting.per_rank and cutting.shares_ranks else least_maximum(cutting)
    if limit is None and math.comb(cutting.num_blocks - 1, cutting.num_stages - 1) > MOST_COMPARED:
        begun = [_least_squares(cutting, _ends(cutting, least_maximum(cutting)))]
    else:
        ends = _ends(cutting, limit)
        if cutting.shares_ranks and _num_cuts(ends) <= MOST_COMPARED:
            return min(_all(ends), key=functools.partial(order, cutting))[1:-1]
        begun = [_least_squares(cutting, ends)]
    if not cutting.shares_ranks:
        return begun[0][1:-1]
    begun += [(0, *cut, cutting.num_blocks) for cut in candidates]
    legal = [starts for starts in begun if limit is None or max(cutting.costs(starts)) <= limit]
    found = [*legal, *(_moved(cutting, starts, limit) for starts in legal)]
    return min(found, key=functools.partial(order, cutting))[1:-1]


def order(cutting: Cutting, starts: Starts) -> tuple[int, int, int, int, Starts]:
    """The criteria, the least is best: weighted maxima, most costly rank and stage, sum of squares, first blocks."""
    costs = cutting.costs(starts)
    by_rank, by_stage = max(cutting.rank_costs(starts)), max(costs)
    weighted = cutting.per_rank * by_rank + cutting.per_stage * by_stage
    return weighted, by_rank, by_stage, sum(cost * cost for cost in costs), starts


def least_maximum(cutting: Cutting) -> int:
    """Cost of the most costly stage of the cut where that is least."""
    bound = max(cutting.costs(_spread(cutting)))
    ends = _ends(cutting, bound)
    reached = {cutting.num_blocks: 0}
    for stage in reversed(range(cutting.num_stages)):
        # Of a stage by its first block: the most costly of it and all that follow, at best.
        reached = {
            first: min(max(cutting.cost(stage, first, last), reached[last]) for last in lasts)
            for first, lasts in ends[stage].items()
        }
    return reached[0]


Ends: TypeAlias = list[dict[int, list[int]]]
"""For every stage, by its first block: the ends from which the rest of a cut can be made."""


def _ends(cutting: Cutting, limit: int | None) -> Ends:
    """All cuts of which no stage costs more than a limit."""
    ends: Ends = [{} for _ in cutting.ranks]
    following = {cutting.num_blocks}
    for stage in reversed(range(cutting.num_stages)):
        for first in cutting.firsts(stage):
            lasts = []
            after = cutting.firsts(stage + 1)
            for last in range(max(first + 1, after.start), after.stop):
                if limit is not None and cutting.held(stage, first, last) > limit:
                    # More blocks never cost less.
                    break
                if last in following and (limit is None or cutting.cost(stage, first, last) <= limit):
                    lasts.append(last)
            if lasts:
                ends[stage][first] = lasts
        following = set(ends[stage])
    return ends


def _least_squares(cutting: Cutting, ends: Ends) -> Starts:
    """The cut with the least sum of squares, and of those the first in order."""
    left: list[dict[int, tuple[int, int]]] = [{} for _ in ends] + [{cutting.num_blocks: (0, 0)}]
    for stage in reversed(range(len(ends))):
        for first, lasts in ends[stage].items():
            left[stage][first] = min(
                (cutting.cost(stage, first, last) ** 2 + left[stage + 1][last][0], last) for last in lasts
            )
    starts = [0]
    for stage in range(len(ends)):
        starts.append(left[stage][starts[-1]][1])
    return tuple(starts)


# ---- several stages a rank ------------------------------------------------------------------------------------------


def _num_cuts(ends: Ends) -> int:
    counts = Counter(dict.fromkeys((last for lasts in ends[-1].values() for last in lasts), 1))
    for stage in reversed(ends):
        counts = Counter({first: sum(counts[last] for last in lasts) for first, lasts in stage.items()})
    return counts[0]


def _all(ends: Ends, starts: Starts = (0,)) -> Iterator[Starts]:
    """Every cut."""
    stage = len(starts) - 1
    if stage == len(ends):
        yield starts
        return
    for last in ends[stage].get(starts[-1], ()):
        yield from _all(ends, (*starts, last))


def _moved(cutting: Cutting, starts: Starts, limit: int | None) -> Starts:
    """A cut that is better by the first criteria: blocks move, those between shift along, while that helps."""

    def badness(cut: Starts) -> tuple[int, list[int], int] | None:
        costs = cutting.costs(cut)
        by_stage, sums = max(costs), sorted(cutting.summed(costs), reverse=True)
        if limit is not None and by_stage > limit:
            return None
        weighted = cutting.per_rank * sums[0] + cutting.per_stage * by_stage
        return weighted, sums, sum(cost * cost for cost in costs)

    now = badness(starts)
    assert now is not None, f"{starts} begins above the limit"
    while True:
        costs = cutting.costs(starts)
        sums = cutting.summed(costs)
        full = [
            stage for stage, rank in enumerate(cutting.ranks) if sums[rank] == max(sums) or costs[stage] == max(costs)
        ]
        moves = (_move(cutting, starts, giver, taker) for giver in full for taker in range(cutting.num_stages))
        judged = ((badness(cut), cut) for cut in moves if cut is not None)
        least = min(((bad, cut) for bad, cut in judged if bad is not None), default=(now, starts))
        if least[0] >= now:
            return starts
        now, starts = least


def _move(cutting: Cutting, starts: Starts, giver: int, taker: int) -> Starts | None:
    """The cut in which one stage has a block less and another one more; None where that cannot be."""
    if giver == taker or starts[giver + 1] - starts[giver] == 1:
        return None
    step, low, high = (1, taker, giver) if giver > taker else (-1, giver, taker)
    if any(low < stage <= high for stage in cutting.fixed):
        return None
    return starts[: low + 1] + tuple(start + step for start in starts[low + 1 : high + 1]) + starts[high + 1 :]


def _spread(cutting: Cutting) -> Starts:
    """Any legal cut: blocks dealt evenly between what is decided."""
    decided = sorted({0: 0, **cutting.fixed, cutting.num_stages: cutting.num_blocks}.items())
    starts: list[int] = []
    for (stage, first), (end, last) in itertools.pairwise(decided):
        count = end - stage
        starts += [first + (last - first) * index // count for index in range(count)]
    return (*starts, cutting.num_blocks)
