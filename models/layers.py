"""The layers that sublayers, embedding and head are made of: norm, linear maps and activations.

Parameters are left as they come from the allocator: `models/initial.py` or a checkpoint fills them. Every product of
hidden states with a weight goes through an attribute `product(x, weight, bias)` that others may replace.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Activation, ModelConfig
from models.elementwise import gelu_tanh_gated, rms_norm, silu_gated, views


class Norm(nn.Module):
    """Layer norm (arXiv 1607.06450), or root-mean-square norm without mean and bias (arXiv 1910.07467)."""

    root_mean_square: Callable[..., Tensor] = staticmethod(rms_norm)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kind = config.norm
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.empty(config.width))
        self.bias = nn.Parameter(torch.empty(config.width)) if config.norm == "layernorm" else None

    def forward(self, hidden: Tensor) -> Tensor:
        """Same shape."""
        if self.kind == "layernorm":
            return F.layer_norm(hidden, self.weight.shape, self.weight, self.bias, self.eps)
        return self.root_mean_square(hidden, self.weight.shape, self.weight, self.eps)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [..., D], weight [U, D], bias [U] or None -> [..., U]."""


class FusedLinear(nn.Module):
    """Several linear maps of one input as one matrix product.

    The rows of `weight` [sum(parts), in_width] are the maps one below the other. The results are views of the product.

    Attributes:
        divide: makes those views.
    """

    product: Product = staticmethod(F.linear)

    def __init__(
        self,
        in_width: int,
        parts: tuple[int, ...],
        bias: bool,
        divide: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, ...]] = views,
    ) -> None:
        super().__init__()
        self.parts, self.divide = parts, divide
        self.weight = nn.Parameter(torch.empty(sum(parts), in_width))
        self.bias = nn.Parameter(torch.empty(sum(parts))) if bias else None

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """One [..., part] for each of `parts`."""
        out = self.joined(hidden)
        return (out,) if len(self.parts) == 1 else self.divide(out, self.parts)

    def joined(self, hidden: Tensor) -> Tensor:
        """The parts side by side, [..., sum(parts)]."""
        return self.product(hidden, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Widths, for printing."""
        return f"in_width={self.weight.shape[1]}, parts={self.parts}, bias={self.bias is not None}"


class Linear(nn.Linear):
    """One linear map."""

    product: Product = staticmethod(F.linear)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., in_width] -> [..., out_width]."""
        return self.product(hidden, self.weight, self.bias)


def linear(in_width: int, out_width: int, bias: bool) -> Linear:
    """A `Linear` on the current default device that spends no time on initial values."""
    with torch.device("meta"):
        module = Linear(in_width, out_width, bias=bias)
    for name, parameter in list(module.named_parameters()):
        setattr(module, name, nn.Parameter(torch.empty(parameter.shape)))
    return module


def _gelu_tanh(hidden: Tensor) -> Tensor:
    return F.gelu(hidden, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[..., Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "swiglu": silu_gated,
    "geglu": gelu_tanh_gated,
}
"""Of the only part of `up`, or of the gate and what it is multiplied with."""
