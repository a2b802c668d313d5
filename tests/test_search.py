"""Does a search find what trying everything finds, do its bounds stay below, and are its bytes those of predictions?"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest

from launch.machine_files import load_machine
from models.config import ModelConfig
from parallel.activations import peak_over, saved_bytes
from parallel.layouts import SPLIT_SCHEDULES, Layout
from parallel.machine import Machine
from parallel.predict import predict
from parallel.rank_bytes import RankBytes, moments
from parallel.schedule import max_in_flight, parse
from parallel.schedules import BUILDERS
from parallel.search import Restriction, search
from parallel.search_answer import BEST
from parallel.search_bounds import Bounds
from parallel.search_space import Question
from parallel.share import shares
from parallel.step_time import StepTime, step_time
from tests.small_models import small_config

PAIR = small_config("encoder_decoder", num_encoder_blocks=2, positions="relative")
SINGLE = small_config("decoder_only", num_decoder_blocks=5)
ENCODER = small_config("encoder_only", num_encoder_blocks=6)
EVERYTHING = 10**9


def machine(capacity_bytes: float = 1e9) -> Machine:
    """Nodes of two slow devices: work, links and latency all weigh something on models this small."""
    known = load_machine("a100")
    device = dataclasses.replace(
        known.device, capacity_bytes=capacity_bytes, bytes_per_second=1e12, bfloat16_flops_per_second=2e9
    )
    return dataclasses.replace(
        known,
        devices_per_node=2,
        device=device,
        node_link=dataclasses.replace(known.node_link, bytes_per_second=1e9),
        cluster_link=dataclasses.replace(known.cluster_link, bytes_per_second=2e7),
    )


def question(config: ModelConfig, *, capacity_bytes: float = 1e9, **changes: Any) -> Question:
    fields: dict[str, Any] = {
        "config": config,
        "machine": machine(capacity_bytes),
        "num_devices": 4,
        "num_sequences": 4,
        "source_length": 7 * config.has_encoder,
        "target_length": 5 * config.has_decoder,
        "fixed": {"recompute": "none", "zero": 0, "memory_gather": "per_stage", "sp": False},
    }
    return Question(**fields | changes)


def every_layout(asked: Question) -> Iterator[Layout]:
    for frame in asked.frames():
        for pipeline in asked.pipelines(frame):
            for schedule in asked.schedules(pipeline):
                yield pipeline.replace(schedule=schedule)


def step_of(asked: Question, layout: Layout) -> StepTime:
    return step_time(asked.machine, asked.config, layout, asked.shape(layout.dp))


@functools.cache
def tried(config: ModelConfig) -> tuple[tuple[Layout, StepTime, int], ...]:
    """Every layout of a small space: its step and the bytes of its fullest rank, by the functions that predict one."""
    asked = question(config)
    found = []
    for layout in every_layout(asked):
        time = step_of(asked, layout)
        found.append((layout, time, max(rank.peak_bytes for rank in predict(time.plan, asked.shape(layout.dp)))))
    return tuple(found)


# ---- the same as trying everything ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PAIR, SINGLE], ids=lambda config: config.architecture)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.02], ids=["roomy", "tight", "tightest"])
def test_the_fastest_that_fits_is_that_of_trying_everything(config: ModelConfig, share: float) -> None:
    needs = sorted(most for _, _, most in tried(config))
    capacity = needs[int(share * (len(needs) - 1))]
    asked = question(config, capacity_bytes=capacity)
    restrictions: dict[str, Restriction] = {
        BEST: lambda layout: layout.pp >= 1,
        "even": lambda layout: layout.cut == "even",
        "1f1b": lambda layout: layout.schedule == "1f1b",
        "direct": lambda layout: layout.transport == "direct",
        "kv": lambda layout: layout.transport == "kv",
        "pipeline": lambda layout: layout.pp > 1,
    }
    answer = search(asked, dict(list(restrictions.items())[1:]), tolerance=0.0, num_others=EVERYTHING, num_listed=0)
    fitting = [(layout, time) for layout, time, most in tried(config) if most <= capacity]
    for goal, holds in restrictions.items():
        steps = [time.step_seconds for layout, time in fitting if holds(layout)]
        if not steps:
            assert goal not in answer.found
            continue
        found = answer.found[goal]
        assert found.time.step_seconds == pytest.approx(min(steps), rel=1e-12)
        assert holds(found.layout)
        assert found.bound_seconds == pytest.approx(min(steps), rel=1e-6)


def test_a_search_simulates_a_small_part_of_the_space() -> None:
    answer = search(question(PAIR), tolerance=0.0, num_others=EVERYTHING, num_listed=0)
    assert answer.num_simulated < len(tried(PAIR)) / 4


def test_a_search_that_ends_early_tells_what_may_be_left() -> None:
    asked = question(PAIR, fixed={"pp": 4, "zero": 0, "recompute": "none"})
    early = search(asked, tolerance=0.0, num_others=0, num_listed=0).found[BEST]
    late = search(asked, tolerance=0.0, num_others=EVERYTHING, num_listed=0).found[BEST]
    assert early.bound_seconds <= late.time.step_seconds < early.time.step_seconds
    assert early.layout.chunks == 1


def test_list_schedules_are_made_last_and_answer_alone_where_they_are_wanted() -> None:
    fixed = {"pp": 4, "zero": 0, "recompute": "none", "memory_gather": "per_stage"}
    named = search(question(PAIR, fixed=fixed), num_listed=0).found[BEST]
    both = search(question(PAIR, fixed=fixed)).found[BEST]
    listed = search(question(PAIR, fixed=fixed | {"schedule": "list"})).found[BEST]
    assert named.layout.schedule != "list" == listed.layout.schedule
    assert both.time.step_seconds == min(named.time.step_seconds, listed.time.step_seconds)
    assert step_of(question(PAIR), listed.explicit).step_seconds == listed.time.step_seconds


def test_inputs_are_kept_whole_where_that_fits() -> None:
    fixed = {"tp": 2, "sp": True, "pp": 2, "recompute": "none", "zero": 0, "memory_gather": "per_stage"}
    whole = search(question(PAIR, fixed=fixed)).found[BEST]
    shard = search(question(PAIR, fixed=fixed | {"saved_input": "shard"})).found[BEST]
    assert shard.layout == whole.layout.replace(saved_input="shard") != whole.layout
    assert shard.time.step_seconds > whole.time.step_seconds
    assert shard.fullest_bytes < whole.fullest_bytes
    tight = search(question(PAIR, fixed=fixed, capacity_bytes=whole.fullest_bytes - 1.0)).found[BEST]
    assert tight.layout.saved_input == "shard"


def test_what_products_keep_is_told_apart() -> None:
    asked, shard = question(PAIR), Layout(tp=2, sp=True, pp=2, microbatches=2, cut="times")
    known = Bounds(asked)
    told = []
    for layout in (shard, shard.replace(saved_input="whole")):
        fresh = Bounds(asked)
        told.append((known.profile(layout), known.bytes.fullest(layout, known.cut(layout), 2)))
        assert told[-1] == (fresh.profile(layout), fresh.bytes.fullest(layout, fresh.cut(layout), 2))
    assert told[0][0].model.total > told[1][0].model.total
    assert told[0][1] < told[1][1]


def test_keys_and_values_are_tried_with_one_stage_a_rank() -> None:
    shipping = [layout for layout in every_layout(question(PAIR)) if layout.transport == "kv"]
    assert {(layout.num_stages > 2, layout.chunks) for layout in shipping} == {(False, 1), (True, 1)}
    asked = question(PAIR, fixed={"pp": 4, "zero": 0, "recompute": "full", "transport": "kv"})
    found = search(asked, num_listed=0).found[BEST]
    assert (found.layout.transport, found.layout.chunks) == ("kv", 1)
    assert step_of(question(PAIR), found.explicit).step_seconds == found.time.step_seconds


def test_a_search_repeats_itself() -> None:
    first, second = (search(question(SINGLE)) for _ in range(2))
    assert first.found[BEST].layout == second.found[BEST].layout
    assert first.num_simulated == second.num_simulated


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PAIR, SINGLE], ids=lambda config: config.architecture)
def test_no_step_is_shorter_than_its_bounds(config: ModelConfig) -> None:
    bounds = Bounds(question(config))
    for layout, time, _ in tried(config):
        is_split = layout.schedule in SPLIT_SCHEDULES
        told = [bounds.frame_seconds(layout), bounds.pipeline_seconds(layout, bounds.cut(layout))[is_split]]
        if layout.chunks == 1:
            told.append(bounds.linear_seconds(layout, split=is_split))
        assert max(told) <= time.step_seconds, layout.label
        if layout.pp == 1:
            assert max(told) > 0.8 * time.step_seconds, layout.label


@pytest.mark.parametrize("config", [PAIR, ENCODER], ids=lambda config: config.architecture)
@pytest.mark.parametrize("options", [{}, {"transport": "kv"}, {"tp": 2, "vocabulary": "whole"}], ids=str)
def test_zero_and_recomputation_are_bounded_too(config: ModelConfig, options: dict[str, Any]) -> None:
    fixed = {"microbatches": 2, "cut": "even", "transport": "relay", "placement": "linear"} | options
    asked = question(config, fixed=fixed)
    bounds = Bounds(asked)
    for layout in every_layout(asked):
        size, step = asked.size(layout), step_of(asked, layout).step_seconds
        assert bounds.frame_seconds(layout) <= step, layout.label
        if layout.chunks == 1:
            assert bounds.linear_seconds(layout, split=layout.schedule in SPLIT_SCHEDULES) <= step, layout.label
        assert bounds.bytes.least(layout, size) <= bounds.bytes.fullest(layout, bounds.cut(layout), size)[0]


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [PAIR, SINGLE], ids=lambda config: config.architecture)
def test_bytes_are_those_of_predictions(config: ModelConfig) -> None:
    asked = question(config)
    known = Bounds(asked)
    for layout, _, most in tried(config):
        assert known.bytes.fullest(layout, known.cut(layout), asked.size(layout))[0] == most, layout.label


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("zero", [1, 3])
def test_bytes_of_states_and_recomputation_are_those_of_predictions(recompute: str, zero: int) -> None:
    config = small_config("encoder_decoder", num_decoder_blocks=3, positions="rope", num_kv_heads=1)
    asked = question(config, fixed={"recompute": recompute, "zero": zero, "cut": "even"}, master_weights=True)
    known = Bounds(asked)
    for layout in every_layout(asked):
        if layout.microbatches != 2 or layout.pp == 1 or layout.transport == "direct":
            continue
        made = step_of(asked, layout).plan
        ranks = predict(made, asked.shape(layout.dp), master_weights=True)
        assert known.bytes.fullest(layout, known.cut(layout), asked.size(layout))[0] == max(
            rank.peak_bytes for rank in ranks
        )


def test_a_row_has_few_moments() -> None:
    whole = moments(parse("0F0 0F1 0B0 0F2 0B1 0B2")[0])
    assert [(moment.whole, moment.halves, moment.running) for moment in whole] == [((2,), (0,), 0)]
    split = moments(parse("0F0 0I0 0F1 0W0 0I1 0W1")[0])
    assert {(moment.whole, moment.halves, moment.running) for moment in split} == {
        ((1,), (1,), -1),
        ((1,), (0,), 0),
    }
    for row in BUILDERS["1f1b"](range(4), 64):
        assert [sum(moment.whole) for moment in moments(row)] == [max_in_flight(row)]


def test_of_the_tp_ranks_the_last_one_needs_most() -> None:
    layout = Layout(tp=4, pp=2, microbatches=2)
    config = small_config("decoder_only", num_decoder_blocks=4, vocabulary=30, tying="head")
    asked = question(config, num_devices=8, num_sequences=8, machine=dataclasses.replace(machine(), devices_per_node=4))
    made = step_of(asked, layout).plan
    needs = {
        share.coordinate: peak_over(
            made.table[share.coordinate.pp],
            {
                (stage.index, microbatch): saved_bytes(chunk, asked.shape(1), 4)
                for stage, chunk in zip(share.stages, share.chunks, strict=True)
                for microbatch in range(2)
            },
        )
        for share in shares(made)
    }
    known = RankBytes(config=config, source_length=0, target_length=5, dtype_bytes=2)
    most = max(
        needs[share.coordinate] + known.states(layout, known.held(layout, (2,))[share.coordinate.pp]).total
        for share in shares(made)
    )
    assert known.fullest(layout, (2,), 4)[0] == most


# ---- questions ------------------------------------------------------------------------------------------------------


def test_where_nothing_fits_the_closest_is_told() -> None:
    asked = question(PAIR, capacity_bytes=1000.0, fixed={"schedule": "1f1b", "cut": "even"})
    answer = search(asked)
    assert not answer.found
    assert answer.closest is not None
    known = Bounds(asked).bytes
    needs = [known.fullest(frame, Bounds(asked).cut(frame), asked.size(frame))[0] for frame in asked.frames()]
    assert answer.closest.fullest_bytes == min(needs) > 1000


def test_all_devices_and_sequences_are_used_and_what_is_given_holds() -> None:
    asked = question(PAIR, fixed={"tp": 2, "placement": "folded"}, microbatch=2)
    layouts = list(every_layout(asked))
    assert layouts
    for layout in layouts:
        assert layout.world_size == 4
        assert (layout.tp, layout.placement) == (2, "folded")
        assert layout.dp * layout.microbatches * 2 == 4
        layout.check_model(PAIR)
    assert len(set(layouts)) == len(layouts)


def test_what_cannot_matter_is_not_varied() -> None:
    layouts = list(every_layout(question(SINGLE)))
    assert {(layout.transport, layout.memory_gather) for layout in layouts} == {("relay", "per_stage")}
    assert {layout.schedule for layout in layouts if layout.pp == 1} == {"1f1b"}
    frames = question(SINGLE, fixed={"saved_input": "whole"}).frames()
    assert {(frame.sp, frame.saved_input) for frame in frames} == {(False, "shard"), (True, "whole")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_devices": 0}, "devices = 0; it must be at least 1"),
        ({"num_sequences": -4}, "sequences = -4; it must be at least 1"),
        ({"microbatch": 0}, "microbatch = 0; it must be at least 1"),
        ({"num_sequences": 3, "fixed": {"dp": 2}}, "3 sequences over 4 devices with dp = 2: none of dp = 2 .* try 4"),
        ({"num_sequences": 8, "microbatch": 3}, "in microbatches of 3; try 9"),
        ({"num_devices": 7, "fixed": {"dp": 1}}, "7 devices with dp = 1"),
        ({"fixed": {"tp": 3}}, "no tp x pp x dp makes that many"),
        ({"fixed": {"gradient_bucket_bytes": 8}}, "gradient_bucket_bytes = 8 is not searched"),
        ({"fixed": {"cut": (2, 4)}}, r"cut = \[2, 4\] is not searched"),
        ({"target_length": 99}, "target_length = 99: .* reads 1 to 12"),
        ({"fixed": {"chunks": 2, "transport": "kv"}}, "'kv' wants one stage a rank: chunks = 2; use chunks = 1"),
        ({"fixed": {"transport": "mail"}}, "transport = 'mail'; choose one of relay, direct, kv"),
    ],
)
def test_a_question_without_an_answer_is_told_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        question(SINGLE, **changes)
    assert "\n" not in str(error.value)
