"""Does what DeepSpeed partitions equal one process, are its traps avoided, and is what it cannot do told before?"""

import importlib.util
import os
import tempfile
from unittest import mock

import pytest
import torch

from launch.case import Case
from launch.parity import case_batch, relative_error
from launch.reference import reference
from models.architectures import build
from models.config import Architecture
from parallel.comm import Comm
from parallel.engines.choice import PARTITIONS, EngineChoice
from parallel.engines.deepspeed_config import ds_config
from parallel.engines.engine import unsupported
from parallel.engines.listed_layers import Current, Parts
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.sequence import deal
from tests.engine_steps import CPU, POST_NORM, RELATIVE, TIED, engine_case, engine_of, proved, trained, tying
from tests.rank import Worker
from tests.small_models import ARCHITECTURES, small_config, small_model
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed: pip install 'twinshard[engines]'"
)

CASES = [
    (Layout(dp=2, microbatches=3), RELATIVE),
    (Layout(dp=2, zero=1, microbatches=2), TIED),
    (Layout(dp=2, zero=2, microbatches=3), POST_NORM),
    (Layout(dp=2, zero=3), TIED),
    (Layout(pp=2, microbatches=2), RELATIVE),
    (Layout(pp=2, microbatches=4), TIED),
    (Layout(pp=2, microbatches=1, cut=(1,), recompute="full"), POST_NORM),
]
"""Ten sequences in 3 and in 4 microbatches leave a ragged last one."""


@pytest.mark.parametrize(("layout", "changes"), CASES, ids=[layout.label.replace(" ", "-") for layout, _ in CASES])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layout_equals_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], two_ranks: Ranks
) -> None:
    case = engine_case("deepspeed", architecture, layout, changes=tying(architecture, changes))
    parity = two_ranks.run(proved, case)[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize("cut", [(2,), (4,)])
def test_any_cut_equals_one_process(cut: tuple[int, ...], two_ranks: Ranks) -> None:
    """Before the memory, at it, and after it; the target's embedding is on the stage of the decoder's first block."""
    case = engine_case("deepspeed", "encoder_decoder", Layout(pp=2, cut=cut), changes=tying("encoder_decoder", TIED))
    assert two_ranks.run(proved, case)[0].failures == ()


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=4, microbatches=3), Layout(pp=2, dp=2, zero=1, microbatches=2)],
    ids=lambda layout: layout.label,
)
def test_stages_in_the_middle_and_zero_beside_stages_equal_one_process(layout: Layout, four_ranks: Ranks) -> None:
    """Fewer microbatches than stages are fine."""
    case = engine_case("deepspeed", "encoder_decoder", layout, changes=tying("encoder_decoder", TIED))
    assert four_ranks.run(proved, case)[0].failures == ()


def test_engines_of_all_grids_take_turns_in_one_process(two_ranks: Ranks) -> None:
    """DeepSpeed keeps the groups of the engine that was made last in globals."""
    plain = Layout(microbatches=2)
    layouts = tuple(plain.replace(**{axis: 2}) for axis in ("pp", "dp", "cp", "tp"))
    for of_pipeline, *others in two_ranks.run(losses_in_turn, layouts):
        for losses_of in others:
            assert losses_of == pytest.approx(of_pipeline, rel=EXACT_RTOL)


def losses_in_turn(worker: Worker, layouts: tuple[Layout, ...]) -> list[list[float]]:
    """Of three steps of engines of several layouts, which compute the same."""
    cases = [engine_case("deepspeed", "encoder_decoder", layout) for layout in layouts]
    engines = [engine_of(worker, case, learning_rate=0.1) for case in cases]
    shares = [
        deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp)
        for case, engine in zip(cases, engines, strict=True)
    ]
    told: list[list[float]] = [[] for _ in cases]
    for _ in range(3):
        for engine, share, losses_of in zip(engines, shares, told, strict=True):
            losses_of.append(engine.step(share).loss)
    return told


# ---- traps --------------------------------------------------------------------------------------------------------


def test_gradients_are_not_clipped_as_they_are_by_default(two_ranks: Ranks) -> None:
    case = engine_case("deepspeed", "encoder_decoder", Layout(dp=2), changes=RELATIVE)
    parity = two_ranks.run(proved_with_default_clipping, case)[0]
    assert parity > 0.1


