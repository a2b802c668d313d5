"""Collectives with a gradient: the conjugate pairs of tensor and sequence parallelism.

What one member does forward, its partner does backward (Shoeybi et al. 2019, arXiv 1909.08053, figure 3; Korthikanti et
al. 2022, arXiv 2205.05198, figure 5):

    function            forward           backward
    copy                nothing           all-reduce
    reduce              all-reduce        nothing
    gather_sequence     all-gather        reduce-scatter
    scatter_sequence    reduce-scatter    all-gather
    slice_sequence      own slice         zero elsewhere (no communication: the input is the same on every rank)

All act on dim 0 (sequence-first tensors, so that no copy is needed) over the tp axis.
"""

from typing import Any

import torch
from torch import Tensor

from parallel.comm import Comm, Site
from parallel.plan import Entering, Leaving


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, comm: Comm, site: Site) -> Tensor:
        ctx.comm, ctx.site = comm, site
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(gradient, "tp", site=ctx.site, phase="backward").wait()
        return gradient, None, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Comm, site: Site) -> Tensor:
        # In place: a partial sum is nobody else's, and a copy would be one more pass over the hidden states.
        ctx.mark_dirty(partial)
        comm.all_reduce(partial, "tp", site=site, phase=comm.forward_phase()).wait()
        return partial

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, comm: Comm, site: Site) -> Tensor:
        ctx.comm, ctx.site = comm, site
        whole, pending = comm.all_gather(shard, "tp", site=site, phase=comm.forward_phase())
        pending.wait()
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        shard, pending = ctx.comm.reduce_scatter(gradients[0], "tp", site=ctx.site, phase="backward")
        pending.wait()
        return shard, None, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, comm: Comm, site: Site) -> Tensor:
        ctx.comm, ctx.site = comm, site
        shard, pending = comm.reduce_scatter(partial, "tp", site=site, phase=comm.forward_phase())
        pending.wait()
        return shard

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        whole, pending = ctx.comm.all_gather(gradients[0], "tp", site=ctx.site, phase="backward")
        pending.wait()
        return whole, None, None


def enter(tensor: Tensor, entering: Entering, comm: Comm, site: Site) -> Tensor:
    """What a plan's `entering` says, for a tensor [L, ...] (a shard of it where it is gathered)."""
    if entering == "none" or comm.size("tp") == 1:
        return tensor
    function = _Copy if entering == "copy" else _GatherSequence
    entered: Tensor = function.apply(tensor, comm, site)  # type: ignore[no-untyped-call]
    return entered


def leave(partial: Tensor, leaving: Leaving, comm: Comm, site: Site) -> Tensor:
    """What a plan's `leaving` says, for a partial sum [L, ...]; a shard of L comes back under `scatter`.

    The partial sum is given away: it may hold the whole sum afterwards. It must be contiguous.
    """
    if leaving == "none" or comm.size("tp") == 1:
        return partial
    function = _Reduce if leaving == "reduce" else _ScatterSequence
    left: Tensor = function.apply(partial, comm, site)  # type: ignore[no-untyped-call]
    return left


def slice_sequence(whole: Tensor, comm: Comm) -> Tensor:
    """This tp rank's slice of dim 0. Raises AssertionError when the length does not divide: pad before."""
    size = comm.size("tp")
    assert whole.shape[0] % size == 0, f"length {whole.shape[0]} over {size} tp ranks"
    length = whole.shape[0] // size
    return whole.narrow(0, comm.position("tp") * length, length)
