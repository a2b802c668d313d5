"""Sharded counterparts of a model's modules: what a rank of the tp axis computes instead of the whole.

    column-parallel   y_r = x W_r^T          the output's units (whole heads, ffn columns) are dealt out; x is whole
    row-parallel      y = sum_r x_r W_r^T    the input's units are dealt out; partial sums meet in one collective

Each product is one autograd function with its collectives, so that one of the backward runs behind the matrix product
that does not need it: the input's gradient is on its way while the weight's is computed, and under sequence parallelism
the saved shard of the input, 1/t of it, is gathered again behind the input gradient's product (arXiv 2205.05198,
section 4.2.2), unless the plan has the gathered input kept (`gather_once`). A `deferral` says when weights' gradients
are computed (`parallel/deferral.py`): those of row-parallel products behind the same messages. Left out: embedding,
head and loss (`parallel/vocabulary.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.elementwise import views
from parallel.collectives import enter
from parallel.comm import Comm, Site
from parallel.deferral import Deferral, Gather
from parallel.plan import Entering, Entry, Leaving

_GATHERING = ("gather", "gather_once")
"""Ways in which a shard of a sequence enters."""


class _ColumnProduct(torch.autograd.Function):
    """x [L(/t), B, D], weight [U, D], bias [U] -> [L, B, U]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        entering: Entering,
        comm: Comm,
        site: Site,
        deferral: Deferral | None,
    ) -> Tensor:
        kept = x
        if entering in _GATHERING:
            x, pending = comm.all_gather(x, "tp", site=site, phase=comm.forward_phase())
            pending.wait()
        ctx.save_for_backward(kept if entering == "gather" else x, weight)
        ctx.parameters, ctx.deferral = (weight, bias), deferral
        ctx.entering, ctx.comm, ctx.site = entering, comm, site
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        comm, site, entering = ctx.comm, ctx.site, ctx.entering
        needs_input = ctx.needs_input_grad[0]
        is_deferred = ctx.deferral is not None and ctx.deferral.is_collecting
        gathered = None
        if entering == "gather" and not is_deferred:
            x, gathered = comm.all_gather(x, "tp", site=site, phase="backward")
        gradient_x, reduced = None, None
        if needs_input:
            gradient_x = gradient.matmul(weight)
            if entering == "copy":
                reduced = comm.all_reduce(gradient_x, "tp", site=site, phase="backward")
            elif entering in _GATHERING:
                gradient_x, reduced = comm.reduce_scatter(gradient_x, "tp", site=site, phase="backward")
        if gathered is not None:
            gathered.wait()
        gradient_weight = gradient_bias = None
        if is_deferred:
            gather = _gather(comm, site) if entering == "gather" else None
            ctx.deferral.add(x, gradient, *ctx.parameters, gather)
        elif ctx.deferral is not None:
            ctx.deferral.catch_up()
            ctx.deferral.write(x, gradient, *ctx.parameters)
        else:
            flat = gradient.reshape(-1, gradient.shape[-1])
            gradient_weight = flat.t().matmul(x.reshape(-1, x.shape[-1]))
            gradient_bias = flat.sum(0) if ctx.parameters[1] is not None else None
        if reduced is not None:
            reduced.wait()
        return gradient_x, gradient_weight, gradient_bias, None, None, None, None


def _gather(comm: Comm, site: Site) -> Gather:
    """Gathers the shard of an input again, when its weight's gradient is computed."""

    def gather(shard: Tensor) -> Tensor:
        whole, pending = comm.all_gather(shard, "tp", site=site, phase="backward")
        pending.wait()
        return whole

    return gather


def column_product(
    x_LBD: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    entering: Entering,
    comm: Comm,
    site: Site,
    deferral: Deferral | None,
) -> Tensor:
    """Input times the rows of this rank: [L, B, D] (a shard of L if it is gathered) -> [L, B, U/t]."""
    out: Tensor = _ColumnProduct.apply(x_LBD, weight, bias, entering, comm, site, deferral)  # type: ignore[no-untyped-call]
    return out


class ColumnLinear(nn.Module):
    """The rows of a fused projection that belong to this rank's units; forward gives one tensor a part.

    Args:
        weight, bias: this rank's shard, [sum(parts), D] and [sum(parts)].
        entry: the plan's word on how the input enters, and on the rows of each part.
        divide: gives the parts of the product.
    """

    def __init__(
        self,
        *,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        entry: Entry,
        comm: Comm,
        divide: Callable[[Tensor, tuple[int, ...]], tuple[Tensor, ...]] = views,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.divide = divide
        shares = (part.share(comm.size("tp"), comm.position("tp")) for part in entry.parts)
        self.parts = tuple(stop - start for start, stop in shares)
        self.entering = entry.entering
        self.comm = comm
        self.site = Site(name=entry.module, stream=entry.stream)
        self.deferral: Deferral | None = None

    def forward(self, x_LBD: Tensor) -> tuple[Tensor, ...]:
        out_LBU = self.joined(x_LBD)
        return (out_LBU,) if len(self.parts) == 1 else self.divide(out_LBU, self.parts)

    def joined(self, x_LBD: Tensor) -> Tensor:
        """The parts side by side."""
        return column_product(
            x_LBD,
            self.weight,
            self.bias,
            entering=self.entering,
            comm=self.comm,
            site=self.site,
            deferral=self.deferral,
        )


class _RowProduct(torch.autograd.Function):
    """x [L, B, U/t], weight [D, U/t] -> the sum over the ranks [L(/t), B, D]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, leaving: Leaving, comm: Comm, site: Site, deferral: Deferral | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Not a saved tensor: its `grad` is needed, and what is saved comes back as another object.
        ctx.weight, ctx.deferral = weight, deferral
        ctx.leaving, ctx.comm, ctx.site = leaving, comm, site
        partial = F.linear(x, weight)
        if leaving == "scatter":
            partial, pending = comm.reduce_scatter(partial, "tp", site=site, phase=comm.forward_phase())
        else:
            pending = comm.all_reduce(partial, "tp", site=site, phase=comm.forward_phase())
        pending.wait()
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        if ctx.leaving == "scatter":
            gradient, pending = ctx.comm.all_gather(gradient, "tp", site=ctx.site, phase="backward")
            pending.wait()
        gradient_x, gradient_weight = gradient.matmul(weight), None
        if ctx.deferral is None:
            gradient_weight = gradient.reshape(-1, gradient.shape[-1]).t().matmul(x.reshape(-1, x.shape[-1]))
        elif ctx.deferral.is_collecting:
            ctx.deferral.add(x, gradient, ctx.weight, None)
        else:
            ctx.deferral.leave_behind(x, gradient, ctx.weight)
        return gradient_x, gradient_weight, None, None, None, None


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
        out_LBD: Tensor = _RowProduct.apply(  # type: ignore[no-untyped-call]
            x_LBU, self.weight, self.leaving, self.comm, self.site, self.deferral
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
