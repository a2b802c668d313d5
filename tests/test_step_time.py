"""Does a predicted step add up: work over rates, collectives and messages over links, gradients, update?"""

import dataclasses
import math
from typing import Any

import pytest

from launch.machine_files import load_machine
from models.config import ModelConfig
from models.named import named_model
from parallel.buckets import bucket_parameters
from parallel.edges import Edge
from parallel.events import step_events
from parallel.figures import PhaseFlops, StepShape
from parallel.flops import step_flops
from parallel.layouts import Layout
from parallel.ledger import Total
from parallel.machine import Device, Link, Machine
from parallel.machine_profile import machine_profile
from parallel.parameters import state_bytes
from parallel.plans import plan
from parallel.predict import predict
from parallel.profile import Profile
from parallel.share import Share, shares
from parallel.stage_costs import message_seconds, stage_seconds
from parallel.step_time import held_bytes, step_time
from parallel.timeline import peak
from parallel.traffic import kept_bytes

PAIR, SINGLE = named_model("tiny-t5"), named_model("tiny-llama")
SHAPE = StepShape(num_sequences=8, source_length=24, target_length=16)
AT_ONCE = 1e30


def machine(
    *, flops: float = AT_ONCE, traffic: float = AT_ONCE, link: float = AT_ONCE, latency: float = 0.0
) -> Machine:
    """One where nothing takes time but what is given a rate."""
    wire = Link(latency_seconds=latency, bytes_per_second=link, efficiency=1.0, efficiency_reason="paper")
    device = Device(
        capacity_bytes=1e12,
        bytes_per_second=traffic,
        bytes_efficiency=1.0,
        bytes_efficiency_reason="paper",
        bfloat16_flops_per_second=flops,
        float32_flops_per_second=flops,
        float64_flops_per_second=flops,
        flops_efficiency=1.0,
        flops_efficiency_reason="paper",
    )
    return Machine(name="paper", devices_per_node=8, device=device, node_link=wire, cluster_link=wire)


def shape_of(config: ModelConfig, **changes: Any) -> StepShape:
    return dataclasses.replace(SHAPE, source_length=SHAPE.source_length * config.has_encoder, **changes)


def fullest(config: ModelConfig, layout: Layout) -> Share:
    """The rank with most vocabulary rows of a layout without a pipeline."""
    return max(shares(plan(config, layout)), key=lambda share: share.vocabulary_rows)


# ---- what takes time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PAIR, SINGLE], ids=lambda config: config.name)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tp": 2},
        {"tp": 2, "sp": True},
        {"tp": 2, "vocabulary": "whole"},
        {"recompute": "full"},
        {"recompute": "selective"},
        {"attention": "materialised"},
    ],
    ids=str,
)
def test_products_take_their_flops(config: ModelConfig, options: dict[str, Any]) -> None:
    layout, shape = Layout(microbatches=4, **options), shape_of(config)
    time = step_time(machine(flops=1e9), config, layout, shape)
    flops = sum(step_flops(fullest(config, layout), shape).values(), start=PhaseFlops())
    assert time.step_seconds == pytest.approx(flops.total / 1e9)
    assert math.fsum(time.seconds.forward) * 4 == pytest.approx(flops.forward / 1e9)


@pytest.mark.parametrize("config", [PAIR, SINGLE], ids=lambda config: config.name)
@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"tp": 4, "sp": True},
        {"tp": 2, "sp": True, "memory_gather": "per_block"},
        {"tp": 2, "memory_gather": "per_block"},
        {"tp": 2, "vocabulary": "whole"},
        {"tp": 2, "sp": True, "recompute": "full"},
    ],
    ids=str,
)
def test_collectives_take_the_bytes_of_the_ledger(config: ModelConfig, options: dict[str, Any]) -> None:
    """The closed form of the time and that of the events are two tellings of the same traffic."""
    layout, shape = Layout(microbatches=4, **options), shape_of(config)
    time = step_time(machine(link=1e6), config, layout, shape)
    events = step_events(fullest(config, layout), shape)
    assert time.timeline.makespan_seconds == pytest.approx(wire_seconds(events, 1e6, is_step=False))
    assert time.gradient_seconds == pytest.approx(wire_seconds(events, 1e6, is_step=True))


