"""Are the steps between products the formulas that they stand for, forward and backward?"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.elementwise import gelu_tanh_gated, rms_norm, rotated, silu_gated, split

ANGLES = torch.arange(5, dtype=torch.float64)[:, None, None, None] * torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64)
COS, SIN = ANGLES.cos(), ANGLES.sin()


def turned(heads: Tensor) -> Tensor:
    points = torch.complex(*heads.chunk(2, dim=-1)) * torch.complex(COS, SIN)
    return torch.cat((points.real, points.imag), dim=-1)


def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * up


FORMULAS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "rms_norm": (
        lambda x, w: rms_norm(x, (6,), w, 0.1),
        lambda x, w: F.rms_norm(x, (6,), w, 0.1),
        [(5, 2, 6), (6,)],
    ),
    "rotated queries": (lambda x: rotated(x, COS, SIN, by_head=False), turned, [(5, 2, 3, 6)]),
    "rotated keys": (lambda x: rotated(x, COS, SIN, by_head=True), turned, [(5, 2, 3, 6)]),
    "silu_gated": (silu_gated, lambda gate, up: F.silu(gate) * up, [(5, 2, 6), (5, 2, 6)]),
    "gelu_tanh_gated": (gelu_tanh_gated, gelu_gated, [(5, 2, 6), (5, 2, 6)]),
}


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()


@pytest.mark.parametrize("name", FORMULAS)
def test_a_step_is_its_formula(name: str) -> None:
    step, formula, shapes = FORMULAS[name]
    inputs = [drawn(*shape) for shape in shapes]
    ours, theirs = step(*inputs), formula(*inputs)
    torch.testing.assert_close(ours, theirs)
    gradient = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    for one, other in zip(*(torch.autograd.grad(y, inputs, gradient) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(one, other)


def test_halves_are_normed_in_single_precision() -> None:
    x, weight = drawn(4, 6).to(torch.bfloat16), drawn(6).to(torch.bfloat16)
    assert torch.equal(rms_norm(x, (6,), weight, 1e-6), F.rms_norm(x, (6,), weight, 1e-6))


@pytest.mark.parametrize("parts", [(6, 6), (4, 2, 6)])
def test_gradients_of_parts_stand_where_the_parts_stood(parts: tuple[int, ...]) -> None:
    product = drawn(5, 2, 12)
    weights = [drawn(5, 2, part) for part in parts]
    views = split(product, parts)
    assert all(view.untyped_storage().data_ptr() == product.untyped_storage().data_ptr() for view in views)
    sum((view * weight).sum() for view, weight in zip(views, weights, strict=True)).backward()  # type: ignore[union-attr]
    assert product.grad is not None
    torch.testing.assert_close(product.grad, torch.cat([weight.detach() for weight in weights], dim=-1))


def test_gradients_that_only_look_adjoining_are_copied_together() -> None:
    """Two buffers: the second part stands where it would in the first one."""
    product = drawn(3, 12)
    zeros, ones = torch.zeros(3, 12, dtype=torch.float64), torch.ones(3, 12, dtype=torch.float64)
    gradients = (zeros[:, :6], ones[:, 6:])
    torch.autograd.backward(split(product, (6, 6)), gradients)
    assert product.grad is not None
    assert product.grad[:, :6].unique().tolist() == [0.0]
    assert product.grad[:, 6:].unique().tolist() == [1.0]


def test_a_gate_gives_both_gradients_as_one_tensor() -> None:
    """Of 12 columns, in the order of the parts; swapped parts are copied together."""
    for order in ((0, 1), (1, 0)):
        product = drawn(5, 2, 12)
        views = split(product, (6, 6))
        gate, up = (views[index] for index in order)
        silu_gated(gate, up).sum().backward()
        plain = product.detach().requires_grad_()
        halves = plain.chunk(2, dim=-1)
        (F.silu(halves[order[0]]) * halves[order[1]]).sum().backward()
        torch.testing.assert_close(product.grad, plain.grad)


def test_what_attention_gives_lies_as_its_output_product_reads_it() -> None:
    """Otherwise it is copied, and kept twice."""

    def lies_right(queries_by_head: bool) -> bool:
        q_LBNH, k_LBKH = (
            rotated(drawn(5, 2, heads, 6), COS, SIN, by_head=is_by_head)
            for heads, is_by_head in ((4, queries_by_head), (2, True))
        )
        q, k, v = (heads.permute(1, 2, 0, 3) for heads in (q_LBNH, k_LBKH, drawn(5, 2, 2, 6)))
        out_BNLH = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out_BNLH.permute(2, 0, 1, 3).is_contiguous()

    assert lies_right(queries_by_head=False)
    assert not lies_right(queries_by_head=True)
