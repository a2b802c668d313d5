"""Do compiled blocks of the torch engine compute what one process does, inside of what shards and sends?

As in `tests/test_compiled.py`, backends stop at the graphs (`aot_eager`).
"""

import dataclasses
from pathlib import Path
from unittest import mock

import pytest

from launch.case import Case
from launch.data import Batches
from launch.env import world
from launch.measure import run_of
from launch.parity import Parity, case_batch, check_parity
from parallel import compiled
from parallel.comm import Groups
from parallel.compiled import compilations
from parallel.engines.choice import EngineChoice
from parallel.engines.engine import unsupported
from parallel.layouts import Layout
from parallel.sequence import deal
from tests.engine_steps import CPU, engine_case, engine_of
from tests.rank import Worker
from tests.small_cells import SIZES, cells
from tests.small_models import small_batch, small_config
from tests.spawn import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks at it
RTOL = 1e-12
"""Of float64: compiled or not, only the order of sums differs."""
GATED = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "num_decoder_blocks": 2}

LAYOUTS = [
    Layout(dp=2),
    Layout(dp=2, zero=3, microbatches=2, recompute="full"),
    Layout(pp=2, microbatches=3),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.label.replace(" ", "-") for layout in LAYOUTS])
def test_compiled_blocks_equal_one_process_and_are_compiled_in_the_first_step(layout: Layout, two_ranks: Ranks) -> None:
    """DistributedDataParallel, FSDP2 around what is computed again, and stages; `verify --compile` proves others."""
    case = engine_case("torch", "decoder_only", layout, changes=GATED)
    case = dataclasses.replace(case, engine=EngineChoice("torch", compiled=True))
    for parity, counts in two_ranks.run(proved, case):
        assert parity.failures == ()
        assert parity.worst_error <= RTOL
        assert counts[0] > 0
        assert counts[1:] == [0, 0]


def test_what_cannot_be_compiled_is_refused() -> None:
    choice, config = EngineChoice("torch", compiled=True), small_config("decoder_only")
    assert unsupported(choice, config, Layout(tp=2, dp=2)) == (
        "gradients leave a compiled block as plain tensors, and DTensor wants its own: "
        "tp = 2; use tp = 1, or engine = 'native'"
    )
    told = unsupported(choice, config, Layout(pp=2, microbatches=2, schedule="zb_h1"))
    assert told is not None
    assert told.startswith("compiled blocks do not leave weight gradients for later")


def proved(worker: Worker, case: Case) -> tuple[Parity, list[int]]:
    """The proof, and how much each of three steps of another engine compiles."""
    with mock.patch.object(compiled, "BACKEND", "aot_eager"):
        parity = check_parity(case, groups=worker.groups, rank=worker.rank, device=CPU)
        engine = engine_of(worker, case)
        share = deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp)
        counts = []
        for _ in range(3):
            with compilations() as told:
                engine.step(share)
            counts.append(len(told))
    return parity, counts


def test_a_run_counts_blocks_as_written_and_times_no_compilation(tmp_path: Path) -> None:
    single = {"architecture": "decoder_only", **SIZES, "num_decoder_blocks": 1}
    (cell,) = cells(compile=True, engine="torch", models={"single": single})
    with world("gloo") as here, mock.patch.object(compiled, "BACKEND", "aot_eager"):
        run = run_of(cell, Batches(tmp_path).batch(cell), here, Groups(timeout_seconds=1.0))
        ready = run.startup_seconds
        assert run.count().difference is None
        assert run.startup_seconds > ready
        assert run.time_step().wall > 0.0
        run.share = small_batch(cell.model, num_sequences=4)
        with pytest.raises(RuntimeError, match=r"^blocks were compiled again in a timed step"):
            run.time_step()
