"""How do the steps between matrix products get by with few passes over memory? Each is one autograd function.

                forward                                         backward, g the gradient of y
    rms_norm    y = r x w,  r = (mean x^2 + eps)^(-1/2)         dx = r (g w - x r^2 mean(x g w)),  dw = sum g (r x)
    rotated     (a, b) -> (a cos - b sin, b cos + a sin)        the same by the opposite angle
    gated       y = f(gate) up                                  d gate = f'(gate) (g up),  d up = g f(gate)
    split       columns of one tensor, as views                 the gradients side by side

Autograd would take each formula apart and keep what every piece needs; here the same tensors are kept as by PyTorch's
own operators, and each result is written once, to where it is read: `gated` writes both of its gradients into one
tensor, and `split` gives that on as it is instead of copying it together. A compiler joins passes by itself, and may
look into what it knows only: it gets the formulas as written. Sources: RMSNorm arXiv 1910.07467, rotations arXiv
2104.09864, gates arXiv 2002.05202. Left out: second derivatives.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, shape: tuple[int, ...], weight: Tensor, eps: float) -> Tensor:
    """`F.rms_norm` over the last dim; half precision, GPUs and compilers, which do well with it, are left to it."""
    if x.is_cuda or x.dtype not in (torch.float32, torch.float64) or torch.compiler.is_compiling():
        half: Tensor = F.rms_norm(x, shape, weight, eps)
        return half
    y: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return y


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        deviation: Tensor = mean_square.add_(eps).rsqrt_()
        normalised = x * deviation
        ctx.save_for_backward(x, deviation, normalised, weight)
        return normalised * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, deviation, normalised, weight = ctx.saved_tensors
        (gradient,) = gradients
        products = (gradient * normalised).reshape(-1, x.shape[-1])
        gradient_weight = products.sum(0) if ctx.needs_input_grad[1] else None
        # Of one position: r^2 mean(x g w), the r of `products` included.
        factors = products.mv(weight).div_(x.shape[-1]).view(deviation.shape).mul_(deviation)
        gradient_x = (gradient * weight).addcmul_(x, factors, value=-1.0).mul_(deviation)
        return gradient_x, gradient_weight, None


def rotated(heads_LBNH: Tensor, cos: Tensor, sin: Tensor, *, by_head: bool) -> Tensor:
    """Heads whose two halves are coordinates, turned by angles [L, 1, 1, H/2]; same shape.

    With `by_head` the result is [B, N, L, H] in memory: attention reads a head's keys one after the other, and faster.
    Not so for queries: what attention gives lies in memory as they do, and is needed as [L, B, N, H].
    """
    if torch.compiler.is_compiling():
        first, second = heads_LBNH.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    turned_LBNH: Tensor = _Rotation.apply(heads_LBNH, cos, sin, by_head)  # type: ignore[no-untyped-call]
    return turned_LBNH


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_LBNH: Tensor, cos: Tensor, sin: Tensor, by_head: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        length, *batch_and_heads, width = heads_LBNH.shape
        if by_head:
            turned_LBNH = heads_LBNH.new_empty(*batch_and_heads, length, width).permute(2, 0, 1, 3)
        else:
            turned_LBNH = heads_LBNH.new_empty(heads_LBNH.shape)
        return _turn(heads_LBNH, cos, sin, 1.0, out=turned_LBNH)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = gradients
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1.0, out=gradient.new_empty(gradient.shape)), None, None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, sign: float, *, out: Tensor) -> Tensor:
    (first, second), (to_first, to_second) = heads.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=sign)
    return out


def silu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU: silu(gate) up."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    inner: Tensor = _Gated.apply(gate, up, "silu")  # type: ignore[no-untyped-call]
    return inner


def gelu_tanh_gated(gate: Tensor, up: Tensor) -> Tensor:
    """GEGLU in the tanh form, as T5 v1.1 has it."""
    if torch.compiler.is_compiling():
        return F.gelu(gate, approximate="tanh") * up
    inner: Tensor = _Gated.apply(gate, up, "gelu")  # type: ignore[no-untyped-call]
    return inner


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
        ctx.kind = kind
        ctx.save_for_backward(gate, up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, activated = ctx.saved_tensors
        (gradient,) = gradients
        both = gradient.new_empty(*gradient.shape[:-1], 2 * gradient.shape[-1])
        gradient_gate, gradient_up = both.chunk(2, dim=-1)
        torch.mul(gradient, activated, out=gradient_up)
        if ctx.kind == "silu":
            torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=gradient_gate)
        else:
            torch.ops.aten.gelu_backward.grad_input(gradient * up, gate, approximate="tanh", grad_input=gradient_gate)
        return gradient_gate, gradient_up, None


def views(product: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Columns of a product [..., sum(parts)], each part a view; their gradients are copied together."""
    return torch.split(product, list(parts), dim=-1)


def split(product: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """As `views`, for parts whose gradients may be made side by side: those of a gate are."""
    if torch.compiler.is_compiling():
        return views(product, parts)
    divided: tuple[Tensor, ...] = _Split.apply(product, parts)  # type: ignore[no-untyped-call]
    return divided


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, product: Tensor, parts: tuple[int, ...]) -> tuple[Tensor, ...]:
        return views(product, parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _side_by_side(gradients), None


def _side_by_side(parts: tuple[Tensor, ...]) -> Tensor:
    """Tensors of equal leading shape as one: copied together, unless they are already."""
    first = parts[0]
    width = sum(part.shape[-1] for part in parts)
    shape = (*first.shape[:-1], width)
    strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    offset = first.storage_offset()
    for part in parts:
        is_next = part.stride() == strides and part.storage_offset() == offset
        if not is_next or part.untyped_storage()._cdata != first.untyped_storage()._cdata:  # noqa: SLF001
            return torch.cat(parts, dim=-1)
        offset += part.shape[-1]
    return first.as_strided(shape, strides)
