"""Where the pipeline cuts fall, which tensors cross them, and who holds a copy of what is shared.

The flat block list of a model is its encoder blocks, then its decoder blocks. A stage is a contiguous slice of it; the
embedding of a stack lives with the stack's first block, its final norm with its last, the head with the model's last:

    blocks   E0 E1 E2 E3 | D0 D1 D2 D3        cut (2, 5):  stage 0 = E0 E1   stage 1 = E2 E3 D0   stage 2 = D1 D2 D3
    edges                                                  0 -> 1: source    1 -> 2: target, memory

Any cut is legal. What crosses an edge follows from where it falls: `source` inside the encoder, `memory` at the
boundary, `target` and `memory` inside a decoder that reads a memory. Left out: other ways of the memory
(`parallel/edges.py`), and which cut costs least (`parallel/balance.py`).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from models.config import ModelConfig
from parallel.layouts import COSTED_CUTS, Layout

Carried: TypeAlias = str
"""`source`, `memory`, `target`, or the keys and values of a decoder block, `kv.3`."""


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


class Balancing(Protocol):
    """Who knows what blocks cost: a profile (`parallel/profile.py`)."""

    def first_blocks(self, config: ModelConfig, layout: Layout) -> tuple[int, ...]:
        """First blocks of stages 1, 2, ... of the best cut of the layout's kind."""
        ...


def stages(config: ModelConfig, layout: Layout, profile: Balancing | None = None) -> tuple[Stage, ...]:
    """The stages of a layout's cut. Raises ValueError for a stage without blocks, and as `first_blocks` does."""
    return stages_of(config, first_blocks(config, layout, profile))


def stages_of(config: ModelConfig, cut: Sequence[int]) -> tuple[Stage, ...]:
    """The stages whose first blocks, but for stage 0, are given. Raises ValueError for a stage without blocks."""
    starts = (0, *cut, config.num_blocks)
    for index, (first, last) in enumerate(itertools.pairwise(starts)):
        if first >= last:
            raise ValueError(
                f"stage {index} would hold blocks {first} to {last} of {config.num_blocks}: "
                f"cuts must rise from 1 to {config.num_blocks - 1}, got {list(cut)}"
            )
    return tuple(
        Stage(index=index, first=first, last=last, inputs=crossing(config, first), outputs=crossing(config, last))
        for index, (first, last) in enumerate(itertools.pairwise(starts))
    )


def first_blocks(config: ModelConfig, layout: Layout, profile: Balancing | None = None) -> tuple[int, ...]:
    """First blocks of stages 1, 2, ... of a layout's cut.

    Args:
        config: the model.
        layout: its cut, stages and placement are read.
        profile: what blocks cost; only cuts that balance costs need it. With one, `aligned` splits the stages between
            the sides by cost instead of by blocks.

    Raises:
        ValueError: more stages than blocks, no profile for a cut that needs one, or a profile that does not fit.
    """
    if not isinstance(layout.cut, str):
        return layout.cut
    if layout.num_stages > config.num_blocks:
        chunks = f" x chunks = {layout.chunks}" if layout.chunks > 1 else ""
        nearest = f"chunks <= {config.num_blocks // layout.pp}" if chunks and config.num_blocks >= layout.pp else ""
        raise ValueError(
            f"pp = {layout.pp}{chunks} stages over {config.num_blocks} blocks: "
            f"try {nearest or f'pp <= {config.num_blocks}'}"
        )
    if layout.cut in COSTED_CUTS and profile is None:
        raise ValueError(
            f"cut = {layout.cut!r} balances what blocks cost, and there is no profile that tells it: "
            "name one in an experiment (twinshard profile writes it), or try cut = 'even'"
        )
    is_aligned = layout.cut == "aligned" and config.has_cross_attention
    if profile is not None and (is_aligned or layout.cut in COSTED_CUTS):
        return profile.first_blocks(config, layout)
    if is_aligned or layout.placement == "folded":
        return min(aligned_cuts(config, layout), key=lambda cut: _blocks_of_largest(config, cut))
    return _even(config.num_blocks, layout.num_stages)


def aligned_cuts(config: ModelConfig, layout: Layout) -> tuple[tuple[int, ...], ...]:
    """First blocks of every cut with all stages encoder XOR decoder, each side evenly; the most even split first.

    Raises ValueError where there is none.
    """
    num_stages, encoder, decoder = layout.num_stages, config.num_encoder_blocks, config.num_decoder_blocks
    if num_stages < 2:
        raise ValueError("cut = 'aligned' needs pp >= 2: an encoder stage and a decoder stage; try cut = 'even'")
    counts = [count for count in range(1, num_stages) if count <= encoder and num_stages - count <= decoder]
    if layout.placement == "folded":
        counts = [count for count in counts if 2 * count == num_stages]
    if not counts:
        raise ValueError(
            f"{num_stages // 2} encoder and {num_stages // 2} decoder stages over {encoder} and {decoder} blocks: "
            f"try pp x chunks <= {2 * min(encoder, decoder)}"
        )
    return tuple(
        (*_even(encoder, count), encoder, *(encoder + first for first in _even(decoder, num_stages - count)))
        for count in sorted(counts, key=lambda count: abs(2 * count - num_stages))
    )


def _blocks_of_largest(config: ModelConfig, cut: tuple[int, ...]) -> int:
    return max(last - first for first, last in itertools.pairwise((0, *cut, config.num_blocks)))


def _even(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Sizes differ by one at most, the larger ones first: 5 blocks over 2 stages are 3 and 2."""
    size, larger = divmod(num_blocks, num_stages)
    return tuple(itertools.accumulate(size + (index < larger) for index in range(num_stages - 1)))


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
    """A parameter of which several pipeline ranks hold a copy, whose gradients must be summed over those ranks."""

    name: str
    """Canonical name: the name under which weights are drawn and counted."""
    holders: tuple[tuple[int, str], ...]
    """(pipeline rank, local name) of each copy, the owner first: the rank of the first stage that has one."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.holders)


def shared_parameters(config: ModelConfig, cut: Sequence[Stage], ranks: Sequence[int]) -> tuple[Shared, ...]:
    """Tied embeddings and heads (up to three ranks) and relative-bias tables (every rank with blocks of a stack).

    A parameter that lives on one rank only is not shared, however many users and stages it has there: they are tied.

    Args:
        config: the model.
        cut: its stages.
        ranks: pipeline rank of every stage.
    """
    shared = []
    for group in config.tie_groups:
        holders: dict[int, str] = {}
        for name in group:
            holders.setdefault(ranks[_home(name, config, cut)], name)
        if len(holders) > 1:
            shared.append(Shared(name=group[0], holders=tuple(holders.items())))
    if config.positions == "relative":
        sides = (("encoder", 0, config.num_encoder_blocks), ("decoder", config.num_encoder_blocks, config.num_blocks))
        for side, first, end in sides:
            name = f"{side}.relative_bias.weight"
            holding = dict.fromkeys((ranks[s.index] for s in cut if max(s.first, first) < min(s.last, end)), name)
            if len(holding) > 1:
                shared.append(Shared(name=name, holders=tuple(holding.items())))
    return tuple(shared)


def _home(name: str, config: ModelConfig, cut: Sequence[Stage]) -> int:
    """Stage of an embedding's or the head's weight."""
    if name == "head.weight":
        return len(cut) - 1
    if name.startswith("encoder."):
        return 0
    return next(stage.index for stage in cut if stage.last > config.num_encoder_blocks)
