"""What does each way of bringing the memory to the decoder cost?"""

import json
from typing import Any

import pytest

from launch.cli import answer
from launch.machine_files import load_machine
from models.config import ModelConfig
from models.named import named_model
from parallel.events import step_events
from parallel.figures import StepShape
from parallel.layouts import Layout, microbatch_sizes
from parallel.machine_profile import machine_profile
from parallel.plans import plan
from parallel.share import shares
from parallel.step_time import step_time
from parallel.transports import TransportCost, chosen_way, transport_costs
from tests.small_models import small_config

MACHINE = load_machine("a100")
LAYOUT = Layout(pp=4, microbatches=6, cut=(1, 2, 4))
BLOCKS = {"num_encoder_blocks": 3, "num_decoder_blocks": 3}


def shape(layout: Layout, **changes: Any) -> StepShape:
    sizes = {"num_sequences": 2 * layout.microbatches, "source_length": 8, "target_length": 4, "dtype_bytes": 2}
    return StepShape(**(sizes | changes))


def costs(layout: Layout = LAYOUT, config: ModelConfig | None = None, **changes: Any) -> dict[str, TransportCost]:
    if config is None:
        config = small_config("encoder_decoder", **BLOCKS)
    return {cost.way: cost for cost in transport_costs(MACHINE, config, layout, shape(layout, **changes))}


def edge_bytes(cost: TransportCost) -> dict[tuple[int, int], int]:
    return {(edge.edge.first, edge.edge.last): edge.size_bytes for edge in cost.edges}


def test_a_relayed_memory_crosses_every_edge_behind_its_maker() -> None:
    told = costs()
    source, target = 8 * 2 * 16 * 2, 4 * 2 * 16 * 2
    # Stage 2 holds the encoder's last block and the decoder's first.
    assert edge_bytes(told["relay"]) == {(0, 1): source, (1, 2): source, (2, 3): source + target}
    assert edge_bytes(costs(LAYOUT.replace(cut=(1, 3, 4)))["direct"]) == {
        (0, 1): source,
        (1, 2): source,
        (1, 3): source,
        (2, 3): target,
    }


@pytest.mark.parametrize("way", ["relay", "direct", "kv"])
@pytest.mark.parametrize(
    "layout",
    [
        LAYOUT,
        LAYOUT.replace(tp=2, sp=True, cut="even"),
        LAYOUT.replace(schedule="zb_h1", microbatches=5),
        Layout(pp=2, chunks=2, placement="folded", schedule="interleaved", microbatches=3),
    ],
)
def test_what_is_sent_is_what_the_ledger_of_a_step_sends(way: Any, layout: Layout) -> None:
    config = small_config("encoder_decoder", **BLOCKS)
    own = layout.replace(transport=way)
    step = shape(own, num_sequences=2 * layout.microbatches - 1)
    told = next(cost for cost in transport_costs(MACHINE, config, layout, step) if cost.way == way)
    sent: dict[int, int] = {}
    for share in shares(plan(config, own)):
        if share.coordinate.tp == 0:
            sent[share.coordinate.pp] = sum(
                total.count * total.event.payload_bytes
                for total in step_events(share, step)
                if total.event.operation == "send"
            )
    assert told.sent_bytes == sum(sent.values())
    assert told.egress_bytes == max(sent.values()) == sent[told.egress_rank]


def test_keys_and_values_take_two_widths_a_block() -> None:
    told = costs(LAYOUT.replace(cut=(1, 3, 4)))
    kv = 8 * 2 * (2 * 2 * 4) * 2
    target = 4 * 2 * 16 * 2
    assert edge_bytes(told["kv"]) == {(0, 1): 512, (1, 2): kv, (1, 3): 2 * kv, (2, 3): target}


@pytest.mark.parametrize("changes", [{}, {"tp": 2, "sp": True, "memory_gather": "per_block", "recompute": "full"}])
def test_keys_and_values_move_work_and_add_none(changes: dict[str, Any]) -> None:
    config = small_config("encoder_decoder", **BLOCKS)
    layout = LAYOUT.replace(**changes)
    kept, moved = (
        machine_profile(MACHINE, config, layout.replace(transport=way), shape(layout)) for way in ("direct", "kv")
    )
    made = moved.keys_values
    again = made.forward * (layout.recompute == "full")
    assert made.total > 0.0
    assert moved.slice(0, 6).total == pytest.approx(kept.slice(0, 6).total, rel=1e-12)
    assert moved.slice(2, 3).total == pytest.approx(kept.slice(2, 3).total + 3 * made.total, rel=1e-12)
    assert moved.slice(3, 5).total == pytest.approx(kept.slice(3, 5).total - 2 * (made.total + again), rel=1e-12)
    assert moved.slice(0, 2) == kept.slice(0, 2)


