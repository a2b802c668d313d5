"""How sure is a median, or a ratio of medians?

Percentile bootstrap (Efron and Tibshirani 1993, chapter 13) at 95 %, from a fixed seed so that the same samples always
give the same interval. Medians, because identical runs on a shared machine have long tails. Left out: corrections for
bias, which a median of few samples makes unstable.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE_LEVEL = 0.95
NUM_RESAMPLES = 999
SEED = 20260101

Samples = Sequence[float]
Statistic = Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A value and the bounds it lies between; bounds are NaN when one sample or none tells nothing of them."""

    value: float
    low: float
    high: float

    @property
    def has_bounds(self) -> bool:
        return not (math.isnan(self.low) or math.isnan(self.high))

    def widened(self, factor: float) -> "Interval":
        """Return the interval with its bounds moved apart by a factor of at least 1, such as the noise of a control."""
        return Interval(value=self.value, low=self.low / factor, high=self.high * factor)

    def columns(self, name: str) -> dict[str, float | None]:
        """Value and bounds as columns of a table, `name`, `name_low` and `name_high`; what is not known is None."""
        told = {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}
        return {key: None if math.isnan(number) else number for key, number in told.items()}


NOTHING = Interval(value=math.nan, low=math.nan, high=math.nan)


def median(samples: Samples) -> Interval:
    """The median of samples, with its interval; all NaN without samples."""
    if not samples:
        return NOTHING
    return _bootstrap([samples], _median_along)


def ratio(before: Samples, after: Samples) -> Interval:
    """The median of `after` over the median of `before`; the two were sampled apart. All NaN without samples."""
    if not before or not after or not np.median(before):
        return NOTHING
    return _bootstrap([before, after], _ratio_along)


def _median_along(samples: NDArray[np.float64], axis: int) -> Any:
    return np.median(samples, axis=axis)


def _ratio_along(before: NDArray[np.float64], after: NDArray[np.float64], axis: int) -> Any:
    # A resample of the lower half may be all zeros where a clock is coarse: the ratio is then unbounded, not an error.
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.median(after, axis=axis) / np.median(before, axis=axis)


def _bootstrap(parts: Sequence[Samples], statistic: Statistic) -> Interval:
    arrays = [np.asarray(samples, dtype=np.float64) for samples in parts]
    value = float(statistic(*arrays, axis=-1))
    if any(len(array) < 2 for array in arrays):
        return Interval(value=value, low=math.nan, high=math.nan)
    result = stats.bootstrap(
        arrays,
        statistic,
        n_resamples=NUM_RESAMPLES,
        confidence_level=CONFIDENCE_LEVEL,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(SEED),
    )
    bounds = result.confidence_interval
    return Interval(value=value, low=float(bounds.low), high=float(bounds.high))
