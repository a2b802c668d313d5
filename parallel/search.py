"""Which layout of a model takes least time for a step on a machine, of all that fit its devices?

    plain     one stage a rank, whole backwards: frames, then their pipelines, the least lower bound first
              (`parallel/search_bounds.py`), cut and simulated unless a closer bound tells that they are not faster;
              until every bound that is left is above the fastest step
    others    several stages a rank or split backwards, the likeliest first, so many for each goal: their cuts take
              long and their bounds are loose
    lists     schedules made for what stages cost, of the fastest pipelines only: they take seconds each
    whole     the fastest of each goal once more, products keeping their gathered inputs whole, if that fits

Several goals share one search: the fastest of all, and the fastest of those that a restriction leaves, such as an even
cut. `tolerance` is by how much of its time a step may be longer than another one that was not tried. What the search
left undecided is told: no layout takes less than `bound_seconds`, lists and whole inputs aside. With `num_others` large
enough nothing is left. Layouts that do not fit are dropped as soon as a bound of their bytes tells, at the latest by
the bytes of the fullest rank, before they are simulated. Everything is the same every time.

Left out: what is searched (`parallel/search_space.py`).
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from parallel.layouts import SPLIT_SCHEDULES, Layout, Schedule
from parallel.search_answer import BEST, Answer, Found
from parallel.search_bounds import Bounds
from parallel.search_space import Question
from parallel.step_time import StepTime, step_time

TOLERANCE = 0.01
"""A goal is reached within one percent."""
NUM_PLAIN = 1200
"""Pipelines with one stage a rank and whole backwards that are cut, at most: most searches need fewer."""
NUM_OTHERS = 30
"""Pipelines with several stages a rank or split backwards that are cut for each goal, at most."""
NUM_LISTED = 2
"""Pipelines that list schedules are made of."""

Restriction = Callable[[Layout], bool]
"""Whether a layout with a named cut is left."""
Observe = Callable[[int, int, float], None]
"""Called with layouts decided, of how many are known, and the fastest step so far."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Node:
    """A pipeline with a named cut, under schedules with whole or with split backwards; or the frame of many."""

    bound: float
    layout: Layout
    goals: frozenset[str]
    schedules: tuple[Schedule, ...] = ()
    """None of a frame."""


def search(
    question: Question,
    restrictions: Mapping[str, Restriction] | None = None,
    *,
    tolerance: float = TOLERANCE,
    num_plain: int = NUM_PLAIN,
    num_others: int = NUM_OTHERS,
    num_listed: int = NUM_LISTED,
    observe: Observe | None = None,
) -> Answer:
    """The fastest layouts that fit.

    Args:
        question: what is searched for.
        restrictions: further goals, by name.
        tolerance: by how much of its time a goal's step may be longer than the least one.
        num_plain: pipelines with one stage a rank and whole backwards that are cut, at most.
        num_others: the others that are cut for each goal, at most.
        num_listed: pipelines that list schedules are made of.
        observe: called now and then.
    """
    return _Search(question, restrictions or {}, tolerance, num_plain, num_others, observe).run(num_listed)


