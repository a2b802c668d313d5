"""Do closed forms of context parallelism add up to those of the whole sequence, and is the ring as long as derived?"""

import pytest

from models.named import named_model
from parallel.account import account
from parallel.activations import saved_bytes
from parallel.context_costs import predict_context
from parallel.figures import StepShape
from parallel.layouts import AttentionKernel, Layout, Recompute
from parallel.plans import plan
from parallel.predict import predict
from parallel.share import shares

NAMES = ("tiny-encoder-decoder", "tiny-llama", "tiny-t5", "tiny-bert")
CP = 4


def shape_of(name: str) -> StepShape:
    config = named_model(name)
    return StepShape(num_sequences=4, source_length=32 * config.has_encoder, target_length=16 * config.has_decoder)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("attention", ["fused", "materialised"])
@pytest.mark.parametrize("name", NAMES)
def test_ranks_compute_and_keep_together_what_one_does(
    name: str, attention: AttentionKernel, recompute: Recompute
) -> None:
    layout = Layout(pp=2, microbatches=2, attention=attention, recompute=recompute)
    shape, config = shape_of(name), named_model(name)
    whole = predict(plan(config, layout), shape)
    made = plan(config, layout.replace(cp=CP))
    for one, many in zip(whole, predict_context(made, shape), strict=True):
        assert many.num_ranks == CP * one.num_ranks
        assert many.figures.parameters == one.figures.parameters
        for phase in ("forward", "recompute", "backward"):
            assert CP * getattr(many.figures.flops, phase) == getattr(one.figures.flops, phase)
        # The mean of a loss is one scalar on every rank.
        scalar = 4 * (one.figures.coordinate.pp == 1)
        assert CP * (many.figures.saved_bytes - scalar) == one.figures.saved_bytes - scalar


def test_peaks_shrink_with_the_shards() -> None:
    config, shape = named_model("tiny-encoder-decoder"), shape_of("tiny-encoder-decoder")
    layout = Layout(attention="materialised", recompute="selective")
    (share,) = shares(plan(config, layout))
    (prediction,) = predict_context(plan(config, layout.replace(cp=CP)), shape)
    assert CP * prediction.saved.on_top == saved_bytes(share, shape, 4).on_top


def test_a_ring_sends_keys_values_and_their_gradients() -> None:
    config, shape = named_model("tiny-llama"), shape_of("tiny-llama")
    made = plan(config, Layout(tp=2, dp=3, cp=CP, microbatches=2, recompute="full"))
    (prediction,) = predict_context(made, shape)
    # A KV head of width 8 a rank, 4 positions, 2 sequences, float32.
    hop_bytes = 2 * 4 * 2 * 8 * 4
    sent = [
        total for total in prediction.figures.events if total.event.axis == "cp" and total.event.operation == "send"
    ]
    assert {total.event.site for total in sent} == {f"decoder.block.{index}.self_attention.core" for index in range(4)}
    assert {total.event.payload_bytes for total in sent} == {hop_bytes}
    by_phase = {"forward": 0, "recompute": 0, "backward": 0}
    for total in sent:
        by_phase[total.event.phase] += total.count
    blocks_and_microbatches = 4 * 2
    assert by_phase == {
        "forward": 3 * blocks_and_microbatches,
        "recompute": 3 * blocks_and_microbatches,
        "backward": (3 + 4) * blocks_and_microbatches,
    }
    gradients = [total.event for total in prediction.figures.events if total.event.site == "gradient.dp"]
    assert [(event.axis, event.group_size) for event in gradients] == [("dp_cp", 3 * CP)]


def test_cross_attention_rings_the_memory() -> None:
    config, shape = named_model("tiny-encoder-decoder"), shape_of("tiny-encoder-decoder")
    (prediction,) = predict_context(plan(config, Layout(cp=2)), shape)
    events = [total for total in prediction.figures.events if "cross_attention.core" in total.event.site]
    assert {total.event.stream for total in events} == {"memory"}
    assert {total.event.payload_bytes for total in events} == {2 * 16 * 4 * 32 * 4}


def test_ranks_need_and_cache_their_share_of_a_sequence() -> None:
    config, shape = named_model("tiny-encoder-decoder"), shape_of("tiny-encoder-decoder")
    (one,) = account(plan(config, Layout()), shape)
    (many,) = account(plan(config, Layout(cp=CP)), shape)
    assert CP * many.model_forward_flops == one.model_forward_flops
    assert CP * many.cache.total == one.cache.total


def test_lengths_are_dealt_evenly() -> None:
    config = named_model("tiny-encoder-decoder")
    made = plan(config, Layout(tp=2, sp=True, cp=2))
    with pytest.raises(ValueError, match="source_length = 30 over cp=2 and tp=2 with sp: 4 must divide it; try 32"):
        predict_context(made, StepShape(num_sequences=1, source_length=30, target_length=8))
