"""Is every layout that PyTorch cannot run refused in one line, and is it torch that cannot?"""

import re
import types
from typing import Any, cast

import pytest
import torch
from torch.distributed.pipelining import Schedule1F1B

from parallel.engines.choice import EngineChoice
from parallel.engines.engine import build, unsupported
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.plans import plan
from tests.one_rank import CPU, rank_of
from tests.small_models import small_config

INTERLEAVED = {"schedule": "interleaved", "placement": "interleaved", "chunks": 2}


def test_torch_still_refuses_fewer_microbatches_than_stages() -> None:
    """When it does not any more, the engine should not either."""
    with pytest.raises(ValueError, match="Number of microbatches"):
        Schedule1F1B(cast("Any", types.SimpleNamespace(num_stages=2, has_backward=True)), 1)


@pytest.mark.parametrize(
    ("layout", "line"),
    [
        (Layout(cp=2), "context_parallel shards the attention of one stream and has no causal kernel on CPUs: cp = 2"),
        (Layout(tp=4), "gives no KV head to two ranks: 2 KV heads over tp = 4; try a tp that divides them"),
        (Layout(pp=2, transport="direct", microbatches=2), "torch's stages send to the next stage only"),
        (
            Layout(pp=2, transport="kv", microbatches=2),
            "to the next stage only: transport = 'kv'; use transport = 'relay'",
        ),
        (Layout(pp=2), "at least as many microbatches as stages: 1 over 2; try microbatches = 2"),
        (Layout(pp=2, schedule="zb_h2"), "no schedule 'zb_h2'; use one of gpipe, 1f1b, interleaved, zb_h1, zb_v"),
        (Layout(pp=2, microbatches=5, schedule="zb_h1"), "zb_h1 wants equal rounds: 5 microbatches in 2; try"),
        (
            Layout.from_dict({"pp": 2, "microbatches": 5, **INTERLEAVED}),
            "wants equal rounds: 5 microbatches in 2; try microbatches = 4",
        ),
        (
            Layout.from_dict({"pp": 2, "microbatches": 2, "schedule": "gpipe", "placement": "v", "chunks": 2}),
            "torch's GPipe deals stages to ranks in turn: placement = 'v'; use placement = 'interleaved'",
        ),
        (Layout.from_dict({"pp": 2, "dp": 2, "microbatches": 2, **INTERLEAVED}), "dp = 2 with chunks; use chunks = 1"),
        (Layout(tp=2, dp=2, zero=1), "ZeroRedundancyOptimizer takes no DTensor: zero = 1 with tp = 2; use zero = 3"),
        (
            Layout(pp=2, dp=2, zero=1, microbatches=2, schedule="zb_h1"),
            "never sums gradients of a backward in two pieces: zero = 1 with zb_h1; use zero = 2",
        ),
        (
            Layout(pp=2, dp=2, zero=3, microbatches=2, schedule="zb_h1"),
            "when torch's backward in two pieces looks for them: zero = 3 with zb_h1; use zero = 2",
        ),
    ],
    ids=lambda value: value.label if isinstance(value, Layout) else None,
)
def test_what_torch_cannot_run_is_told_in_one_line(layout: Layout, line: str) -> None:
    config = small_config("encoder_decoder")
    told = unsupported(EngineChoice("torch"), config, layout)
    assert told is not None
    assert line in told
    assert "\n" not in told
    planned = plan(config, layout)
    settings = EngineSettings(seed=0, dtype=torch.float32, device=CPU)
    with rank_of(planned, 0) as comm, pytest.raises(ValueError, match=re.escape(line)):
        build(EngineChoice("torch"), plan=planned, comm=comm, settings=settings)
