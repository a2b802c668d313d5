"""Do `pipelines.csv` and `improvements.csv` hold what they say, in numbers worked out by hand?"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner

from parallel.layouts import Layout
from results import pipelines
from results.commands import report_command
from results.schema import ProfileFacts, Record
from results.tables import Tables, build
from tests.records import DECODER_ONLY, ENCODER_DECODER, record, write

EVEN = Layout(pp=2, microbatches=4)
ALIGNED = EVEN.replace(cut="aligned")
FLOPS = EVEN.replace(cut=(1,))


def timed(entry: Record, costs: list[dict[str, float]], *, wall: list[float] | None = None) -> Record:
    """A run whose actions cost as said, by step and kind, on every stage; `wall` are the step's lengths."""
    num = len(costs)
    lengths = wall or [10.0] * num
    actions = [
        dataclasses.replace(
            row, busy_seconds=[cost[row.kind] for cost in costs], wall_seconds=[2 * cost[row.kind] for cost in costs]
        )
        for row in entry.actions
    ]
    ranks = [
        dataclasses.replace(
            rank, step_seconds=lengths, busy_seconds=lengths, wait_seconds=lengths, pipeline_seconds=lengths
        )
        for rank in entry.ranks
    ]
    stages = [
        dataclasses.replace(stage, forward_busy_seconds=lengths, backward_busy_seconds=lengths)
        for stage in entry.stages
    ]
    blocks = [dataclasses.replace(block, forward_busy_seconds=[], backward_busy_seconds=[]) for block in entry.blocks]
    return dataclasses.replace(
        entry, actions=actions, ranks=ranks, stages=stages, blocks=blocks, step_seconds=lengths, typical_step=0
    )


def row(entry: Record) -> "pd.Series[Any]":
    (told,) = pipelines.rows(entry)
    return pd.Series(told)


def test_played_time_is_that_of_the_schedule() -> None:
    """1F1B on two equal stages: m + 1 pairs of a forward and a backward."""
    told = row(timed(record(DECODER_ONLY, EVEN), [{"forward": 1.0, "backward": 2.0}] * 3))
    assert told["played_seconds_median"] == 15.0
    assert told["busiest_rank_seconds_median"] == 12.0
    assert told["rank_imbalance_median"] == 1.0
    assert told["over_ideal_median"] == pytest.approx(15 / 12)
    assert told["played_bubble_median"] == pytest.approx(0.2)


def test_wall_seconds_make_what_is_held_against_wall_time() -> None:
    entry = timed(
        record(DECODER_ONLY, EVEN, noise=0.0), [{"forward": 1.0, "backward": 2.0}] * 3, wall=[20.0, 25.0, 40.0]
    )
    told = row(entry)
    assert told["simulated_seconds"] == pytest.approx(30.0)
    assert told["measured_seconds_median"] == 25.0
    assert told["simulated_error"] == pytest.approx(0.2)
    assert json.loads(told["stepwise_error"]) == pytest.approx([0.5, 0.2, -0.25])


def test_a_profile_is_held_against_both_clocks() -> None:
    profile = ProfileFacts(
        forward_seconds=[2.0, 2.0],
        backward_input_seconds=[2.0, 2.0],
        backward_weight_seconds=[2.0, 2.0],
        latency_seconds=1.0,
        seconds_per_byte=0.0,
        machine={},
    )
    entry = timed(record(DECODER_ONLY, EVEN), [{"forward": 1.0, "backward": 2.0}] * 3)
    told = row(dataclasses.replace(entry, profile=profile))
    assert told["profiled_busy_error"] == pytest.approx(1.0)
    assert told["profiled_busy_seconds"] == 30.0
    assert told["profiled_shape_error"] == pytest.approx(0.0)
    assert told["profiled_seconds"] > 30.0
    assert told["profiled_error"] == pytest.approx(told["profiled_seconds"] / 10 - 1)


