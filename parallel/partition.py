"""Where the pipeline cuts fall, which tensors cross them, and who holds a copy of what is shared.

The flat block list of a model is its encoder blocks, then its decoder blocks. A stage is a contiguous slice of it; the
embedding of a stack lives with the stack's first block, its final norm with its last, the head with the model's last:

    blocks   E0 E1 E2 E3 | D0 D1 D2 D3        cut (2, 5):  stage 0 = E0 E1   stage 1 = E2 E3 D0   stage 2 = D1 D2 D3
    edges                                                  0 -> 1: source    1 -> 2: target, memory

Any cut is legal. What crosses an edge follows from where it falls: `source` inside the encoder, `memory` at the
boundary, `target` and `memory` inside a decoder that reads a memory. Left out: costs (which cut is best).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Literal

from models.config import ModelConfig
from parallel.layouts import Cut

Carried = Literal["source", "memory", "target"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Blocks [first, last) of the flat block list, and what enters and leaves them."""

    index: int
    first: int
    last: int
    inputs: tuple[Carried, ...]
    outputs: tuple[Carried, ...]
    """Empty on the last stage."""

    @property
    def num_blocks(self) -> int:
        return self.last - self.first


def stages(config: ModelConfig, pp: int, cut: Cut) -> tuple[Stage, ...]:
    """The stages of a cut. Raises ValueError for a stage without blocks."""
    starts = (0, *first_blocks(config, pp, cut), config.num_blocks)
    for index, (first, last) in enumerate(itertools.pairwise(starts)):
        if first >= last:
            raise ValueError(
                f"stage {index} would hold blocks {first} to {last} of {config.num_blocks}: "
                f"cuts must rise from 1 to {config.num_blocks - 1}, got {list(starts[1:-1])}"
            )
    return tuple(
        Stage(index=index, first=first, last=last, inputs=crossing(config, first), outputs=crossing(config, last))
        for index, (first, last) in enumerate(itertools.pairwise(starts))
    )


def first_blocks(config: ModelConfig, pp: int, cut: Cut) -> tuple[int, ...]:
    """First blocks of stages 1, 2, ..., pp - 1. Raises ValueError for more stages than blocks."""
    if not isinstance(cut, str):
        return cut
    if pp > config.num_blocks:
        raise ValueError(f"pp = {pp} stages over {config.num_blocks} blocks: try pp <= {config.num_blocks}")
    if cut == "aligned" and config.has_cross_attention:
        return _aligned(config.num_encoder_blocks, config.num_decoder_blocks, pp)
    return _even(config.num_blocks, pp)


def _even(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Sizes differ by one at most, the larger ones first: 5 blocks over 2 stages are 3 and 2."""
    size, larger = divmod(num_blocks, num_stages)
    return tuple(itertools.accumulate(size + (index < larger) for index in range(num_stages - 1)))


def _aligned(num_encoder_blocks: int, num_decoder_blocks: int, pp: int) -> tuple[int, ...]:
    """Every stage encoder XOR decoder: the split of the stages whose largest stage is smallest, then evenly inside."""
    if pp < 2:
        raise ValueError("cut = 'aligned' needs pp >= 2: an encoder stage and a decoder stage; try cut = 'even'")

    def largest(num_encoder_stages: int) -> int:
        return max(-(-num_encoder_blocks // num_encoder_stages), -(-num_decoder_blocks // (pp - num_encoder_stages)))

    possible = [count for count in range(1, pp) if count <= num_encoder_blocks and pp - count <= num_decoder_blocks]
    num_encoder_stages = min(possible, key=lambda count: (largest(count), abs(2 * count - pp)))
    encoder = _even(num_encoder_blocks, num_encoder_stages)
    decoder = _even(num_decoder_blocks, pp - num_encoder_stages)
    return (*encoder, num_encoder_blocks, *(num_encoder_blocks + first for first in decoder))


def crossing(config: ModelConfig, cut: int) -> tuple[Carried, ...]:
    """Tensors that cross a cut before block `cut`; none at the ends of the model."""
    if cut in (0, config.num_blocks):
        return ()
    if not config.has_cross_attention:
        return ("target",) if config.has_decoder else ("source",)
    if cut < config.num_encoder_blocks:
        return ("source",)
    return ("memory",) if cut == config.num_encoder_blocks else ("target", "memory")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shared:
    """A parameter of which several stages hold a copy, whose gradients must be summed over those stages."""

    name: str
    """Canonical name: the name under which weights are drawn and counted."""
    holders: tuple[tuple[int, str], ...]
    """(stage, local name) of each copy, the owner first."""

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(stage for stage, _ in self.holders)


def shared_parameters(config: ModelConfig, cut: Sequence[Stage]) -> tuple[Shared, ...]:
    """Tied embeddings and heads (up to three stages) and relative-bias tables (every stage of a stack).

    A parameter that lives on one stage only is not shared, however many users it has there.
    """
    shared = []
    for group in config.tie_groups:
        holders: dict[int, str] = {}
        for name in group:
            holders.setdefault(_home(name, config, cut), name)
        if len(holders) > 1:
            shared.append(Shared(name=group[0], holders=tuple(holders.items())))
    if config.positions == "relative":
        sides = (("encoder", 0, config.num_encoder_blocks), ("decoder", config.num_encoder_blocks, config.num_blocks))
        for side, first, end in sides:
            name = f"{side}.relative_bias.weight"
            holding = tuple((s.index, name) for s in cut if max(s.first, first) < min(s.last, end))
            if len(holding) > 1:
                shared.append(Shared(name=name, holders=holding))
    return tuple(shared)


def _home(name: str, config: ModelConfig, cut: Sequence[Stage]) -> int:
    """Stage of an embedding's or the head's weight."""
    if name == "head.weight":
        return len(cut) - 1
    if name.startswith("encoder."):
        return 0
    return next(stage.index for stage in cut if stage.last > config.num_encoder_blocks)
