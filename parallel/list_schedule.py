"""Which table suits stages of unequal cost? The fastest of many, all simulated with the same durations.

Tried are, each within the memory limit: every named table that the placement can run, and tables made by playing time
(`parallel/greedy.py`) with both orders of forwards, with whole and with split backwards, and with limits from one
microbatch in flight a rank up to the one that is given. The answer is the fastest; of equally fast ones, the first
tried, named ones first. So it is at least as good as the best named one, and always the same.

Bound: no table ends before the busiest rank has done all its work. Left out: microbatches of different size.
"""

import math
from collections.abc import Iterator, Sequence

from parallel.edges import Edge
from parallel.greedy import Order, greedy
from parallel.schedule import Table, is_split, max_in_flight
from parallel.schedules import BUILDERS
from parallel.simulate import StageSeconds, TransferCost, simulate

_ORDERS: tuple[Order, ...] = ("deepest", "oldest")
NUM_LIMITS = 4
"""Limits that are tried, from what one microbatch of all ranks needs up to the one that is given."""


def list_schedule(
    ranks: Sequence[int],
    microbatches: int,
    seconds: StageSeconds,
    *,
    edges: Sequence[Edge] | None = None,
    transfer_seconds: TransferCost | None = None,
    kept: Sequence[float] | None = None,
    limit: float | None = None,
    split: bool = True,
) -> Table:
    """The fastest table found.

    Args:
        ranks: rank of every stage.
        microbatches: of a step.
        seconds: durations, by stage.
        edges: as for `simulate`.
        transfer_seconds: as for `simulate`.
        kept: what a stage keeps of one microbatch; 1 by default.
        limit: most that a rank keeps, in the unit of `kept`; by default what as many microbatches as there are ranks
            need on the fullest rank, which is what 1f1b needs.
        split: whether backwards may come in two halves.

    Raises:
        ValueError: nothing fits into the limit.
    """
    weights = [1.0] * len(ranks) if kept is None else list(kept)
    if limit is None:
        limit = (max(ranks) + 1) * _fullest(ranks, weights)
    best, least = None, math.inf
    for table in _candidates(ranks, microbatches, seconds, edges, transfer_seconds, weights, limit, split):
        timeline = simulate(table, seconds, edges=edges, transfer_seconds=transfer_seconds)
        if timeline.makespan_seconds < least * (1 - 1e-12):
            best, least = table, timeline.makespan_seconds
    if best is None:
        raise ValueError(
            f"one microbatch of all stages of the fullest rank keeps {_fullest(ranks, weights):g}, over the limit of "
            f"{limit:g}; try a limit of {_fullest(ranks, weights):g} or more"
        )
    return best


def least_seconds(ranks: Sequence[int], microbatches: int, seconds: StageSeconds) -> float:
    """No table ends sooner: the work of the busiest rank, behind the forwards of the stages before its first."""
    bounds = []
    for rank in range(max(ranks) + 1):
        mine = [stage for stage, holder in enumerate(ranks) if holder == rank]
        bounds.append(sum(seconds.forward[: mine[0]]) + microbatches * sum(seconds.total[stage] for stage in mine))
    return max(bounds)


def _fullest(ranks: Sequence[int], kept: Sequence[float]) -> float:
    return max(
        sum(size for size, holder in zip(kept, ranks, strict=True) if holder == rank) for rank in range(max(ranks) + 1)
    )


def _candidates(
    ranks: Sequence[int],
    microbatches: int,
    seconds: StageSeconds,
    edges: Sequence[Edge] | None,
    transfer_seconds: TransferCost | None,
    kept: Sequence[float],
    limit: float,
    split: bool,
) -> Iterator[Table]:
    for build in BUILDERS.values():
        try:
            table = build(ranks, microbatches)
        except ValueError:
            # Another placement's.
            continue
        if (split or not is_split(table)) and all(max_in_flight(row, kept) <= limit * (1 + 1e-9) for row in table):
            yield table
    least = _fullest(ranks, kept)
    if least > limit:
        return
    for step in range(NUM_LIMITS):
        share = least + (limit - least) * (step + 1) / NUM_LIMITS
        for order in _ORDERS:
            for is_halved in (False, True)[: 1 + split]:
                yield greedy(
                    ranks,
                    microbatches,
                    seconds,
                    limit=share,
                    split=is_halved,
                    order=order,
                    kept=kept,
                    edges=edges,
                    transfer_seconds=transfer_seconds,
                )
