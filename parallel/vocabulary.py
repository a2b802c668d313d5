"""The vocabulary dealt over the tp ranks: embedding, head and cross-entropy without ever holding all logits.

Rows are dealt as evenly as they divide (11 rows over 4 ranks: 2 3 3 3), so no padding row exists that would have to be
masked or left out of a count; what is communicated never has the vocabulary as a dim. For logits z of one position,
the loss of label y is

    log sum_v exp z_v - z_y  =  log sum_r exp c_r - sum_r z_r,y        c_r = log sum of exp z_v over the rows of rank r

and every rank gathers the other ranks' two numbers, c_r and z_r,y (zero where the label is elsewhere), at once.

Source: Shoeybi et al. 2019 (arXiv 1909.08053), section 3, which reduces largest logit, sum and label's logit in three
messages; sums by their logarithms need no common maximum. Left out: a vocabulary that is whole on every rank, whose
modules stay those of `models/`.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import IGNORED
from models.head import Head
from parallel.collectives import leave
from parallel.comm import Comm, Site
from parallel.deferral import Deferral
from parallel.plan import Entry
from parallel.tensor import column_product


def _rows(entry: Entry, comm: Comm) -> tuple[int, int]:
    (part,) = entry.parts
    return part.share(comm.size("tp"), comm.position("tp"))


class VocabularyEmbedding(nn.Module):
    """Looks up the ids whose rows this rank holds, zero for others; the sum over ranks is the embedding."""

    def __init__(self, *, weight: nn.Parameter, entry: Entry, comm: Comm) -> None:
        super().__init__()
        self.weight = weight
        self.start, self.stop = _rows(entry, comm)
        self.leaving = entry.leaving
        self.comm = comm
        self.site = Site(name=entry.module, stream=entry.stream)

    def forward(self, ids_LB: Tensor) -> Tensor:
        """[L, B] -> [L, B, D], or a shard of L under sequence parallelism."""
        is_elsewhere = (ids_LB < self.start) | (ids_LB >= self.stop)
        rows = F.embedding((ids_LB - self.start).masked_fill(is_elsewhere, 0), self.weight)
        return leave(rows.masked_fill(is_elsewhere[..., None], 0.0), self.leaving, self.comm, self.site)


class VocabularyHead(nn.Module):
    """A head whose rows are dealt out: logits of this rank's rows only.

    The transform before it, if any, works on what enters (a shard of the sequence under sp).
    """

    def __init__(self, *, head: Head, entry: Entry, comm: Comm) -> None:
        super().__init__()
        self.transform = head.transform
        self.scale = head.scale
        self.weight = head.weight
        self.bias = head.bias
        self.entering = entry.entering
        self.comm = comm
        self.site = Site(name=entry.module, stream=entry.stream)
        self.deferral: Deferral | None = None

    def forward(self, hidden_LBD: Tensor) -> Tensor:
        """[L(/t), B, D] -> [L, B, V/t]."""
        hidden_LBD = self.transform(hidden_LBD)
        if self.scale != 1.0:
            hidden_LBD = hidden_LBD * self.scale
        return column_product(
            hidden_LBD,
            self.weight,
            self.bias,
            entering=self.entering,
            comm=self.comm,
            site=self.site,
            deferral=self.deferral,
        )


class _CrossEntropySum(torch.autograd.Function):
    """logits [L, B, V/t], labels [L, B] -> the sum of the losses of all labels that are not ignored."""

    @staticmethod
    def forward(ctx: Any, logits_LBV: Tensor, labels_LB: Tensor, start: int, comm: Comm, site: Site) -> Tensor:
        # Half precision is raised by this difference: no second copy of the logits.
        largest_LB = logits_LBV.amax(-1).to(torch.promote_types(logits_LBV.dtype, torch.float32))
        is_elsewhere_LB = (labels_LB < start) | (labels_LB >= start + logits_LBV.shape[-1])
        local_LB = (labels_LB - start).masked_fill(is_elsewhere_LB, 0)
        label_logits_LB = logits_LBV.gather(-1, local_LB[..., None])[..., 0].masked_fill(is_elsewhere_LB, 0.0)
        exponentials_LBV = (logits_LBV - largest_LB[..., None]).exp_()
        mine_2LB = torch.stack((exponentials_LBV.sum(-1).log_().add_(largest_LB), label_logits_LB))
        all_2LB, pending = comm.all_gather(mine_2LB, "tp", site=site, phase=comm.forward_phase())
        pending.wait()
        log_sum_LB = all_2LB[::2].logsumexp(0)
        is_counted_LB = labels_LB != IGNORED
        probabilities_LBV = exponentials_LBV.mul_((largest_LB - log_sum_LB).exp_()[..., None]).to(logits_LBV.dtype)
        ctx.save_for_backward(probabilities_LBV, local_LB, is_elsewhere_LB, is_counted_LB)
        return ((log_sum_LB - all_2LB[1::2].sum(0)) * is_counted_LB).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities_LBV, local_LB, is_elsewhere_LB, is_counted_LB = ctx.saved_tensors
        # Half precision is raised: 1 / tokens rounded to eight bits would scale every gradient of the step.
        dtype = torch.promote_types(probabilities_LBV.dtype, torch.float32)
        gradient_LBV = probabilities_LBV.to(dtype, copy=True)
        gradient_LBV.scatter_add_(-1, local_LB[..., None], -(~is_elsewhere_LB)[..., None].to(dtype))
        gradient_LBV.mul_((is_counted_LB * gradients[0])[..., None])
        return gradient_LBV.to(probabilities_LBV.dtype), None, None, None, None


class VocabularyCrossEntropy(nn.Module):
    """Sum of the cross-entropy over the labels that count, from logits of this rank's rows."""

    def __init__(self, *, entry: Entry, comm: Comm) -> None:
        super().__init__()
        self.start, _ = _rows(entry, comm)
        self.comm = comm
        self.site = Site(name=entry.module, stream=entry.stream)

    def forward(self, logits_LBV: Tensor, labels_BL: Tensor) -> Tensor:
        """[L, B, V/t] and [B, L] -> scalar, the same on every rank."""
        loss: Tensor = _CrossEntropySum.apply(logits_LBV, labels_BL.t(), self.start, self.comm, self.site)  # type: ignore[no-untyped-call]
        return loss
