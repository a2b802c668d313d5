"""Does DeepSpeed's AutoTP equal one process on these models, and is what it cannot do told before anything starts?"""

import importlib.util

import pytest
import torch

from launch.case import Case
from launch.parity import case_batch
from models.architectures import build
from models.config import Architecture, ModelConfig
from parallel.comm import Comm
from parallel.engines.choice import EngineChoice
from parallel.engines.engine import unsupported
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.recorder import Recorder
from parallel.sequence import deal
from tests.engine_steps import CPU, RELATIVE, engine_case, engine_of, proved
from tests.rank import Worker
from tests.small_models import small_config
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install 'twinshard[engines]'"
)

ROPE = {"positions": "rope", "activation": "swiglu", "head_scale": True, "embedding_scale": True, "num_kv_heads": 4}
POST_NORM = {"norm_position": "post", "num_token_types": 2, "embedding_norm": True, "qkv_bias": False}
ONE_BLOCK = {**ROPE, "num_decoder_blocks": 1}


@pytest.mark.parametrize(
    ("architecture", "layout", "changes"),
    [
        ("encoder_decoder", Layout(tp=2, microbatches=3), RELATIVE),
        ("encoder_decoder", Layout(tp=2, recompute="full", attention="materialised"), ROPE | {"tying": "all"}),
        ("decoder_only", Layout(tp=2, microbatches=2, recompute="selective"), ROPE | {"tying": "head"}),
        ("encoder_only", Layout(tp=2, microbatches=2), POST_NORM),
    ],
    ids=["relative", "tied", "rope", "post-norm"],
)
def test_sharded_matrices_equal_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], two_ranks: Ranks
) -> None:
    parity = two_ranks.run(proved, engine_case("deepspeed", architecture, layout, changes=changes))[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize(
    ("architecture", "layout", "changes"),
    [
        ("encoder_decoder", Layout(tp=4), {**RELATIVE, "tying": "all"}),
        ("decoder_only", Layout(tp=2, dp=2, zero=1, microbatches=2), ONE_BLOCK),
        ("decoder_only", Layout(tp=2, dp=2, zero=3), ONE_BLOCK),
    ],
    ids=["four", "zero1", "zero3"],
)
def test_four_parts_and_zero_beside_parts_equal_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], four_ranks: Ranks
) -> None:
    case = engine_case("deepspeed", architecture, layout, changes={**changes, "num_kv_heads": 4})
    parity = four_ranks.run(proved, case)[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


def test_a_block_sums_what_its_rows_give_and_what_its_columns_took(two_ranks: Ranks) -> None:
    """Three encoder blocks, two decoder blocks; the memory's gradient is summed once a block."""
    case = engine_case("deepspeed", "encoder_decoder", Layout(tp=2), source_length=8, target_length=6)
    source, target = (case.num_sequences * length * case.config.width * 8 for length in (8, 6))
    forward = [source] * 2 * 3 + [target] * 3 * 2
    backward = [source] * (2 * 3 + 2) + [target] * 3 * 2
    for rank, (sent, num_parameters) in enumerate(two_ranks.run(sums_and_parameters, case)):
        assert sent[: len(forward)] == forward, rank
        assert sorted(sent[len(forward) :]) == sorted(backward), rank
        whole, in_blocks = parameters(case.config)
        assert num_parameters == whole - in_blocks // 2, rank


def sums_and_parameters(worker: Worker, case: Case) -> tuple[list[int], int]:
    """Payload bytes of the sums of hidden states in a step, in order, and what the rank holds."""
    engine = engine_of(worker, case)
    share = deal(case_batch(case, seed=0), case.layout, 0)
    with Recorder() as recorder:
        engine.step(share)
    assert recorder.first_unknown() is None
    least = case.num_sequences * case.config.width * 8
    sent = [event for event in recorder.events if event.group_size == 2 and event.payload_bytes >= least]
    assert {event.operation for event in sent} == {"all_reduce"}
    return [event.payload_bytes for event in sent], engine.num_parameters


def parameters(config: ModelConfig) -> tuple[int, int]:
    """Of a model, and those of them that AutoTP shards."""
    with torch.device("meta"):
        model = build(config)
    names = ("qkv", "query", "kv", "up", "output.weight", "down.weight")
    sharded = (p.numel() for name, p in model.named_parameters() if any(f".{part}" in name for part in names))
    return sum(p.numel() for p in model.parameters()), sum(sharded)


def test_what_is_not_contiguous_is_not_summed(two_ranks: Ranks) -> None:
    """AutoTP sums a copy of it, and goes on with what it had; that of these models is contiguous, being a product."""
    case = engine_case("deepspeed", "decoder_only", Layout(tp=2))
    assert two_ranks.run(sums_of_ones, case) == [(2.0, 1.0, 2.0, 1.0)] * 2


def sums_of_ones(worker: Worker, case: Case) -> tuple[float, ...]:
    """Of a column-parallel gradient and a row-parallel result, contiguous and transposed."""
    from deepspeed.module_inject.layers import ColumnParallel, RowParallel  # noqa: PLC0415 - on ranks only

    comm = Comm.create(plan=plan(case.config, case.layout), rank=worker.rank, groups=worker.groups, device=CPU)
    group, told = comm.group("tp"), []
    for transposed in (False, True):
        ones = torch.ones(4, 3).t() if transposed else torch.ones(3, 4)
        hidden = torch.zeros(3, 4, requires_grad=True)
        ColumnParallel.apply(group, hidden).backward(ones)
        assert hidden.grad is not None
        told.append(hidden.grad[0, 0].item())
    for transposed in (False, True):
        ones = torch.ones(4, 3).t() if transposed else torch.ones(3, 4)
        told.append(RowParallel.apply(group, ones, False)[0, 0].item())
    return tuple(told)


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (
            Layout(tp=2, sp=True),
            "deepspeed's AutoTP keeps whole sequences: sp over tp = 2; use sp = false",
        ),
        (
            Layout(tp=2, pp=2),
            "deepspeed's AutoTP has no ranks for pp: tp = 2, pp = 2; use pp = 1",
        ),
        (
            Layout(tp=2, cp=2),
            "deepspeed's AutoTP has no ranks for cp: tp = 2, cp = 2; use cp = 1",
        ),
        (
            Layout(tp=4),
            "deepspeed's AutoTP gives no KV head to two ranks: 2 KV heads over tp = 4; try tp = 1, 2",
        ),
    ],
)
def test_what_autotp_cannot_do_is_told(layout: Layout, line: str) -> None:
    assert unsupported(EngineChoice("deepspeed"), small_config("encoder_decoder"), layout) == line
