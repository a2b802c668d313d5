"""How is a slice of a model made, and how do tied parameters stay one?

    blocks   e0 e1 e2 | d0 d1          encoder first, then decoder: one flat list, and any cut of it is legal
    slice         [2,      4)          e2 with the encoder's norm, d0 with the decoder's embedding

Adjacent slices share no block. An embedding goes with block 0 of its stack, a final norm with its last block, head and
loss with the last block of the model. A relative bias goes with every slice of its stack. No name changes. A slice may
have several ranges, and then parts: each range as a model of its own, the modules the same.

Keys and values of the memory may be made where the memory is: then the slice with the encoder's last block also holds
what makes them for the decoder blocks that it lacks, and all other slices hold blocks without it.
"""

import copy
from typing import TypeVar

from torch import nn

from models.blocks import KeysAndValues
from models.config import ModelConfig
from models.model import Model
from models.stack import Stack

AnyModel = TypeVar("AnyModel", bound=Model)
AnyModule = TypeVar("AnyModule", bound=nn.Module)


def slice_model(
    model: AnyModel, config: ModelConfig, *ranges: tuple[int, int], ships_keys_values: bool = False
) -> AnyModel:
    """Drop from a whole model all but the blocks of some ranges [first, last) and what goes with them.

    Args:
        model: the whole model, or a slice that holds the blocks.
        config: of the whole model.
        ranges: blocks to keep.
        ships_keys_values: whether keys and values are made where the memory is, for all blocks.

    Returns the same object. Raises ValueError if there is no range, or one is empty or out of bounds.
    """
    num_blocks = config.num_blocks
    if not ranges:
        raise ValueError(f"no range of blocks to keep of {num_blocks}")
    for first, last in ranges:
        if not 0 <= first < last <= num_blocks:
            raise ValueError(
                f"blocks [{first}, {last}) of a model of {num_blocks}: need 0 <= first < last <= {num_blocks}"
            )
    kept = {block for first, last in ranges for block in range(first, last)}
    num_encoder_blocks = config.num_encoder_blocks
    model.encoder = _slice_stack(model.encoder, kept, num_encoder_blocks)
    after = {block - num_encoder_blocks for block in kept}
    if ships_keys_values and config.has_cross_attention and model.decoder is not None:
        _part_keys_values(model.decoder, after, is_maker=num_encoder_blocks - 1 in kept)
    model.decoder = _slice_stack(model.decoder, after, config.num_decoder_blocks)
    if num_blocks - 1 not in kept:
        model.head = None
        model.loss = None
    return model


def part_of(
    model: AnyModel, config: ModelConfig, first: int, last: int, *, ships_keys_values: bool = False
) -> AnyModel:
    """Blocks [first, last) of a model or slice that holds them, as a model of their own that shares every module.

    Raises ValueError as `slice_model` does.
    """
    part = _shallow(model)
    for side in ("encoder", "decoder"):
        stack = getattr(part, side)
        setattr(part, side, None if stack is None else _shallow(stack))
    return slice_model(part, config, (first, last), ships_keys_values=ships_keys_values)


def tie(model: nn.Module, config: ModelConfig) -> None:
    """Make all parameters of a tie group that are present here one parameter, that of the first name present."""
    for group in config.tie_groups:
        owners = [owner for name in group if (owner := _owner(model, name)) is not None]
        for owner in owners[1:]:
            owner.weight = owners[0].weight


def _slice_stack(stack: Stack | None, kept: set[int], num_blocks: int) -> Stack | None:
    """Leaves the blocks of `kept`; `num_blocks` are those of the whole stack."""
    if stack is None:
        return None
    blocks = {
        name: block for name, block in stack.block.items() if int(name) in kept or isinstance(block, KeysAndValues)
    }
    if not blocks:
        return None
    stack.block = nn.ModuleDict(blocks)
    if not stack.blocks_here:
        stack.relative_bias = None
    if 0 not in kept:
        stack.embedding = None
    if num_blocks - 1 not in kept:
        stack.norm = None
    return stack


def _part_keys_values(decoder: Stack, kept: set[int], *, is_maker: bool) -> None:
    """Leaves of the blocks outside of `kept` what makes keys and values, or takes it from those inside."""
    if is_maker:
        made = {
            name: block if int(name) in kept or isinstance(block, KeysAndValues) else KeysAndValues(block)
            for name, block in decoder.block.items()
        }
        decoder.block = nn.ModuleDict(made)
        return
    decoder.memory = None
    for name, block in decoder.block.items():
        if int(name) in kept:
            block.cross_attention.kv = None  # type: ignore[union-attr]


def _shallow(module: AnyModule) -> AnyModule:
    """A module of the same children, which may be taken away from it alone."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)  # noqa: SLF001, a copy shares this dict
    return copied


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    """The module that holds a weight, or None if it is not here."""
    path, _, leaf = name.rpartition(".")
    assert leaf == "weight", name
    return dict(model.named_modules()).get(path)
