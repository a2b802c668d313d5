"""How many bytes does the fullest rank of any layout need, whatever its cut, chunks and schedule?

    bytes of a rank = states + largest of its moments

A moment of a rank counts the microbatches that each of its stages keeps, whole or for the weights' half of a backward
only, and tells whose backward runs. A row of a schedule has few moments that no other one exceeds, the same for every
model: they are found once a table. Stages with as many blocks of each side and the same ends keep the same: what they
keep is computed once. Every number is that of `parallel/predict.py`. Left out: communication, ragged microbatches.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from models.config import ModelConfig
from parallel.activations import Saved, saved_bytes
from parallel.figures import Optimizer, StepShape
from parallel.layouts import Layout, Transport
from parallel.mesh import Coordinate
from parallel.parameters import StateBytes, num_tensors, parameter_counts, states_of
from parallel.partition import Stage, stages_of
from parallel.placement import stage_ranks
from parallel.plan import Plan
from parallel.schedule import Row, Table
from parallel.schedules import BUILDERS
from parallel.share import Share


class Moment(NamedTuple):
    """What a rank keeps while it runs its row.

    `whole` and `halves` count, by the rank's own stages, microbatches whose backward is to come, and those of which
    only the weights' half is; `running` is the stage whose backward runs, -1 for none, and `is_split` whether it is the
    input's half.
    """

    whole: tuple[int, ...]
    halves: tuple[int, ...]
    running: int
    is_split: bool = False


class Held(NamedTuple):
    """Parameters of one rank: elements and tensors."""

    num_elements: int
    num_tensors: int


def moments(row: Row) -> tuple[Moment, ...]:
    """The moments of a row that no other moment of it exceeds."""
    mine = sorted({action.stage for action in row})
    at = {stage: index for index, stage in enumerate(mine)}
    whole, halves = [0] * len(mine), [0] * len(mine)
    seen: set[Moment] = set()
    for action in row:
        index = at[action.stage]
        match action.kind:
            case "forward":
                whole[index] += 1
                seen.add(Moment(tuple(whole), tuple(halves), -1))
            case "backward_weight":
                halves[index] -= 1
            case _:
                seen.add(Moment(tuple(whole), tuple(halves), index, is_split=action.kind == "backward_input"))
                whole[index] -= 1
                if action.kind == "backward_input":
                    halves[index] += 1
                    seen.add(Moment(tuple(whole), tuple(halves), -1))
    most: list[Moment] = []
    for moment in sorted(seen, key=lambda moment: (-sum(moment.whole + moment.halves), -moment.running, moment)):
        if not any(_exceeds(other, moment) for other in most):
            most.append(moment)
    return tuple(most)


def _exceeds(moment: Moment, other: Moment) -> bool:
    if other.running >= 0 and (other.running, other.is_split) != (moment.running, moment.is_split):
        return False
    counts = zip(moment.whole + moment.halves, other.whole + other.halves, strict=True)
    return all(more >= less for more, less in counts)


@dataclasses.dataclass(kw_only=True)
class RankBytes:
    """Bytes of one model's ranks under any layout.

    Attributes:
        config: the model.
        source_length, target_length: positions of a sequence, 0 for a stream that the model lacks.
        dtype_bytes: of an element.
        optimizer: whose states are held.
        master_weights: whether it updates a float32 copy.
    """

    config: ModelConfig
    source_length: int
    target_length: int
    dtype_bytes: int
    optimizer: Optimizer = "adamw"
    master_weights: bool = False

    def __post_init__(self) -> None:
        self._saved: dict[tuple[object, ...], Saved] = {}
        self._held: dict[tuple[object, ...], tuple[Held, ...]] = {}
        self._elements: dict[tuple[object, ...], int] = {}
        # A table of many microbatches is large; its moments are few.
        self._moments = functools.cache(self._find_moments)

    def held(self, layout: Layout, cut: Sequence[int]) -> tuple[Held, ...]:
        """Parameters of every pipeline rank; of its tp ranks the last one, which has most rows of the vocabulary."""
        key = (layout.tp, layout.vocabulary, layout.pp, layout.placement, layout.transport == "kv", tuple(cut))
        if key not in self._held:
            stages = stages_of(self.config, cut)
            shares = [self._share(layout, stages, rank) for rank in range(layout.pp)]
            self._held[key] = tuple(Held(parameter_counts(share).total, num_tensors(share)) for share in shares)
        return self._held[key]

    def block_elements(self, layout: Layout, block: int) -> int:
        """Parameters of a block that is no end of its stack, nor on the stage that makes the memory."""
        key = (layout.tp, layout.transport == "kv", block)
        if key not in self._elements:
            alone = Stage(index=0, first=block, last=block + 1, inputs=(), outputs=())
            self._elements[key] = parameter_counts(self._share(_alone(layout), (alone,), 0)).total
        return self._elements[key]

    def states(self, layout: Layout, held: Held) -> StateBytes:
        """States of a rank that holds so many parameters."""
        return states_of(*held, layout, self.dtype_bytes, self.optimizer, master_weights=self.master_weights)

    def saved(self, layout: Layout, stage: Stage, size: int) -> Saved:
        """What a stage keeps of a microbatch of `size` sequences."""
        middle, end = self.config.num_encoder_blocks, self.config.num_blocks
        encoder = max(0, min(stage.last, middle) - stage.first)
        ends = (stage.first == 0, stage.first <= middle < stage.last, stage.first < middle <= stage.last)
        slices = (encoder, stage.num_blocks - encoder, *ends, stage.last == end)
        options = (layout.sp, layout.recompute, layout.memory_gather, layout.saved_input, layout.attention)
        key = (*slices, layout.tp, layout.vocabulary, layout.transport == "kv", *options, size)
        if key not in self._saved:
            alone = Stage(index=0, first=stage.first, last=stage.last, inputs=(), outputs=())
            shape = StepShape(
                num_sequences=size,
                source_length=self.source_length,
                target_length=self.target_length,
                dtype_bytes=self.dtype_bytes,
            )
            self._saved[key] = saved_bytes(self._share(_alone(layout), (alone,), 0), shape, size)
        return self._saved[key]

    def fullest(self, layout: Layout, cut: Sequence[int], size: int, table: Table | None = None) -> tuple[int, int]:
        """Bytes of the rank of a layout that needs most, and its pipeline coordinate.

        Args:
            layout: its cut is not read.
            cut: first blocks of stages 1, 2, ...
            size: sequences of a microbatch, all equally large.
            table: its schedule, which has to be given where it has no name (`list`).
        """
        stages, ranks = stages_of(self.config, cut), stage_ranks(layout.placement, layout.pp, layout.chunks)
        if table is None:
            rows = self._moments(layout.schedule, ranks, layout.microbatches)
        else:
            rows = tuple(moments(row) for row in table)
        needs = []
        for rank, held in enumerate(self.held(layout, cut)):
            saved = [
                self.saved(layout, stage, size) for stage, holder in zip(stages, ranks, strict=True) if holder == rank
            ]
            needs.append(self.states(layout, held).total + _peak(rows[rank], saved))
        most = max(needs)
        return most, needs.index(most)

    def least(self, layout: Layout, size: int) -> float:
        """No cut and no schedule of a layout's degrees has a fullest rank that needs less: a pp-th of the whole.

        Every rank holds its states, and keeps one microbatch of all its stages when it has just run their forwards.
        """
        whole = stages_of(self.config, ())[0]
        return (self.states(layout, self.whole(layout)).total + self.saved(layout, whole, size).total) / layout.pp

    def whole(self, layout: Layout) -> Held:
        """Parameters of a rank that holds all stages."""
        return self.held(_alone(layout), ())[0]

    def _share(self, layout: Layout, stages: Sequence[Stage], rank: int) -> Share:
        # Entries and copies of shared parameters tell of communication, which takes no bytes here.
        plan = Plan(config=self.config, layout=layout, stages=tuple(stages), shared=(), entries=(), edges=(), table=())
        return Share(plan=plan, coordinate=Coordinate(dp=0, pp=rank, cp=0, tp=layout.tp - 1), num_ranks=1)

    @staticmethod
    def _find_moments(schedule: str, ranks: Sequence[int], microbatches: int) -> tuple[tuple[Moment, ...], ...]:
        return tuple(moments(row) for row in BUILDERS[schedule](ranks, microbatches))


def _alone(layout: Layout) -> Layout:
    """The same work on one stage; only whether keys and values come from another one matters to it."""
    transport: Transport = "kv" if layout.transport == "kv" else "relay"
    return layout.replace(
        pp=1, chunks=1, placement="linear", schedule="1f1b", cut="even", transport=transport, microbatches=1
    )


def _peak(row: Iterable[Moment], saved: Sequence[Saved]) -> int:
    shared = [sum(one.shared.values()) for one in saved]
    most = 0
    for moment in row:
        tables: dict[str, int] = {}
        now = 0
        for index, (one, whole, halves) in enumerate(zip(saved, moment.whole, moment.halves, strict=True)):
            now += whole * (one.total - shared[index]) + halves * one.deferred
            if whole:
                tables |= one.shared
        on_top = 0
        if moment.running >= 0:
            running = saved[moment.running]
            on_top = running.on_top_split if moment.is_split else running.on_top
        most = max(most, now + sum(tables.values()) + on_top)
    return most
