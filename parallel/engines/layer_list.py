"""In which order do the layers of a model stand, and with which of them does a stage begin?

    encoder_decoder   token  embedding  block ...  token  embedding  block ...  (transform)  head  (bias)
    begins with       block 0           1 ...      its first                    nothing: these stay with the last block

A stage begins with its first block, or with what stands before that block in its stack. Tied rows stand at each of
their places, with what is done with them there. None of the layers is built: a pipeline does that with its own means.
Left out: what the layers do (`parallel/engines/listed_layers.py`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from models.config import ModelConfig
from models.stack import Side
from parallel.engines.listed_layers import (
    BiasLayer,
    BlockLayer,
    Current,
    EmbeddingLayer,
    HeadLayer,
    Parts,
    States,
    TiedRows,
    TokenLayer,
    TransformLayer,
    look_up,
    tied_product,
)
from parallel.partition import Stage
from parallel.plan import NO_BLOCK

Use = Callable[[Parts, Current, TiedRows, States], States]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One layer of the list: made as `kind(parts, current, *arguments)`, tied rows as `kind(parts, *arguments)`."""

    kind: type[nn.Module]
    arguments: tuple[Any, ...] = ()
    use: Use | None = None
    """What is done with tied rows here; None of every other layer."""
    begins: int = NO_BLOCK
    """Number in the flat block list of the block whose stage begins here, if it begins one."""


def layer_list(config: ModelConfig) -> list[Listed]:
    """The layers of a whole model, in order."""
    tied = config.tie_groups[0] if config.tie_groups else ()
    sides: tuple[tuple[Side, int, int], ...] = (
        ("encoder", 0, config.num_encoder_blocks),
        ("decoder", config.num_encoder_blocks, config.num_decoder_blocks),
    )
    layers = [layer for side, first, count in sides if count for layer in _stack(config, side, first, count, tied)]
    if "head.weight" not in tied:
        return [*layers, Listed(kind=HeadLayer)]
    layers += [Listed(kind=TransformLayer), Listed(kind=TiedRows, arguments=(tied[0],), use=_multiply)]
    return [*layers, Listed(kind=BiasLayer)] if config.head_bias else layers


def first_layers(layers: Sequence[Listed], stages: Sequence[Stage]) -> list[int]:
    """Place in the list of the first layer of each stage; 0 of the first."""
    places = {layer.begins: place for place, layer in enumerate(layers) if layer.begins != NO_BLOCK}
    return [places[stage.first] for stage in stages]


def _stack(config: ModelConfig, side: Side, first: int, num_blocks: int, tied: Sequence[str]) -> list[Listed]:
    """Embedding and blocks of a side, whose first block has a number in the flat block list."""
    layers = []
    if f"{side}.embedding.token.weight" in tied:
        layers.append(Listed(kind=TiedRows, arguments=(tied[0],), use=functools.partial(_look_up, side)))
    elif side == "decoder" or not config.feature_width:
        layers.append(Listed(kind=TokenLayer, arguments=(side,)))
    layers.append(Listed(kind=EmbeddingLayer, arguments=(side,)))
    layers[0] = dataclasses.replace(layers[0], begins=first)
    return layers + [
        Listed(kind=BlockLayer, arguments=(side, index), begins=first + index if index else NO_BLOCK)
        for index in range(num_blocks)
    ]


def _look_up(side: Side, parts: Parts, current: Current, rows: TiedRows, states: States) -> States:
    return look_up(current, parts, side, rows, states)


def _multiply(_parts: Parts, _current: Current, rows: TiedRows, states: States) -> States:
    assert not isinstance(states, tuple)
    return tied_product(rows, states)
