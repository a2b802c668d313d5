"""Does the ledger of every rank hold exactly the communication that the formulas ask for?

Expected events are written out by hand. M_e and M_d are the bytes of a whole source and target hidden state, M_l those
of one number a target position. All in float32, tp = 2 unless said otherwise.
"""

import pytest
import torch
import torch.distributed as dist

from models.batch import synthetic_batch
from models.config import Architecture, ModelConfig
from parallel.comm import Site
from parallel.layouts import Layout
from parallel.ledger import Event, Ledger, Operation, Total, totals, wire_bytes
from parallel.plans import plan
from parallel.recorder import Recorder
from parallel.schedule import batches, with_transfers
from tests.one_rank import rank_of, step_of
from tests.small_models import ARCHITECTURES, small_config

WIDTH, SOURCE, TARGET, SEQUENCES, FLOAT = 16, 6, 4, 2, 4
M_E = SOURCE * SEQUENCES * WIDTH * FLOAT
M_D = TARGET * SEQUENCES * WIDTH * FLOAT
M_L = TARGET * SEQUENCES * FLOAT


def config_of(architecture: Architecture = "encoder_decoder", blocks: int = 1, **changes: object) -> ModelConfig:
    """Each stack with as many blocks."""
    fields: dict[str, object] = {
        "num_encoder_blocks": 0 if architecture == "decoder_only" else blocks,
        "num_decoder_blocks": 0 if architecture == "encoder_only" else blocks,
    }
    return small_config(architecture, **(fields | changes))


def ledger_of(
    config: ModelConfig,
    layout: Layout,
    *,
    rank: int = 0,
    num_sequences: int = SEQUENCES,
    source_length: int = SOURCE,
    target_length: int = TARGET,
) -> Ledger:
    """What one rank sends in one step on full sequences."""
    batch = synthetic_batch(
        config, num_sequences=num_sequences, source_length=source_length, target_length=target_length, seed=3
    )
    planned = plan(config, layout)
    with rank_of(planned, rank) as comm, Recorder() as recorder:
        step_of(planned, comm, batch)
        difference = recorder.first_difference(comm.ledger.events)
    assert difference is None, difference
    return comm.ledger


def told(ledger: Ledger, site: str) -> list[str]:
    """The events at a site and inside it, as `operation site stream phase payload`."""
    events = [event for event in ledger if event.site == site or event.site.startswith(f"{site}.")]
    rest = len(site) + 1
    return [f"{e.operation} {e.site[rest:]} {e.stream} {e.phase} {e.payload_bytes}" for e in events]


# ---- one block ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "block", "stream", "payload"),
    [
        ("encoder_decoder", "encoder.block.0", "source", M_E),
        ("encoder_only", "encoder.block.0", "source", M_E),
        ("decoder_only", "decoder.block.0", "target", M_D),
    ],
)
def test_a_block_of_two_sublayers_reduces_twice_forward_and_twice_backward(
    architecture: Architecture, block: str, stream: str, payload: int
) -> None:
    assert told(ledger_of(config_of(architecture), Layout(tp=2)), block) == [
        f"all_reduce self_attention.output {stream} forward {payload}",
        f"all_reduce ffn.down {stream} forward {payload}",
        f"all_reduce ffn.up {stream} backward {payload}",
        f"all_reduce self_attention.qkv {stream} backward {payload}",
    ]


@pytest.mark.parametrize(
    ("architecture", "block", "stream", "payload"),
    [
        ("encoder_decoder", "encoder.block.0", "source", M_E),
        ("encoder_only", "encoder.block.0", "source", M_E),
        ("decoder_only", "decoder.block.0", "target", M_D),
    ],
)
def test_sequence_parallelism_gathers_and_scatters_and_gathers_again_behind_the_backward(
    architecture: Architecture, block: str, stream: str, payload: int
) -> None:
    assert told(ledger_of(config_of(architecture), Layout(tp=2, sp=True)), block) == [
        f"all_gather self_attention.qkv {stream} forward {payload}",
        f"reduce_scatter self_attention.output {stream} forward {payload}",
        f"all_gather ffn.up {stream} forward {payload}",
        f"reduce_scatter ffn.down {stream} forward {payload}",
        f"all_gather ffn.down {stream} backward {payload}",
        f"all_gather ffn.up {stream} backward {payload}",
        f"reduce_scatter ffn.up {stream} backward {payload}",
        f"all_gather self_attention.output {stream} backward {payload}",
        f"all_gather self_attention.qkv {stream} backward {payload}",
        f"reduce_scatter self_attention.qkv {stream} backward {payload}",
    ]


