"""What a layout does to each named module, as data that the partitioner, the predictor, the printer and the tests read.

An entry names a module, a style and what happens to a tensor that enters and leaves it. Under tensor parallelism a
column-parallel product is followed by a row-parallel one (Shoeybi et al. 2019, arXiv 1909.08053); sequence parallelism
shards what lies between (Korthikanti et al. 2022, arXiv 2205.05198):

                 entering                                  leaving
    tp           copy    nothing fwd, all-reduce bwd       reduce   all-reduce fwd, nothing bwd
    tp + sp      gather  all-gather fwd, reduce-scatter    scatter  reduce-scatter fwd, all-gather bwd

A product whose input enters by `gather` keeps the shard, and gathers it again for its weight's gradient; by
`gather_once` it keeps the whole (`saved_input` of a layout), all else is as in `gather`.

What has no entry is whole on every tp rank and computes there what it does alone: without sp all tensors between the
sharded products are the same on every rank, and so are the gradients of what is held whole, which nothing sums. Such
are embeddings, head and loss of a whole vocabulary. With tp = 1 a plan has no entries: degree 1 changes no module.
Which entries an architecture has is told by the builders in `parallel/plans.py`.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Literal

from models.config import ModelConfig
from parallel.edges import Edge
from parallel.layouts import Layout
from parallel.partition import Shared, Stage
from parallel.placement import stage_ranks
from parallel.schedule import Table

Style = Literal[
    "colwise",
    "rowwise",
    "vocabulary_embedding",
    "vocabulary_head",
    "vocabulary_loss",
    "head_bias_table",
    "memory_entry",
    "sequence_slice",
    "sequence_replicated",
    "sharded_dropout",
]
Entering = Literal["none", "copy", "gather", "gather_once"]
Leaving = Literal["none", "reduce", "scatter"]
StreamName = Literal["source", "memory", "target", "none"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a fused projection: `count` units of `width` rows each; a unit is never cut."""

    count: int
    width: int

    def share(self, tp: int, coordinate: int) -> tuple[int, int]:
        """Rows [start, stop) of a rank. With fewer units than ranks, neighbouring ranks hold the same unit."""
        if self.count >= tp:
            first, last = self.count * coordinate // tp, self.count * (coordinate + 1) // tp
        else:
            first = self.count * coordinate // tp
            last = first + 1
        return first * self.width, last * self.width

    def replicas(self, tp: int) -> int:
        """How many ranks hold the same unit."""
        return max(1, tp // self.count)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """What the layout does to one module."""

    module: str
    style: Style
    stream: StreamName = "none"
    entering: Entering = "none"
    leaving: Leaving = "none"
    parts: tuple[Part, ...] = ()
    """Of a colwise projection's output rows, a rowwise one's input columns, or the vocabulary's rows."""

    @property
    def detail(self) -> str:
        """The choices as text; modules are treated alike when style and detail are equal."""
        chosen = {"stream": self.stream, "entering": self.entering, "leaving": self.leaving}
        told = [f"{key}={value}" for key, value in chosen.items() if value != "none"]
        if self.parts:
            told.append("parts=" + "+".join(f"{part.count}x{part.width}" for part in self.parts))
        return " ".join(told)

    def shard(self, parameter: str, tp: int, coordinate: int) -> "Shard":
        """The rows or columns of `parameter` (`weight` or `bias`) that a rank holds."""
        if self.style not in _SHARDED_DIM or (self.style == "rowwise" and parameter == "bias"):
            return WHOLE
        dim = _SHARDED_DIM[self.style]
        ranges, rows, offset = [], [], 0
        for part in self.parts:
            start, stop = part.share(tp, coordinate)
            ranges.append((offset + start, offset + stop))
            rows.append((stop - start, part.replicas(tp)))
            offset += part.count * part.width
        own = sum(size for size, replicas in rows if replicas == 1)
        total = sum(size for size, _ in rows)
        replicas = max(replicas for _, replicas in rows)
        return Shard(dim=dim, ranges=tuple(ranges), replicated_rows=(own, total), replicas=replicas)


_SHARDED_DIM: dict[str, int] = {
    "colwise": 0,
    "rowwise": 1,
    "vocabulary_embedding": 0,
    "vocabulary_head": 0,
    "head_bias_table": 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Which slices of a full parameter a rank holds, put together along `dim`.

    Local rows [start, stop) of `replicated_rows` are also held by the `replicas` neighbouring ranks of the tp axis (KV
    heads fewer than ranks); their gradients are summed over those ranks. No ranges: the whole parameter.
    """

    dim: int = 0
    ranges: tuple[tuple[int, int], ...] = ()
    replicated_rows: tuple[int, int] = (0, 0)
    replicas: int = 1

    @property
    def is_whole(self) -> bool:
        return not self.ranges

    def shape(self, full: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the shard of a parameter of shape `full`."""
        if self.is_whole:
            return full
        size = sum(stop - start for start, stop in self.ranges)
        return (*full[: self.dim], size, *full[self.dim + 1 :])


WHOLE = Shard()

NO_BLOCK = -1
"""Stands for the block of what is in none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The whole description of one partitioning of one model."""

    config: ModelConfig
    layout: Layout
    stages: tuple[Stage, ...]
    shared: tuple[Shared, ...]
    entries: tuple[Entry, ...]
    edges: tuple[Edge, ...]
    table: Table

    @property
    def ranks(self) -> tuple[int, ...]:
        """Pipeline coordinate of every stage."""
        return stage_ranks(self.layout.placement, self.layout.pp, self.layout.chunks)

    def stages_of(self, coordinate: int) -> tuple[Stage, ...]:
        """The stages of the rank at a pipeline coordinate, in the order of the model."""
        return tuple(stage for stage, rank in zip(self.stages, self.ranks, strict=True) if rank == coordinate)

    def blocks_of(self, coordinate: int) -> tuple[int, ...]:
        """Numbers in the flat block list of the blocks of the rank at a pipeline coordinate."""
        return tuple(block for stage in self.stages_of(coordinate) for block in range(stage.first, stage.last))

    def entry_of(self, parameter: str) -> Entry | None:
        """The entry whose module owns a parameter: that of the module itself or of the nearest module around it."""
        owners = {entry.module: entry for entry in self.entries if entry.style != "sharded_dropout"}
        module = parameter
        while "." in module:
            module = module.rpartition(".")[0]
            if module in owners:
                return owners[module]
        return None

    def shard(self, parameter: str, coordinate: int) -> Shard:
        """Which part of a named parameter the rank at `coordinate` of the tp axis holds."""
        entry = self.entry_of(parameter)
        if entry is None or parameter.removeprefix(entry.module + ".") not in ("weight", "bias"):
            return WHOLE
        return entry.shard(parameter.rpartition(".")[2], self.layout.tp, coordinate)

    def sums_over_sequence(self, parameter: str) -> bool:
        """Whether every tp rank holds the whole parameter but sees a part of the sequence only (sp)."""
        entry = self.entry_of(parameter)
        return self.layout.sp and (entry is None or self.shard(parameter, 0).is_whole)

    def sharded_length(self, length: int) -> int:
        """A stream's length padded so that its positions divide over the ranks that shard it."""
        multiple = self.layout.cp * (self.layout.tp if self.layout.sp else 1)
        return math.ceil(length / multiple) * multiple

    def block_number(self, module: str) -> int:
        """Index in the flat block list of the block that a module is or belongs to, `NO_BLOCK` outside of blocks."""
        side, *rest = module.split(".")
        if side not in ("encoder", "decoder") or rest[0] != "block":
            return NO_BLOCK
        return int(rest[1]) + (self.config.num_encoder_blocks if side == "decoder" else 0)

    def lines(self) -> list[str]:
        """The plan as text, one line a stage and an entry."""
        told = [
            f"stage {stage.index} on rank {rank}: blocks {stage.first} to {stage.last - 1}, "
            f"sends {self._sent(stage.index) or 'nothing'}"
            for stage, rank in zip(self.stages, self.ranks, strict=True)
        ]
        return told + [f"{entry.module}: {entry.style} {entry.detail}".rstrip() for entry in self.entries]

    def _sent(self, stage: int) -> str:
        leaving = (edge for edge in self.edges if edge.first == stage)
        return "; ".join(f"{', '.join(edge.carries)} to {edge.last}" for edge in leaving)


Builder = Callable[[ModelConfig, Layout], tuple[Entry, ...]]
