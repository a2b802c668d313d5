"""Which part of the model does one rank hold? The numbers that every closed form of a rank starts from.

    plan + pp and tp coordinate  ->  blocks, ends, and heads, columns and rows that are this rank's

Tensor parallelism deals whole heads, ffn columns and vocabulary rows (t = tp, c = coordinate):

    query heads   N / t
    KV heads      max(1, K / t)                              fewer heads than ranks are held several times
    ffn columns   F / t
    vocabulary    floor(V (c + 1) / t) - floor(V c / t)      rows; uneven where t does not divide V; V if it is whole

Ranks of one pp coordinate differ in their vocabulary rows alone, so one stands for all whose rows are equally many.
Left out: bytes, FLOPs, events; and context parallelism, which no closed form here knows yet.
"""

import dataclasses
import functools
from collections import Counter

from models.config import ModelConfig
from models.costs import Side, num_blocks, sides
from parallel.layouts import Layout
from parallel.mesh import Coordinate
from parallel.partition import Stage
from parallel.plan import Part, Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank holds.

    Attributes:
        plan: the partitioning.
        coordinate: the rank's position; replicas along dp are alike.
        num_ranks: how many ranks of the mesh this one stands for.
        chunk: number of the one stage that is meant; None means all stages of the rank.
    """

    plan: Plan
    coordinate: Coordinate
    num_ranks: int
    chunk: int | None = None

    @property
    def config(self) -> ModelConfig:
        return self.plan.config

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    # ---- stages, blocks and ends --------------------------------------------------------------------------------

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that live here, in the order of the model."""
        held = self.plan.stages_of(self.coordinate.pp)
        return held if self.chunk is None else tuple(stage for stage in held if stage.index == self.chunk)

    @property
    def chunks(self) -> "tuple[Share, ...]":
        """What each stage of the rank holds, as if it were alone; what stages share counts in each."""
        return tuple(dataclasses.replace(self, chunk=stage.index) for stage in self.stages)

    @functools.cached_property
    def sides(self) -> tuple[Side, ...]:
        """Sides with a block here, in the order of the flat list of blocks."""
        return tuple(side for side, held in self._blocks.items() if held)

    def blocks(self, side: Side) -> tuple[int, ...]:
        """Indices, within their stack, of the blocks of a side that live here."""
        return self._blocks.get(side, ())

    @functools.cached_property
    def _blocks(self) -> dict[Side, tuple[int, ...]]:
        held: dict[Side, tuple[int, ...]] = {}
        for side in sides(self.config):
            before = 0 if side == "encoder" else self.config.num_encoder_blocks
            end = before + num_blocks(self.config, side)
            ranges = (range(max(stage.first, before), min(stage.last, end)) for stage in self.stages)
            held[side] = tuple(block - before for blocks in ranges for block in blocks)
        return held

    @functools.cached_property
    def kv_blocks(self) -> tuple[int, ...]:
        """Indices, within the decoder, of the blocks whose keys and values are made here, of the memory."""
        if not self.config.has_cross_attention:
            return ()
        if self.layout.transport != "kv":
            return self.blocks("decoder")
        return tuple(range(self.config.num_decoder_blocks)) if self.has_end("encoder") else ()

    @property
    def num_shipped(self) -> int:
        """Blocks elsewhere whose keys and values are made here, or, negative, blocks here that get theirs."""
        return len(self.kv_blocks) - len(self.blocks("decoder")) * self.config.has_cross_attention

    def runs(self, module: str) -> bool:
        """Whether the block that a module belongs to runs here."""
        number = self.plan.block_number(module)
        return any(stage.first <= number < stage.last for stage in self.stages)

    def has_embedding(self, side: Side) -> bool:
        """Whether the stack's first block, and so its embedding, lives here."""
        return 0 in self.blocks(side)

    def has_end(self, side: Side) -> bool:
        """Whether the stack's last block, and so its final norm if it has one, lives here."""
        return num_blocks(self.config, side) - 1 in self.blocks(side)

    @property
    def has_head(self) -> bool:
        return self.stages[-1].last == self.config.num_blocks

    @functools.cached_property
    def token_weights(self) -> tuple[str, ...]:
        """Qualified names of the matrices of V rows that live here: token embeddings and head, tied or not."""
        names = [
            f"{side}.embedding.token.weight"
            for side in self.sides
            if self.has_embedding(side) and not (side == "encoder" and self.config.feature_width)
        ]
        return (*names, "head.weight") if self.has_head else tuple(names)

    def holds(self, module: str) -> bool:
        """Whether a module, by its qualified name in the whole model, lives here."""
        stack, _, rest = module.partition(".")
        if stack in ("head", "loss"):
            return self.has_head
        side: Side = "encoder" if stack == "encoder" else "decoder"
        child, _, rest = rest.partition(".")
        if child == "block":
            index, _, inside = rest.partition(".")
            return int(index) in (self.kv_blocks if inside == "cross_attention.kv" else self.blocks(side))
        if child == "memory":
            return bool(self.kv_blocks)
        if child == "embedding":
            return self.has_embedding(side)
        return self.has_end(side) if child == "norm" else bool(self.blocks(side))

    # ---- local sizes --------------------------------------------------------------------------------------------

    @property
    def num_heads(self) -> int:
        return self.config.num_heads // self.layout.tp

    @property
    def num_kv_heads(self) -> int:
        return max(1, self.config.num_kv_heads // self.layout.tp)

    @property
    def num_kv_replicas(self) -> int:
        """Ranks of the tp axis that hold the same KV head; 1 when every rank has heads of its own."""
        return max(1, self.layout.tp // self.config.num_kv_heads)

    @property
    def ffn_width(self) -> int:
        return self.config.ffn_width // self.layout.tp

    def vocabulary(self, name: str) -> int:
        """Rows of one of `token_weights` that this rank holds."""
        config = self.config
        rows = config.source_vocabulary if name.startswith("encoder.") else config.vocabulary
        if not self.layout.shards_vocabulary:
            return rows
        start, stop = Part(count=rows, width=1).share(self.layout.tp, self.coordinate.tp)
        return stop - start

    @property
    def vocabulary_rows(self) -> tuple[int, ...]:
        """Rows of each of `token_weights`: what may tell apart the ranks of one stage."""
        return tuple(self.vocabulary(name) for name in self.token_weights)

    def sequence_shard(self, length: int) -> int:
        """Positions of a padded length that this rank holds between the sharded products (sp)."""
        return length // self.layout.tp if self.layout.sp else length


def share_of(plan: Plan, coordinate: Coordinate) -> Share:
    """What the rank at a coordinate holds. Raises ValueError for a layout with context parallelism."""
    if plan.layout.cp > 1:
        raise ValueError(f"cp = {plan.layout.cp}: context parallelism is not accounted yet; use cp = 1")
    return Share(plan=plan, coordinate=coordinate, num_ranks=1)


def shares(plan: Plan) -> tuple[Share, ...]:
    """One rank of each kind: for every pipeline rank, one tp coordinate for each distinct number of vocabulary rows.

    Raises ValueError for a layout with context parallelism.
    """
    layout = plan.layout
    kinds = []
    for pp_coordinate in range(layout.pp):
        candidates = [
            share_of(plan, Coordinate(dp=0, pp=pp_coordinate, cp=0, tp=tp_coordinate))
            for tp_coordinate in range(layout.tp)
        ]
        rows = [share.vocabulary_rows for share in candidates]
        kinds += [
            dataclasses.replace(candidates[rows.index(held)], num_ranks=layout.dp * count)
            for held, count in Counter(rows).items()
        ]
    return tuple(kinds)