class _Search:
    def __init__(
        self,
        question: Question,
        restrictions: Mapping[str, Restriction],
        tolerance: float,
        num_plain: int,
        num_others: int,
        observe: Observe | None,
    ) -> None:
        self._question, self._bounds = question, Bounds(question)
        self._restrictions, self._tolerance, self._observe = restrictions, tolerance, observe
        self._num_plain, self._num_others = num_plain, num_others
        self._capacity = question.machine.device.capacity_bytes
        self._best: dict[str, Found] = {}
        self._tried: dict[Layout, Found | None] = {}
        self._makespans: dict[Layout, float] = {}
        self._queue: list[tuple[float, int, _Node]] = []
        self._count = itertools.count()
        self._num_decided = self._num_simulated = self._num_too_large = 0

    def run(self, num_listed: int) -> Answer:
        frames = list(self._question.frames())
        goals = frozenset((BEST, *self._restrictions))
        nodes = [
            _Node(self._bounds.frame_seconds(frame), frame, goals)
            for frame in frames
            if self._bounds.bytes.least(frame, self._question.size(frame)) <= self._capacity
        ]
        left = self._search_plain(nodes)
        left = {goal: min(left[goal], bound) for goal, bound in self._search_others(nodes).items()}
        self._list(num_listed)
        self._keep_inputs()
        found = {
            goal: dataclasses.replace(
                self._best[goal], bound_seconds=min(left[goal], self._best[goal].time.step_seconds)
            )
            for goal in (BEST, *self._restrictions)
            if goal in self._best
        }
        return Answer(
            found=found,
            closest=None if found else self._bounds.closest(frames),
            num_frames=len(frames),
            num_simulated=self._num_simulated,
            num_too_large=self._num_too_large,
        )

    # ---- from bound to bound ------------------------------------------------------------------------------------

    def _search_plain(self, nodes: Sequence[_Node]) -> dict[str, float]:
        """Takes pipelines with one stage a rank and whole backwards, the least bound first, until none is faster.

        Returns the least bound left by goal.
        """
        for node in nodes:
            self._push(node.bound, node)
        num_left = self._num_plain
        while self._queue and num_left:
            node = self._pop()
            if not self._is_open(node):
                continue
            if node.schedules:
                self._try(node)
                num_left -= 1
                continue
            for pipeline in self._pipelines(node, are_plain=True):
                self._push(pipeline.bound, pipeline)
        return self._left()

    def _search_others(self, nodes: Sequence[_Node]) -> dict[str, float]:
        """Takes the other pipelines, the likeliest first, so many of them for each goal; the least bound left by goal.

        A goal has a share of its own, because what is likeliest of all may reach few goals.
        """
        likely: list[tuple[float, int, _Node]] = []
        for node in nodes:
            for pipeline in self._pipelines(node, are_plain=False) if self._is_open(node) else ():
                is_split = pipeline.schedules[0] in SPLIT_SCHEDULES
                order = self._bounds.likely_seconds(pipeline.layout, pipeline.bound, split=is_split)
                likely.append((order, next(self._count), pipeline))
        self._queue = sorted(likely)
        done: set[int] = set()
        for goal in (BEST, *self._restrictions):
            num_left = self._num_others
            for _, place, node in self._queue:
                is_wanted = goal in node.goals and place not in done
                if is_wanted and num_left and self._is_open(node, goal):
                    self._try(node)
                    done.add(place)
                    num_left -= 1
                    self._num_decided += 1
                    self._tell()
        self._queue = [one for one in self._queue if one[1] not in done and self._is_open(one[2])]
        return self._left()

    def _left(self) -> dict[str, float]:
        """Empties the queue."""
        left = dict.fromkeys((BEST, *self._restrictions), float("inf"))
        for _, _, node in self._queue:
            for goal in node.goals:
                left[goal] = min(left[goal], node.bound)
        self._queue.clear()
        return left

    def _push(self, order: float, node: _Node) -> None:
        heapq.heappush(self._queue, (order, next(self._count), node))

    def _pop(self) -> _Node:
        _, _, node = heapq.heappop(self._queue)
        self._num_decided += 1
        self._tell()
        return node

    def _tell(self) -> None:
        if self._observe is not None:
            self._observe(self._num_decided, self._num_decided + len(self._queue), self._seconds(BEST))

    def _is_open(self, node: _Node, goal: str | None = None) -> bool:
        """Whether it may hold a faster step of a goal, or of any."""
        goals = node.goals if goal is None else (goal,)
        return any(node.bound * (1 + self._tolerance) < self._seconds(wanted) for wanted in goals)

    def _seconds(self, goal: str) -> float:
        return self._best[goal].time.step_seconds if goal in self._best else float("inf")

    def _pipelines(self, node: _Node, *, are_plain: bool) -> Iterator[_Node]:
        """Pipelines of a frame, those with whole and those with split backwards apart."""
        for layout in self._question.pipelines(node.layout):
            able = self._question.schedules(layout)
            for is_split in (False, True):
                schedules = tuple(name for name in able if (name in SPLIT_SCHEDULES) == is_split)
                is_plain = layout.chunks == 1 and not is_split
                if not schedules or is_plain != are_plain:
                    continue
                bound = node.bound
                if layout.chunks == 1:
                    bound = max(bound, self._bounds.linear_seconds(layout, split=is_split))
                yield _Node(bound, layout, self._goals(layout, schedules), schedules)

    def _try(self, node: _Node) -> None:
        """Cuts a pipeline, and simulates its schedules unless a closer bound tells that none of them is faster."""
        cut = self._bounds.cut(node.layout)
        is_split = node.schedules[0] in SPLIT_SCHEDULES
        bound = max(node.bound, self._bounds.pipeline_seconds(node.layout, cut)[is_split])
        for schedule in node.schedules:
            layout = node.layout.replace(schedule=schedule)
            known = self._makespans.get(_without_zero(layout, cut))
            least = bound
            if known is not None:
                least = max(bound, self._bounds.pipeline_seconds(layout, cut, known)[is_split])
            if self._is_open(_Node(least, layout, self._goals(layout, [schedule]))):
                self._simulate(layout, cut)

    def _goals(self, layout: Layout, schedules: Sequence[Schedule]) -> frozenset[str]:
        """Goals that a layout with one of these schedules reaches."""
        made = [layout.replace(schedule=schedule) for schedule in schedules]
        return frozenset((BEST, *(goal for goal, holds in self._restrictions.items() if any(map(holds, made)))))

    # ---- steps --------------------------------------------------------------------------------------------------

    def _simulate(self, layout: Layout, cut: tuple[int, ...]) -> None:
        explicit = layout.replace(cut=cut) if layout.pp > 1 else layout
        if explicit not in self._tried:
            self._tried[explicit] = self._step(layout, explicit, cut)
        found = self._tried[explicit]
        if found is None:
            return
        # Other names may stand for the same first blocks.
        self._keep(dataclasses.replace(found, layout=layout))

    def _step(self, layout: Layout, explicit: Layout, cut: tuple[int, ...]) -> Found | None:
        question, time = self._question, None
        if layout.schedule == "list":
            time = self._time(explicit)
        size = question.size(layout)
        most, rank = self._bounds.bytes.fullest(layout, cut, size, None if time is None else time.plan.table)
        if most > self._capacity:
            self._num_too_large += 1
            return None
        return Found(
            layout=layout,
            cut=cut,
            time=self._time(explicit) if time is None else time,
            fullest_bytes=most,
            fullest_rank=rank,
            bound_seconds=0.0,
        )

    def _time(self, explicit: Layout) -> StepTime:
        question = self._question
        self._num_simulated += 1
        time = step_time(
            question.machine,
            question.config,
            explicit,
            question.shape(explicit.dp),
            profile=self._bounds.profile(explicit),
            optimizer=question.optimizer,
            master_weights=question.master_weights,
        )
        self._makespans[explicit.replace(zero=0)] = time.timeline.makespan_seconds
        return time

    def _keep(self, found: Found) -> None:
        for goal in self._goals(found.layout, [found.layout.schedule]):
            best = self._best.get(goal)
            if best is None or found.order < best.order:
                self._best[goal] = found

    def _list(self, num_listed: int) -> None:
        """Makes list schedules of the fastest pipelines; where they alone are wanted, the others are dropped."""
        wanted = self._question.fixed.get("schedule", "list") == "list"
        named = self._best
        if "schedule" in self._question.fixed and wanted:
            self._best = {}
        known = [found for found in self._tried.values() if found is not None and found.layout.pp > 1]
        pipelines: dict[Layout, Found] = {}
        for found in sorted(known, key=lambda found: found.order):
            pipelines.setdefault(found.explicit.replace(schedule="gpipe"), found)
        for found in list(pipelines.values())[: num_listed * wanted]:
            layout = found.layout.replace(schedule="list")
            self._simulate(layout, found.cut)
            # Lists bear unequal stages on equal ranks, which a cut of their own gives them.
            if layout.chunks > 1 and layout.cut == "times":
                self._simulate(layout, self._bounds.cut(layout))
        self._best = self._best or named

    def _keep_inputs(self) -> None:
        """Trades bytes for collectives: what the best layouts gather twice under sp, they keep."""
        if "saved_input" not in self._question.fixed:
            for found in list(self._best.values()):
                if found.layout.sp:
                    self._simulate(found.layout.replace(saved_input="whole"), found.cut)


def _without_zero(layout: Layout, cut: tuple[int, ...]) -> Layout:
    """Layouts that differ in ZeRO alone have one pipeline."""
    return layout.replace(cut=cut, zero=0) if layout.pp > 1 else layout.replace(zero=0)
