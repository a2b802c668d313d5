"""Where does DeepSpeed keep which elements of which parameter and gradient?

    zero 0      every rank: whole
    zero 1, 2   weights whole; gradients, masters and states: the parameters of a group one after the other, cut evenly
                over the ranks                                      rank 0: A A A B B   rank 1: B C C C .
    zero 3      each parameter cut evenly over the ranks            rank 0: A A B B C C   rank 1: A A B B C .

A dot is padding. A piece is what of one parameter lies together on one rank. Source: deepspeed 0.19, runtime/zero.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from parallel.engines.gathered import cut_of


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Elements [start, start + values.numel()) of a parameter, flattened."""

    parameter: nn.Parameter
    start: int
    values: Tensor


def whole(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Iterator[Piece]:
    """Tensors that the rank holds whole."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        yield Piece(parameter=parameter, start=0, values=gradient.detach().reshape(-1))


def of_partition(group: Sequence[nn.Parameter], partition: Tensor, rank: int) -> Iterator[Piece]:
    """Zero 1 and 2: the rank's even cut of a group's parameters one after the other."""
    for index, start, values in cut_of(partition.detach(), [parameter.numel() for parameter in group], rank):
        yield Piece(parameter=group[index], start=start, values=values)


def of_shards(group: Sequence[Any], flat: Tensor, rank: int) -> Iterator[Piece]:
    """Zero 3: the rank's cut of every parameter of a group, one after the other."""
    offset = 0
    for parameter in group:
        size = parameter.ds_tensor.ds_numel
        yield from _cut(parameter, flat.detach()[offset : offset + size], rank)
        offset += size


def of_weights(parameters: Sequence[Any], rank: int) -> Iterator[Piece]:
    """The weights that a rank holds: whole, or its cut of them under zero 3."""
    for parameter in parameters:
        if hasattr(parameter, "ds_tensor"):
            yield from _cut(parameter, parameter.ds_tensor.detach(), rank)
        else:
            yield Piece(parameter=parameter, start=0, values=parameter.detach().reshape(-1))


def _cut(parameter: Any, shard: Tensor, rank: int) -> Iterator[Piece]:
    """A shard without its padding."""
    start = rank * shard.numel()
    length = min(shard.numel(), parameter.ds_numel - start)
    if length > 0:
        yield Piece(parameter=parameter, start=start, values=shard.reshape(-1)[:length])
