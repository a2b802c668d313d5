"""How does a sublayer run in few steps? Its ends are two autograd functions, written out forward and backward.

    project     norm, column-parallel product            the product's backward, and the norm's right after it
    merge       row-parallel product, residual           the residual is what the product is added to
                in an ffn the activation before them     its gradient is written to where the product's stood

Autograd would run five to seven functions, each with a result of its own that something else adds up or copies. Here
the same tensors are kept, gradients of norms and biases are added to where they add up, and what the row-parallel
product makes is summed over the ranks and joined with the residual where it stands. A `deferral` says when weights'
gradients are computed (`parallel/deferral.py`); messages are those of `parallel/tensor.py`.

Left out, and run as the models have them: post-norm, dropouts between hidden states, blocks that a compiler sees, and
root mean squares in half precision and on GPUs, where PyTorch's own norm does well.
"""

import dataclasses
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import Activation, ModelConfig
from models.elementwise import activated_gate, gated_gradients, rms_gradients, rms_normed, side_by_side
from models.layers import FusedLinear, Linear, Norm
from models.sublayers import Ffn, Sublayer
from parallel.comm import Comm, Site
from parallel.deferral import Deferral, gradient_of
from parallel.plan import Leaving
from parallel.tensor import Column, ColumnLinear, RowLinear


def fuse(model: nn.Module, config: ModelConfig, comm: Comm, deferral: Deferral, dtype: torch.dtype) -> None:
    """Makes the sublayers of a rank's part run so, where they can."""
    is_exact = dtype in (torch.float32, torch.float64)
    if config.norm == "rmsnorm" and not (is_exact and comm.device.type == "cpu"):
        return
    if config.norm_position != "pre" or config.dropout:
        return
    for module in model.modules():
        if isinstance(module, Sublayer):
            ends = _Ends(module, comm, deferral)
            module.project, module.merge = ends.project, ends.merge  # type: ignore[method-assign]
            if isinstance(module, Ffn) and not config.ffn_dropout:
                run = functools.partial(ends.run, module, _Activation(config.activation))
                module.forward = run  # type: ignore[method-assign]


class _Ends:
    """The ends of one sublayer."""

    def __init__(self, sublayer: Sublayer, comm: Comm, deferral: Deferral) -> None:
        assert isinstance(sublayer.norm, Norm)
        self._norm, self._comm, self._deferral = sublayer.norm, comm, deferral

    def project(self, linear: nn.Module, hidden_LBD: Tensor) -> tuple[Tensor, ...]:
        """As `Sublayer.project`."""
        assert isinstance(linear, ColumnLinear | FusedLinear)
        parts: tuple[Tensor, ...] = self._projected(linear, hidden_LBD, linear.parts)
        return parts

    def merge(self, hidden_LBD: Tensor, linear: nn.Module, inner_LBU: Tensor) -> Tensor:
        """As `Sublayer.merge`."""
        return self._merged(hidden_LBD, linear, inner_LBU, None)

    def run(self, ffn: Ffn, activation: "_Activation", hidden_LBD: Tensor) -> Tensor:
        """As `Ffn.forward`."""
        assert isinstance(ffn.up, ColumnLinear | FusedLinear)
        return self._merged(hidden_LBD, ffn.down, self._projected(ffn.up, hidden_LBD, None), activation)

    def _projected(self, linear: ColumnLinear | FusedLinear, hidden_LBD: Tensor, parts: tuple[int, ...] | None) -> Any:
        if isinstance(linear, ColumnLinear):
            column = linear.column()
        else:
            column = Column(
                weight=linear.weight,
                bias=linear.bias,
                entering="none",
                comm=self._comm,
                site=_HERE,
                deferral=self._deferral,
            )
        return _Project.apply(hidden_LBD, column.weight, self._norm, column, parts)  # type: ignore[no-untyped-call]

    def _merged(
        self, hidden_LBD: Tensor, linear: nn.Module, inner_LBU: Tensor, activation: "_Activation | None"
    ) -> Tensor:
        assert isinstance(linear, RowLinear | Linear)
        leaving, site = (linear.leaving, linear.site) if isinstance(linear, RowLinear) else ("none", _HERE)
        row = _Row(
            weight=linear.weight,
            bias=linear.bias,
            leaving=leaving,
            comm=self._comm,
            site=site,
            deferral=self._deferral,
        )
        merged: Tensor = _Merge.apply(hidden_LBD, inner_LBU, row.weight, row, activation)  # type: ignore[no-untyped-call]
        return merged


_HERE = Site(name="")
"""Of a product that sends nothing."""


class _Project(torch.autograd.Function):
    """x [L(/t), B, D] -> the product [L, B, U], in parts or joined."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _weight: Tensor, norm: Norm, column: Column, parts: tuple[int, ...] | None) -> Any:
        normed, *kept = _normed(norm, x)
        out, kept_input = column.forward(normed)
        ctx.save_for_backward(kept_input, x, *kept)
        ctx.norm, ctx.column = norm, column
        return out if parts is None else torch.split(out, list(parts), dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kept_input, x, first, second = ctx.saved_tensors
        gradient = gradients[0] if len(gradients) == 1 else side_by_side(gradients)
        gradient_normed, _, _ = ctx.column.backward(gradient, kept_input, needs_input=True)
        return _norm_backward(ctx.norm, gradient_normed, x, first, second), None, None, None, None


def _normed(norm: Norm, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of x, and the two tensors that its backward needs beside x."""
    if norm.kind == "rmsnorm":
        return rms_normed(x, norm.weight, norm.eps)
    return torch.native_layer_norm(x, norm.weight.shape, norm.weight, norm.bias, norm.eps)


