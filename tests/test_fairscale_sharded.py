"""Does zero 3 by fairscale's FullyShardedDataParallel equal one process, and is it refused where it cannot run?

Here is no GPU. What fairscale asks of CUDA is stood in for: streams that do nothing, in whose order all runs anyway on
a CPU. So what is checked is the arithmetic of the real wrapper and of the adapter: which unit holds what, what is
summed and scaled, what is put together by which name. Not checked is that it runs on CUDA, nor what streams are there
for: that nothing is read before it has arrived, or freed while it is read.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from launch.case import Case
from launch.parity import Parity, case_batch
from models.config import Architecture
from parallel.engines.engine import unsupported
from parallel.layouts import Layout, Recompute
from parallel.recorder import Recorder
from parallel.sequence import deal
from tests.engine_steps import POST_NORM, RELATIVE, TIED, HeldBytes, engine_case, engine_of, proved, trained, tying
from tests.rank import Worker
from tests.small_models import ARCHITECTURES
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("fairscale") is None, reason="needs fairscale: pip install 'twinshard[engines]'"
)


class Torch:
    """The module as one file of fairscale sees it: with another `cuda`."""

    def __init__(self, cuda: object) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def streams_stood_in() -> Iterator[None]:
    """One stream for all, which does nothing; fairscale asserts which one it is in."""
    stream = mock.Mock(spec=["wait_stream"])
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _stream: contextlib.nullcontext(),
    )
    wrapper = importlib.import_module("fairscale.nn.data_parallel.fully_sharded_data_parallel")
    engine = importlib.import_module("parallel.engines.fairscale")
    with (
        mock.patch.object(wrapper, "torch", Torch(cuda)),
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch.object(engine, "no_streams", return_value=None),
    ):
        yield


def proved_on_stand_ins(worker: Worker, case: Case) -> Parity:
    with streams_stood_in():
        return proved(worker, case)


@pytest.mark.parametrize("changes", [TIED, RELATIVE], ids=["tied", "relative"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_arithmetic_equals_one_process(
    architecture: Architecture, changes: dict[str, object], two_ranks: Ranks
) -> None:
    case = engine_case(
        "fairscale", architecture, Layout(dp=2, zero=3, microbatches=3), changes=tying(architecture, changes)
    )
    parity = two_ranks.run(proved_on_stand_ins, case)[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_block_that_is_computed_again_finds_its_weights(recompute: Recompute, two_ranks: Ranks) -> None:
    layout = Layout(dp=2, zero=3, microbatches=2, recompute=recompute, attention="materialised")
    case = engine_case("fairscale", "encoder_decoder", layout, changes=POST_NORM)
    assert two_ranks.run(proved_on_stand_ins, case)[0].failures == ()


@pytest.mark.parametrize(("tp", "dp"), [(2, 2), (1, 4)])
def test_four_ranks_equal_one_process(tp: int, dp: int, four_ranks: Ranks) -> None:
    """With tp, a unit has parameters that ranks of the tensor group cut beside those that they all hold."""
    changes = RELATIVE | {"tying": "all"}
    layout = Layout(tp=tp, dp=dp, zero=3, microbatches=2)
    case = engine_case("fairscale", "encoder_decoder", layout, changes=changes, num_sequences=12)
    parity = four_ranks.run(proved_on_stand_ins, case)[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


def test_a_microbatch_gathers_blocks_twice_and_scatters_each_gradient(two_ranks: Ranks) -> None:
    case = engine_case("fairscale", "encoder_decoder", Layout(dp=2, zero=3, microbatches=3))
    num_blocks = case.config.num_blocks
    for told in two_ranks.run(operations, case):
        assert told["all_gather"] == 3 * (2 * num_blocks + 1)
        assert told["reduce_scatter"] == 3 * (num_blocks + 1)


def operations(worker: Worker, case: Case) -> Counter[str]:
    """How often a step does what."""
    with streams_stood_in():
        engine = engine_of(worker, case)
        share = deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp)
        engine.step(share)
        with Recorder() as recorder:
            engine.step(share)
    return Counter(event.operation for event in recorder.events)


def test_each_rank_holds_its_half_and_learns_what_whole_models_learn(two_ranks: Ranks) -> None:
    case = engine_case("fairscale", "encoder_decoder", Layout(dp=2, zero=0), changes=TIED)
    whole = two_ranks.run(trained, case, torch.float32, 3)[0]
    sharded = dataclasses.replace(case, layout=case.layout.replace(zero=3))
    halves = two_ranks.run(trained_on_stand_ins, sharded, torch.float32)
    assert all(half.losses == pytest.approx(whole.losses, rel=1e-5) for half in halves)
    assert whole.losses[0] > whole.losses[2]
    assert sum(half.parameters for half in halves) == whole.parameters
    # An odd unit is padded by one element.
    padding_bytes = 4 * (case.config.num_blocks + 1)
    for half in halves:
        assert whole.parameters <= 2 * half.gradients <= whole.parameters + padding_bytes
        assert half.optimizer <= (whole.optimizer + 2 * padding_bytes) / 2


def test_half_precision_learns(two_ranks: Ranks) -> None:
    """It shards float32 only; what it sharded is converted."""
    case = engine_case("fairscale", "encoder_decoder", Layout(dp=2, zero=3), changes=RELATIVE)
    half = two_ranks.run(trained_on_stand_ins, case, torch.bfloat16)[0]
    assert half.losses[2] < half.losses[0]
    assert half.gradients == pytest.approx(half.parameters, rel=0.01)


def trained_on_stand_ins(worker: Worker, case: Case, dtype: torch.dtype) -> HeldBytes:
    with streams_stood_in():
        return trained(worker, case, dtype, 3)


def test_no_gpu_is_told_before_anything_starts_and_another_device_by_each_rank(two_ranks: Ranks) -> None:
    case = engine_case("fairscale", "decoder_only", Layout(dp=2, zero=3))
    told = unsupported(case.engine, case.config, case.layout)
    line = "fairscale's FullyShardedDataParallel needs CUDA streams, and "
    assert told == (None if torch.cuda.is_available() else line + "there is no GPU: use zero <= 2")
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        assert unsupported(case.engine, case.config, case.layout) is None
        told = unsupported(case.engine, case.config, Layout(cp=2, dp=2, zero=3))
        assert told == "fairscale does not shard a sequence over ranks: cp = 2; use cp = 1"
    assert two_ranks.run(refused_on_a_cpu, case) == [line + "ranks compute on cpu: use zero <= 2"] * 2


def refused_on_a_cpu(worker: Worker, case: Case) -> str:
    """Where there is a GPU, but not for every rank."""
    with mock.patch.object(torch.cuda, "is_available", return_value=True):
        with pytest.raises(ValueError, match="streams") as refusal:
            engine_of(worker, case)
        return str(refusal.value)
