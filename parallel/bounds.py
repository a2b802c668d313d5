"""How soon can a step end at best, whatever the order? A lower bound, in the seconds of `parallel/simulate.py`.

The largest of:

    path     a lone microbatch, from end to end
    rank     what the first microbatch takes to get to a rank + all work of the rank + what the last one takes from
             there to the end
    lap      the same, where stages are dealt to ranks 0 1 .. p-1 0 1 .. p-1: before the first microbatch comes back to
             rank r as stage p + r, the rank has at most forwards of stage r to do, and all that it does of these, k of
             them, have passed the ranks before it ahead of that microbatch. It comes back not before, for any rank
             j <= r,
                 (time to get to rank j) + k F(j) + F(p + j) + .. + F(p + r - 1)
             and k F(r) of that time is work. The least k leaves r idle for the rest. Backwards alike at the end.
    room     microbatches x (what a stage keeps of one x how long at least), over the limit of its rank

With backwards in two halves, the weights' halves fill the end: the bounds hold for the rest of the work with its end,
and for all work without it. Left out: what messages wait for each other, and that ranks want the same microbatch.
"""

import math
from collections.abc import Iterable, Sequence

from parallel.pieces import Pieces


def least_seconds(pieces: Pieces, microbatches: int, limit: Sequence[float] | None = None) -> float:
    """No table of these pieces ends sooner.

    Args:
        pieces: what there is to do.
        microbatches: of a step.
        limit: most that each rank may keep.
    """
    heads, tails, num_stages = pieces.heads_seconds, pieces.tails_seconds, len(pieces.ranks)

    def work(some: Iterable[int]) -> float:
        return microbatches * math.fsum(pieces.seconds[piece] for piece in some)

    bounds = [heads[piece] + pieces.seconds[piece] + tails[piece] for piece in pieces.along]
    before, after = (_laps(pieces, microbatches, first) for first in (0, num_stages))
    for rank, mine in enumerate(pieces.of_rank):
        begin = max(before[rank], min(heads[piece] for piece in mine))
        inputs = [piece for piece in mine if num_stages <= piece < 2 * num_stages]
        end = max(after[rank], min(tails[piece] for piece in inputs))
        bounds.append(begin + work(piece for piece in mine if piece < 2 * num_stages) + end)
        bounds.append(begin + work(mine))
    if limit is not None:
        used = _used(pieces)
        bounds += [microbatches * use / most for use, most in zip(used, limit, strict=True)]
    return max(bounds)


def _laps(pieces: Pieces, microbatches: int, first: int) -> list[float]:
    """How long every rank is idle before its second stage can begin; nothing where stages are not dealt in turn.

    `first` is the first of the pieces that count: forwards, or backwards with time reversed.
    """
    pp = pieces.num_ranks
    idle = [0.0] * pp
    if len(pieces.ranks) == pp or pieces.ranks != tuple(range(pp)) * (len(pieces.ranks) // pp):
        return idle
    one, two = pieces.seconds[first : first + pp], pieces.seconds[first + pp : first + 2 * pp]
    for rank in range(pp):
        way = [math.fsum(one[:other]) for other in range(rank + 1)]
        lap = [math.fsum(two[other:rank]) for other in range(rank + 1)]
        idle[rank] = min(
            max(way[other] + passed * one[other] + lap[other] for other in range(rank + 1)) - passed * one[rank]
            for passed in range(1, microbatches + 1)
        )
    return idle


def _used(pieces: Pieces) -> list[float]:
    """What a microbatch keeps on every rank, times how long it keeps it at least."""
    num_stages = len(pieces.ranks)
    used, span = [0.0] * pieces.num_ranks, 0.0
    for stage in reversed(range(num_stages)):
        back = num_stages + stage
        span += pieces.seconds[stage] + pieces.seconds[back]
        span += sum(link.delay for link in pieces.links[stage] if link.piece == stage + 1)
        span += (
            sum(link.delay for link in pieces.links[back + 1] if link.piece == back) if stage < num_stages - 1 else 0
        )
        used[pieces.ranks[stage]] += pieces.takes[stage] * span
        if len(pieces.kinds) == 3:
            later = pieces.takes[stage] + pieces.takes[back]
            used[pieces.ranks[stage]] += later * pieces.seconds[back + num_stages]
    return used