def test_imbalance_is_over_ranks_where_ranks_have_several_stages() -> None:
    layout = Layout(pp=2, chunks=2, placement="v", microbatches=4, schedule="zb_v")
    entry = timed(record(DECODER_ONLY, layout), [{"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0}] * 2)
    actions = [
        dataclasses.replace(one, busy_seconds=[3.0, 3.0]) if one.stage in (0, 3) and one.kind == "forward" else one
        for one in entry.actions
    ]
    # Stages 0 and 3 are rank 0's: 5 units each against 3.
    assert row(dataclasses.replace(entry, actions=actions))["rank_imbalance_median"] == pytest.approx(10 / 8)


def test_wall_time_of_oversubscribed_runs_is_in_no_summary() -> None:
    entries = [record(DECODER_ONLY, EVEN), record(DECODER_ONLY, EVEN.replace(pp=4))]
    told = pipelines.error_summary(build(entries).pipelines)
    assert told[["pp", "num_cells"]].to_numpy().tolist() == [[2, 1]] * 2


def test_telling_cells_have_the_median_and_the_largest_error() -> None:
    entries = [
        timed(record(DECODER_ONLY, EVEN.replace(microbatches=m), noise=0.0), [{"forward": 1.0, "backward": 2.0}] * 2)
        for m in (2, 4, 8)
    ]
    slow = [
        dataclasses.replace(
            entry,
            ranks=[dataclasses.replace(rank, pipeline_seconds=[seconds] * 2) for rank in entry.ranks],
        )
        for entry, seconds in zip(entries, (18.0, 30.0 / 1.1, 54.0 / 1.5), strict=True)
    ]
    told = pipelines.telling(build(slow).pipelines)
    assert {caption: one["microbatches"] for caption, one in told.items()} == {
        "median error, 2 ranks": 4,
        "largest error, 2 ranks": 8,
    }


# ---- improvements ----------------------------------------------------------------------------------------------------


def study(*, noisy: bool = False) -> Tables:
    """Even and aligned cuts twice as slow as another one, and a control of the first."""
    slow, fast = [{"forward": 2.0, "backward": 4.0}] * 3, [{"forward": 1.0, "backward": 2.0}] * 3
    even = timed(record(ENCODER_DECODER, EVEN), slow, wall=[20.0, 20.0, 20.0])
    control = dataclasses.replace(
        timed(record(ENCODER_DECODER, EVEN), slow, wall=[50.0 if noisy else 21.0] * 3), cell="control", is_control=True
    )
    return build(
        [
            even,
            control,
            timed(record(ENCODER_DECODER, ALIGNED), slow, wall=[20.0] * 3),
            timed(record(ENCODER_DECODER, FLOPS), fast, wall=[10.0] * 3),
            timed(record(DECODER_ONLY, EVEN), fast, wall=[10.0] * 3),
        ]
    )


def test_gains_are_ratios_to_both_cuts_of_others() -> None:
    told = study().improvements
    ours = told[told["layout_label"] == FLOPS.label].set_index(["baseline", "quantity"])
    assert len(ours) == 2 * 5
    seconds = ours[ours.index.get_level_values("quantity").str.endswith("seconds")]
    assert seconds["ratio"].tolist() == [0.5] * 6
    assert seconds["ratio_low"].tolist() == seconds["ratio_high"].tolist() == [0.5] * 6
    assert set(seconds["outcome"]) == {"less"}
    # Equal stages are as even as equal stages that are twice as fast.
    assert ours.drop(seconds.index)["ratio"].tolist() == [1.0] * 4


def test_another_architecture_is_no_baseline() -> None:
    assert DECODER_ONLY.name not in set(study().improvements["model"])


def test_a_control_tells_the_noise_and_a_gain_within_it_is_undecided() -> None:
    told = study(noisy=True).improvements
    steps = told[told["quantity"] == "step_seconds"]
    assert set(steps["noise"]) == {2.5}
    assert set(steps.loc[steps["baseline"] != "itself", "outcome"]) == {"undecided"}
    busy = told[(told["quantity"] == "busiest_rank_seconds") & (told["layout_label"] == FLOPS.label)]
    assert set(busy["outcome"]) == {"less"}


def test_without_a_control_nothing_is_decided() -> None:
    slow = [{"forward": 2.0, "backward": 4.0}] * 3
    entries = [timed(record(ENCODER_DECODER, layout), slow) for layout in (EVEN, ALIGNED)]
    assert set(build(entries).improvements["outcome"]) == {"undecided"}


def test_pipelines_that_sum_their_gradients_otherwise_are_not_compared() -> None:
    layouts = [EVEN.replace(dp=2), ALIGNED.replace(dp=2, gradient_bucket_bytes=8)]
    assert build([record(ENCODER_DECODER, layout) for layout in layouts]).improvements.empty
    alike = [layout.replace(gradient_bucket_bytes=8) for layout in layouts]
    assert not build([record(ENCODER_DECODER, layout) for layout in alike]).improvements.empty


def test_step_time_of_oversubscribed_runs_is_not_compared() -> None:
    layouts = [layout.replace(pp=3, microbatches=3) for layout in (EVEN, ALIGNED)]
    told = build([record(ENCODER_DECODER, layout) for layout in layouts]).improvements
    assert set(told["quantity"]) == {"busiest_rank_seconds", "played_seconds", "rank_imbalance", "over_ideal"}


# ---- pictures --------------------------------------------------------------------------------------------------------


def test_a_named_pipeline_is_drawn_and_another_name_is_a_mistake(tmp_path: Path) -> None:
    entry = record(ENCODER_DECODER, EVEN.replace(pp=3))
    write(tmp_path / "records", [entry])
    arguments = [str(tmp_path / "records"), str(tmp_path / "out")]
    told = CliRunner().invoke(report_command, [*arguments, "--timeline", entry.cell])
    assert told.exit_code == 0, told.output
    (trace,) = (tmp_path / "out" / "pictures").glob("timeline-cell-*.trace.json")
    names = {
        event["args"]["name"]
        for event in json.loads(trace.read_text())["traceEvents"]
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    assert {"measured: rank 0", "simulated: rank 2"} <= names
    refused = CliRunner().invoke(report_command, [*arguments, "--timeline", "nothing"])
    assert refused.exit_code == 2
    assert f"the nearest is {entry.cell!r}" in refused.output
