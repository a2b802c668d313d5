"""Does the ledger hold the communication that the formulas ask for, in the blocks and at the ends of a model?

Expected events are written out by hand. M_e and M_d are the bytes of a whole source and target hidden state, M_l those
of one number a target position. All in float32, tp = 2 unless said otherwise.
"""

import pytest

from models.config import Architecture
from parallel.layouts import Layout
from parallel.ledger import Event, Ledger
from tests.small_ledgers import M_D, M_E, M_L, config_of, ledger_of, told

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


def test_an_input_that_is_kept_whole_is_not_gathered_again() -> None:
    config, kept = config_of(), Layout(tp=2, sp=True, saved_input="whole", memory_gather="per_block")
    ledger = ledger_of(config, kept)
    for site, stream, size in (("query", "target", M_D), ("kv", "memory", M_E)):
        assert told(ledger, f"decoder.block.0.cross_attention.{site}") == [
            f"all_gather  {stream} forward {size}",
            f"reduce_scatter  {stream} backward {size}",
        ]
    again = ledger_of(config, kept.replace(saved_input="shard"))
    gathers = [
        event for event in again if (event.operation, event.phase) == ("all_gather", "forward") and event.site != "loss"
    ]
    assert len(again) == len(ledger) + len(gathers)


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


def test_the_head_reduces_its_input_gradient_and_the_loss_gathers_two_numbers_a_position_and_rank() -> None:
    ledger = ledger_of(config_of(), Layout(tp=2))
    assert told(ledger, "head") == [f"all_reduce  target backward {M_D}"]
    assert told(ledger, "loss") == [f"all_gather  target forward {2 * 2 * M_L}"]


def test_the_head_gathers_its_input_under_sequence_parallelism() -> None:
    ledger = ledger_of(config_of(), Layout(tp=2, sp=True))
    assert told(ledger, "head") == [
        f"all_gather  target forward {M_D}",
        f"all_gather  target backward {M_D}",
        f"reduce_scatter  target backward {M_D}",
    ]
    assert told(ledger, "loss") == [f"all_gather  target forward {2 * 2 * M_L}"]


@pytest.mark.parametrize("tying", ["none", "all"])
def test_a_whole_vocabulary_sends_nothing_at_the_ends_and_the_same_between_them(tying: str) -> None:
    config = config_of(tying=tying, head_bias=True)
    sharded, whole = (ledger_of(config, Layout(tp=2, vocabulary=held)) for held in ("sharded", "whole"))
    ends = ("encoder.embedding.token", "decoder.embedding.token", "head", "loss")
    assert {event.site for event in sharded} >= set(ends)
    assert whole.events == [event for event in sharded if event.site not in ends]


@pytest.mark.parametrize("vocabulary", [11, 50])
def test_what_is_sent_does_not_depend_on_the_vocabulary_but_for_its_gradient(vocabulary: int) -> None:
    def in_step(ledger: Ledger) -> list[Event]:
        return [event for event in ledger if event.phase != "step"]

    small, other = (ledger_of(config_of(vocabulary=v), Layout(tp=2)) for v in (29, vocabulary))
    assert in_step(small) == in_step(other)
