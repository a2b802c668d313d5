"""Which schedules have names: builders of tables. `parallel/layouts.py` tells the placements that each runs on.

    gpipe        any          all forwards, then all backwards; holds every microbatch, and where chunks are dealt,
                              m / p - 1 messages of a channel wait for their receiver
    1f1b         linear       rank r starts p - r forwards, then one backward for one forward; holds p - r
    interleaved  interleaved, the same with chunks: rounds of p microbatches or more go through chunk after chunk;
                 folded       bubble (p - 1) / (m chunks) for every m >= p
    zb_h1        linear       1f1b with the weight gradients of rank r put off by r microbatches; holds p
    zb_h2        linear       2 (p - r) - 1 forwards first, weight gradients put off by 2 r; holds 2 p - 1, and
                              while forward, input and weight gradients take equal time nobody waits between
                              the first forward and the last backward of a rank
    zb_v         v            the same promise on two chunks a rank, and holds p (2 p half stages) as 1f1b does

p ranks, m microbatches; "holds" counts microbatches from forward to the end of their backward. Of the others, two
messages of a channel wait for their receiver at most (`parallel/transfers.py`). All tables are made for ranks of equal
cost; `parallel/list_schedule.py` makes those for unequal ones.

Sources: gpipe, Huang et al. 2019 (arXiv 1811.06965), with chunks in the breadth-first order of Lamy-Poirier 2023
(arXiv 2211.05953); 1f1b and interleaved, Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; zb_h1 and zb_h2, Qi et
al. 2023 (arXiv 2401.10241), section 3; zb_v, Qi et al. 2024 (arXiv 2405.15362). Left out: time
(`parallel/simulate.py`).
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

from parallel.schedule import Action, Kind, Row, Table

Builder: TypeAlias = Callable[[Sequence[int], int], Table]
"""From the rank of every stage and the number of microbatches."""


def gpipe(ranks: Sequence[int], microbatches: int) -> Table:
    """All forwards, then all backwards, a chunk at a time."""
    _check_microbatches(microbatches)
    rows = []
    for rank in range(max(ranks) + 1):
        mine = [stage for stage, holder in enumerate(ranks) if holder == rank]
        cells = _cells("forward", mine, range(microbatches))
        rows.append(_row(cells + _cells("backward", mine[::-1], range(microbatches))))
    return tuple(rows)


def one_forward_one_backward(ranks: Sequence[int], microbatches: int) -> Table:
    """One backward for one forward, as soon as there is one; one chunk."""
    pp = _one_chunk("1f1b", ranks, microbatches)
    rows = []
    for rank in range(pp):
        forwards = _cells("forward", [rank], range(microbatches))
        backwards = _cells("backward", [rank], range(microbatches))
        rows.append(_row(_alternate(forwards, backwards, ahead=pp - 1 - rank)))
    return tuple(rows)


def interleaved(ranks: Sequence[int], microbatches: int) -> Table:
    """One forward, one backward with two chunks or more, for any number of microbatches.

    Microbatches go in rounds: a round runs through the first chunks of all ranks, then through the second and so on.
    With fewer than p in a round, ranks wait for its return; with rounds of different sizes only the largest decides how
    far forwards run ahead. So there are as many rounds as have p microbatches, and what is over is dealt to them.
    """
    _check_microbatches(microbatches)
    pp = max(ranks) + 1
    chunks = len(ranks) // pp
    if chunks < 2 or tuple(ranks) != tuple(range(pp)) * chunks:
        raise ValueError(
            f"schedule 'interleaved' deals stages to ranks in turn, two or more each: {_told(ranks)}; "
            f"try {_told((*range(pp), *range(pp)))}"
        )
    num_rounds = max(1, microbatches // pp)
    firsts = [microbatches * index // num_rounds for index in range(num_rounds + 1)]
    rounds = [range(first, after) for first, after in itertools.pairwise(firsts)]
    rows = []
    for rank in range(pp):
        stages = range(rank, len(ranks), pp)
        forwards = [cell for members in rounds for cell in _cells("forward", stages, members)]
        backwards = [cell for members in rounds for cell in _cells("backward", stages[::-1], members)]
        ahead = (chunks - 1) * max(map(len, rounds)) + 2 * (pp - 1 - rank)
        rows.append(_row(_alternate(forwards, backwards, ahead=ahead)))
    return tuple(rows)


def zb_h1(ranks: Sequence[int], microbatches: int) -> Table:
    """Weight gradients fill the end of 1f1b, within its memory; one chunk."""
    pp = _one_chunk("zb_h1", ranks, microbatches)
    return tuple(_deferring(rank, microbatches, ahead=pp - 1 - rank, behind=rank) for rank in range(pp))


def zb_h2(ranks: Sequence[int], microbatches: int) -> Table:
    """More forwards first fill its beginning as well, for twice the memory; one chunk."""
    pp = _one_chunk("zb_h2", ranks, microbatches)
    return tuple(_deferring(rank, microbatches, ahead=2 * (pp - 1 - rank), behind=2 * rank) for rank in range(pp))


def zb_v(ranks: Sequence[int], microbatches: int) -> Table:
    """No bubble between equal pieces, within the memory of 1f1b; two chunks that go down the ranks and up again."""
    _check_microbatches(microbatches)
    pp = len(ranks) // 2
    if tuple(ranks) != (*range(pp), *reversed(range(pp))):
        way = range(max(ranks) + 1)
        raise ValueError(
            f"schedule 'zb_v' goes down the ranks and up again: {_told(ranks)}; try {_told((*way, *reversed(way)))}"
        )
    # The pattern needs 2 p - 1 microbatches to unfold; those that do not exist are left out of it.
    whole = max(microbatches, 2 * pp - 1)
    rows = []
    for rank in range(pp):
        down, up = _Chunk(rank), _Chunk(2 * pp - 1 - rank)
        # The first comes back from the turn; down the v, what is on its way is as much as the ranks below can take.
        cells = down.forwards(2 * (pp - rank) - 1)
        for _ in range(rank):
            cells += up.forwards(1) + down.forwards(1)
        for _ in range(pp - rank):
            cells += up.forwards(1) + up.backwards(1)
        while up.num_forwards < whole:
            cells += down.forwards(min(1, whole - down.num_forwards)) + down.backwards(1)
            cells += up.forwards(1) + up.backwards(1)
        for _ in range(rank):
            cells += down.inputs(1) + up.inputs(1)
        cells += [cell for _ in range(pp - rank) for cell in down.inputs(1) + down.weights(1)]
        cells += up.weights(whole - up.num_weights) + down.weights(whole - down.num_weights)
        rows.append(_row([cell for cell in cells if cell[2] < microbatches]))
    return tuple(rows)


BUILDERS: dict[str, Builder] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb_v": zb_v,
}


def named(ranks: Sequence[int], microbatches: int) -> dict[str, Table]:
    """Every named table that these ranks can run, by its name."""
    _check_microbatches(microbatches)
    tables = {}
    for name, build in BUILDERS.items():
        # What it refuses are ranks of another placement.
        with contextlib.suppress(ValueError):
            tables[name] = build(ranks, microbatches)
    return tables


_Cell: TypeAlias = tuple[Kind, int, int]
"""Kind, stage, microbatch."""


class _Chunk:
    """A stage that counts what it has done: the next microbatches of a kind, whole backwards in two pieces."""

    def __init__(self, stage: int) -> None:
        self._stage = stage
        self.num_forwards = self.num_inputs = self.num_weights = 0

    def forwards(self, count: int) -> list[_Cell]:
        self.num_forwards += count
        return _cells("forward", [self._stage], range(self.num_forwards - count, self.num_forwards))

    def inputs(self, count: int) -> list[_Cell]:
        self.num_inputs += count
        return _cells("backward_input", [self._stage], range(self.num_inputs - count, self.num_inputs))

    def weights(self, count: int) -> list[_Cell]:
        self.num_weights += count
        return _cells("backward_weight", [self._stage], range(self.num_weights - count, self.num_weights))

    def backwards(self, count: int) -> list[_Cell]:
        return [cell for _ in range(count) for cell in self.inputs(1) + self.weights(1)]


def _cells(kind: Kind, stages: Sequence[int], members: Sequence[int]) -> list[_Cell]:
    return [(kind, stage, index) for stage in stages for index in members]


def _alternate(forwards: Sequence[_Cell], backwards: Sequence[_Cell], *, ahead: int) -> list[_Cell]:
    """`ahead` forwards, then one backward for one forward, then what is left."""
    cells = list(forwards[:ahead])
    for index, backward in enumerate(backwards):
        cells += [*forwards[ahead + index : ahead + index + 1], backward]
    return cells


def _deferring(rank: int, microbatches: int, *, ahead: int, behind: int) -> Row:
    """One input gradient for one forward; the weight gradient of each comes `behind` input gradients later."""
    forwards = _cells("forward", [rank], range(microbatches))
    inputs = _cells("backward_input", [rank], range(microbatches))
    cells: list[_Cell] = []
    for cell in _alternate(forwards, inputs, ahead=ahead):
        cells.append(cell)
        kind, _, index = cell
        if kind == "backward_input" and index >= behind:
            cells.append(("backward_weight", rank, index - behind))
    return _row(cells + _cells("backward_weight", [rank], range(max(0, microbatches - behind), microbatches)))


def _row(cells: Sequence[_Cell]) -> Row:
    return tuple(Action(kind=kind, stage=stage, microbatch=index) for kind, stage, index in cells)


def _one_chunk(schedule: str, ranks: Sequence[int], microbatches: int) -> int:
    """Number of ranks. Raises ValueError for a rank with several stages."""
    _check_microbatches(microbatches)
    if tuple(ranks) != tuple(range(len(ranks))):
        raise ValueError(f"schedule {schedule!r} has one stage a rank, in order: {_told(ranks)}; try interleaved")
    return len(ranks)


def _check_microbatches(microbatches: int) -> None:
    if microbatches < 1:
        raise ValueError(f"microbatches = {microbatches}; a step has at least 1")


def _told(ranks: Sequence[int]) -> str:
    return f"stages on ranks {' '.join(map(str, ranks))}"
