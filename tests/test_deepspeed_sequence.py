"""Does Ulysses attention under DeepSpeed equal one process, is the sequence sharded, and are its traps avoided?"""

import importlib.util
from unittest import mock

import pytest

from launch.case import Case
from launch.parity import LEARNING_RATE, Parity, case_batch
from models.config import Architecture
from parallel.engines.choice import EngineChoice
from parallel.engines.deepspeed_config import ds_config
from parallel.engines.engine import unsupported
from parallel.layouts import Layout
from parallel.recorder import Recorder
from parallel.sequence import deal
from tests.engine_steps import RELATIVE, engine_case, engine_of, proved
from tests.rank import Worker
from tests.small_models import small_config
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install 'twinshard[engines]'"
)

ROPE = {"positions": "rope", "activation": "swiglu", "head_scale": True, "embedding_scale": True, "norm": "rmsnorm"}
LEARNED = {
    "positions": "learned",
    "position_offset": 2,
    "max_length": 7,
    "norm_position": "post",
    "num_token_types": 2,
    "embedding_norm": True,
    "num_kv_heads": 4,
}
"""Seven positions are padded to eight, one more than the table has."""
UNEVEN = {"positions": "relative", "num_heads": 6, "num_kv_heads": 3, "width": 24}
"""Four query heads on one rank, two on the other."""
ONE_BLOCK = {**ROPE, "num_decoder_blocks": 1}


@pytest.mark.parametrize(
    ("architecture", "layout", "changes"),
    [
        ("encoder_decoder", Layout(cp=2, microbatches=3), RELATIVE),
        ("encoder_decoder", Layout(cp=2, recompute="full", attention="materialised"), LEARNED),
        ("encoder_decoder", Layout(cp=2), UNEVEN),
        ("decoder_only", Layout(cp=2, microbatches=2, recompute="selective"), ROPE),
        ("encoder_only", Layout(cp=2, microbatches=2), LEARNED),
    ],
    ids=["relative", "learned", "uneven", "rope", "encoder-only"],
)
def test_a_sharded_sequence_equals_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], two_ranks: Ranks
) -> None:
    parity = two_ranks.run(proved, engine_case("deepspeed", architecture, layout, changes=changes))[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize(
    ("architecture", "layout", "changes"),
    [
        ("encoder_decoder", Layout(cp=4), {**RELATIVE, "tying": "all"}),
        ("decoder_only", Layout(cp=2, dp=2, zero=1, microbatches=2), ONE_BLOCK),
        ("decoder_only", Layout(cp=2, dp=2, zero=3), ONE_BLOCK),
    ],
    ids=["four", "zero1", "zero3"],
)
def test_four_shards_and_zero_beside_shards_equal_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], four_ranks: Ranks
) -> None:
    case = engine_case("deepspeed", architecture, layout, changes={**changes, "num_kv_heads": 4})
    parity = four_ranks.run(proved, case)[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


# ---- what is sent -------------------------------------------------------------------------------------------------


def test_a_core_exchanges_its_heads_for_positions_and_back(two_ranks: Ranks) -> None:
    """Three encoder blocks, two decoder blocks with a second attention; nothing is sent again for a recomputed core."""
    layout = Layout(cp=2, recompute="selective")
    case = engine_case("deepspeed", "encoder_decoder", layout, source_length=8, target_length=6)
    element_bytes, head_width, num_heads, num_kv_heads = 8, 4, 4, 2

    def exchanged(length: int, heads: int) -> int:
        return case.num_sequences * length // 2 * heads * head_width * element_bytes

    source, target = exchanged(8, num_heads), exchanged(6, num_heads)
    source_kv, target_kv = exchanged(8, num_kv_heads), exchanged(6, num_kv_heads)
    encoder = [source, source_kv, source_kv, source]
    decoder = [target, target_kv, target_kv, target, target, source_kv, source_kv, target]
    forward = encoder * 3 + decoder * 2
    for sent in two_ranks.run(exchanges, case):
        assert sent[: len(forward)] == forward
        assert sorted(sent[len(forward) :]) == sorted(forward)


def exchanges(worker: Worker, case: Case) -> list[int]:
    """Payload bytes of the all-to-alls of a step, in order."""
    engine = engine_of(worker, case)
    share = deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp)
    with Recorder() as recorder:
        engine.step(share)
    assert recorder.first_unknown() is None
    return [event.payload_bytes for event in recorder.events if event.operation == "all_to_all"]


