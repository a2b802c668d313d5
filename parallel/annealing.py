"""Which cuts of many stages on few ranks are good, where too many exist to compare them and moving blocks gets stuck?

Starts of stages are shifted by one, one of them or several that follow each other, as chance has it; what is worse is
taken too, the less often the later (simulated annealing, Kirkpatrick et al. 1983). Least is to be what
`parallel/cuts.py` makes least: the weighted most costly rank and stage. Several weights give several cuts, for others
to choose from by playing the schedule (`parallel/candidates.py`). One seed: the same cuts every time.
"""

import dataclasses
import math
import random
from collections.abc import Sequence

from parallel.cuts import Cutting, Starts

NUM_SHIFTS = 2500
"""Of one search."""
_HOT, _COLD = 0.03, 0.0003
"""How much worse a cut may be to be taken every third time, relative to what it is, at the beginning and at the end."""
STAGE_WEIGHTS = (1.0, 0.25, 3.0)
"""Of the several cuts, times the weight of the most costly stage that a cutting has."""


def several(cutting: Cutting, begun: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """First blocks of stages 1, 2, ... of several good cuts, each told once.

    Args:
        cutting: what to cut, with several stages a rank.
        begun: a legal cut from which to search.
    """
    found: dict[tuple[int, ...], None] = {}
    for weight in STAGE_WEIGHTS:
        weighed = dataclasses.replace(
            cutting, per_rank=64 * cutting.per_rank, per_stage=round(64 * weight * cutting.per_stage)
        )
        starts = _annealed(weighed, (0, *begun, cutting.num_blocks), random.Random(0))
        found[starts[1:-1]] = None
    return tuple(found)


def _annealed(cutting: Cutting, begun: Starts, chance: random.Random) -> Starts:
    """The best cut on the way."""
    starts = list(begun)
    movable = [stage for stage in range(1, cutting.num_stages) if stage not in cutting.fixed]
    costs = cutting.costs(begun)
    sums = cutting.summed(costs)
    now = _weighted(cutting, costs, sums)
    best, least = begun, now
    for shift in range(NUM_SHIFTS if movable else 0):
        heat = now * _HOT * (_COLD / _HOT) ** (shift / NUM_SHIFTS)
        first = chance.randrange(len(movable))
        last = first + (0 if chance.random() < 0.5 else chance.randrange(1, 4))
        moved, step = movable[first : last + 1], chance.choice((-1, 1))
        for stage in moved:
            starts[stage] += step
        changed = {stage - 1 for stage in moved} | set(moved)
        if any(starts[stage] >= starts[stage + 1] for stage in changed):
            _back(starts, moved, step)
            continue
        before = {stage: costs[stage] for stage in changed}
        for stage in changed:
            costs[stage] = cutting.cost(stage, starts[stage], starts[stage + 1])
        sums = cutting.summed(costs)
        then = _weighted(cutting, costs, sums)
        if then <= now or chance.random() < math.exp((now - then) / heat):
            now = then
            if now < least:
                best, least = tuple(starts), now
            continue
        _back(starts, moved, step)
        for stage, cost in before.items():
            costs[stage] = cost
    return best


def _back(starts: list[int], moved: Sequence[int], step: int) -> None:
    for stage in moved:
        starts[stage] -= step


def _weighted(cutting: Cutting, costs: Sequence[int], sums: Sequence[int]) -> float:
    """What is least, and a little of how far all ranks are from even, so that shifts have a slope to follow."""
    most = cutting.per_rank * max(sums) + cutting.per_stage * max(costs)
    spread = math.sqrt(sum(cost * cost for cost in sums) / len(sums))
    return float(most + 0.1 * cutting.per_rank * spread)
