"""What can be cut where: a model as a line of atoms, between any two of which a pipeline may be cut.

    grain "block"      encoder blocks, decoder blocks; embeddings and head live with theirs: what engines run
    grain "sublayer"   self-attention | ffn   and   self-attention | cross-attention | ffn;   the head alone

A stage is a slice of the line. It costs what its atoms cost, what it pays once for all its blocks of a side, and what
it sends to other ranks: forward over its end, gradients over its start. A sublayer costs its share of its block, as
FLOPs share the block out. The memory is relayed. Sublayer cuts are simulated only: no engine cuts inside of blocks.

Which cut is best is told by `parallel/cuts.py`, what a cut comes to by `parallel/candidates.py`.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal, get_args

from models.config import ModelConfig
from models.costs import num_blocks, sides
from parallel.cuts import Cutting
from parallel.edges import Edge
from parallel.grain import sublayer_shares
from parallel.partition import Carried, crossing
from parallel.placement import Placement, stage_ranks
from parallel.profile import GRAINS, Profile
from parallel.simulate import StageSeconds, TransferCost
from parallel.stage_costs import message_seconds, seconds_of
from parallel.work import Work

Grained = Literal["block", "sublayer"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """A model that is to be cut.

    Attributes:
        profile: what its pieces cost.
        grain: what an atom is.

    Raises ValueError for an unknown grain.
    """

    profile: Profile
    grain: Grained = "block"

    def __post_init__(self) -> None:
        if self.grain not in get_args(Grained):
            raise ValueError(f"grain = {self.grain!r}; choose one of {', '.join(get_args(Grained))}")

    @property
    def config(self) -> ModelConfig:
        return self.profile.config

    @functools.cached_property
    def boundary(self) -> int:
        """First atom of the decoder."""
        encoder = len(sublayer_shares(self.profile, "encoder")) if self.grain == "sublayer" else 1
        return self.config.num_encoder_blocks * encoder if self.config.has_encoder else 0

    @property
    def num_atoms(self) -> int:
        return self.config.num_blocks if self.grain == "block" else len(self._works)

    # ---- what a slice costs -----------------------------------------------------------------------------------------

    def slice(self, first: int, last: int) -> Work:
        """Cost of the atoms [first, last) as a stage."""
        return self._slice(first, last)

    @functools.cached_property
    def _slice(self) -> "functools._lru_cache_wrapper[Work]":
        if self.grain == "block":
            return functools.cache(self.profile.slice)
        return functools.cache(self._sublayers)

    def _sublayers(self, first: int, last: int) -> Work:
        work = sum(self._works[first:last], start=Work())
        work += self.profile.encoder_stage if first < self.boundary else Work()
        reads_decoder = self.config.has_decoder and max(first, self.boundary) < min(last, self.num_atoms - 1)
        return work + (self.profile.decoder_stage if reads_decoder else Work())

    @functools.cached_property
    def _works(self) -> tuple[Work, ...]:
        """Of every sublayer, embeddings with the first of their side, and of the head."""
        works: list[Work] = []
        for side in sides(self.config):
            block: Work = getattr(self.profile, f"{side}_block")
            mine = [block * share for share in sublayer_shares(self.profile, side)] * num_blocks(self.config, side)
            mine[0] += getattr(self.profile, f"{side}_embedding")
            works += mine
        return (*works, self.profile.head)

    def seconds(self, starts: Sequence[int]) -> StageSeconds:
        """Durations of the stages of a cut, of which all starts and the end are given."""
        return seconds_of([self.slice(first, last) for first, last in itertools.pairwise(starts)])

    # ---- what is sent -----------------------------------------------------------------------------------------------

    def carried(self, atom: int) -> tuple[Carried, ...]:
        """Tensors that cross a cut before an atom."""
        if self.grain == "block":
            return crossing(self.config, atom)
        if not self.config.has_cross_attention:
            return ("target",) if self.config.has_decoder else ("source",)
        if atom <= self.boundary:
            return ("source",) if atom < self.boundary else ("memory",)
        return ("target",) if atom == self.num_atoms - 1 else ("target", "memory")

    def edges(self, starts: Sequence[int]) -> tuple[Edge, ...]:
        """Edges of a cut, of which all starts and the end are given."""
        return tuple(
            Edge(first=stage, last=stage + 1, carries=self.carried(atom)) for stage, atom in enumerate(starts[1:-1])
        )

    @property
    def transfer_seconds(self) -> TransferCost:
        """Of a message between ranks."""
        return message_seconds(self.profile)

    # ---- cuts -------------------------------------------------------------------------------------------------------

    def cutting(self, placement: Placement, pp: int, chunks: int, *, per_rank: int = 0, per_stage: int = 1) -> Cutting:
        """The line as a list to cut; ValueError for more stages than atoms, or a placement that cannot be."""
        ranks = stage_ranks(placement, pp, chunks)
        if len(ranks) > self.num_atoms:
            raise ValueError(
                f"pp = {pp} x chunks = {chunks} stages over {self.num_atoms} {self.grain}s: try chunks <= "
                f"{self.num_atoms // pp}"
            )
        scale = GRAINS[self.profile.unit]

        def sent(stage: int, first: int, last: int) -> int:
            cost = 0.0
            for other, atom in ((stage - 1, first), (stage + 1, last)):
                if 0 <= other < len(ranks) and ranks[other] != ranks[stage]:
                    cost += self.profile.message(self.carried(atom))
            return round(cost * scale)

        return Cutting(
            num_blocks=self.num_atoms,
            ranks=ranks,
            held=lambda _, first, last: round(self.slice(first, last).total * scale),
            sent=sent,
            fixed={len(ranks) // 2: self.boundary} if placement == "folded" else {},
            per_rank=per_rank,
            per_stage=per_stage,
        )
