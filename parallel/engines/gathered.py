"""How do the shards of all ranks become whole tensors again, and do copies agree?

Every rank gives, by canonical name, what it holds and which part of the whole that is (`parallel.plan.Shard`). Where
several ranks hold the same numbers, the first counts and the others are compared with it.
"""

import dataclasses
import math

import torch
from torch import Tensor

from parallel.plan import Shard


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Whole tensors put together from the shards of all ranks."""

    tensors: dict[str, Tensor]
    """By canonical name."""
    replica_error: float
    """Worst relative disagreement between ranks that hold copies of the same numbers."""
    replica_name: str


def put_together(everyone: list[dict[str, tuple[Shard, Tensor]]]) -> Gathered:
    """Fills whole tensors from shards; where several ranks hold the same rows, they are compared."""
    sizes: dict[str, tuple[int, ...]] = {}
    for held in everyone:
        for name, (shard, tensor) in held.items():
            size = list(tensor.shape)
            if not shard.is_whole:
                size[shard.dim] = max(stop for _, stop in shard.ranges)
            sizes[name] = tuple(max(pair) for pair in zip(size, sizes.get(name, size), strict=True))
    worst, worst_name = 0.0, ""
    tensors: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for held in everyone:
        for name, (shard, tensor) in held.items():
            if name not in tensors:
                tensors[name] = torch.zeros(sizes[name], dtype=tensor.dtype)
                filled[name] = torch.zeros(sizes[name], dtype=torch.bool)
            offset = 0
            for start, stop in shard.ranges or ((0, tensor.shape[0]),):
                piece = tensor.narrow(shard.dim, offset, stop - start)
                whole = tensors[name].narrow(shard.dim, start, stop - start)
                known = filled[name].narrow(shard.dim, start, stop - start)
                error = _disagreement(piece[known], whole[known])
                if error > worst:
                    worst, worst_name = error, name
                whole.copy_(torch.where(known, whole, piece))
                known.fill_(True)
                offset += stop - start
    missing = [name for name, mask in filled.items() if not mask.all()]
    assert not missing, f"no rank holds all of {missing}"
    return Gathered(tensors=tensors, replica_error=worst, replica_name=worst_name)


def _disagreement(piece: Tensor, whole: Tensor) -> float:
    if not piece.numel():
        return 0.0
    scale = whole.abs().max().item()
    difference = (piece - whole).abs().max().item()
    error = difference / scale if scale else difference
    # A nan agrees with nothing, and is smaller than nothing either.
    return math.inf if math.isnan(error) else error
