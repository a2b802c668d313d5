"""Do a record's spans and costs of actions say when and how long each rank worked? On reports made by hand."""

import dataclasses
from typing import Any, cast

import pytest

from launch.engine_run import TimedAction, TimedStep
from launch.facts import Report
from launch.spans import action_facts, profile_facts, span_facts, typical_step
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.profile import Profile
from parallel.schedule import Action
from tests.records import ENCODER_DECODER, record

ROWS = ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")


def step(rank: int, *, begun: float, slow: float = 1.0) -> TimedStep:
    """Actions of a second each, half of it busy, a rank's stage later than the first."""
    actions = tuple(
        TimedAction(action=Action.parse(word), start=rank + slow * at, end=rank + slow * (at + 1), busy=0.5 * slow)
        for at, word in enumerate(ROWS[rank].split())
    )
    return TimedStep(begun=begun, actions=actions, wall=6.0 * slow, forward={}, backward={}, busy=2.0 * slow)


def reports() -> list[Report]:
    """Two ranks, three steps; rank 1 leaves the barrier a quarter of a second late in the second."""
    facts = record(ENCODER_DECODER, Layout(pp=2, microbatches=2)).ranks
    return [
        Report(
            facts=dataclasses.replace(facts[rank], rank=rank),
            coordinate=cast(Any, None),
            counted=cast(Any, None),
            steps=(step(rank, begun=10.0), step(rank, begun=20.0 + 0.25 * rank, slow=2.0), step(rank, begun=30.0)),
            block_steps=(),
            parts=(),
            shards={},
        )
        for rank in (0, 1)
    ]


@pytest.mark.parametrize(
    ("seconds", "index"), [([], -1), ([3.0], 0), ([3.0, 1.0, 2.0], 2), ([4.0, 1.0, 3.0, 2.0], 3), ([1.0, 1.0, 1.0], 1)]
)
def test_the_typical_step_is_the_one_of_median_length(seconds: list[float], index: int) -> None:
    assert typical_step(seconds) == index


def test_spans_are_those_of_one_step_in_the_order_of_every_rank() -> None:
    rows = span_facts(reports(), 1, is_one_host=False)
    assert [row.action for row in rows if row.rank == 0] == ROWS[0].split()
    assert [row.action for row in rows if row.rank == 1] == ROWS[1].split()
    assert [(row.start_seconds, row.end_seconds, row.busy_seconds) for row in rows[:2]] == [(0, 2, 1), (2, 4, 1)]


def test_ranks_of_one_host_count_from_the_first_that_left_the_barrier() -> None:
    one = [row.start_seconds for row in span_facts(reports(), 1, is_one_host=True) if row.rank == 1]
    several = [row.start_seconds for row in span_facts(reports(), 1, is_one_host=False) if row.rank == 1]
    assert one == [start + 0.25 for start in several]


def test_without_steps_there_are_no_spans() -> None:
    assert span_facts(reports(), -1, is_one_host=True) == []


def test_costs_are_means_over_microbatches_step_by_step() -> None:
    rows = action_facts(reports())
    assert [(row.rank, row.stage, row.kind) for row in rows] == [
        (0, 0, "forward"),
        (0, 0, "backward"),
        (1, 1, "forward"),
        (1, 1, "backward"),
    ]
    assert all(row.busy_seconds == [0.5, 1.0, 0.5] and row.wall_seconds == [1.0, 2.0, 1.0] for row in rows)


def test_a_profile_is_told_stage_by_stage() -> None:
    layout = Layout(pp=2, microbatches=2)
    shape = StepShape(num_sequences=4, source_length=6, target_length=5, dtype_bytes=4)
    counted = Profile.of_flops(ENCODER_DECODER, layout, shape)
    profile = dataclasses.replace(counted, unit="seconds", transfer_cost=2.0, byte_cost=3.0, machine={"device": "cpu"})
    made = plan(ENCODER_DECODER, layout)
    told = profile_facts(profile, made)
    assert told is not None
    assert told.forward_seconds == [profile.stage(stage).forward for stage in made.stages]
    assert told.backward_weight_seconds == [profile.stage(stage).backward_weight for stage in made.stages]
    assert (told.latency_seconds, told.seconds_per_byte, told.machine) == (2.0, 3.0, {"device": "cpu"})
    assert profile_facts(None, made) is None
