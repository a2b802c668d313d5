"""Is a compiled block the block that was written, and is nothing compiled while a clock runs?

Two tests make machine code; the others stop at the graphs (`aot_eager`), which takes a tenth of the time.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from launch.case import Case
from launch.case import case_of as launch_case_of
from launch.data import Batches
from launch.env import World, world
from launch.measure import Run
from launch.parity import Parity, check_parity
from models.config import Architecture
from models.named import named_model
from parallel import compiled
from parallel.comm import Groups
from parallel.compiled import compilations
from parallel.engines.choice import NATIVE, EngineChoice
from parallel.engines.engine import unsupported
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.plans import plan
from tests.engine_steps import engine_case
from tests.one_rank import CPU, rank_of
from tests.rank import Worker
from tests.small_cells import SIZES, cells
from tests.small_models import small_batch, small_config
from tests.spawn import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks at it
RTOL = 1e-12
"""Of float64: compiled or not, only the order of sums differs."""
GATED = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}


def case_of(architecture: Architecture, layout: Layout, **changes: object) -> Case:
    """One block."""
    fewest: dict[str, object] = {f"num_{architecture.removesuffix('_only')}_blocks": 1}
    case = engine_case("native", architecture, layout, changes=fewest | changes)
    return dataclasses.replace(case, engine=EngineChoice(compiled=True))


@pytest.fixture
def graphs_only() -> Iterator[None]:
    with mock.patch.object(compiled, "BACKEND", "aot_eager"):
        yield


def proved(worker: Worker, case: Case) -> Parity:
    with mock.patch.object(compiled, "BACKEND", "aot_eager"):
        return check_parity(case, groups=worker.groups, rank=worker.rank, device=CPU)


def test_compiled_blocks_on_ranks_equal_one_process(two_ranks: Ranks) -> None:
    """Those with products that send in them; `twinshard verify --compile` proves any layout."""
    parity = two_ranks.run(proved, case_of("decoder_only", Layout(tp=2, sp=True), **GATED))[0]
    assert parity.failures == ()
    assert parity.worst_error <= RTOL


def test_machine_code_of_blocks_equals_one_process() -> None:
    # Few kernels: a C++ compiler takes a second for each.
    plain = {"norm": "rmsnorm", "activation": "relu", "qkv_bias": False, "attention_output_bias": False}
    case = case_of("decoder_only", Layout(), **plain, ffn_bias=False, num_kv_heads=4)
    # No vector instructions: to find out which there are takes five compilations.
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        parity = check_parity(case, groups=Groups(timeout_seconds=1.0), rank=0, device=CPU)
    assert parity.failures == ()
    assert parity.worst_error <= RTOL


def test_relative_biases_and_one_sequence_are_compiled() -> None:
    """Both blocks of T5, run twice: torch's search for attention in graphs dies of the last microbatch."""
    config = named_model("tiny-t5").replace(num_encoder_blocks=1, num_decoder_blocks=1)
    case = launch_case_of(config, Layout(microbatches=3, recompute="full"))
    with torch._inductor.config.patch({"cpp.vec_isa_ok": False}):
        parity = check_parity(
            dataclasses.replace(case, engine=EngineChoice(compiled=True)),
            groups=Groups(timeout_seconds=1.0),
            rank=0,
            device=CPU,
        )
    assert parity.failures == ()
    assert parity.worst_error <= RTOL


def engine_of(architecture: Architecture, layout: Layout, *, is_compiled: bool, **changes: object) -> NativeEngine:
    config = small_config(architecture, **changes)
    with rank_of(plan(config, layout), 0) as comm:
        settings = EngineSettings(seed=0, dtype=torch.float64, device=CPU)
        return NativeEngine(plan=plan(config, layout), comm=comm, settings=settings, compiled=is_compiled)


@pytest.mark.usefixtures("graphs_only")
def test_compiled_blocks_drop_out_what_blocks_as_written_do_and_are_compiled_once() -> None:
    """Masks change with every step and microbatch, valid lengths with every batch."""
    layout, dropout = Layout(microbatches=2), {"dropout": 0.2, "attention_dropout": 0.1, "ffn_dropout": 0.1}
    written, made = (
        engine_of("encoder_only", layout, is_compiled=is_compiled, num_encoder_blocks=1, **dropout)
        for is_compiled in (False, True)
    )
    batches = [small_batch(written.plan.config, seed=seed, num_sequences=4) for seed in (2, 3, 4)]
    for step, batch in enumerate(batches):
        expected = written.step(batch)
        with compilations() as told:
            found = made.step(batch)
        assert bool(told) == (step == 0)
        assert found.loss == pytest.approx(expected.loss, rel=RTOL)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=RTOL)


@pytest.mark.usefixtures("graphs_only")
def test_blocks_that_are_alike_are_compiled_once() -> None:
    batch = small_batch(small_config("decoder_only"))
    counts = []
    for num_decoder_blocks in (1, 12):
        engine = engine_of("decoder_only", Layout(), is_compiled=True, num_decoder_blocks=num_decoder_blocks)
        with compilations() as told:
            engine.step(batch)
        counts.append(len(told))
    assert counts[0] == counts[1]


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world("gloo") as alone:
        yield alone


@pytest.mark.usefixtures("graphs_only")
def test_a_timed_step_in_which_something_is_compiled_has_no_time(here: World, tmp_path: Path) -> None:
    single = {"architecture": "decoder_only", "num_decoder_blocks": 1, **SIZES}
    (cell,) = cells(compile=True, models={"single": single})
    run = Run(cell, Batches(tmp_path).batch(cell), here, Groups(timeout_seconds=1.0))
    counted = run.count()
    assert counted.difference is None
    assert run.time_step().wall > 0.0
    run.share = small_batch(cell.model, num_sequences=4)
    with pytest.raises(
        RuntimeError, match=r"^blocks were compiled again in a timed step \(dynamo.*its seconds are none$"
    ):
        run.time_step()


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(pp=2, microbatches=2, schedule="zb_h1"), "compiled blocks do not leave weight gradients for later"),
        (Layout(recompute="selective"), "what a compiled block keeps is the compiler's choice"),
    ],
)
def test_what_cannot_be_compiled_is_refused(layout: Layout, message: str) -> None:
    config = small_config("decoder_only")
    assert unsupported(NATIVE, config, layout) is None
    told = unsupported(EngineChoice(compiled=True), config, layout)
    assert told is not None
    assert told.startswith(message)


def test_an_engine_that_compiles_no_blocks_says_so() -> None:
    pytest.importorskip("fairscale", reason="needs fairscale: pip install 'twinshard[engines]'")
    told = unsupported(EngineChoice("fairscale", compiled=True), small_config("decoder_only"), Layout())
    assert told == "the fairscale engine does not compile blocks: use engine = 'native' or 'torch'"


def test_an_older_torch_compiles_no_blocks() -> None:
    config = small_config("decoder_only")
    with mock.patch.object(torch, "compile", lambda model: model):
        told = unsupported(EngineChoice(compiled=True), config, Layout())
    assert told == f"blocks are compiled by torch 2.13 or later, and this is {torch.__version__}"
