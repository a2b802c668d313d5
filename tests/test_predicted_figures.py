"""Does the closed form meet figures worked out by hand and published ones?"""

import dataclasses

from models.named import named_model
from parallel.activations import Saved, peak_over
from parallel.events import step_events
from parallel.figures import StepShape
from parallel.flops import model_flops
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.predict import predict
from parallel.schedule import parse
from parallel.share import shares
from tests.small_models import small_config

SOURCE_LENGTH, TARGET_LENGTH = 7, 6


# ---- known numbers --------------------------------------------------------------------------------------------------

T5_SHAPE = StepShape(num_sequences=8, source_length=512, target_length=128, dtype_bytes=2)


def _wire_bytes(layout: Layout, stream: str, *parts: str) -> int:
    """Of the blocks (and the memory's entry) of T5-base, on one rank."""
    (rank,) = shares(plan(named_model("t5-base"), layout))[:1]
    return sum(
        total.wire_bytes
        for total in step_events(rank, T5_SHAPE)
        if total.event.stream == stream and any(part in total.event.site for part in parts)
    )


def test_bytes_of_t5_over_four_ranks_are_those_worked_out_by_hand() -> None:
    source, target = 512 * 8 * 768 * 2, 128 * 8 * 768 * 2
    tensor, sequence = Layout(tp=4), Layout(tp=4, sp=True)
    # Forward and backward of 12 blocks: 2 + 2 all-reduces in an encoder block, 3 + 3 in a decoder block.
    assert _wire_bytes(tensor, "source", "block") == 12 * 4 * 3 * source // 2 == 452_984_832
    assert _wire_bytes(tensor, "target", "block") == 12 * 6 * 3 * target // 2 == 169_869_312
    # A column-parallel product gathers its input once more: 5 collectives where there were 2 all-reduces of 2 each.
    assert _wire_bytes(sequence, "source", "block") == 12 * 10 * 3 * source // 4 == 566_231_040
    assert _wire_bytes(sequence, "target", "block") == 12 * 15 * 3 * target // 4 == 212_336_640


def test_a_memory_gathered_once_per_stage_moves_an_eighteenth() -> None:
    per_stage, per_block = Layout(tp=4, sp=True), Layout(tp=4, sp=True, memory_gather="per_block")
    assert _wire_bytes(per_stage, "memory", "memory", "block") == 9_437_184
    assert _wire_bytes(per_block, "memory", "memory", "block") == 18 * 9_437_184
    without_sp = Layout(tp=4)
    assert _wire_bytes(without_sp, "memory", "memory", "block") == 9_437_184
    assert _wire_bytes(without_sp.replace(memory_gather="per_block"), "memory", "memory", "block") == 12 * 9_437_184


def test_the_relay_carries_the_memory_through_every_decoder_edge() -> None:
    made = plan(named_model("t5-base"), Layout(pp=4, cut="aligned"))
    sent = sum(
        total.payload_bytes
        for rank in shares(made)
        for total in step_events(rank, T5_SHAPE)
        if total.event.operation == "send" and total.event.phase == "forward"
    )
    assert sent == 20_447_232


def test_a_fused_core_of_half_precision_keeps_what_the_published_formula_has_and_what_it_leaves_out() -> None:
    # arXiv 2205.05198: 34 s b h and 5 a s^2 b for a layer with dropout, half precision, materialised scores.
    width, heads, length, size = 64, 4, 32, 2
    config = small_config(
        "decoder_only",
        width=width,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_width=4 * width,
        dropout=0.1,
        attention_dropout=0.1,
        max_length=length,
        num_decoder_blocks=2,
    )
    shape = StepShape(num_sequences=size, target_length=length, dtype_bytes=2)
    (longer,) = predict(plan(config, Layout()), shape)
    (shorter,) = predict(plan(config.replace(num_decoder_blocks=1), Layout()), shape)
    block = longer.figures.saved_bytes - shorter.figures.saved_bytes
    published = 34 * length * size * width + 5 * heads * length**2 * size
    statistics = 2 * 2 * length * size * 2
    causal_flags = length * length
    assert block == published + statistics + causal_flags


def test_model_flops_are_three_forwards_and_recomputation_is_on_top() -> None:
    config = small_config("encoder_decoder", num_kv_heads=4)
    shape = StepShape(num_sequences=4, source_length=7, target_length=5)
    for recompute, attention in (("none", "materialised"), ("full", "materialised"), ("none", "fused")):
        (rank,) = predict(plan(config, Layout(recompute=recompute, attention=attention)), shape)  # type: ignore[arg-type]
        flops = rank.figures.flops
        assert 3 * flops.forward == model_flops(config, shape)
        if attention == "materialised":
            assert flops.backward == 2 * flops.forward
        if recompute == "full":
            assert flops.recompute == flops.forward - rank.flops["head"].forward


def test_a_peak_counts_microbatches_in_flight_and_shared_tables_once() -> None:
    held = Saved(by_part={"all": 10}, shared={"table": 3}, on_top=4)
    both = {(0, 0): held, (0, 1): held}
    (apart,), (together,) = parse("0F0 0B0 0F1 0B1"), parse("0F0 0F1 0B0 0B1")
    assert peak_over(apart, both) == 14
    assert peak_over(together, both) == 21
    assert peak_over(together, {**both, (0, 1): dataclasses.replace(held, by_part={"all": 6})}) == 17


def test_what_is_kept_for_weight_gradients_stays_until_they_are_computed() -> None:
    held = Saved(by_part={"all": 10}, shared={}, on_top=0, deferred=6)
    (late,), (soon,) = parse("0F0 0I0 0F1 0I1 0W0 0W1"), parse("0F0 0I0 0W0 0F1 0I1 0W1")
    both = {(0, 0): held, (0, 1): held}
    assert peak_over(late, both) == 16
    assert peak_over(soon, both) == 10
