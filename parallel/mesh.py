"""Where a rank stands: the grid of ranks over the axes dp, pp, cp and tp. Arithmetic only.

Ranks count through the axes from the last to the first, so that the ranks of a tensor-parallel group are neighbours:

    rank = ((dp * PP + pp) * CP + cp) * TP + tp          dp=2 pp=2 tp=2:   dp 0: pp 0: ranks 0 1    pp 1: ranks 2 3
                                                                           dp 1: pp 0: ranks 4 5    pp 1: ranks 6 7

Left out: process groups (`parallel/comm.py` makes them from the rank lists told here).
"""

import dataclasses
import itertools
import math
from typing import Literal

Axis = Literal["dp", "pp", "cp", "tp"]
AXES: tuple[Axis, ...] = ("dp", "pp", "cp", "tp")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Coordinate:
    """A rank's position on every axis; prints as `dp=0 pp=1 cp=0 tp=1`."""

    dp: int
    pp: int
    cp: int
    tp: int

    def __str__(self) -> str:
        return " ".join(f"{axis}={getattr(self, axis)}" for axis in AXES)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """The degrees of the four axes. Raises ValueError for a degree below 1."""

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if self.degree(axis) < 1:
                raise ValueError(f"{axis} = {self.degree(axis)}; a degree must be at least 1")

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degree(axis) for axis in AXES)

    def degree(self, axis: Axis) -> int:
        degree: int = getattr(self, axis)
        return degree

    def coordinate(self, rank: int) -> Coordinate:
        """Position of `rank`; ValueError outside the mesh."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank} is outside a mesh of {self.size} ranks")
        position = {}
        for axis in reversed(AXES):
            rank, position[axis] = divmod(rank, self.degree(axis))
        return Coordinate(**position)

    def rank(self, coordinate: Coordinate) -> int:
        """The inverse of `coordinate`."""
        rank = 0
        for axis in AXES:
            rank = rank * self.degree(axis) + getattr(coordinate, axis)
        return rank

    def peers(self, rank: int, *axes: Axis) -> tuple[int, ...]:
        """Ranks that differ from `rank` on the given axes only, `rank` among them, in ascending order."""
        mine = self.coordinate(rank)
        ranges = [range(self.degree(axis)) if axis in axes else (getattr(mine, axis),) for axis in AXES]
        return tuple(self.rank(Coordinate(**dict(zip(AXES, at, strict=True)))) for at in itertools.product(*ranges))

    def groups(self, *axes: Axis) -> tuple[tuple[int, ...], ...]:
        """All groups along the given axes; they cover every rank once."""
        firsts = [range(1) if axis in axes else range(self.degree(axis)) for axis in AXES]
        starts = (self.rank(Coordinate(**dict(zip(AXES, at, strict=True)))) for at in itertools.product(*firsts))
        return tuple(self.peers(rank, *axes) for rank in starts)
