"""How do the shards of all ranks become whole tensors again, and do copies agree?

Every rank gives, by canonical name, what it holds and which part of the whole that is (`parallel.plan.Shard`). Where
several ranks hold the same numbers, the first counts and the others are compared with it. Where shards are cut on, such
as over dp, a rank gives pieces of them: what of one, flattened, lies together on the rank.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from parallel.plan import Shard

Held = dict[str, tuple[Shard, Tensor]]
"""What a rank holds of tensors, by canonical name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Whole tensors put together from the shards of all ranks."""

    tensors: dict[str, Tensor]
    """By canonical name."""
    replica_error: float
    """Worst relative disagreement between ranks that hold copies of the same numbers."""
    replica_name: str


def put_together(everyone: Sequence[Held]) -> Gathered:
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


def cut_of(cut: Tensor, sizes: Sequence[int], rank: int) -> Iterator[tuple[int, int, Tensor]]:
    """What of tensors that lie one after the other, cut evenly over ranks, a rank's cut holds.

    Args:
        cut: the rank's, flat; the last ones may end in padding.
        sizes: elements of each tensor.
        rank: place of the cut.

    Returns (which tensor, its first element here, the elements of it that are here).
    """
    first, offset = rank * cut.numel(), 0
    for index, size in enumerate(sizes):
        start, stop = max(first, offset), min(first + cut.numel(), offset + size)
        if start < stop:
            yield index, start - offset, cut[start - first : stop - first]
        offset += size


def joined(everyone: Sequence[tuple[int, Held, dict[str, tuple[int, ...]], dict[str, Shard]]]) -> Gathered:
    """Whole tensors from pieces of all ranks: first the shards of each tensor-parallel coordinate, then what they make.

    Args:
        everyone: of each rank its tp coordinate, its pieces, and by name the shapes and the shards that these make.
    """
    shards: list[Held] = []
    flats = []
    for coordinate in sorted({rank[0] for rank in everyone}):
        ranks = [rank for rank in everyone if rank[0] == coordinate]
        flat = put_together([held for _, held, _, _ in ranks])
        shapes = {name: shape for _, _, of_rank, _ in ranks for name, shape in of_rank.items()}
        of_name = {name: shard for *_, of_rank in ranks for name, shard in of_rank.items()}
        shards.append({name: (of_name[name], tensor.view(shapes[name])) for name, tensor in flat.tensors.items()})
        flats.append(flat)
    whole_tensors = put_together(shards)
    worst = max((*flats, whole_tensors), key=lambda gathered: gathered.replica_error)
    return dataclasses.replace(whole_tensors, replica_error=worst.replica_error, replica_name=worst.replica_name)


def _disagreement(piece: Tensor, whole: Tensor) -> float:
    if not piece.numel():
        return 0.0
    scale = whole.abs().max().item()
    difference = (piece - whole).abs().max().item()
    error = difference / scale if scale else difference
    # A nan agrees with nothing, and is smaller than nothing either.
    return math.inf if math.isnan(error) else error
