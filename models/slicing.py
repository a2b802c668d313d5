"""How is a contiguous slice of a model made, and how do tied parameters stay one?

    blocks   e0 e1 e2 | d0 d1          encoder first, then decoder: one flat list, and any cut of it is legal
    slice         [2,      4)          e2 with the encoder's norm, d0 with the decoder's embedding

Adjacent slices share no block. An embedding goes with block 0 of its stack, a final norm with its last block, head and
loss with the last block of the model. A relative bias goes with every slice of its stack. No name changes.
"""

from typing import TypeVar

from torch import nn

from models.config import ModelConfig
from models.model import Model
from models.stack import Stack

AnyModel = TypeVar("AnyModel", bound=Model)


def slice_model(model: AnyModel, first: int, last: int) -> AnyModel:
    """Drop from a whole model all but blocks [first, last) and what goes with them; returns the same object.

    Raises ValueError if the range is empty or out of bounds.
    """
    num_encoder_blocks = 0 if model.encoder is None else len(model.encoder.block)
    num_decoder_blocks = 0 if model.decoder is None else len(model.decoder.block)
    num_blocks = num_encoder_blocks + num_decoder_blocks
    if not 0 <= first < last <= num_blocks:
        raise ValueError(f"blocks [{first}, {last}) of a model of {num_blocks}: need 0 <= first < last <= {num_blocks}")
    model.encoder = _slice_stack(model.encoder, first, last)
    model.decoder = _slice_stack(model.decoder, first - num_encoder_blocks, last - num_encoder_blocks)
    if last < num_blocks:
        model.head = None
        model.loss = None
    return model


def tie(model: nn.Module, config: ModelConfig) -> None:
    """Make all parameters of a tie group that are present here one parameter, that of the first name present."""
    for group in config.tie_groups:
        owners = [owner for name in group if (owner := _owner(model, name)) is not None]
        for owner in owners[1:]:
            owner.weight = owners[0].weight


def _slice_stack(stack: Stack | None, first: int, last: int) -> Stack | None:
    if stack is None:
        return None
    num_blocks = len(stack.block)
    kept = range(max(first, 0), min(last, num_blocks))
    if not kept:
        return None
    stack.block = nn.ModuleDict({name: block for name, block in stack.block.items() if int(name) in kept})
    if kept[0] > 0:
        stack.embedding = None
    if kept[-1] < num_blocks - 1:
        stack.norm = None
    return stack


def _owner(model: nn.Module, name: str) -> nn.Module | None:
    """The module that holds a weight, or None if it is not here."""
    path, _, leaf = name.rpartition(".")
    assert leaf == "weight", name
    return dict(model.named_modules()).get(path)
