"""What does something cost that is run forward and backward: three numbers that add up.

    forward  |  the input's half of the backward  |  the weights' half

In whatever unit the one who counts has: FLOPs, seconds or bytes. Left out: which pieces of a model there are
(`parallel/profile.py`).
"""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Cost of one microbatch; a difference below 0 is refused like any other cost below 0."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not 0.0 <= getattr(self, field.name) < float("inf"):
                raise ValueError(f"{field.name} = {getattr(self, field.name)}; a cost is a number, 0 or more")

    @property
    def backward(self) -> float:
        """Both halves."""
        return self.backward_input + self.backward_weight

    @property
    def total(self) -> float:
        return self.forward + self.backward

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def __sub__(self, other: "Work") -> "Work":
        return Work(
            self.forward - other.forward,
            self.backward_input - other.backward_input,
            self.backward_weight - other.backward_weight,
        )

    def __mul__(self, factor: float) -> "Work":
        return Work(self.forward * factor, self.backward_input * factor, self.backward_weight * factor)

    __rmul__ = __mul__


NO_WORK = Work()
"""What a piece costs that a model lacks."""
