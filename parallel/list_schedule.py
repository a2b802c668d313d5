"""Which table suits stages of unequal cost? The fastest that a search finds, never slower than the best named one.

Compared are, each within what the ranks may keep:

    named      every table of `parallel/schedules.py` that the ranks can run
    played     tables of what is most urgent (`parallel/greedy.py`), where urgency grows along the way of a microbatch
               at several rates, with several patiences, within the limit and within what 1f1b keeps; whole backwards
               and, if asked, split ones
    evolved    the best of those, again and again with the urgency of a few pieces changed, until the lower bound is met
               (`parallel/bounds.py`) or the search has played so many actions; seeded, so it is always the same

The least makespan of `parallel/simulate.py` wins; of equally fast tables, the one whose fullest rank keeps least.

List scheduling: Graham 1969. Left out: microbatches of different size, and proof that nothing is faster: the bound
tells how far off a table can be.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeAlias

from parallel.bounds import least_seconds
from parallel.edges import Edge
from parallel.greedy import Played, play
from parallel.pieces import Pieces
from parallel.schedule import Kind, Table, is_split, ranks_of
from parallel.schedules import named
from parallel.simulate import StageSeconds, TransferCost, simulate

RATES = (2.0, 0.0, 4.0, 1.0)
"""How fast urgency falls along the way of a microbatch: times the seconds that a lone one takes to get there."""
PATIENCES = (0.5, 0.0, 1.0)
NUM_EVOLVED = 80
"""Tables that are played after the first ones, at most."""
NUM_ACTIONS = 250_000
"""Actions that one search plays, at most: two seconds or so."""
_CLOSE = 1e-9
"""Times that differ relatively by less are equal."""

Limit: TypeAlias = tuple[float, ...]
"""Most that each rank may keep."""


def list_schedule(
    ranks: Sequence[int],
    microbatches: int,
    seconds: StageSeconds,
    *,
    edges: Sequence[Edge] | None = None,
    transfer_seconds: TransferCost | None = None,
    kept: Sequence[float] | None = None,
    kept_for_weights: Sequence[float] | None = None,
    limit: float | Sequence[float] | None = None,
    split: bool = True,
    num_actions: int = NUM_ACTIONS,
) -> Table:
    """The fastest table found.

    Args:
        ranks: rank of every stage.
        microbatches: of a step.
        seconds: durations, by stage.
        edges: as for `simulate`.
        transfer_seconds: as for `simulate`.
        kept: bytes that a stage keeps of one microbatch, from its forward on; 1 by default: microbatches are counted.
        kept_for_weights: bytes that stay between the halves of a backward; the same by default.
        limit: most bytes that ranks may keep, in the unit of `kept`, one number for all or one each; `usual_limit` by
            default, and as many as it takes if it is infinite.
        split: whether backwards may come in two halves.
        num_actions: that the search plays, at most.

    Raises:
        ValueError: durations of another number of stages, limits of another number of ranks, or ranks that may not keep
            what one microbatch needs.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches = {microbatches}; a step has at least 1")
    if len(ranks) != seconds.num_stages:
        raise ValueError(f"durations of {seconds.num_stages} stages for {len(ranks)}; give one a stage")
    if limit is None:
        limit = usual_limit(ranks, microbatches, kept=kept, kept_for_weights=kept_for_weights, split=split)
    most = tuple(limit) if isinstance(limit, Sequence) else (limit,) * (max(ranks) + 1)
    if len(most) != max(ranks) + 1:
        raise ValueError(f"limits of {len(most)} ranks for {max(ranks) + 1}; give one a rank, or one for all")
    ways = [
        Pieces(
            ranks,
            seconds,
            split=is_halved,
            edges=edges,
            transfer_seconds=transfer_seconds,
            kept=kept,
            kept_for_weights=kept_for_weights,
        )
        for is_halved in (False, True)[: 1 + split]
    ]
    able = [pieces for pieces in ways if _needs(pieces, most) is None]
    if not able:
        raise ValueError(_needs(ways[0], most))
    search = _Search(able, microbatches, most, num_actions)
    search.run()
    best: tuple[float, float, Table] | None = None
    tables = [table for table in named(ranks, microbatches).values() if split or not is_split(table)]
    for table in (*tables, search.best.table):
        peaks = most_kept(table, kept, kept_for_weights)
        if not _fits(peaks, most):
            continue
        makespan = simulate(table, seconds, edges=edges, transfer_seconds=transfer_seconds).makespan_seconds
        if best is None or _is_better(makespan, max(peaks), *best[:2]):
            best = (makespan, max(peaks), table)
    assert best is not None, "what was played fits"
    return best[2]


def usual_limit(
    ranks: Sequence[int],
    microbatches: int,
    *,
    kept: Sequence[float] | None = None,
    kept_for_weights: Sequence[float] | None = None,
    split: bool = True,
) -> tuple[float, ...]:
    """A limit for those who have none: what the named tables of these ranks keep on their fullest rank, gpipe aside.

    So no named table but gpipe is faster. Where only gpipe runs, it is a microbatch for each rank, as 1f1b keeps. The
    arguments are those of `list_schedule`.
    """
    whole = [1.0] * len(ranks) if kept is None else kept
    num_ranks = max(ranks) + 1
    tables = [
        table
        for name, table in named(ranks, microbatches).items()
        if name != "gpipe" and (split or not is_split(table))
    ]
    most = max((max(most_kept(table, kept, kept_for_weights)) for table in tables), default=0.0)
    if not tables:
        most = num_ranks * max(
            sum(size for size, holder in zip(whole, ranks, strict=True) if holder == rank) for rank in ranks
        )
    return (most,) * num_ranks