def wire_seconds(events: tuple[Total, ...], rate: float, *, is_step: bool) -> float:
    return sum(total.wire_bytes for total in events if (total.event.phase == "step") == is_step) / rate


def test_messages_of_a_pipeline_take_the_bytes_of_their_edges() -> None:
    layout, shape = Layout(pp=2), shape_of(PAIR)
    time = step_time(machine(link=1e6), PAIR, layout, shape)
    ranks = shares(plan(PAIR, layout))
    there_and_back = sum(wire_seconds(step_events(share, shape), 1e6, is_step=False) for share in ranks)
    assert time.timeline.makespan_seconds == pytest.approx(there_and_back)


def test_a_second_gathering_belongs_to_the_weights_half() -> None:
    layout, shape = Layout(tp=2, sp=True), shape_of(SINGLE)
    block = machine_profile(machine(link=1e6), SINGLE, layout, shape).decoder_block
    hidden = shape.target_length * shape.num_sequences * SINGLE.width * 4 / 2 / 1e6
    # Of one block: two gatherings and two scatterings forward, as many for inputs backward, two for weights.
    assert block.forward == pytest.approx(4 * hidden)
    assert block.backward_input == pytest.approx(4 * hidden)
    assert block.backward_weight == pytest.approx(2 * hidden)


def test_latency_is_paid_by_the_collective() -> None:
    layout, shape = Layout(tp=2, microbatches=4), shape_of(SINGLE)
    time = step_time(machine(latency=1.0), SINGLE, layout, shape)
    events = step_events(fullest(SINGLE, layout), shape)
    # Over two ranks: there and back, but what is gathered goes there only.
    hops = {"all_reduce": 2, "all_gather": 1}
    num_hops = sum(hops[total.event.operation] * total.count for total in events if total.event.phase != "step")
    assert time.timeline.makespan_seconds == pytest.approx(num_hops)


def test_what_lies_between_products_takes_bytes() -> None:
    layout, shape = Layout(microbatches=4), shape_of(PAIR)
    one = dataclasses.replace(shape, num_sequences=2)
    kept = kept_bytes(PAIR, layout, one, "none")
    plain = step_time(machine(traffic=1e9), PAIR, layout, shape)
    assert plain.seconds.forward[0] == pytest.approx(2e-9 * whole(PAIR, kept))
    assert plain.seconds.backward_input[0] == pytest.approx(3e-9 * whole(PAIR, kept))
    again = step_time(machine(traffic=1e9), PAIR, layout.replace(recompute="full"), shape)
    assert plain.seconds.backward_input[0] < again.seconds.backward_input[0] <= 5e-9 * whole(PAIR, kept)
    assert again.seconds.forward == plain.seconds.forward


def whole(config: ModelConfig, pieces: dict[str, int]) -> int:
    counts = {"encoder_block": config.num_encoder_blocks, "decoder_block": config.num_decoder_blocks}
    return sum(size * counts.get(piece, 1) for piece, size in pieces.items())


@pytest.mark.parametrize("config", [PAIR, SINGLE], ids=lambda config: config.name)
def test_kept_bytes_of_pieces_add_up_to_those_of_the_model(config: ModelConfig) -> None:
    shape = shape_of(config)
    saved = predict(plan(config, Layout()), shape)[0].figures.saved_bytes
    told = whole(config, kept_bytes(config, Layout(), shape, "none"))
    # The last norm of an encoder that has a decoder belongs to no piece of a profile.
    assert told <= saved
    assert told == pytest.approx(saved, rel=0.03 if config.has_cross_attention else 1e-12)


# ---- what comes after the pipeline ----------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_an_update_reads_and_writes_its_share_of_the_states(zero: int) -> None:
    layout, shape = Layout(dp=4, zero=zero), shape_of(SINGLE)
    states = state_bytes(shares(plan(SINGLE, layout))[0], 4, "adamw")
    time = step_time(machine(traffic=1e9), SINGLE, layout, shape)
    whole = states.parameters + states.gradients
    dealt = whole / 4 + states.optimizer if zero == 1 else states.total
    assert time.update_seconds == pytest.approx(2 * dealt / 1e9)


