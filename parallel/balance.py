"""What does a named cut balance, and where does it fall? One list of blocks to cut for each name.

    parameters   parameters of a stage, a tied tensor once                    nothing for what is sent
    flops        FLOPs of a microbatch, forward and backward                  messages as the profile costs them
    times        busy seconds of a microbatch, forward and backward           messages as the profile costs them
    memory       bytes of a rank: parameters, gradients, AdamW's moments      nothing for what is sent
                 and what is kept of the microbatches in flight
    aligned      as flops or times, but every stage encoder XOR decoder, each side evenly

A stage pays for what it sends: hidden states over its end, gradients over its start; nothing to its own rank. Memory
that travels directly is paid by the stage that makes it, once for every later stage, and its gradient by each of those,
as a message of its own; so are keys and values, of as many blocks as each reads. Where encoder and decoder are folded,
the encoder fills the first half of the stages.

How many microbatches a stage keeps is read off the schedule, at the moment when its rank keeps most; a `list` schedule,
which is made after the cut, counts as the named one of its placement. Left out: the search itself (`parallel/cuts.py`).
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence

from models.config import ModelConfig, keys_values_name
from parallel.activations import Saved
from parallel.cuts import Cost, Cutting, best, order
from parallel.figures import StepShape
from parallel.layouts import Layout, Schedule
from parallel.partition import Carried, aligned_cuts, crossing
from parallel.placement import Placement, stage_ranks
from parallel.schedule import Row
from parallel.schedules import BUILDERS
from parallel.slices import Slices

_STANDS_FOR_LIST: dict[Placement, Schedule] = {
    "linear": "1f1b",
    "interleaved": "interleaved",
    "folded": "interleaved",
    "v": "zb_v",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Balance:
    """What decides over the cuts of one model under one layout.

    Attributes:
        config: the model.
        layout: all of it is read.
        shape: of one microbatch.
        work: what blocks [first, last) cost with their ends, a whole number.
        message: what it costs to send tensors together, a whole number.
    """

    config: ModelConfig
    layout: Layout
    shape: StepShape
    work: Callable[[int, int], int]
    message: Callable[[tuple[Carried, ...]], int]

    def first_blocks(self) -> tuple[int, ...]:
        """First blocks of stages 1, 2, ... of the layout's cut."""
        cutting = self.cutting()
        has_sides = self.config.has_cross_attention and self.layout.num_stages > 1
        aligned = aligned_cuts(self.config, self.layout) if has_sides else ()
        if self.layout.cut == "aligned":
            return min(aligned, key=lambda cut: order(cutting, (0, *cut, self.config.num_blocks)))
        return best(cutting, aligned)

    def cutting(self) -> Cutting:
        """The list of blocks to cut."""
        fixed = {}
        if self.layout.placement == "folded":
            fixed = {self.layout.num_stages // 2: self.config.num_encoder_blocks}
        weighs_work = self.layout.cut in ("flops", "times", "aligned")
        held: dict[str, Cost] = {"parameters": self._parameters, "memory": self._bytes}
        weights = (0, 1)
        if self.layout.cut == "memory":
            weights = (1, 0)
        elif self.layout.schedule == "list":
            weights = (2 * self.layout.microbatches, self.layout.pp - 1)
        return Cutting(
            num_blocks=self.config.num_blocks,
            ranks=self.ranks,
            held=self._work if weighs_work else held[str(self.layout.cut)],
            sent=self.sent if weighs_work else _nothing,
            fixed=fixed,
            per_rank=weights[0],
            per_stage=weights[1],
        )

    @functools.cached_property
    def ranks(self) -> tuple[int, ...]:
        """Pipeline rank of every stage."""
        return stage_ranks(self.layout.placement, self.layout.pp, self.layout.chunks)

    # ---- what is held -------------------------------------------------------------------------------------------

    @functools.cached_property
    def _slices(self) -> Slices:
        return Slices(config=self.config, layout=self.layout, shape=self.shape)

    def _work(self, _stage: int, first: int, last: int) -> int:
        return self._works(*self._alike(first, last))

    @functools.cached_property
    def _works(self) -> Callable[[int, int], int]:
        return functools.cache(self.work)

    def _parameters(self, _stage: int, first: int, last: int) -> int:
        return self._slices.parameters(*self._alike(first, last))

    def _bytes(self, stage: int, first: int, last: int) -> int:
        states, saved = self._held(*self._alike(first, last))
        whole, waiting = self._in_flight[stage]
        kept = whole * saved.total + waiting * saved.deferred - max(0, whole - 1) * sum(saved.shared.values())
        return states + kept + saved.on_top

    @functools.cached_property
    def _held(self) -> Callable[[int, int], tuple[int, Saved]]:
        """Bytes of states, and what is kept of a microbatch; the same for every stage."""
        return functools.cache(
            lambda first, last: (self._slices.state_bytes(first, last), self._slices.saved(first, last))
        )

    def _alike(self, first: int, last: int) -> tuple[int, int]:
        """The first slice that holds as many blocks of each side and the same ends."""
        middle, end = self.config.num_encoder_blocks, self.config.num_blocks
        begin, end = (0, middle) if last <= middle else (middle, end)
        is_inside = begin < first and last < end
        return (begin + 1, begin + 1 + last - first) if is_inside else (first, last)

    @functools.cached_property
    def _in_flight(self) -> tuple[tuple[int, int], ...]:
        layout = self.layout
        schedule = _STANDS_FOR_LIST[layout.placement] if layout.schedule == "list" else layout.schedule
        table = BUILDERS[schedule](self.ranks, layout.microbatches)
        kept = {stage: counts for row in table for stage, counts in fullest(row).items()}
        return tuple(kept[stage] for stage in range(layout.num_stages))

    # ---- what is sent -------------------------------------------------------------------------------------------

    def sent(self, stage: int, first: int, last: int) -> int:
        """What a stage's messages cost, if it has blocks [first, last)."""
        num_encoder_blocks = self.config.num_encoder_blocks
        is_direct = self.layout.transport != "relay" and self.config.has_cross_attention
        onward, back = crossing(self.config, last), crossing(self.config, first)
        cost = 0
        if is_direct and first < num_encoder_blocks <= last:
            later = range(stage + 1, len(self.ranks))
            dealt = self._dealt(last, len(later))
            onward = _without_memory(onward) + (dealt[0] if dealt else ())
            cost += sum(self._message(stage, other, names) for other, names in zip(later[1:], dealt[1:], strict=True))
        elif is_direct and first >= num_encoder_blocks:
            onward = _without_memory(onward)
        if is_direct and first >= num_encoder_blocks:
            got = self._dealt(first, 1, last)[0]
            if first == num_encoder_blocks:
                back = got
            else:
                # Whoever makes the memory is on another rank, at most one stage aside.
                back = _without_memory(back)
                cost += self.message(got)
        return cost + self._message(stage, stage + 1, onward) + self._message(stage, stage - 1, back)

    def _dealt(self, first: int, num_stages: int, last: int | None = None) -> list[tuple[Carried, ...]]:
        """What stages behind block `first` get of the memory; keys and values cost the same whoever gets them."""
        if self.layout.transport != "kv":
            return [("memory",)] * num_stages
        middle = self.config.num_encoder_blocks
        names = [keys_values_name(block - middle) for block in range(first, last or self.config.num_blocks)]
        return [tuple(names[index::num_stages]) for index in range(num_stages)]

    def _message(self, stage: int, other: int, names: tuple[Carried, ...]) -> int:
        if not names or self.ranks[stage] == self.ranks[other]:
            return 0
        return self.message(names)


def fullest(row: Row) -> dict[int, tuple[int, int]]:
    """Microbatches that each stage of a rank keeps, at the moment when they are most together.

    Returns by stage: those whose backward is to come, and those of which only the weights' half is to come.
    """
    whole: Counter[int] = Counter()
    waiting: Counter[int] = Counter()
    most, kept = 0, {action.stage: (0, 0) for action in row}
    for action in row:
        whole[action.stage] += {"forward": 1, "backward": -1, "backward_input": -1}.get(action.kind, 0)
        waiting[action.stage] += {"backward_input": 1, "backward_weight": -1}.get(action.kind, 0)
        if whole.total() + waiting.total() > most:
            most = whole.total() + waiting.total()
            kept = {stage: (whole[stage], waiting[stage]) for stage in kept}
    return kept


def _without_memory(names: Sequence[Carried]) -> tuple[Carried, ...]:
    return tuple(name for name in names if name != "memory")


def _nothing(_stage: int, _first: int, _last: int) -> int:
    return 0