def most_kept(
    table: Table, kept: Sequence[float] | None = None, kept_for_weights: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Most that each rank keeps; the arguments as for `list_schedule`."""
    whole = [1.0] * len(ranks_of(table)) if kept is None else kept
    later = whole if kept_for_weights is None else kept_for_weights
    takes: dict[Kind, list[float]] = {
        "forward": list(whole),
        "backward": [-size for size in whole],
        "backward_input": [after - before for before, after in zip(whole, later, strict=True)],
        "backward_weight": [-size for size in later],
    }
    rows = (itertools.accumulate(takes[action.kind][action.stage] for action in row) for row in table)
    return tuple(max(row, default=0.0) for row in rows)


def _needs(pieces: Pieces, limit: Limit) -> str | None:
    """Why one microbatch does not fit, on the rank that lacks most; None if it does."""
    lacks = {rank: pieces.room(rank)[1] - most for rank, most in enumerate(limit)}
    rank = max(lacks, key=lambda rank: lacks[rank])
    need, most = pieces.room(rank)[1], limit[rank]
    if _fits((need,), (most,)):
        return None
    mine = [stage for stage, holder in enumerate(pieces.ranks) if holder == rank]
    stages = f"stage {mine[0]}" if len(mine) == 1 else f"stages {', '.join(map(str, mine))}"
    return (
        f"rank {rank} may keep {most:.15g} and needs {need:.15g} for one microbatch of {stages}: no schedule fits; "
        f"try a limit of {need:.15g}, smaller microbatches or more recomputation"
    )


def _fits(kept: Sequence[float], limit: Limit) -> bool:
    return all(now <= most * (1 + _CLOSE) for now, most in zip(kept, limit, strict=True))


def _is_better(makespan: float, kept: float, than: float, than_kept: float) -> bool:
    if abs(makespan - than) <= _CLOSE * than:
        return kept < than_kept
    return makespan < than


class _Trial(NamedTuple):
    """One way to play."""

    pieces: Pieces
    offsets: tuple[float, ...]
    is_late: bool
    patience: float
    limit: Limit


class _Search:
    """Plays one trial after the other and remembers the best.

    Attributes:
        best: the table so far.
    """

    best: Played

    def __init__(self, ways: Sequence[Pieces], microbatches: int, limit: Limit, num_actions: int) -> None:
        self._ways, self._microbatches, self._limit = ways, microbatches, limit
        self._heads = [pieces.heads_seconds for pieces in ways]
        self._period = ways[0].period_seconds
        # Later than anything: what has this offset is done where nothing else can be.
        self._late = microbatches * self._period + max(RATES) * max(map(max, self._heads))
        self._num_left = num_actions
        self._bound = min(least_seconds(pieces, microbatches, limit) for pieces in ways)
        self._trial: _Trial | None = None

    def run(self) -> None:
        """Plays the usual trials, then variations of the best one."""
        for trial in self._trials():
            self._play(trial)
        # One seed: the same search every time, on every rank.
        chance = random.Random(0)
        for _ in range(NUM_EVOLVED):
            if self.best.makespan_seconds <= self._bound * (1 + _CLOSE):
                break
            assert self._trial is not None
            self._play(self._varied(self._trial, chance))

    def _play(self, trial: _Trial) -> None:
        num_actions = len(trial.offsets) * self._microbatches
        if self._trial is not None and self._num_left < num_actions:
            return
        self._num_left -= num_actions
        num_stages = len(trial.pieces.ranks)
        offsets = [
            offset + self._late if trial.is_late and piece >= 2 * num_stages else offset
            for piece, offset in enumerate(trial.offsets)
        ]
        played = play(trial.pieces, self._microbatches, offsets, patience=trial.patience, limit=trial.limit)
        if self._trial is None or not _is_better(
            self.best.makespan_seconds, max(self.best.most), played.makespan_seconds, max(played.most)
        ):
            self.best, self._trial = played, trial

    def _trials(self) -> Iterator[_Trial]:
        for patience, rate, limit, (pieces, heads) in itertools.product(
            PATIENCES, RATES, self._limits(), list(zip(self._ways, self._heads, strict=True))[::-1]
        ):
            offsets = tuple(rate * head for head in heads)
            yield _Trial(pieces, offsets, True, patience, limit)

    def _limits(self) -> list[Limit]:
        """What 1f1b keeps, which is a microbatch for each rank, and what is given."""
        pieces = self._ways[-1]
        usual = tuple(min(pieces.num_ranks * pieces.room(rank)[1], most) for rank, most in enumerate(self._limit))
        return list(dict.fromkeys([usual, self._limit]))

    def _varied(self, trial: _Trial, chance: random.Random) -> _Trial:
        spread = self._period * chance.choice((0.1, 0.3, 1.0, 3.0))
        share = chance.choice((0.1, 0.3, 1.0))
        offsets = tuple(
            offset + chance.gauss(0.0, spread) if chance.random() < share else offset for offset in trial.offsets
        )
        if chance.random() < 0.2:
            factor = chance.uniform(0.7, 1.5)
            offsets = tuple(offset * factor for offset in offsets)
        return trial._replace(
            offsets=offsets,
            is_late=trial.is_late != (chance.random() < 0.2),
            patience=trial.patience if chance.random() < 0.6 else chance.choice((0.0, 0.25, 0.5, 0.75, 1.0, 1.5)),
            limit=trial.limit if chance.random() < 0.7 else self._limit,
        )
