"""What is told of one rank and one step, whoever tells it: predicted, traced or measured, in the same words.

    predicted   closed forms                              parallel/predict.py
    traced      the partitioned code, run dry             parallel/trace.py
    measured    the partitioned code, run for real        parallel/meter.py

All fields but the coordinate are numbers that must be equal; `differences` names the first places where they are not.
Left out: time.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Literal

from models.config import ModelConfig
from models.costs import ParameterCounts
from parallel.ledger import Event, Total
from parallel.mesh import Coordinate

Optimizer = Literal["sgd", "adamw"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepShape:
    """What one step computes on.

    Attributes:
        num_sequences: of one data-parallel rank.
        source_length, target_length: positions of a sequence before padding; 0 for a stream that the model lacks.
        dtype_bytes: of an element of parameters, activations and gradients: 2, 4 or 8.
        is_ragged: whether every microbatch has sequences shorter than these lengths, so that keys are masked.

    Raises ValueError for numbers below their least, or another dtype.
    """

    num_sequences: int
    source_length: int = 0
    target_length: int = 0
    dtype_bytes: int = 4
    is_ragged: bool = False

    def __post_init__(self) -> None:
        if self.num_sequences < 1:
            raise ValueError(f"num_sequences = {self.num_sequences}; a step has at least 1 sequence a rank")
        for field in ("source_length", "target_length"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} = {getattr(self, field)}; it must not be negative")
        if self.dtype_bytes not in (2, 4, 8):
            raise ValueError(f"dtype_bytes = {self.dtype_bytes}; choose 2, 4 or 8")

    def check(self, config: ModelConfig) -> None:
        """Raises ValueError unless a model can read sequences of these lengths."""
        for stream, is_read in (("source", config.has_encoder), ("target", config.has_decoder)):
            length: int = getattr(self, f"{stream}_length")
            if is_read and not 1 <= length <= config.max_length:
                raise ValueError(
                    f"{stream}_length = {length}: {config.name} reads 1 to {config.max_length} {stream} positions"
                )
        if self.is_ragged and config.has_encoder and self.source_length < 2:
            raise ValueError("is_ragged needs source_length >= 2: of a single position none is padding")

    @property
    def accumulated_bytes(self) -> int:
        """Of an element where half precision is raised to float32: losses, norms, sums of exponentials."""
        return max(4, self.dtype_bytes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PhaseFlops:
    """FLOPs of matrix products and attention as executed, a multiply-add as 2."""

    forward: int = 0
    recompute: int = 0
    backward: int = 0

    @property
    def total(self) -> int:
        return self.forward + self.recompute + self.backward

    def __add__(self, other: "PhaseFlops") -> "PhaseFlops":
        return PhaseFlops(
            forward=self.forward + other.forward,
            recompute=self.recompute + other.recompute,
            backward=self.backward + other.backward,
        )

    def times(self, count: int) -> "PhaseFlops":
        return PhaseFlops(
            forward=self.forward * count, recompute=self.recompute * count, backward=self.backward * count
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """One rank and one step, without an update of the weights.

    Attributes:
        coordinate: the rank's position.
        parameters: elements that it holds, by component; a tied tensor counts once, under its first name here.
        parameter_bytes, gradient_bytes: as the native engine keeps them.
        events: its communication, equal events counted.
        flops: of all its microbatches.
        saved_bytes: kept for the backward when the first forward is done: the first microbatch on the first stage.
        peak_saved_bytes: most that is kept at any moment of the step.
    """

    coordinate: Coordinate
    parameters: ParameterCounts
    parameter_bytes: int
    gradient_bytes: int
    events: tuple[Total, ...]
    flops: PhaseFlops
    saved_bytes: int
    peak_saved_bytes: int


def differences(expected: RankFigures, found: RankFigures) -> list[str]:
    """Lines that name every quantity in which two figures of one rank differ, events by their site; none when equal."""
    lines = []
    for field in dataclasses.fields(RankFigures):
        left, right = getattr(expected, field.name), getattr(found, field.name)
        if field.name == "events":
            lines += _event_differences(left, right)
        elif left != right:
            lines.append(f"{expected.coordinate}: {field.name} is {right}, expected {left}")
    return lines


def _event_differences(expected: Iterable[Total], found: Iterable[Total]) -> list[str]:
    left, right = _counted(expected), _counted(found)
    return [
        f"{event.operation} {event.axis} at {event.site} ({event.stream}, {event.phase}), {event.payload_bytes} bytes "
        f"over {event.group_size} ranks: {right[event]} times, expected {left[event]}"
        for event in dict.fromkeys((*left, *right))
        if left[event] != right[event]
    ]


def _counted(totals: Iterable[Total]) -> Counter[Event]:
    counted: Counter[Event] = Counter()
    for total in totals:
        counted[total.event] += total.count
    return counted