def _norm_backward(norm: Norm, gradient: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The gradient of x; those of the norm's parameters are added to where they add up."""
    if norm.kind == "rmsnorm":
        gradient_x, gradient_weight = rms_gradients(gradient, x, first, second, norm.weight)
    else:
        assert norm.bias is not None
        gradient_x, gradient_weight, gradient_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, x, norm.weight.shape, first, second, norm.weight, norm.bias, [True, True, True]
        )
        gradient_of(norm.bias).add_(gradient_bias)
    gradient_of(norm.weight).add_(gradient_weight)
    return gradient_x


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A row-parallel product that is added to the residual: weight [D, U/t], bias [D]."""

    weight: Tensor
    bias: Tensor | None
    leaving: Leaving
    comm: Comm
    site: Site
    deferral: Deferral

    def forward(self, hidden: Tensor, inner: Tensor) -> Tensor:
        """[L(/t), B, D] and [L, B, U/t] -> [L(/t), B, D]."""
        if self.leaving == "none":
            flat = hidden.reshape(-1, hidden.shape[-1])
            out = torch.addmm(flat, inner.reshape(-1, inner.shape[-1]), self.weight.t()).view(hidden.shape)
        else:
            out = self._summed(F.linear(inner, self.weight)).add_(hidden)
        return out if self.bias is None else out.add_(self.bias)

    def _summed(self, partial: Tensor) -> Tensor:
        """The sum over the ranks, where a partial sum stands; a shard of it under sequence parallelism."""
        phase = self.comm.forward_phase()
        if self.leaving == "reduce":
            self.comm.all_reduce(partial, "tp", site=self.site, phase=phase).wait()
            return partial
        shard, pending = self.comm.reduce_scatter(partial, "tp", site=self.site, phase=phase)
        pending.wait()
        return shard

    def backward(self, gradient: Tensor, inner: Tensor) -> Tensor:
        """The gradient of `inner`; those of weight and bias are added up, now or when the deferral says so."""
        whole, deferral = gradient, self.deferral
        if self.leaving == "scatter":
            whole, pending = self.comm.all_gather(gradient, "tp", site=self.site, phase="backward")
            pending.wait()
        gradient_inner = whole.matmul(self.weight)
        if self.bias is not None:
            # Each position once: under sequence parallelism those of this rank.
            gradient_of(self.bias).add_(gradient.reshape(-1, gradient.shape[-1]).sum(0))
        if deferral.is_collecting:
            deferral.add(inner, whole, self.weight, None)
        elif self.leaving != "none":
            deferral.leave_behind(inner, whole, self.weight, None)
        else:
            deferral.write(inner, whole, self.weight, None)
        return gradient_inner


class _Merge(torch.autograd.Function):
    """hidden [L(/t), B, D] and what the branch makes before its last product [L, B, U/t] -> hidden."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, inner: Tensor, _weight: Tensor, row: _Row, activation: "_Activation | None"
    ) -> Tensor:
        kept: tuple[Tensor, ...] = ()
        if activation is not None:
            inner, kept = activation.forward(inner)
        ctx.save_for_backward(inner, *kept)
        ctx.row, ctx.activation = row, activation
        return row.forward(hidden, inner)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inner, *kept = ctx.saved_tensors
        gradient = ctx.row.backward(gradients[0], inner)
        if ctx.activation is not None:
            gradient = ctx.activation.backward(gradient, inner, *kept)
        return gradients[0], gradient, None, None, None


@dataclasses.dataclass(frozen=True, slots=True)
class _Activation:
    """An ffn's activation, on the parts of its first product side by side, [..., U] or [..., 2 U]."""

    name: Activation

    def forward(self, joined: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[..., U], and what the backward needs beside it."""
        if self.name == "relu":
            return F.relu(joined), ()
        if self.name in ("gelu", "gelu_tanh"):
            return F.gelu(joined, approximate=self._approximation), (joined,)
        gate, up = joined.chunk(2, dim=-1)
        activated = activated_gate(gate, self._gate)
        return activated * up, (gate, up, activated)

    def backward(self, gradient: Tensor, inner: Tensor, *kept: Tensor) -> Tensor:
        """The gradient of what came in; `gradient` is given away."""
        aten = torch.ops.aten
        if self.name == "relu":
            aten.threshold_backward.grad_input(gradient, inner, 0, grad_input=gradient)
        elif self.name in ("gelu", "gelu_tanh"):
            aten.gelu_backward.grad_input(gradient, *kept, approximate=self._approximation, grad_input=gradient)
        else:
            gate, up, activated = kept
            return gated_gradients(gradient, gate, up, activated, self._gate)
        return gradient

    @property
    def _approximation(self) -> str:
        return "tanh" if self.name == "gelu_tanh" else "none"

    @property
    def _gate(self) -> Any:
        return "silu" if self.name == "swiglu" else "gelu"
