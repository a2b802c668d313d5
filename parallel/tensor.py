"""Sharded counterparts of a model's modules: what a rank of the tp axis computes instead of the whole.

    column-parallel   y_r = x W_r^T          the output's units (whole heads, ffn columns) are dealt out; x is whole
    row-parallel      y = sum_r x_r W_r^T    the input's units are dealt out; partial sums meet in one collective

A column-parallel product is one autograd function, so that a collective of the backward runs behind the matrix product
that does not need it: the input's gradient is on its way while the weight's is computed, and under sequence parallelism
the saved shard of the input, 1/t of it, is gathered again behind the input gradient's product (arXiv 2205.05198,
section 4.2.2), unless the plan has the gathered input kept (`gather_once`). A `deferral` says when weights' gradients
are computed (`parallel/deferral.py`): those of row-parallel products behind the same messages. Left out: embedding,
head and loss (`parallel/vocabulary.py`).
"""

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.elementwise import split
from parallel.collectives import enter, leave
from parallel.comm import Comm, Site
from parallel.deferral import Deferral, product
from parallel.plan import Entering, Entry

_GATHERING = ("gather", "gather_once")
"""Ways in which a shard of a sequence enters."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column-parallel product, forward and backward: x [L(/t), B, D], weight [U, D], bias [U] -> [L, B, U]."""

    weight: Tensor
    bias: Tensor | None
    entering: Entering
    comm: Comm
    site: Site
    deferral: Deferral | None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The product, and what of its input the backward needs."""
        kept = x
        if self.entering in _GATHERING:
            x, pending = self.comm.all_gather(x, "tp", site=self.site, phase=self.comm.forward_phase())
            pending.wait()
        return F.linear(x, self.weight, self.bias), kept if self.entering == "gather" else x

    def backward(
        self, gradient: Tensor, x: Tensor, *, needs_input: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of x, weight and bias; the last two are None where `deferral` sees to them."""
        comm, site, deferral = self.comm, self.site, self.deferral
        is_deferred = deferral is not None and deferral.is_collecting
        gathered = gradient_x = reduced = None
        if self.entering == "gather" and not is_deferred:
            x, gathered = comm.all_gather(x, "tp", site=site, phase="backward")
        if needs_input:
            gradient_x = gradient.matmul(self.weight)
            if self.entering == "copy":
                reduced = comm.all_reduce(gradient_x, "tp", site=site, phase="backward")
            elif self.entering in _GATHERING:
                gradient_x, reduced = comm.reduce_scatter(gradient_x, "tp", site=site, phase="backward")
        if gathered is not None:
            gathered.wait()
        gradient_weight = gradient_bias = None
        if deferral is None:
            flat = gradient.reshape(-1, gradient.shape[-1])
            gradient_weight = flat.t().matmul(x.reshape(-1, x.shape[-1]))
            gradient_bias = flat.sum(0) if self.bias is not None else None
        elif is_deferred:
            deferral.add(x, gradient, self.weight, self.bias, self._gather if self.entering == "gather" else None)
        else:
            deferral.catch_up()
            deferral.write(x, gradient, self.weight, self.bias)
        if reduced is not None:
            reduced.wait()
        return gradient_x, gradient_weight, gradient_bias

    def _gather(self, shard: Tensor) -> Tensor:
        """The shard of an input gathered again, when its weight's gradient is computed."""
        whole, pending = self.comm.all_gather(shard, "tp", site=self.site, phase="backward")
        pending.wait()
        return whole


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, _bias: Tensor | None, column: Column) -> Tensor:
        out, kept = column.forward(x)
        ctx.save_for_backward(kept, weight)
        ctx.column = column
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        return (*ctx.column.backward(gradients[0], x, needs_input=ctx.needs_input_grad[0]), None)


def column_product(x_LBD: Tensor, column: Column) -> Tensor:
    """Input times the rows of this rank: [L, B, D] (a shard of L if it is gathered) -> [L, B, U/t]."""
    out: Tensor = _ColumnProduct.apply(x_LBD, column.weight, column.bias, column)  # type: ignore[no-untyped-call]
    return out


class ColumnLinear(nn.Module):
    """The rows of a fused projection that belong to this rank's units; forward gives one tensor a part.

    Args:
        weight, bias: this rank's shard, [sum(parts), D] and [sum(parts)].
        parts: rows of each part on this rank.
        entry: the plan's word on how the input enters.
    """

    def __init__(self, *, weight: nn.Parameter, bias: nn.Parameter | None, entry: Entry, comm: Comm) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        shares = (part.share(comm.size("tp"), comm.position("tp")) for part in entry.parts)
        self.parts = tuple(stop - start for start, stop in shares)
        self.entering = entry.entering
        self.comm = comm
        self.site = Site(name=entry.module, stream=entry.stream)
        self.deferral: Deferral | None = None

    def forward(self, x_LBD: Tensor) -> tuple[Tensor, ...]:
        out_LBU = self.joined(x_LBD)
        return (out_LBU,) if len(self.parts) == 1 else split(out_LBU, self.parts)

    def joined(self, x_LBD: Tensor) -> Tensor:
        """The parts side by side."""
        return column_product(x_LBD, self.column())

    def column(self) -> Column:
        """Its product."""
        return Column(
            weight=self.weight,
            bias=self.bias,
            entering=self.entering,
            comm=self.comm,
            site=self.site,
            deferral=self.deferral,
        )


class RowLinear(nn.Module):
    """The columns of a projection that belong to this rank's units; the bias is added once, after the sum."""

    def __init__(self, *, weight: nn.Parameter, bias: nn.Parameter | None, entry: Entry, comm: Comm) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.leaving = entry.leaving
        self.comm = comm
        self.site = Site(name=entry.module, stream=entry.stream)
        self.deferral: Deferral | None = None

    def forward(self, x_LBU: Tensor) -> Tensor:
        """[L, B, U/t] -> [L, B, D], or a shard of L under sequence parallelism."""
        out_LBD = leave(
            product(x_LBU, self.weight, None, self.deferral, is_behind=True), self.leaving, self.comm, self.site
        )
        return out_LBD if self.bias is None else out_LBD + self.bias


class MemoryEntry(nn.Module):
    """Where the memory enters a stage's decoder blocks: gathered, and its gradient reduced, once for all of them."""

    def __init__(self, *, entry: Entry, comm: Comm) -> None:
        super().__init__()
        self.entering = entry.entering
        self.comm = comm
        self.site = Site(name=entry.module, stream=entry.stream)

    def forward(self, memory_SBD: Tensor) -> Tensor:
        return enter(memory_SBD, self.entering, self.comm, self.site)
