"""Do the stages that fairscale's Pipe drives from one process equal one process, and who holds and tells what?"""

import importlib.util
import threading
from typing import Any
from unittest import mock

import pytest
import torch

from launch.case import Case
from launch.engine_run import EngineRun
from launch.env import World
from launch.facts import report
from launch.parity import case_batch
from models.config import Architecture, ModelConfig
from parallel.comm import Comm
from parallel.engines.choice import EngineChoice, EngineName
from parallel.engines.engine import build
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.recorder import Recorder
from results.schema import RankFacts
from tests.engine_steps import CPU, POST_NORM, RELATIVE, TIED, engine_case, engine_of, proved, trained, tying
from tests.rank import Worker
from tests.small_cells import cells
from tests.small_models import ARCHITECTURES, SOURCE_LENGTH, TARGET_LENGTH, small_batch, small_config
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fairscale") is None, reason="needs fairscale: pip install 'twinshard[engines]'"
)

PIPE = Layout(pp=2, microbatches=4, schedule="gpipe")
CASES = [
    (PIPE, TIED),
    (PIPE.replace(microbatches=3, cut=(1,), recompute="full", attention="materialised"), POST_NORM),
    (PIPE.replace(microbatches=1, recompute="selective"), RELATIVE),
]
"""Ten sequences in 3 and in 4 microbatches leave a ragged last one."""


