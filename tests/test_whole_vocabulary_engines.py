"""Do engines of others hold a whole vocabulary on every tp rank where it is asked for, and equal one process then?"""

import importlib.util

import pytest

from launch.case import Case
from launch.parity import Parity
from models.config import Architecture
from parallel.layouts import Layout
from parallel.parameters import parameter_counts
from parallel.plans import plan
from parallel.share import shares
from tests.engine_steps import RELATIVE, TIED, engine_case, engine_of, proved, tying
from tests.rank import Worker
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

WHOLE = Layout(tp=2, vocabulary="whole", microbatches=2)
UNEVEN = {**RELATIVE, "tying": "none", "vocabulary": 29}


def skip_without(engine: str) -> None:
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"needs {engine}: pip install 'twinshard[engines]'")


def equals_one_process(parity: Parity) -> None:
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize(
    ("engine", "architecture", "changes"),
    [
        ("torch", "encoder_decoder", UNEVEN),
        ("torch", "decoder_only", TIED),
        ("fairscale", "encoder_decoder", UNEVEN),
        ("fairscale", "encoder_only", TIED),
        ("deepspeed", "encoder_decoder", TIED),
    ],
)
def test_two_ranks_equal_one_process(
    engine: str, architecture: Architecture, changes: dict[str, object], two_ranks: Ranks
) -> None:
    skip_without(engine)
    case = engine_case(engine, architecture, WHOLE, changes=tying(architecture, changes))
    equals_one_process(two_ranks.run(proved, case)[0])


@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        ("torch", WHOLE.replace(pp=2, schedule="zb_h1")),
        ("torch", WHOLE.replace(dp=2, zero=3)),
        ("fairscale", WHOLE.replace(dp=2, zero=2)),
    ],
    ids=["torch stages", "torch zero3", "fairscale zero2"],
)
def test_stages_and_replicas_beside_equal_one_process(engine: str, layout: Layout, four_ranks: Ranks) -> None:
    skip_without(engine)
    case = engine_case(engine, "encoder_decoder", layout, changes=tying("encoder_decoder", TIED))
    equals_one_process(four_ranks.run(proved, case)[0])


def num_parameters(worker: Worker, case: Case) -> int:
    return engine_of(worker, case).num_parameters


@pytest.mark.parametrize("engine", ["torch", "fairscale", "deepspeed"])
def test_every_rank_holds_what_is_predicted(engine: str, two_ranks: Ranks) -> None:
    skip_without(engine)
    case = engine_case(engine, "encoder_decoder", WHOLE, changes=TIED)
    (share,) = shares(plan(case.config, case.layout))
    assert two_ranks.run(num_parameters, case) == [parameter_counts(share).total] * 2
