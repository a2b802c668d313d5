"""Does the ledger hold the communication that the formulas ask for, over a pipeline and at the end of a step?

Expected events are written out by hand. M_e and M_d are the bytes of a whole source and target hidden state, M_l those
of one number a target position. All in float32, tp = 2 unless said otherwise.
"""

import pytest

from models.batch import synthetic_batch
from models.config import ModelConfig
from parallel.layouts import Layout
from parallel.ledger import Ledger
from parallel.plans import plan
from parallel.transfers import Transfer, with_transfers
from tests.one_rank import rank_of, step_of
from tests.small_ledgers import FLOAT, M_D, M_E, SOURCE, TARGET, WIDTH, config_of, ledger_of, told
from tests.small_models import ARCHITECTURES

# ---- the pipeline -------------------------------------------------------------------------------------------------


def test_edges_carry_source_then_memory_then_target_and_memory_and_their_gradients_back() -> None:
    layout = Layout(pp=4, cut=(1, 2, 3))
    ledgers = [ledger_of(config_of(blocks=2), layout, rank=rank) for rank in range(4)]
    assert [told(ledger, "edge") for ledger in ledgers] == [
        [
            f"receive 0-1 source backward {M_E}",
            f"send 0-1 source forward {M_E}",
        ],
        [
            f"receive 1-2 memory backward {M_E}",
            f"receive 0-1 source forward {M_E}",
            f"send 1-2 memory forward {M_E}",
            f"send 0-1 source backward {M_E}",
        ],
        [
            f"receive 2-3 target backward {M_D}",
            f"receive 2-3 memory backward {M_E}",
            f"receive 1-2 memory forward {M_E}",
            f"send 2-3 target forward {M_D}",
            f"send 2-3 memory forward {M_E}",
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
    made = plan(config, layout)
    steps = with_transfers(made.table, made.edges)
    for rank in range(3):
        ledger = ledger_of(config, layout, rank=rank, num_sequences=8)
        issued = [(event.operation, event.phase) for event in ledger if "edge" in event.site]
        assert issued == [(one.operation, one.direction) for one in steps[rank] if isinstance(one, Transfer)]


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