def test_a_cut_by_costs_knows_who_makes_keys_and_values() -> None:
    layout = LAYOUT.replace(cut="times")
    config = named_model("t5-large")
    told = costs(layout, config, source_length=512, target_length=512)
    busiest = {way: max(cost.timeline.busy_seconds) for way, cost in told.items()}
    cut = tuple(stage.first for stage in told["direct"].stages[1:])
    unaware = costs(layout.replace(cut=cut), config, source_length=512, target_length=512)
    assert told["kv"].stages != told["direct"].stages
    assert busiest["kv"] < max(unaware["kv"].timeline.busy_seconds)


def test_ways_that_are_run_take_as_long_as_their_steps() -> None:
    config = named_model("t5-small")
    layout = Layout(pp=4, microbatches=8, cut="times")
    step = shape(layout, source_length=128, target_length=64)
    for cost in transport_costs(MACHINE, config, layout, step):
        own = step_time(MACHINE, config, layout.replace(transport=cost.way), step)
        assert cost.timeline == own.timeline


def test_what_waits_is_what_was_sent_and_not_yet_used() -> None:
    layout = Layout(pp=2, microbatches=1, cut=(3,))
    told = costs(layout)["relay"]
    assert microbatch_sizes(2, 1) == (2,)
    # One message forth and one back, and the first is used before the second is sent.
    assert told.waiting_bytes == edge_bytes(told)[0, 1]
    filled = costs(Layout(pp=2, microbatches=4, cut=(3,), schedule="gpipe"), num_sequences=8)["relay"]
    assert told.waiting_bytes <= filled.waiting_bytes <= 4 * told.waiting_bytes


@pytest.mark.parametrize(("pp", "cut"), [(4, "times"), (8, "times"), (16, "aligned")])
def test_the_default_is_what_the_numbers_choose_for_a_balanced_cut(pp: int, cut: Any) -> None:
    layout = Layout(pp=pp, microbatches=4 * pp, cut=cut)
    told = costs(layout, named_model("t5-large"), source_length=512, target_length=512)
    assert chosen_way(list(told.values())).way == Layout().transport


def test_keys_and_values_pay_where_a_cut_leaves_the_encoder_less_to_do() -> None:
    layout = Layout(pp=4, microbatches=16, cut="even")
    told = costs(layout, named_model("t5-large"), source_length=512, target_length=512)
    seconds = {way: cost.timeline.makespan_seconds for way, cost in told.items()}
    assert seconds["kv"] < 0.97 * seconds["direct"]
    assert told["kv"].egress_bytes > 10 * told["direct"].egress_bytes


def test_the_command_tells_every_way_with_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("t5-small", "--machine", "h100", "--pp", "3", "--microbatches", "4", "--format", "json")
    assert answer(("transports", *words)) == 0
    told = json.loads(capsys.readouterr().out)
    assert [way["way"] for way in told["ways"]] == ["relay", "direct", "kv"]
    assert [way["is_run"] for way in told["ways"]] == [True, True, True]
    chunked = (*words, "--chunks", "2", "--placement", "interleaved", "--schedule", "interleaved")
    assert answer(("transports", *chunked)) == 0
    assert [way["is_run"] for way in json.loads(capsys.readouterr().out)["ways"]] == [True, True, False]
    assert all(way["egress_bytes"] <= way["sent_bytes"] for way in told["ways"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("gpt2", "--machine", "a100", "--pp", "2"), "gpt2 is decoder_only: there is no memory to bring"),
        (("t5-small", "--machine", "a100"), "pp = 1: nothing is sent; try pp >= 2"),
        (
            ("t5-small", "--machine", "a100", "--pp", "13"),
            "pp = 13 stages over 12 blocks",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(("transports", *words)) == 2
    assert message in capsys.readouterr().err
