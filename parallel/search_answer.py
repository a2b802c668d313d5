"""What does a search of layouts find: the fastest layout of each goal, or where nothing fits the one that lacks least.

Left out: how it is found (`parallel/search.py`).
"""

import dataclasses
from collections.abc import Mapping

from parallel.layouts import Layout
from parallel.step_time import StepTime

BEST = "best"
"""The goal without a restriction."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The fastest layout of one goal.

    Attributes:
        layout: its cut is named.
        cut: first blocks of stages 1, 2, ...
        time: its step.
        fullest_bytes: of the rank that needs most.
        fullest_rank: its pipeline coordinate.
        bound_seconds: no layout of the goal, `list` schedules and inputs kept whole aside, takes less, but for the
            search's tolerance.
    """

    layout: Layout
    cut: tuple[int, ...]
    time: StepTime
    fullest_bytes: int
    fullest_rank: int
    bound_seconds: float

    @property
    def explicit(self) -> Layout:
        """The same layout, its cut in numbers."""
        return self.layout.replace(cut=self.cut) if self.layout.pp > 1 else self.layout

    @property
    def order(self) -> tuple[float, int, bool, str]:
        """The shortest step first, of equal ones that with fewest bytes, rather one whose schedule has a name."""
        return self.time.step_seconds, self.fullest_bytes, self.layout.schedule == "list", self.layout.label


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Closest:
    """Where nothing fits: a layout whose fullest rank needs least of those with one stage a rank, evenly cut, 1f1b."""

    layout: Layout
    fullest_bytes: int
    fullest_rank: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a search found.

    Attributes:
        found: by goal; a goal that nothing reaches is not in it.
        closest: None where something fits.
        num_frames: degrees and options before pipelines.
        num_simulated: steps.
        num_too_large: layouts that were refused by their exact bytes.
    """

    found: Mapping[str, Found]
    closest: Closest | None
    num_frames: int
    num_simulated: int
    num_too_large: int
