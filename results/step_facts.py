"""What does a record say of the inside of a step: when its actions ran, what they cost, what was counted and expected?

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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PartFacts:
    """What a rank's step is made of: seconds that its operators took by themselves, one entry a watched step.

    The last two are floors, of the native engine only: all products of a step with nothing else done, and all messages.
    """

    rank: int
    products_seconds: list[float]
    """Matrix products and attention."""
    copies_seconds: list[float]
    other_operators_seconds: list[float]
    products_alone_seconds: list[float]
    messages_alone_seconds: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OperatorFacts:
    """One distinct (operator, shapes) pair of a step on one rank, as dispatched."""

    operator: str
    shapes: str
    phase: str
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FigureFacts:
    """One quantity of one rank and one step from all three sides; a record with a forbidden difference failed.

    Quantities: parameters, parameter_bytes, gradient_bytes, forward_flops, recompute_flops, backward_flops, saved_bytes
    (after the first forward), peak_saved_bytes, communication_events, communication_payload_bytes. Communication is
    compared event by event before it is added up here.
    """

    rank: int
    quantity: str
    predicted: int
    """In closed form."""
    traced: int
    """By the partitioned code run dry."""
    measured: int
    must_be_exact: bool
    """Otherwise 2 % are allowed: what autograd keeps depends on the padding of each microbatch."""
