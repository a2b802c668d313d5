"""Is what the simulator makes of a record what the record says, where the two can be told by hand?"""

import dataclasses
import itertools

import pytest

from parallel.layouts import Layout
from parallel.plans import plan
from parallel.timeline import peak
from results.measured_steps import MeasuredStep, is_pipeline, steps_of
from results.schema import ProfileFacts, Record, SpanFacts
from tests.records import DECODER_ONLY, ENCODER_DECODER, record, unsuccessful

LAYOUTS = (
    Layout(pp=2, microbatches=4),
    Layout(pp=2, tp=2, microbatches=4),
    Layout(pp=2, dp=2, microbatches=4),
    Layout(pp=4, microbatches=4, schedule="gpipe"),
    Layout(pp=2, microbatches=4, schedule="zb_h2"),
    Layout(pp=2, chunks=2, placement="v", microbatches=4, schedule="zb_v"),
    Layout(pp=2, chunks=2, placement="interleaved", microbatches=4, schedule="interleaved", transport="direct"),
)


def stretched(entry: Record, *, message: float, gap: float) -> Record:
    """The same run with time between its actions: before each that another rank's message came for, and elsewhere."""
    step = MeasuredStep(entry)
    spans: list[SpanFacts] = []
    ends: dict[object, float] = {}
    rows = {rank: [s for s in entry.spans if s.rank == rank] for rank in (0, 1)}
    place = {0: 0, 1: 0}
    while any(place[rank] < len(rows[rank]) for rank in rows):
        for rank, row in rows.items():
            if place[rank] == len(row):
                continue
            span, action = row[place[rank]], step.table[rank][place[rank]]
            needs = action.needs(2)
            if needs is not None and needs not in ends:
                continue
            free = spans_end(spans, rank)
            start = max(free + gap * bool(free), ends[needs] + message if needs is not None else 0.0)
            end = start + span.end_seconds - span.start_seconds
            spans.append(dataclasses.replace(span, start_seconds=start, end_seconds=end))
            if action.gives is not None:
                ends[action.gives] = end
            place[rank] += 1
    spans.sort(key=lambda span: span.rank)
    return dataclasses.replace(entry, spans=spans)


def spans_end(spans: list[SpanFacts], rank: int) -> float:
    return max((span.end_seconds for span in spans if span.rank == rank), default=0.0)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_table_stages_and_edges_are_read_off_the_record(layout: Layout) -> None:
    made = plan(ENCODER_DECODER, layout)
    told = MeasuredStep(record(ENCODER_DECODER, layout)).plan
    assert (told.table, told.stages, told.edges, told.ranks) == (made.table, made.stages, made.edges, made.ranks)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_a_run_without_messages_is_simulated_exactly(layout: Layout) -> None:
    step = MeasuredStep(record(ENCODER_DECODER, layout, noise=0.0))
    assert step.message_seconds == step.gap_seconds == 0.0
    for row, again in zip(step.measured.spans, step.simulated.spans, strict=True):
        for span, other in zip(row, again, strict=True):
            assert other.action == span.action
            assert other[1:] == pytest.approx(span[1:], rel=1e-9, abs=1e-15)
    assert step.played().makespan_seconds == pytest.approx(step.simulated.makespan_seconds, rel=1e-9)


def test_messages_and_gaps_are_read_off_the_spans() -> None:
    plain = record(DECODER_ONLY, Layout(pp=2, microbatches=4), noise=0.0)
    shortest = min(span.end_seconds - span.start_seconds for span in plain.spans)
    message, gap = shortest / 4, shortest / 10
    step = MeasuredStep(stretched(plain, message=message, gap=gap))
    assert step.message_seconds == pytest.approx(message)
    assert step.gap_seconds == pytest.approx(gap)
    assert step.simulated.makespan_seconds == pytest.approx(step.measured.makespan_seconds, rel=0.02)
    assert step.simulated.makespan_seconds > 1.01 * step.played().makespan_seconds


def test_a_gap_belongs_to_no_action() -> None:
    plain = record(DECODER_ONLY, Layout(pp=2, microbatches=4), noise=0.0)
    shortest = min(span.end_seconds - span.start_seconds for span in plain.spans)
    step = MeasuredStep(stretched(plain, message=shortest, gap=shortest / 2))
    assert step.simulated.busy_seconds == pytest.approx(MeasuredStep(plain).simulated.busy_seconds)
    for row in step.simulated.spans:
        for before, after in itertools.pairwise(row):
            assert after.start_seconds >= before.end_seconds + shortest / 2 - 1e-12


def test_costs_are_medians_over_the_steps() -> None:
    entry = record(ENCODER_DECODER, LAYOUTS[0])
    actions = [
        dataclasses.replace(row, busy_seconds=3 * ([1.0, 2.0, 9.0] if row.kind == "forward" else [4.0, 3.0, 1.0]))
        for row in entry.actions
    ]
    step = MeasuredStep(dataclasses.replace(entry, actions=actions))
    assert step.costs("busy_seconds").forward == (2.0, 2.0)
    assert step.costs("busy_seconds").backward == (3.0, 3.0)
    assert step.costs("busy_seconds", 2).total == (10.0, 10.0)


def test_a_smaller_last_microbatch_makes_no_other_cheaper() -> None:
    """8 sequences in 3 microbatches are 3, 3 and 2: the mean of three is 8/9 of a whole one."""
    step = MeasuredStep(record(ENCODER_DECODER, Layout(pp=2, microbatches=3), noise=0.0))
    whole = step.record.actions[0].busy_seconds[0] * 9 / 8
    assert step.costs("busy_seconds").forward[0] == pytest.approx(whole)


def test_a_profile_is_simulated_with_its_own_costs_and_messages() -> None:
    profile = ProfileFacts(
        forward_seconds=[1.0, 2.0],
        backward_input_seconds=[1.0, 2.0],
        backward_weight_seconds=[1.0, 2.0],
        latency_seconds=10.0,
        seconds_per_byte=0.0,
        machine={},
    )
    entry = record(DECODER_ONLY, Layout(pp=2, microbatches=2, schedule="gpipe"))
    step = MeasuredStep(dataclasses.replace(entry, profile=profile))
    free, sent = step.profiled(with_messages=False), step.profiled(with_messages=True)
    assert free is not None
    assert sent is not None
    # One forward, then the slower rank's four actions, then one backward: 1 + 2 + 2 + 4 + 4 + 2.
    assert free.makespan_seconds == 15.0
    assert sent.makespan_seconds == 15.0 + 2 * 10.0
    assert MeasuredStep(entry).profiled(with_messages=False) is None


def test_the_fullest_moment_is_between_the_states_and_them_with_the_measured_peak() -> None:
    step = MeasuredStep(record(DECODER_ONLY, LAYOUTS[0]))
    for steps, rank in zip(step.held(step.measured), step.record.ranks, strict=True):
        assert peak(steps) > rank.parameter_bytes + rank.gradient_bytes + rank.optimizer_bytes


def test_only_runs_of_several_pipeline_ranks_with_spans_are_pipelines() -> None:
    with_spans = record(ENCODER_DECODER, LAYOUTS[0])
    others = [
        record(ENCODER_DECODER, Layout(tp=2)),
        dataclasses.replace(with_spans, spans=[], typical_step=-1),
        unsuccessful("failed", "why", LAYOUTS[0]),
    ]
    assert is_pipeline(with_spans)
    assert [step.record for step in steps_of([*others, with_spans])] == [with_spans]
