"""Is what is told before a run what the partitioned code does, dry? Closed form against trace, part against whole."""

import random
import resource

import pytest
import torch.distributed as dist

from models.named import named_model
from parallel.figures import StepShape, differences
from parallel.layouts import Layout
from parallel.mesh import Coordinate
from parallel.plans import plan
from parallel.predict import predict, predict_rank
from parallel.share import share_of, shares
from parallel.trace import trace
from tests.rank import Worker
from tests.sampled_layouts import Sample, samples
from tests.small_models import small_config
from tests.spawn import Ranks

SEEDS, SAMPLES_PER_SEED = range(1), 15
MEBIBYTE = 2**20


@pytest.mark.parametrize("seed", SEEDS)
def test_closed_form_equals_trace_on_random_layouts_of_random_models(seed: int) -> None:
    choose = random.Random(seed)
    told = []
    for sample in samples(SAMPLES_PER_SEED, seed=seed):
        share = choose.choice(shares(sample.plan))
        (traced,) = trace(sample.plan, sample.shape, ranks=[share])
        predicted = predict_rank(share, sample.shape)
        told += [f"{line}\n    {sample}" for line in differences(predicted.figures, traced.figures)]
    assert not told, "\n".join(told[:10])


WHOLE = {
    "five decoder blocks, rope, microbatches of 2 2 1 in flight": (
        {"architecture": "decoder_only", "num_decoder_blocks": 5, "positions": "rope"},
        Layout(microbatches=3, schedule="gpipe"),
        5,
    ),
    "both sides on one stage, all recomputed": (
        {"num_encoder_blocks": 3, "num_decoder_blocks": 4, "positions": "rope", "norm": "rmsnorm"},
        Layout(tp=2, sp=True, microbatches=3, recompute="full", memory_gather="per_block", saved_input="whole"),
        6,
    ),
    "a whole vocabulary on both stages": (
        {"num_encoder_blocks": 3, "num_decoder_blocks": 3, "tying": "all", "head_bias": True},
        Layout(tp=4, pp=2, vocabulary="whole", microbatches=3),
        5,
    ),
    "relative biases over three stages, cores recomputed": (
        {"num_encoder_blocks": 4, "num_decoder_blocks": 5, "positions": "relative", "relative_buckets": 8},
        Layout(tp=4, pp=3, dp=2, microbatches=2, recompute="selective"),
        4,
    ),
    "dropout everywhere, a stage with three kinds of ends": (
        {"num_encoder_blocks": 3, "num_decoder_blocks": 3, "dropout": 0.1, "attention_dropout": 0.1, "tying": "all"},
        Layout(tp=2, pp=2, sp=True, microbatches=3, cut=(1,)),
        5,
    ),
    "encoder only, materialised scores": (
        {"architecture": "encoder_only", "num_encoder_blocks": 6, "head_transform": True, "tying": "head"},
        Layout(tp=2, pp=2, microbatches=3, attention="materialised", schedule="gpipe"),
        6,
    ),
}


@pytest.mark.parametrize("name", WHOLE)
def test_composing_equal_blocks_microbatches_and_stages_changes_nothing(name: str) -> None:
    changes, layout, num_sequences = WHOLE[name]
    config = small_config(**({"architecture": "encoder_decoder"} | changes))  # type: ignore[arg-type]
    shape = StepShape(
        num_sequences=num_sequences,
        source_length=7 if config.has_encoder else 0,
        target_length=5 if config.has_decoder else 0,
        dtype_bytes=4,
    )
    made = plan(config, layout)
    composed, whole = trace(made, shape), trace(made, shape, compose=False)
    assert [
        line for two in zip(whole, composed, strict=True) for line in differences(two[0].figures, two[1].figures)
    ] == []
    assert [kind.operators for kind in composed] == [kind.operators for kind in whole]
    assert [kind.num_ranks for kind in composed] == [kind.num_ranks for kind in whole]


@pytest.mark.parametrize(
    ("name", "shape", "stages"),
    [
        ("llama-2-70b", StepShape(num_sequences=32, target_length=4096, dtype_bytes=2), (0, 7, 8, 15)),
        ("t5-11b", StepShape(num_sequences=64, source_length=512, target_length=128, dtype_bytes=2), (7, 8)),
    ],
)
def test_published_models_on_1024_ranks_are_traced_without_their_memory(
    name: str, shape: StepShape, stages: tuple[int, ...]
) -> None:
    made = plan(named_model(name), Layout(tp=8, pp=16, dp=8, sp=True, microbatches=32))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ranks = [share_of(made, Coordinate(dp=3, pp=stage, cp=0, tp=5)) for stage in stages]
    traced = trace(made, shape, ranks=ranks)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    predicted = [predict_rank(rank, shape) for rank in ranks]
    for expected, found in zip(predicted, traced, strict=True):
        assert differences(expected.figures, found.figures) == []
    held = traced[0].figures.parameter_bytes + traced[0].figures.peak_saved_bytes
    assert grown < 512 * MEBIBYTE < held // 4


def test_stages_of_one_kind_differ_in_names_and_in_microbatches_in_flight_only() -> None:
    config = small_config("decoder_only", num_decoder_blocks=8)
    made = plan(config, Layout(pp=4, microbatches=4))
    traced = trace(made, StepShape(num_sequences=4, target_length=5))
    assert [kind.figures.peak_saved_bytes // kind.figures.saved_bytes for kind in traced] == [4, 3, 2, 1]
    sites = [{total.event.site for total in kind.figures.events if total.event.axis == "pp"} for kind in traced]
    assert sites[1] == {"edge.0-1", "edge.1-2", "loss.sum"}
    assert sites[2] == {"edge.1-2", "edge.2-3", "loss.sum"}


def test_a_trace_leaves_no_process_group_behind() -> None:
    trace(plan(small_config("decoder_only"), Layout(tp=2)), StepShape(num_sequences=1, target_length=4))
    assert not dist.is_initialized()


def test_what_the_engine_does_not_run_is_not_traced() -> None:
    made = plan(small_config("decoder_only"), Layout(dp=2, zero=2))
    with pytest.raises(ValueError, match="zero = 2"):
        trace(made, StepShape(num_sequences=1, target_length=4))
    assert not dist.is_initialized()


def _refusal(worker: Worker, sample: Sample) -> str:
    try:
        trace(sample.plan, sample.shape)
    except ValueError as error:
        return str(error)
    return ""


def test_a_process_that_has_joined_a_group_is_refused(two_ranks: Ranks) -> None:
    sample = Sample(
        plan=plan(small_config("decoder_only"), Layout(tp=2)), shape=StepShape(num_sequences=1, target_length=4)
    )
    for told in two_ranks.run(_refusal, sample):
        assert "without a process group" in told


def test_every_rank_is_of_one_kind() -> None:
    for sample in samples(20, seed=1):
        predicted = predict(sample.plan, sample.shape)
        assert sum(kind.num_ranks for kind in predicted) == sample.plan.layout.world_size
