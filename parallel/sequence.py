"""How a step's sequences reach a rank: dealt over dp, padded per stream, cut into microbatches.

Sequence parallelism needs lengths that divide over the ranks. Each stream is padded on its own, with positions that are
valid nowhere: masked as keys, without a label, their ids 0. What that costs is counted, not hidden:

    source of 7 over tp = 2: 8 positions, waste 1/8        target of 9 over tp = 4: 12 positions, waste 3/12
"""

import dataclasses
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from models.batch import IGNORED, Batch
from parallel.layouts import Layout, microbatch_sizes
from parallel.plan import Plan


def deal(batch: Batch, layout: Layout, dp_coordinate: int) -> Batch:
    """The share of one data-parallel rank. Raises ValueError when dp does not divide the sequences."""
    layout.check_sequences(batch.num_sequences)
    count = batch.num_sequences // layout.dp
    return batch.narrow(dp_coordinate * count, count)


def pad(batch: Batch, plan: Plan) -> Batch:
    """The batch with every stream padded to its sharded length; the batch itself when all divide."""
    changes: dict[str, Any] = {}
    if batch.source is not None:
        changes["source"] = _padded(batch.source, plan.sharded_length(batch.source.shape[1]), 0)
    if batch.target is not None:
        changes["target"] = _padded(batch.target, plan.sharded_length(batch.target.shape[1]), 0)
    changes["labels"] = _padded(batch.labels, plan.sharded_length(batch.labels.shape[1]), IGNORED)
    if batch.token_types is not None:
        changes["token_types"] = _padded(batch.token_types, plan.sharded_length(batch.token_types.shape[1]), 0)
    return dataclasses.replace(batch, **changes)


def microbatches(batch: Batch, layout: Layout) -> list[Batch]:
    """The batch cut into the layout's microbatches, each a copy of its own; only the last may be smaller.

    A view would keep the ids of the whole batch, and whatever batch that was cut from, until its own backward.
    """
    start, cut = 0, []
    for size in microbatch_sizes(batch.num_sequences, layout.microbatches):
        cut.append(_copied(batch.narrow(start, size)))
        start += size
    return cut


def _copied(batch: Batch) -> Batch:
    tensors = {name: getattr(batch, name) for name in ("labels", "source", "target", "token_types")}
    return dataclasses.replace(batch, **{n: tensor.clone() for n, tensor in tensors.items() if tensor is not None})


def _padded(tensor: Tensor, length: int, value: int) -> Tensor:
    """[B, L, ...] padded with `value` to [B, length, ...]."""
    missing = length - tensor.shape[1]
    if missing == 0:
        return tensor
    return F.pad(tensor, (*(0, 0) * (tensor.dim() - 2), 0, missing), value=value)
