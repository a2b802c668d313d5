"""Do a timeline's measures say what they are called, and does what ranks hold add up?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.placement import Placement, stage_ranks
from parallel.schedule import Action, max_in_flight, parse
from parallel.schedules import BUILDERS
from parallel.simulate import StageSeconds, TransferSeconds, every_message, simulate
from parallel.timeline import Span, Timeline, peak

PIPELINES: tuple[tuple[str, Placement, int], ...] = (
    ("gpipe", "linear", 1),
    ("1f1b", "linear", 1),
    ("zb_h1", "linear", 1),
    ("zb_h2", "linear", 1),
    ("interleaved", "interleaved", 2),
    ("zb_v", "v", 2),
)


def row(text: str, *times: tuple[float, float]) -> tuple[Span, ...]:
    return tuple(Span(Action.parse(word), *at) for word, at in zip(text.split(), times, strict=True))


UNEQUAL = Timeline(
    spans=(
        row("0F0 0B0", (0.0, 1.0), (6.0, 8.0)),
        row("1F0 1B0", (2.0, 4.0), (4.0, 6.0)),
    )
)


def test_measures_of_unequal_ranks() -> None:
    assert UNEQUAL.makespan_seconds == 8
    assert UNEQUAL.busy_seconds == (3, 4)
    assert UNEQUAL.extent_seconds == (8, 4)
    assert UNEQUAL.bubbles == (5 / 8, 4 / 8)
    assert UNEQUAL.bubble == 9 / 16
    # The published rate sets the longest extent against the busiest rank.
    assert UNEQUAL.bubble_rate == (8 - 4) / 8
    assert UNEQUAL.imbalance == 4 / 3.5
    assert UNEQUAL.order == parse("0F0 0B0", "1F0 1B0")


def test_the_published_rate_begins_with_a_ranks_first_action() -> None:
    late = Timeline(spans=(row("0F0 0B0", (10.0, 11.0), (11.0, 12.0)),))
    assert (late.bubble_rate, late.bubble) == (0.0, 10 / 12)


def test_a_step_without_work_has_no_bubble() -> None:
    nothing = Timeline(spans=((), ()))
    assert (nothing.makespan_seconds, nothing.bubble, nothing.bubble_rate, nothing.imbalance) == (0, 0, 0, 1)


def test_bytes_are_held_from_the_forward_to_the_end_of_the_backward() -> None:
    held = UNEQUAL.held((10.0, 20.0), base=(1.0, 2.0), on_top=(3.0, 4.0))
    assert held[0] == ((0.0, 11.0), (6.0, 14.0), (8.0, 1.0))
    assert held[1] == ((0.0, 2.0), (2.0, 22.0), (4.0, 26.0), (6.0, 2.0))
    assert [peak(steps) for steps in held] == [14, 26]


def test_the_weights_half_keeps_its_part() -> None:
    timeline = Timeline(spans=(row("0F0 0I0 0W0", (0.0, 1.0), (1.0, 2.0), (5.0, 6.0)),))
    assert timeline.held((10.0,), (4.0,)) == (((0.0, 10.0), (2.0, 4.0), (6.0, 0.0)),)
    # All of it, where nothing is known.
    assert timeline.held((10.0,)) == (((0.0, 10.0), (2.0, 10.0), (6.0, 0.0)),)


def test_smaller_microbatches_hold_less() -> None:
    timeline = Timeline(spans=(row("0F0 0F1 0B0 0B1", (0, 1), (1, 2), (2, 3), (3, 4)),))
    assert timeline.held((10.0,), scale=(1.0, 0.5)) == (((0.0, 10.0), (1.0, 15.0), (3.0, 5.0), (4.0, 0.0)),)


@settings(max_examples=60, deadline=None)
@given(
    pipeline=st.sampled_from(PIPELINES),
    num_ranks=st.integers(2, 5),
    microbatches=st.integers(1, 9),
    latency=st.sampled_from((0.0, 0.3, 2.0)),
)
def test_as_much_is_held_as_the_table_says_whatever_the_times(
    pipeline: tuple[str, Placement, int], num_ranks: int, microbatches: int, latency: float
) -> None:
    name, placement, chunks = pipeline
    ranks = stage_ranks(placement, num_ranks, chunks)
    table = BUILDERS[name](ranks, microbatches)
    kept = tuple(float(stage + 1) for stage in range(len(ranks)))
    cost = every_message(TransferSeconds(latency=latency))
    timeline = simulate(table, StageSeconds.equal(len(ranks)), transfer_seconds=cost)
    for actions, steps in zip(table, timeline.held(kept), strict=True):
        assert peak(steps) == max_in_flight(actions, kept)
        assert steps[-1][1] == 0.0, "all is given back"
        assert [seconds for seconds, _ in steps] == sorted({seconds for seconds, _ in steps})


def test_what_is_under_way_is_on_no_rank() -> None:
    cost = every_message(TransferSeconds(latency=2.0))
    timeline = simulate(BUILDERS["gpipe"](range(2), 2), StageSeconds.equal(2), transfer_seconds=cost)
    # Forwards leave at 1 and 2 and take 2 seconds, backwards at 7 and 9.
    assert timeline.under_way([10.0] * 4) == (
        (0.0, 0.0),
        (1.0, 10.0),
        (2.0, 20.0),
        (3.0, 10.0),
        (4.0, 0.0),
        (7.0, 10.0),
        (9.0, 10.0),
        (11.0, 0.0),
    )
    with pytest.raises(ValueError, match="argument 2"):
        timeline.under_way([1.0])
