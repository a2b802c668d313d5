"""Are imbalance, bubble and padding what their definitions say, by hand?"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.layouts import Schedule
from parallel.schedules import BUILDERS
from results.balance import (
    coefficient_of_variation,
    imbalance,
    padding_waste,
    rank_bubbles,
    span,
    wall_bubbles,
)

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")


def test_imbalance_is_the_largest_over_the_mean() -> None:
    assert imbalance([1, 1, 1, 1]) == 1
    assert imbalance([4, 2, 2, 0]) == 2
    assert imbalance([0, 0, 8, 0]) == 4
    assert imbalance([0, 0]) == 1


def test_imbalance_of_several_steps_is_told_for_each() -> None:
    assert imbalance([[1, 3], [1, 1]]).tolist() == [1, 1.5]


def test_coefficient_of_variation_is_of_the_whole_population() -> None:
    assert coefficient_of_variation([5, 5]) == 0
    assert coefficient_of_variation([2, 4, 4, 4, 5, 5, 7, 9]) == pytest.approx(2 / 5)
    assert coefficient_of_variation([0, 0]) == 0


@pytest.mark.parametrize("values", [[], [1.0, -1.0]])
def test_there_is_no_balance_of_nothing_or_of_less_than_nothing(values: list[float]) -> None:
    with pytest.raises(ValueError, match="values"):
        imbalance(values)


def test_padding_waste_is_the_share_of_positions_without_a_token() -> None:
    assert padding_waste(75, 100) == 0.25
    assert padding_waste(0, 0) == 0
    with pytest.raises(ValueError, match="101 valid of 100"):
        padding_waste(101, 100)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(stages=st.integers(1, 6), microbatches=st.integers(1, 8))
def test_equal_stages_wait_for_as_long_as_the_formula_says(schedule: Schedule, stages: int, microbatches: int) -> None:
    bubbles = rank_bubbles(BUILDERS[schedule](range(stages), microbatches), [1.0] * stages, [2.0] * stages)
    assert bubbles == pytest.approx([(stages - 1) / (microbatches + stages - 1)] * stages)


def test_a_slow_stage_sets_the_pace() -> None:
    # F0 F1 F0 ..: stage 1 takes 2 + 4 a microbatch, stage 0 takes 1 + 2; 1 before the first, 2 behind the last.
    assert span(BUILDERS["1f1b"](range(2), 3), [1, 2], [2, 4]) == 1 + 3 * 6 + 2
    assert rank_bubbles(BUILDERS["1f1b"](range(2), 3), [1, 2], [2, 4]) == pytest.approx([1 - 9 / 21, 1 - 18 / 21])


def test_many_steps_are_played_at_once() -> None:
    forward, backward = np.array([[1.0, 3.0], [2.0, 1.0]]), np.array([[1.0, 1.0], [1.0, 2.0]])
    together = span(BUILDERS["1f1b"](range(2), 4), forward, backward)
    apart = [span(BUILDERS["1f1b"](range(2), 4), forward[:, step], backward[:, step]) for step in range(2)]
    assert together.tolist() == apart


def test_a_stage_that_never_works_is_idle_all_the_time() -> None:
    assert rank_bubbles(BUILDERS["gpipe"](range(2), 2), [1, 0], [1, 0]).tolist() == [0, 1]
    assert rank_bubbles(BUILDERS["gpipe"](range(2), 2), [0, 0], [0, 0]).tolist() == [0, 0]


def test_the_bubble_of_the_wall_is_what_the_step_took_beyond_the_busy_time() -> None:
    assert wall_bubbles([0.75, 2.0, 0.0], [1.0, 1.0, 0.0]) == [0.25, 0, 0]
