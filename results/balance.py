"""How evenly is work spread, and how long does a stage wait for the others?

    imbalance                  largest / mean; 1 is perfect, n is all work on one of n
    coefficient of variation   standard deviation (of the whole population) / mean
    padding waste              1 - valid positions / positions computed on
    bubble of a stage          1 - busy / critical path, the share of a step in which the stage has nothing to do

Two critical paths. On GPUs the busy time is that of CUDA events and the critical path is the wall time of the step, so
the bubble holds whatever the stage waited for. On CPUs ranks share cores, so wall time says how many ranks a core
carried: busy time is thread CPU time and the critical path is the span of the schedule played with those times, every
stage on a core of its own and transfers free. That bubble is the schedule's and the cut's alone.

Source for the play: Narayanan et al. 2021 (arXiv 2104.04473) section 2.2, whose (p - 1)/m is bubble / (1 - bubble) for
equal stages. Left out: transfer times.
"""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parallel.schedule import Product, Table, ranks_of

Floats = NDArray[np.float64]


def imbalance(values: ArrayLike) -> Any:
    """Largest over mean along the first dim; 1 where all are zero.

    Raises:
        ValueError: no values, or a negative one.
    """
    array = _checked(values)
    mean = array.mean(axis=0)
    return np.where(mean > 0, array.max(axis=0) / np.where(mean > 0, mean, 1.0), 1.0)[()]


def coefficient_of_variation(values: ArrayLike) -> Any:
    """Standard deviation over mean along the first dim; 0 where all are zero.

    Raises:
        ValueError: no values, or a negative one.
    """
    array = _checked(values)
    mean = array.mean(axis=0)
    return np.where(mean > 0, array.std(axis=0) / np.where(mean > 0, mean, 1.0), 0.0)[()]


def padding_waste(valid_tokens: int, padded_tokens: int) -> float:
    """Share of the computed positions that hold no token; 0 where nothing is computed.

    Raises:
        ValueError: more valid positions than positions.
    """
    if not 0 <= valid_tokens <= padded_tokens:
        raise ValueError(f"{valid_tokens} valid of {padded_tokens} positions: valid ones are a part of all")
    return 1 - valid_tokens / padded_tokens if padded_tokens else 0.0


def span(table: Table, forward: ArrayLike, backward: ArrayLike) -> Floats:
    """Time from the first action of a table to its last, transfers free.

    `forward` and `backward` are times of one microbatch on each stage, [stages, ...]; trailing dims are played at once.
    Of a backward in two pieces each takes half.
    """
    forward, backward = _checked(forward), _checked(backward)
    seconds = {
        "forward": forward,
        "backward": backward,
        "backward_input": backward / 2,
        "backward_weight": backward / 2,
    }
    waiting = [
        collections.deque((action, action.gives, action.needs(len(forward))) for action in actions) for actions in table
    ]
    ends: dict[Product | None, Floats] = {}
    free = [np.zeros(forward.shape[1:]) for _ in waiting]
    while any(waiting):
        num_waiting = sum(map(len, waiting))
        for rank, actions in enumerate(waiting):
            while actions:
                action, gives, needs = actions[0]
                if needs is not None and needs not in ends:
                    break
                start = free[rank] if needs is None else np.maximum(free[rank], ends[needs])
                free[rank] = ends[gives] = start + seconds[action.kind][action.stage]
                actions.popleft()
        assert sum(map(len, waiting)) < num_waiting, "the table deadlocks"
    return np.asarray(np.stack(free).max(axis=0))


def rank_bubbles(table: Table, forward: ArrayLike, backward: ArrayLike) -> Floats:
    """Bubble of every rank on the played table, [ranks, ...]; arguments as in `span`. 0 where all times are."""
    forward, backward = _checked(forward), _checked(backward)
    path = span(table, forward, backward)
    microbatches = 1 + max(action.microbatch for row in table for action in row)
    ranks = ranks_of(table)
    work = microbatches * (forward + backward)
    busy = np.stack([sum(work[s] for s, holder in enumerate(ranks) if holder == rank) for rank in range(len(table))])
    return np.where(path > 0, 1 - busy / np.where(path > 0, path, 1.0), 0.0)


def wall_bubbles(busy_seconds: Sequence[float], step_seconds: Sequence[float]) -> list[float]:
    """Bubble of one rank in every step, against the wall time of the step; never below 0 where clocks disagree."""
    pairs = zip(busy_seconds, step_seconds, strict=True)
    return [max(0.0, 1 - busy / step) if step > 0 else 0.0 for busy, step in pairs]


def _checked(values: ArrayLike) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim == 0 or array.shape[0] == 0:
        raise ValueError("there is no balance without values")
    if (array < 0).any():
        raise ValueError(f"{array.min()} among the values to balance; they must not be negative")
    return array
