"""Do whole ledgers agree with the independent recorder and with published totals, and what is on the wire?

Expected events are written out by hand. M_e and M_d are the bytes of a whole source and target hidden state, M_l those
of one number a target position. All in float32, tp = 2 unless said otherwise.
"""

import pytest
import torch
import torch.distributed as dist

from models.config import Architecture
from parallel.comm import Site
from parallel.layouts import Layout
from parallel.ledger import Event, Operation, Total, totals, wire_bytes
from parallel.plans import plan
from parallel.recorder import Recorder
from tests.one_rank import rank_of
from tests.small_ledgers import FLOAT, M_D, M_E, SEQUENCES, SOURCE, WIDTH, config_of, ledger_of, told
from tests.small_models import ARCHITECTURES

# ---- whole ledgers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, dp=2, sp=True, microbatches=3, recompute="full"),
        Layout(tp=4, sp=True, saved_input="whole", memory_gather="per_block", attention="materialised"),
        Layout(tp=2, pp=3, schedule="gpipe", microbatches=2, memory_gather="per_block"),
        Layout(tp=4, pp=2, vocabulary="whole", microbatches=2),
    ],
    ids=lambda layout: layout.label,
)
def test_the_independent_recorder_agrees_event_for_event_on_every_rank(
    architecture: Architecture, layout: Layout
) -> None:
    config = config_of(architecture, 3, num_kv_heads=1, tying="head", positions="relative")
    for rank in range(layout.world_size):
        assert len(ledger_of(config, layout, rank=rank, num_sequences=14, source_length=7)) > 10


def test_lengths_that_do_not_divide_are_sent_padded() -> None:
    ledger = ledger_of(config_of(), Layout(tp=2, sp=True), source_length=7, target_length=3)
    assert (
        told(ledger, "encoder.embedding")[0] == f"reduce_scatter token source forward {8 * SEQUENCES * WIDTH * FLOAT}"
    )
    assert (
        told(ledger, "decoder.embedding")[0] == f"reduce_scatter token target forward {4 * SEQUENCES * WIDTH * FLOAT}"
    )
    whole = ledger_of(config_of(), Layout(tp=2), source_length=7, target_length=3)
    assert told(whole, "encoder.embedding")[0] == f"all_reduce token source forward {7 * SEQUENCES * WIDTH * FLOAT}"


def test_sequence_parallelism_sends_a_quarter_more_than_tensor_parallelism_in_a_block_of_two_sublayers() -> None:
    config = config_of("decoder_only")
    tp, sp = (
        sum(e.wire_bytes for e in ledger_of(config, layout) if e.site.startswith("decoder.block"))
        for layout in (Layout(tp=2), Layout(tp=2, sp=True))
    )
    assert sp / tp == 1.25


@pytest.mark.parametrize(
    ("sp", "encoder", "decoder", "per_block", "per_stage"), [(False, 72, 108, 18, 1.5), (True, 90, 135, 27, 1.5)]
)
def test_twelve_blocks_a_side_over_four_ranks_send_the_multiples_of_a_hidden_state_that_formulas_give(
    sp: bool, encoder: float, decoder: float, per_block: float, per_stage: float
) -> None:
    """T5's shape. One stage that gathers the memory once sends an eighteenth of what twelve blocks would."""
    sent = {}
    for gather in ("per_block", "per_stage"):
        layout = Layout.from_dict({"tp": 4, "sp": sp, "memory_gather": gather})
        ledger = ledger_of(config_of(blocks=12), layout, source_length=8)
        for part, stream in (("encoder.block", "source"), ("decoder.block", "target"), ("decoder", "memory")):
            events = [e for e in ledger if e.site.startswith(part) and e.stream == stream]
            sent[gather, stream] = sum(event.wire_bytes for event in events)
    m_e = M_E // SOURCE * 8
    assert [sent["per_block", "source"], sent["per_stage", "source"]] == [encoder * m_e] * 2
    assert [sent["per_block", "target"], sent["per_stage", "target"]] == [decoder * M_D] * 2
    assert [sent["per_block", "memory"], sent["per_stage", "memory"]] == [per_block * m_e, per_stage * m_e]


