"""Do intervals hold what they promise, and say nothing where there is nothing to say?"""

import math

import numpy as np
import pytest

from results.intervals import median, ratio


def test_samples_without_spread_have_an_interval_without_width() -> None:
    told = median([2.0] * 5)
    assert (told.value, told.low, told.high) == (2, 2, 2)
    told = ratio([2.0] * 5, [3.0] * 4)
    assert (told.value, told.low, told.high) == (1.5, 1.5, 1.5)


def test_the_same_samples_give_the_same_interval() -> None:
    samples = [1.0, 1.2, 0.9, 1.1, 3.0]
    assert median(samples) == median(samples)


def test_an_interval_lies_within_the_samples_around_the_median() -> None:
    told = median([1.0, 1.2, 0.9, 1.1, 3.0])
    assert told.value == 1.1
    assert 0.9 <= told.low < 1.1 < told.high <= 3.0


def test_one_sample_has_a_value_and_no_interval() -> None:
    told = median([4.0])
    assert told.value == 4
    assert not told.has_bounds
    assert not ratio([1.0, 1.0], [2.0]).has_bounds


@pytest.mark.parametrize(("before", "after"), [([], [1.0, 2.0]), ([1.0, 2.0], []), ([0.0, 0.0], [1.0, 2.0])])
def test_nothing_is_told_of_nothing(before: list[float], after: list[float]) -> None:
    assert math.isnan(ratio(before, after).value)
    assert math.isnan(median([]).value)


def test_intervals_of_equal_sources_hold_one_most_of_the_time() -> None:
    draw = np.random.default_rng(7)
    told = [ratio(draw.normal(10, 1, 15).tolist(), draw.normal(10, 1, 15).tolist()) for _ in range(60)]
    assert sum(interval.low <= 1 <= interval.high for interval in told) >= 52


def test_widening_moves_both_bounds_apart() -> None:
    told = ratio([2.0] * 5, [3.0] * 4).widened(1.5)
    assert (told.low, told.high) == (1, 2.25)
