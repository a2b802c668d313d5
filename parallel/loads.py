"""How many bytes does the fullest rank of a layout need, for very many layouts of one model and step?

    bytes of a rank = states + peak of activations            peak = n kept - (n - 1) shared + on top

n microbatches are in flight, and `shared` of what a microbatch keeps is kept once for all. Numbers are computed once
for each kind of rank: equal blocks, ends and vocabulary rows, whatever the depth of the pipeline. Of the stages of a
kind the first one decides, because none has more microbatches in flight. Every number is that of `parallel.predict`,
which says far more, of one layout. Left out: communication.
"""

import dataclasses
import functools

from models.config import ModelConfig
from parallel.activations import Saved, saved_bytes
from parallel.figures import Optimizer, StepShape
from parallel.layouts import Layout, microbatch_sizes
from parallel.mesh import Coordinate
from parallel.parameters import StateBytes, state_bytes
from parallel.partition import stages
from parallel.plan import Plan
from parallel.schedule import max_in_flight
from parallel.schedules import BUILDERS
from parallel.share import Share


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What the fullest rank of a layout needs."""

    layout: Layout
    coordinate: Coordinate
    states: StateBytes
    peak_saved_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.states.total + self.peak_saved_bytes


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """Ranks that hold alike: the blocks of each side, the ends and the vocabulary rows of a tp degree.

    Attributes:
        held: what tells it from other kinds, whatever the depth.
        coordinate: the first stage's.
    """

    held: tuple[object, ...]
    coordinate: Coordinate


@dataclasses.dataclass(kw_only=True)
class Loads:
    """Loads of one model and step.

    Attributes:
        config: the model.
        shape: sequences of a data-parallel rank, lengths, dtype.
        base: microbatches and cut of all layouts that are asked for.
        optimizer: whose states are held.
        master_weights: whether it updates a float32 copy.

    Raises ValueError where microbatches are not equally large.
    """

    config: ModelConfig
    shape: StepShape
    base: Layout
    optimizer: Optimizer
    master_weights: bool

    def __post_init__(self) -> None:
        sizes = microbatch_sizes(self.shape.num_sequences, self.base.microbatches)
        if len(set(sizes)) > 1:
            raise ValueError(f"microbatches of {sizes[0]} and {sizes[-1]} sequences: give as many to each")
        self._size = sizes[0]
        self._cut = functools.cache(lambda pp: stages(self.config, self.base.replace(pp=pp)))
        self._kinds = functools.cache(self._make_kinds)
        self._in_flight = functools.cache(self._count_in_flight)
        self._saved: dict[object, Saved] = {}
        self._states: dict[object, StateBytes] = {}

    def fullest(self, layout: Layout) -> Load:
        """The rank of a layout that needs most."""
        loads = [self._load(layout, kind) for kind in self._kinds(layout.tp, layout.pp)]
        return max(loads, key=lambda load: load.total_bytes)

    def _load(self, layout: Layout, kind: _Kind) -> Load:
        saved_key = (kind.held, layout.sp, layout.recompute)
        if saved_key not in self._saved:
            self._saved[saved_key] = saved_bytes(self._share(layout, kind.coordinate), self.shape, self._size)
        states_key = (kind.held, layout.zero, layout.dp if layout.zero else 1)
        if states_key not in self._states:
            self._states[states_key] = state_bytes(
                self._share(layout, kind.coordinate),
                self.shape.dtype_bytes,
                self.optimizer,
                master_weights=self.master_weights,
            )
        saved = self._saved[saved_key]
        count = self._in_flight(layout.pp)[kind.coordinate.pp]
        peak = count * saved.total - (count - 1) * sum(saved.shared.values()) + saved.on_top
        return Load(layout=layout, coordinate=kind.coordinate, states=self._states[states_key], peak_saved_bytes=peak)

    def _share(self, layout: Layout, coordinate: Coordinate) -> Share:
        # Entries and copies of shared parameters tell of communication, which takes no bytes here.
        plan = Plan(
            config=self.config, layout=layout, stages=self._cut(layout.pp), shared=(), entries=(), edges=(), table=()
        )
        return Share(plan=plan, coordinate=coordinate, num_ranks=1)

    def _count_in_flight(self, pp: int) -> tuple[int, ...]:
        """Most microbatches that each stage keeps at once."""
        table = BUILDERS[self.base.schedule](range(pp), self.base.microbatches)
        return tuple(int(max_in_flight(row)) for row in table)

    def _make_kinds(self, tp: int, pp: int) -> tuple[_Kind, ...]:
        layout = self.base.replace(
            tp=tp, pp=pp, dp=1, cp=1, sp=False, zero=0, gradient_bucket_bytes=0, recompute="none"
        )
        first: dict[tuple[object, ...], Coordinate] = {}
        for index in range(pp):
            at = Coordinate(dp=0, pp=index, cp=0, tp=0)
            share = self._share(layout, at)
            blocks = tuple((side, len(share.blocks(side)), share.has_end(side)) for side in share.sides)
            names = share.token_weights
            for coordinate in range(tp if names else 1):
                at = Coordinate(dp=0, pp=index, cp=0, tp=coordinate)
                rows = tuple((name, self._share(layout, at).vocabulary(name)) for name in names)
                ends = tuple(share.has_embedding(side) for side in share.sides)
                first.setdefault((tp, blocks, ends, share.has_head, rows), at)
        return tuple(_Kind(held=held, coordinate=at) for held, at in first.items())