def test_a_block_with_cross_attention_reduces_three_times_and_the_memory_gradient_once_a_stage() -> None:
    ledger = ledger_of(config_of(blocks=2), Layout(tp=2))
    assert told(ledger, "decoder.block.1") == [
        f"all_reduce self_attention.output target forward {M_D}",
        f"all_reduce cross_attention.output target forward {M_D}",
        f"all_reduce ffn.down target forward {M_D}",
        f"all_reduce ffn.up target backward {M_D}",
        f"all_reduce cross_attention.query target backward {M_D}",
        f"all_reduce self_attention.qkv target backward {M_D}",
    ]
    assert told(ledger, "decoder.memory") == [f"all_reduce  memory backward {M_E}"]


def test_the_memory_gradient_is_reduced_in_every_block_if_it_is_not_summed_before() -> None:
    ledger = ledger_of(config_of(blocks=2), Layout(tp=2, memory_gather="per_block"))
    for block in ("decoder.block.0", "decoder.block.1"):
        assert sorted(told(ledger, f"{block}.cross_attention")) == [
            f"all_reduce kv memory backward {M_E}",
            f"all_reduce output target forward {M_D}",
            f"all_reduce query target backward {M_D}",
        ]
    assert told(ledger, "decoder.memory") == []


def test_the_memory_is_gathered_once_a_stage_under_sequence_parallelism() -> None:
    ledger = ledger_of(config_of(blocks=2), Layout(tp=2, sp=True))
    assert told(ledger, "decoder.memory") == [
        f"all_gather  memory forward {M_E}",
        f"reduce_scatter  memory backward {M_E}",
    ]
    for block in ("decoder.block.0", "decoder.block.1"):
        assert told(ledger, f"{block}.cross_attention") == [
            f"all_gather query target forward {M_D}",
            f"reduce_scatter output target forward {M_D}",
            f"all_gather output target backward {M_D}",
            f"all_gather query target backward {M_D}",
            f"reduce_scatter query target backward {M_D}",
        ]


def test_the_memory_is_gathered_three_times_in_every_block_otherwise() -> None:
    ledger = ledger_of(config_of(blocks=2), Layout(tp=2, sp=True, memory_gather="per_block"))
    assert told(ledger, "decoder.memory") == []
    for block in ("decoder.block.0", "decoder.block.1"):
        assert sorted(told(ledger, f"{block}.cross_attention.kv")) == [
            f"all_gather  memory backward {M_E}",
            f"all_gather  memory forward {M_E}",
            f"reduce_scatter  memory backward {M_E}",
        ]


def test_full_recomputation_repeats_the_forward_of_a_block_before_its_backward() -> None:
    ledger = ledger_of(config_of(), Layout(tp=2, recompute="full"))
    assert told(ledger, "encoder.block.0") == [
        f"all_reduce self_attention.output source forward {M_E}",
        f"all_reduce ffn.down source forward {M_E}",
        f"all_reduce self_attention.output source recompute {M_E}",
        f"all_reduce ffn.down source recompute {M_E}",
        f"all_reduce ffn.up source backward {M_E}",
        f"all_reduce self_attention.qkv source backward {M_E}",
    ]
    assert told(ledger, "decoder.memory") == [f"all_reduce  memory backward {M_E}"]


