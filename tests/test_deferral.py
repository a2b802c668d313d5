"""Is every weight gradient computed once a step, whenever that is, and is nothing of the last step left?"""

import pytest
import torch
from torch import Tensor, nn

from parallel.deferral import Deferral, product


def weight_of(stale: float = 7.0) -> nn.Parameter:
    """[U, D] = [3, 2], with what a former step left in its gradient."""
    weight = nn.Parameter(torch.arange(6, dtype=torch.float64).view(3, 2))
    weight.grad = torch.full_like(weight, stale)
    return weight


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


X, Y = drawn(4, 5, 2), drawn(4, 5, 3)
GRADIENT = torch.einsum("lbu,lbd->ud", Y, X)


def test_the_first_gradient_of_a_step_overwrites_and_others_add() -> None:
    deferral, weight = Deferral(), weight_of()
    deferral.begin([weight])
    for count in (1, 2):
        deferral.write(X, Y, weight, None)
        torch.testing.assert_close(weight.grad, count * GRADIENT)
    deferral.finish()
    torch.testing.assert_close(weight.grad, 2 * GRADIENT)


def test_a_bias_and_a_weight_that_others_write_too_are_added_to() -> None:
    deferral, weight, bias = Deferral(), weight_of(), nn.Parameter(torch.zeros(3, dtype=torch.float64))
    bias.grad = torch.ones_like(bias)
    deferral.begin([])
    deferral.write(X, Y, weight, bias)
    torch.testing.assert_close(weight.grad, 7.0 + GRADIENT)
    torch.testing.assert_close(bias.grad, 1.0 + Y.sum((0, 1)))


def test_a_weight_that_no_product_used_has_no_gradient() -> None:
    deferral, weight = Deferral(), weight_of()
    deferral.begin([weight])
    deferral.finish()
    assert weight.grad is not None
    assert weight.grad.abs().max() == 0.0


def test_a_product_writes_now_or_when_it_is_told() -> None:
    deferral, weight = Deferral(), weight_of()
    x = X.clone().requires_grad_()
    for is_split in (False, True):
        deferral.begin([weight])
        out = product(x, weight, None, deferral)
        if is_split:
            with deferral.collect(0, 3):
                out.backward(Y)
            torch.testing.assert_close(weight.grad, GRADIENT)  # of the step before
            deferral.run(0, 3)
        else:
            out.backward(Y)
        torch.testing.assert_close(weight.grad, GRADIENT)
        deferral.finish()


def test_what_is_left_behind_is_done_with_the_next_message() -> None:
    deferral, weight = Deferral(), weight_of()
    deferral.begin([weight])
    deferral.leave_behind(X, Y, weight)
    with pytest.raises(AssertionError, match="wait for a message that never came"):
        deferral.finish()
    deferral.catch_up()
    deferral.catch_up()
    torch.testing.assert_close(weight.grad, GRADIENT)
    deferral.finish()


def test_a_step_does_not_end_with_gradients_that_nobody_computed() -> None:
    deferral, weight = Deferral(), weight_of()
    deferral.begin([weight])
    with deferral.collect(1, 0):
        deferral.add(X, Y, weight, None)
    with pytest.raises(AssertionError, match="never computed"):
        deferral.finish()


def test_jobs_of_a_step_that_did_not_end_are_forgotten() -> None:
    deferral, weight = Deferral(), weight_of()
    with deferral.collect(0, 0):
        deferral.add(X, Y, weight, None)
    deferral.leave_behind(X, Y, weight)
    deferral.begin([weight])
    deferral.write(X, Y, weight, None)
    deferral.catch_up()
    deferral.run(0, 0)
    deferral.finish()
    torch.testing.assert_close(weight.grad, GRADIENT)