def test_gradients_of_replicas_are_summed_over_the_cluster() -> None:
    shape = shape_of(SINGLE)
    time = step_time(machine(link=1e6), SINGLE, Layout(dp=2), shape)
    share = shares(plan(SINGLE, Layout(dp=2)))[0]
    assert time.gradient_seconds == pytest.approx(wire_seconds(step_events(share, shape), 1e6, is_step=True))
    assert step_time(machine(link=1e6), SINGLE, Layout(), shape).gradient_seconds == 0


def test_a_rank_that_ends_early_sums_while_others_run() -> None:
    """The last stage ends first in 1f1b: its gradients hide, those of the first stage do not."""
    layout, shape = Layout(pp=2, dp=2, microbatches=4), shape_of(SINGLE)
    made = plan(SINGLE, layout)
    slow = machine(flops=1e3, link=1e6)
    time = step_time(slow, SINGLE, layout, shape)
    first, last = (next(one for one in shares(made) if one.coordinate.pp == pp) for pp in (0, 1))
    own = wire_seconds(step_events(first, shape), 1e6, is_step=True)
    assert time.gradient_seconds == pytest.approx(own, rel=0.02)
    assert time.gradient_seconds < own + wire_seconds(step_events(last, shape), 1e6, is_step=True)


def test_holders_of_a_shared_tensor_sum_it_when_the_last_has_ended() -> None:
    layout, shape = Layout(pp=2, microbatches=4), shape_of(PAIR)
    time = step_time(machine(flops=1e6, link=1e6), PAIR, layout, shape)
    events = step_events(shares(plan(PAIR, layout))[0], shape)
    assert any("tied" in total.event.site for total in events)
    assert time.gradient_seconds == pytest.approx(wire_seconds(events, 1e6, is_step=True))


def test_a_step_is_its_parts_and_its_share_of_the_peak() -> None:
    time = step_time(load_machine("h100"), PAIR, Layout(pp=2, dp=2, tp=2, microbatches=4), shape_of(PAIR))
    parts = (time.timeline.makespan_seconds, time.gradient_seconds, time.update_seconds)
    assert all(part > 0 for part in parts)
    assert time.step_seconds == math.fsum(parts)
    assert time.peak_flops_per_second == 8 * 67e12
    assert time.model_flops_utilisation == pytest.approx(time.model_flops / (time.step_seconds * 8 * 67e12))
    assert 0 < time.model_flops_utilisation < 1


def test_a_smaller_last_microbatch_takes_less() -> None:
    layout = Layout(pp=2, microbatches=4)
    slow = machine(flops=1e9)
    even = step_time(slow, SINGLE, layout, shape_of(SINGLE, num_sequences=8)).timeline
    ragged = step_time(slow, SINGLE, layout, shape_of(SINGLE, num_sequences=7)).timeline
    assert ragged.busy_seconds[0] == pytest.approx(even.busy_seconds[0] * 7 / 8)


# ---- bytes over time ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"pp": 2},
        {"pp": 2, "schedule": "gpipe", "tp": 2},
        {"pp": 2, "recompute": "full"},
        {"pp": 2, "recompute": "selective", "attention": "materialised", "tp": 2, "sp": True},
        {"pp": 2, "chunks": 2, "placement": "folded", "schedule": "interleaved"},
        {"pp": 2, "chunks": 2, "placement": "v", "schedule": "gpipe"},
        {"pp": 2, "schedule": "zb_h1"},
        {"pp": 2, "dp": 2, "zero": 1, "cut": "aligned"},
    ],
    ids=str,
)
def test_the_peak_over_time_is_the_predicted_peak(options: dict[str, Any]) -> None:
    layout, shape = Layout(microbatches=4, **options), shape_of(PAIR)
    time = step_time(load_machine("a100"), PAIR, layout, shape)
    peaks: dict[int, int] = {}
    for rank in predict(time.plan, shape):
        at = rank.figures.coordinate.pp
        peaks[at] = max(peaks.get(at, 0), rank.peak_bytes)
    assert [peak(steps) for steps in held_bytes(time.plan, shape, time.timeline)] == list(peaks.values())


