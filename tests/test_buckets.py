"""Do gradients leave in whole buckets, each behind the last backward that adds to it, and is it told which and when?"""

from typing import Any

import pytest
import torch
from torch import nn

from launch.machine_files import load_machine
from models.named import named_model
from parallel.arrivals import Arrivals, Bucket
from parallel.buckets import block_parameters, bucket_parameters, fill
from parallel.comm import Comm, Done, Site
from parallel.deferral import Deferral
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.parameters import parameter_counts, whole_parameters
from parallel.plans import plan
from parallel.share import shares
from parallel.step_time import step_time
from tests.sampled_layouts import samples
from tests.small_models import small_config

# ---- which ----------------------------------------------------------------------------------------------------------


def test_buckets_are_filled_from_the_last_block_with_whole_blocks() -> None:
    counts = {0: 5, 1: 1, 2: 3, 7: 4}
    assert fill(counts, 4) == ((7,), (2, 1), (0,))
    assert fill(counts, 4.5) == ((7, 2), (1, 0))
    assert fill(counts, 1) == ((7,), (2,), (1,), (0,))
    assert fill(counts, 100) == ((7, 2, 1, 0),)
    assert fill({}, 1) == ()


def test_every_parameter_is_in_one_bucket() -> None:
    """On random layouts of random models; what a rank holds is counted elsewhere, by component."""
    several = 0
    for sample in samples(60, seed=3):
        for share in shares(sample.plan):
            total = parameter_counts(share).total
            in_sequence = whole_parameters(share) if share.layout.sp else 0
            assert sum(block_parameters(share).values()) == total - in_sequence
            if share.layout.gradient_bucket_bytes:
                buckets = bucket_parameters(share, 4)
                assert sum(buckets.values()) == total
                assert buckets.get((), 0) == in_sequence
                several += len(buckets) > 2
    assert several > 10


def test_keys_and_values_made_elsewhere_go_with_their_block() -> None:
    layout = Layout(pp=2, dp=2, transport="kv", gradient_bucket_bytes=1)
    made = plan(small_config("encoder_decoder", num_encoder_blocks=2, num_decoder_blocks=2), layout)
    first, second = shares(made)
    assert [list(bucket_parameters(share, 4)) for share in (first, second)] == [[(3,), (2,), (1,), (0,)], [(3,), (2,)]]
    assert sum(bucket_parameters(first, 4).values()) == parameter_counts(first).total


# ---- when -----------------------------------------------------------------------------------------------------------


class _Sending(Comm):
    """Writes down what would be summed."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []

    def all_reduce(self, tensor: torch.Tensor, axis: str, *, site: Site, phase: Any) -> Any:
        assert (axis, site.name) == ("dp", "gradient.dp")
        self.sent.append((tensor.numel(), phase))
        return Done()


def _two_layers(microbatches: int) -> tuple[nn.Sequential, _Sending, Arrivals]:
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Linear(3, 4, bias=False))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    comm = _Sending()
    buckets = [Bucket(one.grad, [one]) for one in reversed(list(model.parameters())) if one.grad is not None]
    arrivals = Arrivals(buckets, stages=[model], writers={}, deferral=Deferral(), microbatches=microbatches, comm=comm)
    return model, comm, arrivals


def test_a_bucket_leaves_in_the_last_backward_that_adds_to_it() -> None:
    model, comm, arrivals = _two_layers(microbatches=2)
    for _ in range(2):
        arrivals.begin()
        comm.sent.clear()
        model(torch.ones(1, 2)).sum().backward()
        assert comm.sent == []
        model(torch.ones(1, 2)).sum().backward()
        assert comm.sent == [(12, "backward"), (6, "backward")]
        arrivals.finish()
        assert len(comm.sent) == 2


def test_buckets_leave_in_their_order() -> None:
    model, comm, arrivals = _two_layers(microbatches=1)
    model[0](torch.ones(1, 2)).sum().backward()  # the second to be sent is whole first
    assert comm.sent == []
    model[1](torch.ones(1, 3)).sum().backward()
    assert comm.sent == [(12, "backward"), (6, "backward")]
    arrivals.finish()


def test_a_gradient_that_never_comes_leaves_its_bucket_for_the_end() -> None:
    model, comm, arrivals = _two_layers(microbatches=1)
    model[1](torch.ones(1, 3)).sum().backward()
    assert comm.sent == [(12, "backward")]
    arrivals.finish()
    assert comm.sent == [(12, "backward"), (6, "step")]


def test_a_share_that_would_be_lost_is_an_error() -> None:
    model, _, _ = _two_layers(microbatches=1)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="came after all that were expected"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2), Layout(tp=2, dp=4, pp=2, sp=True)], ids=lambda one: one.label)
def test_predicted_pipelines_are_as_without_buckets_and_what_follows_is_no_longer(layout: Layout) -> None:
    shape = StepShape(num_sequences=8, source_length=512, target_length=128)
    once, behind = (
        step_time(load_machine("h100"), named_model("t5-small"), layout.replace(gradient_bucket_bytes=least), shape)
        for least in (0, 2**20)
    )
    assert behind.timeline == once.timeline
    assert behind.gradient_seconds < once.gradient_seconds