def test_a_memory_gathered_in_every_block_is_gathered_again_in_the_recomputation() -> None:
    per_block = ledger_of(config_of(), Layout(tp=2, sp=True, recompute="full", memory_gather="per_block"))
    assert sorted(told(per_block, "decoder.block.0.cross_attention.kv")) == [
        f"all_gather  memory backward {M_E}",
        f"all_gather  memory forward {M_E}",
        f"all_gather  memory recompute {M_E}",
        f"reduce_scatter  memory backward {M_E}",
    ]
    per_stage = ledger_of(config_of(), Layout(tp=2, sp=True, recompute="full"))
    assert told(per_stage, "decoder.memory") == [
        f"all_gather  memory forward {M_E}",
        f"reduce_scatter  memory backward {M_E}",
    ]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sp=True)], ids=["tp", "sp"])
def test_selective_recomputation_sends_nothing_more(layout: Layout) -> None:
    plain, selective = ledger_of(config_of(), layout), ledger_of(config_of(), layout.replace(recompute="selective"))
    assert plain.events == selective.events


# ---- ends of the model --------------------------------------------------------------------------------------------


def test_both_embeddings_reduce_forward_and_nothing_backward() -> None:
    ledger = ledger_of(config_of(), Layout(tp=2))
    assert told(ledger, "encoder.embedding") == [f"all_reduce token source forward {M_E}"]
    assert told(ledger, "decoder.embedding") == [f"all_reduce token target forward {M_D}"]


def test_under_sequence_parallelism_embeddings_scatter_and_gather_their_gradient() -> None:
    ledger = ledger_of(config_of(), Layout(tp=2, sp=True))
    assert told(ledger, "encoder.embedding") == [
        f"reduce_scatter token source forward {M_E}",
        f"all_gather token source backward {M_E}",
    ]
    assert told(ledger, "decoder.embedding") == [
        f"reduce_scatter token target forward {M_D}",
        f"all_gather token target backward {M_D}",
    ]


def test_the_head_reduces_its_input_gradient_and_the_loss_sends_three_numbers_a_position() -> None:
    ledger = ledger_of(config_of(), Layout(tp=2))
    assert told(ledger, "head") == [f"all_reduce  target backward {M_D}"]
    assert told(ledger, "loss") == [f"all_reduce  target forward {M_L}", f"all_reduce  target forward {2 * M_L}"]


def test_the_head_gathers_its_input_under_sequence_parallelism() -> None:
    ledger = ledger_of(config_of(), Layout(tp=2, sp=True))
    assert told(ledger, "head") == [
        f"all_gather  target forward {M_D}",
        f"all_gather  target backward {M_D}",
        f"reduce_scatter  target backward {M_D}",
    ]
    assert told(ledger, "loss") == [f"all_reduce  target forward {M_L}", f"all_reduce  target forward {2 * M_L}"]


@pytest.mark.parametrize("vocabulary", [11, 50])
def test_what_is_sent_does_not_depend_on_the_vocabulary_but_for_its_gradient(vocabulary: int) -> None:
    def in_step(ledger: Ledger) -> list[Event]:
        return [event for event in ledger if event.phase != "step"]

    small, other = (ledger_of(config_of(vocabulary=v), Layout(tp=2)) for v in (29, vocabulary))
    assert in_step(small) == in_step(other)


# ---- the pipeline -------------------------------------------------------------------------------------------------


def test_edges_carry_source_then_memory_then_target_and_memory_and_their_gradients_back() -> None:
    layout = Layout(pp=4, cut=(1, 2, 3))
    ledgers = [ledger_of(config_of(blocks=2), layout, rank=rank) for rank in range(4)]
    assert [told(ledger, "edge") for ledger in ledgers] == [
        [
            f"send 0-1 source forward {M_E}",
            f"receive 0-1 source backward {M_E}",
        ],
        [
            f"receive 0-1 source forward {M_E}",
            f"send 1-2 memory forward {M_E}",
            f"receive 1-2 memory backward {M_E}",
            f"send 0-1 source backward {M_E}",
        ],
        [
            f"receive 1-2 memory forward {M_E}",
            f"send 2-3 target forward {M_D}",
            f"send 2-3 memory forward {M_E}",
            f"receive 2-3 target backward {M_D}",
            f"receive 2-3 memory backward {M_E}",
            f"send 1-2 memory backward {M_E}",
        ],
        [
            f"receive 2-3 target forward {M_D}",
            f"receive 2-3 memory forward {M_E}",
            f"send 2-3 target backward {M_D}",
            f"send 2-3 memory backward {M_E}",
        ],
    ]
    edges = [event for ledger in ledgers for event in ledger if event.site.startswith("edge")]
    assert {(event.axis, event.group_size) for event in edges} == {("pp", 2)}


