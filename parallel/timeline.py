"""When did each rank do what, and what did it hold meanwhile: the timeline of one step, simulated or measured.

    rank 0   0F0 0F1 .   .   0B0 0B1        span    action with start and end       busy    sum of a rank's spans
    rank 1   .   1F0 1B0 1F1 1B1 .          message tensors on their way            idle    what is left of the makespan

Three numbers tell how well a pipeline is filled:

    bubble            1 - busy / makespan, of each rank or of all together
    bubble_rate       1 - busy / longest extent, as published for zero-bubble schedules: a rank's extent runs from its
                      first start to its last end, busy is the busiest rank's (arXiv 2401.10241, section 5.3)
    imbalance         the busiest rank's busy seconds over the mean of all ranks

Left out: where spans come from (`parallel/simulate.py`, or a measured step) and how they are drawn
(`results/timeline.py`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from parallel.edges import Edge
from parallel.schedule import Action, Direction, Table


class Span(NamedTuple):
    """An action and when it ran, in seconds since the step began."""

    action: Action
    start_seconds: float
    end_seconds: float


class Message(NamedTuple):
    """Tensors of one microbatch on an edge: from when they leave their rank to when the other one has them."""

    edge: Edge
    direction: Direction
    microbatch: int
    start_seconds: float
    end_seconds: float


Steps: TypeAlias = tuple[tuple[float, float], ...]
"""A step function: (seconds, value from then on), seconds rising."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One step of a pipeline. Every rank's spans stand in the order in which it ran them.

    Attributes:
        spans: one row a rank.
        messages: all messages between ranks, in no order that means anything.
    """

    spans: tuple[tuple[Span, ...], ...]
    messages: tuple[Message, ...] = ()

    @property
    def makespan_seconds(self) -> float:
        """From the beginning of the step to the last end."""
        return max((row[-1].end_seconds for row in self.spans if row), default=0.0)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Seconds of work, by rank."""
        return tuple(math.fsum(span.end_seconds - span.start_seconds for span in row) for row in self.spans)

    @property
    def extent_seconds(self) -> tuple[float, ...]:
        """From the first start to the last end, by rank."""
        return tuple(row[-1].end_seconds - row[0].start_seconds if row else 0.0 for row in self.spans)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """Share of the makespan in which a rank does nothing, by rank."""
        makespan = self.makespan_seconds
        return tuple(1.0 - busy / makespan if makespan else 0.0 for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """Share of the makespan in which the ranks do nothing, all together."""
        return math.fsum(self.bubbles) / len(self.spans)

    @property
    def bubble_rate(self) -> float:
        """The published rate for equal ranks: (cost - m (TF + TB + TW)) / cost, cost the longest extent."""
        cost = max(self.extent_seconds)
        return (cost - max(self.busy_seconds)) / cost if cost else 0.0

    @property
    def imbalance(self) -> float:
        """Busy seconds of the busiest rank over the mean of all ranks; 1 where work is dealt evenly."""
        busy = self.busy_seconds
        return max(busy) * len(busy) / math.fsum(busy) if any(busy) else 1.0

    @property
    def order(self) -> Table:
        """What each rank ran, in the order of starting."""
        return tuple(tuple(span.action for span in row) for row in self.spans)

    def held(
        self,
        kept: Sequence[float],
        kept_for_weights: Sequence[float] | None = None,
        *,
        on_top: Sequence[float] | None = None,
        base: Sequence[float] | None = None,
        scale: Sequence[float] | None = None,
    ) -> tuple[Steps, ...]:
        """What each rank holds over time, in the unit of `kept`: bytes, or microbatches.

        A forward takes `kept` of its stage when it starts, a whole backward gives it back when it ends. Of a backward
        in two pieces the first gives back all but `kept_for_weights`, the second the rest.

        Args:
            kept: of one microbatch, by stage.
            kept_for_weights: of it, what the weight gradients need, by stage; all of it by default.
            on_top: what a backward holds besides, from its start to its end, by stage.
            base: what a rank holds all the time, by rank.
            scale: factor of each microbatch, where they differ in size.
        """
        later = kept if kept_for_weights is None else kept_for_weights
        rows = []
        for rank, row in enumerate(self.spans):
            now = 0.0 if base is None else base[rank]
            steps = {0.0: now}
            for action, start_seconds, end_seconds in row:
                factor = 1.0 if scale is None else scale[action.microbatch]
                stage = action.stage
                if action.kind == "forward":
                    now += kept[stage] * factor
                    steps[start_seconds] = now
                    continue
                if action.kind == "backward_weight":
                    now -= later[stage] * factor
                else:
                    if on_top is not None:
                        steps[start_seconds] = now + on_top[stage] * factor
                    left = later[stage] if action.kind == "backward_input" else 0.0
                    now -= (kept[stage] - left) * factor
                steps[end_seconds] = now
            rows.append(tuple(steps.items()))
        return tuple(rows)

    def under_way(self, carried: Sequence[float]) -> Steps:
        """What all messages between ranks carry at a time; `carried` is what one takes, in the order of `messages`."""
        changes = sorted(
            (seconds, step)
            for message, size in zip(self.messages, carried, strict=True)
            for seconds, step in ((message.start_seconds, size), (message.end_seconds, -size))
        )
        steps, now = {0.0: 0.0}, 0.0
        for seconds, step in changes:
            now += step
            steps[seconds] = now
        return tuple(steps.items())


def peak(steps: Steps) -> float:
    """The most that a step function reaches."""
    return max(value for _, value in steps)