@pytest.mark.parametrize(("layout", "changes"), CASES, ids=[layout.label.replace(" ", "-") for layout, _ in CASES])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layout_equals_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], two_ranks: Ranks
) -> None:
    case = engine_case("fairscale", architecture, layout, changes=tying(architecture, changes))
    parity = two_ranks.run(proved, case)[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize("cut", [(2,), (3,), (4,)])
def test_any_cut_equals_one_process(cut: tuple[int, ...], two_ranks: Ranks) -> None:
    """Before the memory, at it, and after it; recomputed with a memory that crosses and a relative bias that may."""
    layout = PIPE.replace(cut=cut, recompute="full")
    case = engine_case("fairscale", "encoder_decoder", layout, changes=RELATIVE)
    assert two_ranks.run(proved, case)[0].failures == ()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_in_the_middle_and_fewer_microbatches_than_stages_equal_one_process(
    architecture: Architecture, four_ranks: Ranks
) -> None:
    depth = {"encoder_only": {"num_encoder_blocks": 4}, "decoder_only": {"num_decoder_blocks": 4}}
    changes = tying(architecture, TIED) | depth.get(architecture, {})
    case = engine_case("fairscale", architecture, PIPE.replace(pp=4, microbatches=3), changes=changes)
    assert four_ranks.run(proved, case)[0].failures == ()


def test_stages_that_fairscale_balances_by_time_equal_one_process(two_ranks: Ranks) -> None:
    """The tool runs copies of layers that share rows: neither they nor their gradients may stay."""
    case = engine_case("fairscale:time", "encoder_decoder", PIPE, changes=tying("encoder_decoder", TIED))
    assert two_ranks.run(proved, case)[0].failures == ()


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_masks_of_dropout_are_those_of_every_engine(recompute: Any, two_ranks: Ranks) -> None:
    """Each layer has a key of its own; a second step draws other masks, a recomputed stage the same ones."""
    config = small_config("encoder_decoder", dropout=0.3, ffn_dropout=0.2)
    layout = PIPE.replace(microbatches=2, recompute=recompute)
    native, pipe = (two_ranks.run(losses, config, layout, name)[0] for name in ("native", "fairscale"))
    assert native[0] != native[1]
    assert pipe == pytest.approx(native, rel=EXACT_RTOL)


def losses(worker: Worker, config: ModelConfig, layout: Layout, name: EngineName) -> list[float]:
    """Loss and gradient norm of three steps."""
    partitioning = plan(config, layout)
    comm = Comm.create(plan=partitioning, rank=worker.rank, groups=worker.groups, device=CPU)
    settings = EngineSettings(seed=3, dtype=torch.float64, device=CPU, learning_rate=0.1)
    engine = build(EngineChoice(name), plan=partitioning, comm=comm, settings=settings)
    steps = [engine.step(small_batch(config, num_sequences=4)) for _ in range(3)]
    return [number for facts in steps for number in (facts.loss, facts.gradient_norm)]


def test_rank_0_holds_the_model_and_learns(two_ranks: Ranks) -> None:
    case = engine_case("fairscale", "encoder_decoder", PIPE, changes=tying("encoder_decoder", TIED))
    alone = engine_case("fairscale", "encoder_decoder", Layout(dp=2), changes=tying("encoder_decoder", TIED))
    first, second = two_ranks.run(trained, case, torch.float32, 3)
    whole = two_ranks.run(trained, alone, torch.float32, 3)[0]
    assert (first.parameters, first.gradients, first.optimizer) == (whole.parameters, whole.gradients, whole.optimizer)
    assert (second.parameters, second.gradients, second.optimizer) == (0, 0, 0)
    assert first.losses == second.losses == pytest.approx(whole.losses, rel=1e-5)
    assert first.losses[2] < first.losses[0]


def test_nothing_is_sent_but_what_a_step_tells(two_ranks: Ranks) -> None:
    for seen in two_ranks.run(sent, engine_case("fairscale", "encoder_decoder", PIPE)):
        assert seen == [("all_reduce", 2, 2 * 8)]


def sent(worker: Worker, case: Case) -> list[tuple[str, int, int]]:
    """Operation, ranks and payload bytes of all that a step sends."""
    engine = engine_of(worker, case)
    with Recorder() as recorder:
        engine.step(case_batch(case, seed=0))
    return [(event.operation, event.group_size, event.payload_bytes) for event in recorder.events]


def test_a_record_tells_that_one_rank_computes_on_threads_of_its_own(two_ranks: Ranks) -> None:
    """The thread that calls is busy with backwards alone: no busy time is told, and no parts of a step."""
    first, second = two_ranks.run(facts_of_a_cell)
    assert (first.pp, second.pp) == (0, 1)
    assert first.parameters > second.parameters == 0
    assert (first.valid_tokens, first.padded_tokens) == (4 * (SOURCE_LENGTH + TARGET_LENGTH), 0)
    assert (second.valid_tokens, second.padded_tokens) == (0, 0)
    for rank in (first, second):
        assert len(rank.step_seconds) == 1
        assert (rank.busy_seconds, rank.wait_seconds) == ([], [])


def facts_of_a_cell(worker: Worker) -> RankFacts:
    """What this rank reports of one timed step."""
    layouts = [{"pp": 2, "microbatches": 2, "schedule": "gpipe"}]
    cell = cells(engine="fairscale", layouts=layouts)[0]
    here = World(rank=worker.rank, world_size=2, local_rank=worker.rank, local_world_size=2, backend="gloo", device=CPU)
    batch = small_batch(cell.model, num_sequences=4, ragged=False)
    run = EngineRun(cell, batch, here, worker.groups)
    counted = run.count()
    assert run.time_parts() is None
    return report(run, counted, [run.time_step()], [], []).facts


@pytest.mark.parametrize(
    ("num_gpus", "changes", "line"),
    [
        (1, {}, "fairscale's Pipe drives a GPU a stage from one process: pp = 2, and 1 can be seen"),
        (
            2,
            TIED | {"tying": "head"},
            "fairscale's Pipe ties no parameters over GPUs: decoder.embedding.token.weight, head.weight",
        ),
        (2, TIED, None),
    ],
)
def test_gpus_are_as_many_as_stages_and_share_no_parameter(
    num_gpus: int, changes: dict[str, object], line: str | None
) -> None:
    from parallel.engines.fairscale_pipe import no_devices  # noqa: PLC0415 - needs fairscale

    planned = plan(small_config("decoder_only", **changes), PIPE)
    with mock.patch.object(torch.cuda, "device_count", return_value=num_gpus):
        assert no_devices(planned, torch.device("cuda", 0)) == line
        assert no_devices(planned, CPU) is None


def test_threads_end_with_the_engine(two_ranks: Ranks) -> None:
    started = two_ranks.run(threads, engine_case("fairscale", "decoder_only", PIPE))
    assert started == [(1, 0), (0, 0)]


def threads(worker: Worker, case: Case) -> tuple[int, int]:
    """Threads more than before: while an engine is there, and afterwards."""
    before = set(threading.enumerate())
    engine = engine_of(worker, case)
    engine.step(case_batch(case, seed=0))
    started = set(threading.enumerate()) - before
    del engine
    for thread in started:
        # It is told to end; how soon it does is the machine's affair.
        thread.join(timeout=30)
    return len(started), sum(thread.is_alive() for thread in started)