def sent_over_edges(config: ModelConfig, layout: Layout, **lengths: int) -> int:
    ledgers = (ledger_of(config, layout, rank=rank, **lengths) for rank in range(layout.world_size))
    return sum(
        event.wire_bytes for ledger in ledgers for event in ledger if event.axis == "pp" and "edge" in event.site
    )


def test_the_relay_sends_what_the_closed_form_says() -> None:
    """Forward: (p_e + p_d - 1) M_e + (p_d - 1) M_d; backward the same."""
    config = config_of(blocks=3)
    for num_encoder, num_decoder, cut in ((1, 2, (3, 5)), (2, 2, (1, 3, 4)), (3, 1, (1, 2, 3))):
        layout = Layout(pp=num_encoder + num_decoder, cut=cut)
        relay = (num_encoder + num_decoder - 1) * M_E + (num_decoder - 1) * M_D
        assert sent_over_edges(config, layout) == 2 * relay


def test_edges_send_a_shard_under_sequence_parallelism_and_every_tp_rank_the_whole_otherwise() -> None:
    config = config_of(blocks=2)
    once = sent_over_edges(config, Layout(pp=2))
    assert once == 2 * M_E
    assert sent_over_edges(config, Layout(pp=2, tp=2)) == 2 * once
    assert sent_over_edges(config, Layout(pp=2, tp=2, sp=True)) == once


