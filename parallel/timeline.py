"""When did each rank do what: the timeline of one step.

    rank 0   0F0 0F1 .   .   0B0 0B1        span    action with start and end       busy    sum of a rank's spans
    rank 1   .   1F0 1B0 1F1 1B1 .          message tensors on their way            idle    what is left of the makespan

Three numbers tell how well a pipeline is filled:

    bubble            1 - busy / makespan, of each rank or of all together
    bubble_rate       1 - busy / longest extent, as published for zero-bubble schedules: a rank's extent runs from its
                      first start to its last end, busy is the busiest rank's (arXiv 2401.10241, section 5.3)
    imbalance         the busiest rank's busy seconds over the mean of all ranks

Left out: where spans come from (`parallel/simulate.py`).
"""

import dataclasses
import math
from typing import NamedTuple

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
