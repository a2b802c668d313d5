"""Which cut and placement end a step soonest? Candidates are compared by simulating their schedules.

    named      one cut, one placement, one named schedule
    listed     for the placements of so many chunks a rank, several cuts each, and a list schedule for each:

                   all              cuts of several weights and starts     by lower bounds (`parallel/bounds.py`)
                   the least ones   NUM_LOOKED of every placement, and     by a short search for a schedule
                                    the cut that an engine would take
                   the least ones   NUM_SEARCHED                           by a whole one (`parallel/list_schedule.py`)

Times are in the unit of the line's profile. Left out: tp and dp (`parallel/step_time.py`), and bytes: list schedules
keep no more microbatches than the named ones of their placement do.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

from parallel.annealing import several
from parallel.bounds import least_seconds
from parallel.cuts import Cutting, Starts, best, order
from parallel.layouts import Schedule
from parallel.line import Line
from parallel.list_schedule import NUM_ACTIONS, list_schedule
from parallel.pieces import Pieces
from parallel.placement import Placement, stage_ranks
from parallel.schedule import Table
from parallel.schedules import BUILDERS
from parallel.simulate import simulate
from parallel.timeline import Timeline

CutKind = Literal["even", "aligned", "costed"]

PLACEMENTS: dict[int, tuple[Placement, ...]] = {1: ("linear",), 2: ("interleaved", "v", "folded")}
"""By chunks a rank; `interleaved` and `folded` for other numbers."""
NUM_LOOKED = 2
NUM_SEARCHED = 1
_LOOK_ACTIONS = NUM_ACTIONS // 12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A cut line on ranks, and how its step runs.

    Attributes:
        line: what is cut.
        placement, pp, chunks, microbatches: how it is run.
        starts: first atom of every stage, and the number of atoms.
        table: the schedule.
        timeline: of the step.
    """

    line: Line
    placement: Placement
    pp: int
    chunks: int
    microbatches: int
    starts: Starts
    table: Table
    timeline: Timeline

    @property
    def ideal(self) -> float:
        """All work dealt evenly, without a bubble."""
        return self.microbatches * self.line.profile.model.total / self.pp

    @property
    def over_ideal(self) -> float:
        """Makespan over the ideal."""
        return self.timeline.makespan_seconds / self.ideal

    @property
    def stage_imbalance(self) -> float:
        """Most costly stage over the mean."""
        costs = [self.line.slice(first, last).total for first, last in itertools.pairwise(self.starts)]
        return max(costs) * len(costs) / sum(costs)

    @property
    def bound(self) -> float:
        """What no schedule of these stages falls below, over the ideal; backwards may be split."""
        return _bound(self.line, stage_ranks(self.placement, self.pp, self.chunks), self.starts, self.microbatches)


def named(
    line: Line, *, pp: int, microbatches: int, schedule: Schedule, cut: CutKind, placement: Placement, chunks: int = 1
) -> Pipeline:
    """One cut under a named schedule.

    Args:
        line: what to cut.
        pp: ranks.
        microbatches: of a step.
        schedule: a name of `parallel/schedules.py`.
        cut: `even` counts atoms, on each side apart where they are folded; `aligned` has no stage of both sides, each
            evenly and with the split that costs least; `costed` has the least most costly stage.
        placement: of the chunks.
        chunks: a rank.

    Raises:
        ValueError: more stages than atoms, or a cut or placement that the model cannot have.
    """
    cutting = line.cutting(placement, pp, chunks)
    starts = _even(line, cutting) if cut == "even" else _aligned(line, cutting) if cut == "aligned" else None
    if starts is None:
        starts = (0, *best(cutting), line.num_atoms)
    table = BUILDERS[schedule](cutting.ranks, microbatches)
    return _pipeline(line, placement, pp, chunks, microbatches, starts, table)