def proved_with_default_clipping(worker: Worker, case: Case) -> float:
    """The error of the gradients where the configuration does not mention clipping."""
    config = ds_config(case.layout, optimizer="sgd", learning_rate=1.0)
    del config["gradient_clipping"]
    with mock.patch("parallel.engines.deepspeed.ds_config", return_value=config):
        return proved(worker, case).weight.error


def test_a_batch_of_another_shape_gets_other_buffers(two_ranks: Ranks) -> None:
    """DeepSpeed sizes a stage's receive buffers by the first batch, and gloo accepts what is shorter in silence."""
    layout = Layout(pp=2, microbatches=2)
    for source_length, target_length in ((4, 3), (11, 9)):
        case = engine_case("deepspeed", "encoder_decoder", layout, changes=RELATIVE)
        other = engine_case(
            "deepspeed",
            "encoder_decoder",
            layout,
            changes=RELATIVE,
            source_length=source_length,
            target_length=target_length,
        )
        assert two_ranks.run(error_after_another_shape, case, other)[0] <= EXACT_RTOL


def error_after_another_shape(worker: Worker, case: Case, other: Case) -> float:
    """Worst relative error of the gradients of a step that follows one on a batch of another shape."""
    engine = engine_of(worker, case)
    engine.step(case_batch(case, seed=0), update=False)
    engine.step(case_batch(other, seed=0), update=False)
    gathered = engine.gather("gradient")
    if gathered is None:
        return 0.0
    expected = reference(case.config, case_batch(other, seed=0), seed=0, learning_rate=1.0).gradients
    return max(relative_error(gathered.tensors[name], tensor) for name, tensor in expected.items())


def test_the_loss_that_deepspeed_tells_other_stages_is_rounded_and_ours_is_not(two_ranks: Ranks) -> None:
    case = engine_case("deepspeed", "decoder_only", Layout(pp=2, microbatches=2))
    expected = reference(case.config, case_batch(case, seed=0), seed=0, learning_rate=1.0).loss
    (told, ours), (told_last, ours_last) = two_ranks.run(losses, case)
    assert [ours, ours_last, told_last] == pytest.approx([expected] * 3, rel=EXACT_RTOL)
    assert EXACT_RTOL < abs(told - expected) / expected < 1e-6


def losses(worker: Worker, case: Case) -> tuple[float, float]:
    """What DeepSpeed and what the engine tell."""
    engine = engine_of(worker, case)
    facts = engine.step(case_batch(case, seed=0))
    return float(engine._engine.agg_train_loss), facts.loss  # type: ignore[attr-defined]


@pytest.mark.parametrize("changes", [RELATIVE, TIED, POST_NORM], ids=["relative", "tied", "post-norm"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_layers_chained_are_the_model_and_what_they_pass_on_has_a_gradient(
    architecture: Architecture, changes: dict[str, object]
) -> None:
    """Wherever DeepSpeed cuts: a floating tensor without a gradient that crosses a stage ends its backward."""
    from parallel.engines.deepspeed_pipeline import layer_specs  # noqa: PLC0415 - needs DeepSpeed

    case = engine_case("deepspeed", architecture, Layout(pp=2), changes=tying(architecture, changes))
    with torch.device("meta"):
        model = build(case.config)
    current = Current()
    current.batches, current.index = [case_batch(case, seed=0)], 0
    parts = Parts(model, plan(case.config, case.layout), seed=1, dtype=torch.float64, device=CPU)
    states: torch.Tensor | tuple[torch.Tensor, ...] = torch.tensor([0])
    for spec in layer_specs(parts, current):
        layer = spec.build()
        states = spec.forward_fn(layer, states) if getattr(spec, "forward_fn", None) else layer(states)
        passed = states if isinstance(states, tuple) else (states,)
        assert all(tensor.is_floating_point() and tensor.requires_grad for tensor in passed)
    expected = small_model(case.config).train()(current.batch, {})["logits"]
    assert isinstance(states, torch.Tensor)
    assert torch.equal(states, expected)


def test_deepspeed_writes_nothing_compiles_nothing_and_replaces_nothing(two_ranks: Ranks) -> None:
    for layout in (Layout(dp=2, zero=3), Layout(pp=2, microbatches=2), Layout(cp=2), Layout(tp=2)):
        assert two_ranks.run(noise, engine_case("deepspeed", "encoder_decoder", layout)) == [("", False, True)] * 2


def noise(worker: Worker, case: Case) -> tuple[str, bool, bool]:
    """What a step writes, whether an operator of DeepSpeed's own is used, and that torch keeps its product."""
    saved = [os.dup(stream) for stream in (1, 2)]
    with tempfile.TemporaryFile("w+") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        try:
            engine = engine_of(worker, case)
            engine.step(deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp))
        finally:
            for stream, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, stream)
        file.seek(0)
        from deepspeed.comm import comm  # noqa: PLC0415 - on ranks only

        is_own = torch.nn.functional.linear is torch._C._nn.linear
        return file.read(), comm.cdb.shm_comm_op is not None, is_own


