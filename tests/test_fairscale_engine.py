"""Does what fairscale partitions equal one process, and is what it cannot do told before?"""

import importlib.util

import pytest
import torch

from launch.parity import case_batch
from models.batch import Batch
from models.config import Architecture
from parallel.engines.choice import EngineChoice
from parallel.engines.engine import Engine, unsupported
from parallel.layouts import Layout
from parallel.sequence import deal
from tests.engine_steps import POST_NORM, RELATIVE, engine_case, engine_of, proved, trained
from tests.rank import Worker
from tests.small_models import ARCHITECTURES, small_config
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fairscale") is None, reason="needs fairscale: pip install 'twinshard[engines]'"
)

TIED = {"positions": "rope", "activation": "swiglu", "head_scale": True, "embedding_scale": True}


CASES = [
    (Layout(tp=2, microbatches=2), RELATIVE),
    (Layout(tp=2, microbatches=3), TIED),
    (Layout(tp=2, recompute="full", attention="materialised"), POST_NORM),
    (Layout(dp=2, microbatches=3), RELATIVE),
    (Layout(dp=2, zero=1, microbatches=2), TIED),
    (Layout(dp=2, zero=2, microbatches=3), TIED),
]


@pytest.mark.parametrize(("layout", "changes"), CASES, ids=[layout.label.replace(" ", "-") for layout, _ in CASES])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_layout_equals_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], two_ranks: Ranks
) -> None:
    tying = {"tying": "all" if architecture == "encoder_decoder" else "head"} if changes is TIED else {}
    parity = two_ranks.run(proved, engine_case("fairscale", architecture, layout, changes=changes | tying))[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


def test_both_axes_together_equal_one_process(four_ranks: Ranks) -> None:
    case = engine_case("fairscale", "encoder_decoder", Layout(tp=2, dp=2, zero=2, microbatches=2), changes=RELATIVE)
    assert four_ranks.run(proved, case)[0].failures == ()


def test_engines_of_two_topologies_take_turns_in_one_process(two_ranks: Ranks) -> None:
    """The groups of its layers are globals of a module."""
    for alone, in_turn in two_ranks.run(losses_alone_and_in_turn):
        assert alone == in_turn


def losses_alone_and_in_turn(worker: Worker) -> tuple[list[float], list[float]]:
    cases = [engine_case("fairscale", "encoder_decoder", layout) for layout in (Layout(tp=2), Layout(dp=2, zero=2))]

    def engines() -> list[tuple[Engine, Batch]]:
        made = []
        for case in cases:
            engine = engine_of(worker, case)
            made.append((engine, deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp)))
        return made

    alone = [engine.step(share).loss for engine, share in engines() for _ in range(2)]
    (first, its), (second, others) = engines()
    in_turn = [(first.step(its).loss, second.step(others).loss) for _ in range(2)]
    return alone, [*(one for one, _ in in_turn), *(other for _, other in in_turn)]


def test_sharded_states_are_halves_and_learn_what_whole_ones_learn(two_ranks: Ranks) -> None:
    held = {
        zero: two_ranks.run(
            trained, engine_case("fairscale", "encoder_decoder", Layout(dp=2, zero=zero)), torch.float32, 3
        )
        for zero in (0, 1, 2)
    }
    whole = held[0][0]
    assert whole.losses[0] > whole.losses[2]
    for zero in (1, 2):
        assert all(rank.losses == pytest.approx(whole.losses, rel=1e-5) for rank in held[zero])
        states = [rank.optimizer for rank in held[zero]]
        assert max(states) < 0.55 * whole.optimizer
        # AdamW counts the steps of each parameter on its own: all in all nothing is lost and nothing is kept twice.
        assert sum(states) == whole.optimizer
        assert {rank.parameters for rank in held[zero]} == {whole.parameters}
    assert {rank.gradients for rank in held[0]} == {whole.parameters}


def test_half_precision_learns(two_ranks: Ranks) -> None:
    case = engine_case("fairscale", "encoder_decoder", Layout(tp=2), changes=RELATIVE)
    losses = two_ranks.run(trained, case, torch.bfloat16, 3)[0].losses
    assert losses[2] < losses[0]


@pytest.mark.parametrize(
    ("layout", "changes", "line"),
    [
        (
            Layout(pp=2),
            {},
            (
                "fairscale's Pipe runs every forward before the first backward: schedule = '1f1b'; "
                "use schedule = 'gpipe'"
            ),
        ),
        (
            Layout(pp=2, tp=2, schedule="gpipe"),
            {},
            (
                "fairscale's Pipe drives all stages from one process, which shares them with no other: pp = 2, tp = 2, "
                "dp = 1; use tp = 1 and dp = 1"
            ),
        ),
        (
            Layout(pp=2, schedule="gpipe", chunks=2, placement="interleaved"),
            {},
            "fairscale's Pipe has one stage a device: chunks = 2; use chunks = 1",
        ),
        (
            Layout(pp=2, schedule="gpipe", transport="direct"),
            {},
            "fairscale's stages hand on to their neighbours only: transport = 'direct'; use transport = 'relay'",
        ),
        (Layout(cp=2), {}, "fairscale does not shard a sequence over ranks: cp = 2; use cp = 1"),
        (
            Layout(tp=2, sp=True),
            {},
            "fairscale's tensor-parallel layers keep whole sequences: sp over tp = 2; use sp = false",
        ),
        (Layout(tp=4), {}, "fairscale cuts evenly: tp = 4 must divide 2 KV heads"),
        (Layout(tp=2), {"vocabulary": 29}, "fairscale cuts evenly: tp = 2 must divide 29 rows of the vocabulary"),
    ],
)
def test_what_fairscale_cannot_do_is_told(layout: Layout, changes: dict[str, object], line: str) -> None:
    assert (
        unsupported(EngineChoice("fairscale"), small_config("decoder_only", **({"vocabulary": 32} | changes)), layout)
        == line
    )


def test_an_engine_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    line = "the fairscale engine is not installed: pip install 'twinshard[engines]'"
    assert unsupported(EngineChoice("fairscale"), small_config("decoder_only"), Layout()) == line