def listed(line: Line, *, pp: int, chunks: int, microbatches: int) -> Pipeline:
    """The soonest that is found with so many chunks a rank. Raises ValueError for more stages than atoms."""
    looked = []
    for placement in placements(line, pp, chunks):
        cutting = line.cutting(placement, pp, chunks, per_rank=2 * microbatches, per_stage=pp - 1)
        usual, *others = _cuts(line, cutting)
        others.sort(key=lambda starts: (_bound(line, cutting.ranks, starts, microbatches), starts))
        looked += [
            _searched(line, placement, pp, chunks, microbatches, starts, _LOOK_ACTIONS)
            for starts in (usual, *others[:NUM_LOOKED])
        ]
    looked.sort(key=lambda pipeline: pipeline.over_ideal)
    searched = [
        _searched(line, one.placement, pp, chunks, microbatches, one.starts, NUM_ACTIONS)
        for one in looked[:NUM_SEARCHED]
    ]
    return min((*searched, *looked), key=lambda pipeline: pipeline.over_ideal)


def placements(line: Line, pp: int, chunks: int) -> tuple[Placement, ...]:
    """Those that so many chunks may have; a side that has too few atoms is not folded."""
    known = PLACEMENTS.get(chunks, ("interleaved", "folded"))
    half = pp * chunks // 2
    can_fold = line.config.has_cross_attention and chunks % 2 == 0
    can_fold &= half <= min(line.boundary, line.num_atoms - line.boundary)
    return tuple(name for name in known if name != "folded" or can_fold)


def _cuts(line: Line, cutting: Cutting) -> tuple[Starts, ...]:
    """Cuts worth a look."""
    first = best(cutting)
    if not cutting.shares_ranks:
        return ((0, *first, line.num_atoms),)
    by_stage = best(dataclasses.replace(cutting, per_rank=0, per_stage=1))
    cuts = dict.fromkeys((first, by_stage, *several(cutting, first)))
    return tuple((0, *cut, line.num_atoms) for cut in cuts)


def _even(line: Line, cutting: Cutting) -> Starts:
    """Numbers of atoms that differ by one at most, on each side apart where the boundary is decided."""
    decided = sorted({0: 0, **cutting.fixed, cutting.num_stages: line.num_atoms}.items())
    starts: list[int] = []
    for (stage, first), (end, last) in itertools.pairwise(decided):
        starts += _dealt(first, last, end - stage)
    return (*starts, line.num_atoms)


def _aligned(line: Line, cutting: Cutting) -> Starts:
    """Of all splits of the stages between the sides, each cut evenly, the one that costs least."""
    boundary, end, num_stages = line.boundary, line.num_atoms, cutting.num_stages
    splits = [count for count in range(1, num_stages) if count <= boundary and num_stages - count <= end - boundary]
    if not splits:
        raise ValueError(f"no aligned cut of {boundary} encoder and {end - boundary} decoder atoms into {num_stages}")
    cuts = [(*_dealt(0, boundary, count), *_dealt(boundary, end, num_stages - count), end) for count in splits]
    return min(cuts, key=lambda starts: order(cutting, starts))


def _dealt(first: int, last: int, count: int) -> list[int]:
    """Where parts begin, the larger ones first."""
    size, larger = divmod(last - first, count)
    return [first + size * index + min(index, larger) for index in range(count)]


def _bound(line: Line, ranks: Sequence[int], starts: Starts, microbatches: int) -> float:
    pieces = Pieces(
        ranks,
        line.seconds(starts),
        split=True,
        edges=line.edges(starts),
        transfer_seconds=line.transfer_seconds,
    )
    ideal = microbatches * line.profile.model.total / pieces.num_ranks
    return least_seconds(pieces, microbatches) / ideal


def _searched(
    line: Line, placement: Placement, pp: int, chunks: int, microbatches: int, starts: Starts, num_actions: int
) -> Pipeline:
    table = list_schedule(
        stage_ranks(placement, pp, chunks),
        microbatches,
        line.seconds(starts),
        edges=line.edges(starts),
        transfer_seconds=line.transfer_seconds,
        num_actions=num_actions,
    )
    return _pipeline(line, placement, pp, chunks, microbatches, starts, table)


def _pipeline(
    line: Line, placement: Placement, pp: int, chunks: int, microbatches: int, starts: Starts, table: Table
) -> Pipeline:
    timeline = simulate(table, line.seconds(starts), edges=line.edges(starts), transfer_seconds=line.transfer_seconds)
    return Pipeline(
        line=line,
        placement=placement,
        pp=pp,
        chunks=chunks,
        microbatches=microbatches,
        starts=starts,
        table=table,
        timeline=timeline,
    )
