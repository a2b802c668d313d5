"""What does a record say of the inside of a step: when its actions ran, what they cost, and what was expected?

A part of the record's format, which is read and written as one (`results/schema.py`, whence others import it).
"""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActionFacts:
    """One kind of action of one stage on one rank: means over the microbatches, one entry a timed step."""

    rank: int
    stage: int
    kind: str
    busy_seconds: list[float]
    wall_seconds: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SpanFacts:
    """When one action of the typical step ran. A rank's spans stand in the order in which it ran them.

    Seconds since the step began: on one host by its one clock, on several by that of each rank since the barrier at
    which the ranks began together.
    """

    rank: int
    action: str
    """`2F0`: stage, kind, microbatch (`parallel/schedule.py`)."""
    start_seconds: float
    end_seconds: float
    busy_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProfileFacts:
    """What a profile of the model's pieces, measured apart from the run, says of the stages: one entry a stage."""

    forward_seconds: list[float]
    backward_input_seconds: list[float]
    backward_weight_seconds: list[float]
    latency_seconds: float
    """Of a message; 0 where it was not measured."""
    seconds_per_byte: float
    machine: dict[str, Any]
    """Where and how it was measured."""