# ---- profiles -------------------------------------------------------------------------------------------------------


def test_measured_pieces_take_the_place_of_closed_forms() -> None:
    layout, shape = Layout(pp=2, microbatches=4), shape_of(SINGLE)
    closed = machine_profile(load_machine("a100"), SINGLE, layout, shape)
    measured = dataclasses.replace(closed, decoder_block=2 * closed.decoder_block)
    slow = step_time(load_machine("a100"), SINGLE, layout, shape, profile=measured)
    assert slow.seconds == stage_seconds(measured, slow.plan.stages)
    assert slow.step_seconds > step_time(load_machine("a100"), SINGLE, layout, shape).step_seconds


def test_messages_of_a_profile_take_its_latency_and_bytes() -> None:
    profile = machine_profile(machine(link=1e6, latency=0.5), PAIR, Layout(pp=2), shape_of(PAIR))
    cost = message_seconds(profile)(Edge(first=0, last=1, carries=("memory", "target")), "backward")
    num_bytes = SHAPE.num_sequences * PAIR.width * 4 * (SHAPE.source_length + SHAPE.target_length)
    assert (cost.latency, cost.port) == (0.5, None)
    assert cost.occupancy == pytest.approx(num_bytes / 1e6)


def test_a_profile_that_does_not_fit_is_told() -> None:
    layout, shape = Layout(pp=2, microbatches=4), shape_of(SINGLE)
    counted = Profile.of_flops(SINGLE, layout, shape)
    with pytest.raises(ValueError, match="the profile counts FLOPs, a time needs seconds"):
        step_time(load_machine("a100"), SINGLE, layout, shape, profile=counted)
    other = machine_profile(load_machine("a100"), SINGLE, layout, dataclasses.replace(shape, target_length=8))
    with pytest.raises(ValueError, match="target_length = 8, and the step has 16"):
        step_time(load_machine("a100"), SINGLE, layout, shape, profile=other)


def test_costs_of_the_machine_decide_cut_and_order() -> None:
    """A cut by times needs no measurement: the machine's closed forms are seconds."""
    layout, shape, paper = Layout(pp=2, microbatches=4), shape_of(SINGLE), machine(flops=1e9)
    deep = SINGLE.replace(num_decoder_blocks=8, vocabulary=2000)
    even, times, ordered = (
        step_time(paper, deep, layout.replace(**changes), shape).timeline
        for changes in ({}, {"cut": "times"}, {"cut": "times", "schedule": "list"})
    )
    assert times.imbalance < even.imbalance
    assert ordered.makespan_seconds < times.makespan_seconds < even.makespan_seconds


def test_sums_behind_the_backward_leave_what_they_cannot_hide() -> None:
    """One stage of four equal blocks: a slow link is busy from the first block's gradient, a quick one at the end."""
    config = dataclasses.replace(SINGLE, num_decoder_blocks=4)
    layout = Layout(dp=2)
    in_buckets, in_one = (layout.replace(gradient_bucket_bytes=least) for least in (1, 10**9))
    shape = shape_of(config)
    sizes = [4 * count for count in bucket_parameters(shares(plan(config, in_buckets))[0], 4).values()]
    assert len(sizes) == 4
    for link, is_slow in ((1e3, True), (1e12, False)):
        wired = machine(flops=1e9, link=link)
        once, behind, one = (step_time(wired, config, given, shape) for given in (layout, in_buckets, in_one))
        assert one.step_seconds == pytest.approx(once.step_seconds)
        (row,) = once.timeline.spans
        backward_seconds = row[-1].end_seconds - row[-1].start_seconds
        assert sum(sizes) / link > 10 * backward_seconds or not is_slow
        hidden_seconds = backward_seconds * 3 / 4 if is_slow else sum(sizes[:-1]) / link
        assert once.gradient_seconds - behind.gradient_seconds == pytest.approx(hidden_seconds, rel=1e-6)