# ---- traps --------------------------------------------------------------------------------------------------------


def test_zero_3_divides_by_ranks_of_a_sequence_too(four_ranks: Ranks) -> None:
    """Every other ZeRO stage divides by dp alone."""
    case = engine_case("deepspeed", "decoder_only", Layout(cp=2, dp=2, zero=3), changes=ONE_BLOCK)
    assert four_ranks.run(error_if_divided_by_dp, case)[0] == pytest.approx(0.5, rel=1e-6)


def error_if_divided_by_dp(worker: Worker, case: Case) -> float:
    from parallel.engines.deepspeed import DeepspeedEngine  # noqa: PLC0415 - on ranks only

    with mock.patch.object(DeepspeedEngine, "_divisor", case.layout.dp):
        return proved(worker, case).gradient.error


def test_zero_1_reduces_in_single_precision_where_sequences_are_shared(four_ranks: Ranks) -> None:
    """Whatever the dtype; all right for training, and not what a comparison with one process needs."""
    case = engine_case("deepspeed", "decoder_only", Layout(cp=2, dp=2, zero=1), changes=ONE_BLOCK)
    assert EXACT_RTOL < four_ranks.run(error_if_reduced_in_single, case)[0] < 1e-6


def error_if_reduced_in_single(worker: Worker, case: Case) -> float:
    from parallel.engines import deepspeed_double  # noqa: PLC0415 - on ranks only

    with mock.patch.object(deepspeed_double, "_reduce_as_it_is"):
        return proved(worker, case).gradient.error


def test_gradients_are_reduced_over_dp_alone_where_the_configuration_tells_of_sequences(two_ranks: Ranks) -> None:
    """So this engine tells DeepSpeed by an mpu."""
    case = engine_case("deepspeed", "decoder_only", Layout(cp=2), changes=ONE_BLOCK)
    parity = two_ranks.run(proved_by_configuration, case)[0]
    assert parity.loss.error <= EXACT_RTOL
    assert parity.gradient.error > 0.1
    assert parity.replica.error > 0.1


def proved_by_configuration(worker: Worker, case: Case) -> Parity:
    from deepspeed.utils import groups  # noqa: PLC0415 - on ranks only

    from parallel.engines.deepspeed import DeepspeedEngine  # noqa: PLC0415 - on ranks only

    config = ds_config(case.layout, optimizer="sgd", learning_rate=LEARNING_RATE)
    config["data_parallel_size"] = case.layout.dp
    try:
        with (
            mock.patch("parallel.engines.deepspeed.ds_config", return_value=config),
            mock.patch.object(DeepspeedEngine, "_ranks", return_value=(None, None)),
        ):
            return proved(worker, case)
    finally:
        groups.mesh_device = None


def test_dropout_of_shards_differs(two_ranks: Ranks) -> None:
    case = engine_case("deepspeed", "decoder_only", Layout(cp=2))
    first, second = two_ranks.run(mask_seeds, case)
    assert len(first) == len(second) > 0
    assert not set(first) & set(second)


def mask_seeds(worker: Worker, case: Case) -> list[int]:
    """Of every dropout."""
    from models.dropout import Dropout  # noqa: PLC0415 - on ranks only

    engine = engine_of(worker, case)
    modules = engine.model.modules()  # type: ignore[attr-defined]
    return [module.mask_seed() for module in modules if isinstance(module, Dropout)]


# ---- what it cannot do --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (
            Layout(cp=4),
            "deepspeed's Ulysses attention needs a KV head for each rank: 2 KV heads over cp = 4; use cp <= 2",
        ),
        (
            Layout(cp=2, pp=2),
            (
                "deepspeed's pipeline has no ranks that share a sequence: Ulysses attention with cp = 2, pp = 2; "
                "use pp = 1 or cp = 1"
            ),
        ),
    ],
)
def test_what_ulysses_attention_cannot_do_is_told(layout: Layout, line: str) -> None:
    assert unsupported(EngineChoice("deepspeed"), small_config("encoder_decoder"), layout) == line