# ---- the recorder -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hide", "difference"),
    [
        ("event", "the ledger has 1 events, the recorder saw 2"),
        ("payload", "event 0 at a: the ledger says"),
        ("communication", "the ledger has 2 events, the recorder saw 1"),
    ],
)
def test_the_recorder_tells_the_first_difference(hide: str, difference: str) -> None:
    planned = plan(config_of(), Layout(tp=2))
    tensor = torch.ones(3)
    with rank_of(planned, 0) as comm, Recorder() as recorder:
        comm.all_reduce(tensor, "tp", site=Site(name="a"), phase="forward").wait()
        if hide == "event":
            dist.all_reduce(tensor)
        elif hide == "payload":
            recorder.events.clear()
            dist.all_reduce(torch.ones(4))
        else:
            comm._write("all_reduce", "tp", tensor, Site(name="b"), "forward")
        told_difference = recorder.first_difference(comm.ledger.events)
    assert told_difference is not None
    assert told_difference.startswith(difference)


def test_an_operator_that_the_recorder_does_not_know_is_told() -> None:
    planned = plan(config_of(), Layout(tp=2))
    with rank_of(planned, 0) as comm, Recorder() as recorder:
        dist.barrier()
        difference = recorder.first_difference(comm.ledger.events)
    assert difference == "unknown communication operators barrier"


# ---- bytes on the wire --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "payload", "ranks", "expected"),
    [
        ("all_reduce", 1200, 4, 1800),
        ("all_gather", 1200, 4, 900),
        ("reduce_scatter", 1200, 4, 900),
        ("all_to_all", 1200, 4, 900),
        ("broadcast", 1200, 4, 900),
        ("reduce", 1200, 4, 900),
        ("send", 1200, 2, 1200),
        ("receive", 1200, 2, 0),
        ("all_reduce", 10, 4, 2 * 3 * 3),
        ("all_gather", 10, 3, 2 * 4),
        ("all_reduce", 1200, 1, 0),
    ],
)
def test_a_ring_sends_what_the_formulas_say_and_pads_its_last_piece(
    operation: Operation, payload: int, ranks: int, expected: int
) -> None:
    assert wire_bytes(operation, payload, ranks) == expected


def test_the_published_block_of_the_22_billion_model() -> None:
    """Width 6144, length 2048, four sequences, bfloat16, tp = 8."""
    payload = 2048 * 4 * 6144 * 2
    assert payload == 100_663_296
    assert 2 * wire_bytes("all_reduce", payload, 8) == 352_321_536
    assert 4 * wire_bytes("all_gather", payload, 8) == 352_321_536
    assert 6 * wire_bytes("reduce_scatter", payload, 8) == 528_482_304


def test_totals_count_equal_events_and_keep_the_order() -> None:
    def event(site: str, payload: int) -> Event:
        return Event(
            operation="all_reduce",
            axis="tp",
            group_size=4,
            payload_bytes=payload,
            site=site,
            stream="target",
            phase="forward",
        )

    events = [event("b", 8), event("a", 8), event("b", 8), event("b", 12)]
    counted = totals(events)
    assert counted == (
        Total(event=event("b", 8), count=2),
        Total(event=event("a", 8), count=1),
        Total(event=event("b", 12), count=1),
    )
    assert [total.payload_bytes for total in counted] == [16, 8, 12]
    assert [total.wire_bytes for total in counted] == [24, 12, 18]
    assert sum(total.wire_bytes for total in counted) == sum(e.wire_bytes for e in events)


def test_a_cleared_ledger_is_empty() -> None:
    planned = plan(config_of(), Layout(tp=2))
    with rank_of(planned, 0) as comm:
        comm.all_reduce(torch.ones(3), "tp", site=Site(name="a"), phase="forward").wait()
        assert len(comm.ledger) == 1
        comm.ledger.clear()
        assert list(comm.ledger) == []