def test_a_ragged_last_microbatch_sends_less() -> None:
    ledger = ledger_of(config_of("decoder_only", 2), Layout(pp=2, microbatches=2), num_sequences=3)
    sent = [event.payload_bytes for event in ledger if event.operation == "send"]
    assert sent == [M_D, M_D // 2]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_transfers_are_issued_in_the_order_of_the_schedule(schedule: str) -> None:
    layout = Layout.from_dict({"pp": 3, "microbatches": 4, "schedule": schedule, "cut": [1, 2]})
    config = config_of("decoder_only", 3)
    table = with_transfers(plan(config, layout).table)
    for rank in range(3):
        ledger = ledger_of(config, layout, rank=rank, num_sequences=8)
        issued = [(event.operation, event.phase) for event in ledger if "edge" in event.site]
        transfers = [action for batch in batches(table[rank]) for action in batch if action.is_transfer]
        expected = [tuple(action.kind.split("_")) for action in transfers]
        assert issued == expected


# ---- the end of a step --------------------------------------------------------------------------------------------


def in_step(ledger: Ledger) -> list[str]:
    return [f"{e.operation} {e.axis}{e.group_size} {e.site} {e.payload_bytes}" for e in ledger if e.phase == "step"]


def parameters_bytes(config: ModelConfig, layout: Layout, rank: int) -> int:
    planned = plan(config, layout)
    batch = synthetic_batch(config, num_sequences=4, source_length=SOURCE, target_length=TARGET, seed=3)
    with rank_of(planned, rank) as comm:
        return step_of(planned, comm, batch).gradient_bytes


@pytest.mark.parametrize("microbatches", [1, 2])
def test_dp_reduces_every_gradient_once_a_step_whatever_the_number_of_microbatches(microbatches: int) -> None:
    config, layout = config_of(), Layout(dp=2, microbatches=microbatches)
    assert in_step(ledger_of(config, layout, num_sequences=4)) == [
        "all_reduce dp2 loss.tokens 8",
        f"all_reduce dp2 gradient.dp {parameters_bytes(config, layout, 0)}",
        "all_reduce dp2 loss.sum 4",
    ]


def test_tp_alone_reduces_one_number_for_the_norm() -> None:
    assert in_step(ledger_of(config_of(), Layout(tp=2))) == ["all_reduce model2 gradient.norm 4"]


def test_replicated_parameters_are_reduced_together_under_sequence_parallelism() -> None:
    """Norms: 2 D each; 3 and 2 in the blocks, 2 final. Row biases: D each, 5. Positions: 12 D, twice."""
    assert in_step(ledger_of(config_of(), Layout(tp=2, sp=True))) == [
        f"all_reduce tp2 gradient.sequence {(7 * 2 + 5 + 24) * WIDTH * FLOAT}",
        "all_reduce model2 gradient.norm 4",
    ]


def test_key_value_heads_fewer_than_ranks_are_reduced_over_those_that_hold_them() -> None:
    """One head of width 4 for key and one for value, weight and bias, in three attentions."""
    config = config_of(num_kv_heads=2)
    assert in_step(ledger_of(config, Layout(tp=4), rank=2)) == [
        f"all_reduce kv_replica2 gradient.kv_replica {3 * 2 * 4 * (WIDTH + 1) * FLOAT}",
        "all_reduce model4 gradient.norm 4",
    ]
    assert in_step(ledger_of(config.replace(num_kv_heads=1), Layout(tp=4)))[0] == (
        f"all_reduce kv_replica4 gradient.kv_replica {3 * 2 * 4 * (WIDTH + 1) * FLOAT}"
    )


def test_a_tied_embedding_is_reduced_over_the_three_stages_that_hold_it() -> None:
    config, layout = config_of(blocks=2, tying="all", vocabulary=30), Layout(pp=3, tp=2, cut=(1, 3))
    for rank in range(6):
        assert in_step(ledger_of(config, layout, rank=rank)) == [
            f"all_reduce tied3 gradient.tied.encoder.embedding.token.weight {15 * WIDTH * FLOAT}",
            "all_reduce model6 gradient.norm 4",
            "all_reduce pp3 loss.sum 4",
        ]


def test_a_stage_without_a_copy_takes_no_part_in_a_tied_reduction() -> None:
    config, layout = config_of("decoder_only", 3, tying="head"), Layout(pp=3, cut=(1, 2))
    tied = f"all_reduce tied2 gradient.tied.decoder.embedding.token.weight {29 * WIDTH * FLOAT}"
    norm, loss = "all_reduce model3 gradient.norm 4", "all_reduce pp3 loss.sum 4"
    assert [in_step(ledger_of(config, layout, rank=rank)) for rank in range(3)] == [
        [tied, norm, loss],
        [norm, loss],
        [tied, norm, loss],
    ]


def test_a_relative_bias_is_reduced_over_every_stage_of_its_stack() -> None:
    config = config_of(blocks=2, positions="relative")
    ledgers = [ledger_of(config, Layout(pp=4, cut=(1, 2, 3)), rank=rank) for rank in range(4)]
    tied = [[line for line in in_step(ledger) if "tied" in line] for ledger in ledgers]
    encoder, decoder = (
        f"all_reduce tied2 gradient.tied.{side}.relative_bias.weight {32 * 4 * FLOAT}"
        for side in ("encoder", "decoder")
    )
    assert tied == [[encoder], [encoder], [decoder], [decoder]]


def test_one_rank_sends_nothing() -> None:
    for architecture in ARCHITECTURES:
        assert len(ledger_of(config_of(architecture, tying="head"), Layout(microbatches=2))) == 0


# ---- whole ledgers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, pp=2, dp=2, sp=True, microbatches=3, recompute="full"),
        Layout(tp=4, sp=True, memory_gather="per_block", recompute="selective", attention="materialised"),
        Layout(tp=2, pp=3, schedule="gpipe", microbatches=2, memory_gather="per_block"),
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