# ---- what a rank holds --------------------------------------------------------------------------------------------


def test_what_zero_shards_is_halved_and_learns_the_same(two_ranks: Ranks) -> None:
    held = {
        zero: two_ranks.run(
            trained, engine_case("deepspeed", "encoder_decoder", Layout(dp=2, zero=zero)), torch.float32, 3
        )
        for zero in (0, 1, 2)
    }
    whole = held[0][0]
    assert whole.losses[0] > whole.losses[2]
    for zero in (1, 2):
        assert all(rank.losses == pytest.approx(whole.losses, rel=1e-4) for rank in held[zero])
        assert sum(rank.gradients for rank in held[zero]) == whole.gradients
        # Two moments of 4 bytes, and a master although the weights are float32 as well: 12 bytes instead of 8.
        assert max(rank.optimizer for rank in held[zero]) == pytest.approx(0.75 * whole.optimizer, rel=0.01)
        assert {rank.parameters for rank in held[zero]} == {whole.parameters}


@pytest.mark.parametrize(
    ("architecture", "method", "blocks"),
    [
        ("encoder_decoder", "type:^Start", [1, 4]),
        ("encoder_decoder", "type:BlockLayer", [3, 2]),
        ("encoder_decoder", "uniform", [3, 2]),
        ("encoder_only", "uniform", [1, 2]),
        ("encoder_decoder", "parameters", [0, 5]),
    ],
)
def test_stages_are_those_of_deepspeeds_method(
    architecture: Architecture, method: str, blocks: list[int], two_ranks: Ranks
) -> None:
    """The plan's cut is before block 1. The source embedding is larger than all the rest."""
    large = {"source_vocabulary": 2000} if architecture == "encoder_decoder" else {}
    case = engine_case("deepspeed", architecture, Layout(pp=2, cut=(1,)), changes=large)
    assert two_ranks.run(blocks_of_stage, case, method) == blocks


@pytest.mark.parametrize("method", PARTITIONS["deepspeed"])
def test_stages_of_a_method_of_its_own_equal_one_process(method: str, two_ranks: Ranks) -> None:
    layout = Layout(pp=2, microbatches=3, cut=(1,))
    case = engine_case(f"deepspeed:{method}", "encoder_decoder", layout, changes=tying("encoder_decoder", TIED))
    assert two_ranks.run(proved, case)[0].failures == ()


def blocks_of_stage(worker: Worker, case: Case, method: str) -> int:
    """Number of blocks that DeepSpeed gives this rank."""
    from parallel.engines.deepspeed import DeepspeedEngine  # noqa: PLC0415 - on ranks only

    partitioning = plan(case.config, case.layout)
    comm = Comm.create(plan=partitioning, rank=worker.rank, groups=worker.groups, device=CPU)
    settings = EngineSettings(seed=0, dtype=torch.float32, device=CPU)
    engine = DeepspeedEngine(plan=partitioning, comm=comm, settings=settings, partition=method)
    return len(engine.held_blocks)


# ---- before anything starts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (Layout(), "deepspeed needs a process group: a layout of one rank is plain PyTorch; use 2 ranks or more"),
        (
            Layout(pp=2, dp=2, zero=2),
            "deepspeed's PipelineModule refuses ZeRO 2 and 3: zero = 2, pp = 2; use zero <= 1",
        ),
        (
            Layout(pp=2, schedule="gpipe"),
            "deepspeed's pipeline runs 1F1B only: schedule = 'gpipe'; use schedule = '1f1b'",
        ),
        (
            Layout(pp=2, transport="direct"),
            "deepspeed's stages send to their neighbours only: transport = 'direct'; use transport = 'relay'",
        ),
    ],
)
def test_what_deepspeed_cannot_do_is_told(layout: Layout, line: str) -> None:
    assert unsupported(EngineChoice("deepspeed"), small_config("encoder_decoder"), layout) == line


def test_an_engine_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    line = "the deepspeed engine is not installed: pip install 'twinshard[engines]'"
    assert unsupported(EngineChoice("deepspeed"), small_config("decoder_only"), Layout(dp=2)) == line
