"""What would each rank of a layout hold, send, compute and keep? Read off the partitioned code itself, run dry.

    plan + step  ->  one rank of each kind, each run for a moment  ->  figures of all stages

Every kind of rank (`parallel/share.py`) whose stage is not like one seen before is run, alone, at the full world size
(`parallel/dry.py`). Blocks of one side are equal, so of more than two on a stage the first two are run: the first keeps
what all share, and the second stands for the rest. Microbatches are equal but for a smaller last one: the first and the
last are run, or one if they are equal and share no tables of rope. Stages that hold equal blocks and ends differ in
names and in microbatches in flight: one is run for all. What has been run is put together again:

    FLOPs, events, kept bytes     the second block's, once for each further block and under its name
    microbatches                  the first's for all but the last
    peak                          the schedule played with what each microbatch keeps (`parallel/activations.py`)

Ranks with several stages, those that split their backward, those of pipelines that ship keys and values and those that
sum gradients while the backward runs are run whole. Parameters and what follows the last backward are never put
together: they are those of the whole stage.
`compose=False` runs all blocks and all microbatches instead, which must and does give the same.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from models.costs import Side
from parallel.activations import Saved, peak_over
from parallel.dry import dry_batch, dry_engine
from parallel.figures import PhaseFlops, RankFigures, StepShape
from parallel.layouts import microbatch_sizes
from parallel.ledger import Event, Total
from parallel.meter import ActionFigures, Meter, Segment
from parallel.operators import Operator
from parallel.plan import Plan
from parallel.schedule import is_split
from parallel.schedules import BUILDERS
from parallel.share import Share, shares

NUM_RUN = 2
"""Blocks of one side, and microbatches, that stand for any number."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankTrace:
    """One kind of rank.

    Attributes:
        figures: as predicted and measured ranks have them.
        num_ranks: how many ranks of the mesh are of this kind.
        operators: every distinct (operator, shapes, phase) of its forwards, recomputations and backwards.
    """

    figures: RankFigures
    num_ranks: int
    operators: frozenset[Operator]


def trace(
    plan: Plan, shape: StepShape, *, ranks: Sequence[Share] | None = None, compose: bool = True
) -> tuple[RankTrace, ...]:
    """Traces one step for one rank of each kind, by stage and then by vocabulary rows.

    Args:
        plan: of the model and the layout; any number of ranks.
        shape: sequences of a data-parallel rank, lengths, dtype.
        ranks: whose figures are wanted (`share_of`); None stands for one of each kind.
        compose: whether equal blocks, microbatches and stages are run once; otherwise everything is run.

    Raises:
        ValueError: what the engine does not run, lengths that the model cannot read, sequences that do not fill the
            microbatches, or a process that has joined a process group.
    """
    shape.check(plan.config)
    plan.layout.check_sequences(shape.num_sequences * plan.layout.dp)
    wanted = shares(plan) if ranks is None else ranks
    layout = plan.layout
    is_plain = layout.chunks == 1 and layout.transport != "kv" and not is_split(plan.table)
    if not compose or not is_plain or layout.gradient_bucket_bytes:
        return tuple(_run_whole(share, shape) for share in wanted)
    run: dict[Any, _Run] = {}
    traces = []
    for share in wanted:
        kind = _kind(share)
        if kind not in run:
            run[kind] = _run_part(share, shape)
        traces.append(run[kind].trace(share, shape))
    return tuple(traces)


def _rank(share: Share) -> int:
    return share.layout.mesh.rank(share.coordinate)


def _run_whole(share: Share, shape: StepShape) -> RankTrace:
    with dry_engine(share.plan, _rank(share), shape.dtype_bytes) as engine:
        batch = dry_batch(share.config, shape)
        with Meter(engine) as meter:
            engine.step(batch, observer=meter)
    return RankTrace(figures=meter.figures(), num_ranks=share.num_ranks, operators=_distinct(meter))


def _distinct(meter: Meter) -> frozenset[Operator]:
    return frozenset(operator for operator in meter.operators.counts if operator[2] != "step")


# ---- running a part -------------------------------------------------------------------------------------------------


def _kind(share: Share) -> Any:
    """Stages of equal kind differ in names and in their place in the schedule only."""
    held = tuple(
        (side, len(share.blocks(side)), share.has_embedding(side), share.has_end(side)) for side in share.sides
    )
    (stage,) = share.stages
    shared = tuple(shared for shared in share.plan.shared if share.coordinate.pp in shared.ranks)
    edges = tuple(
        (edge.first - stage.index, edge.last - stage.index, edge.carries)
        for edge in share.plan.edges
        if stage.index in (edge.first, edge.last)
    )
    return held, share.vocabulary_rows, shared, stage.inputs, stage.outputs, edges


def _run_part(share: Share, shape: StepShape) -> "_Run":
    sizes = microbatch_sizes(shape.num_sequences, share.layout.microbatches)
    is_one_enough = len(set(sizes)) == 1 and share.config.positions != "rope"
    run_sizes = sizes[:1] if is_one_enough else sizes if len(sizes) <= NUM_RUN else (sizes[0], sizes[-1])
    # All forwards before all backwards, so that it shows what two microbatches in flight keep together.
    layout = share.layout.replace(microbatches=len(run_sizes), schedule="gpipe")
    table = BUILDERS["gpipe"](share.plan.ranks, len(run_sizes))
    plan = dataclasses.replace(share.plan, layout=layout, table=table)
    with dry_engine(plan, _rank(share), shape.dtype_bytes) as engine:
        batch = dry_batch(share.config, dataclasses.replace(shape, num_sequences=sum(run_sizes)))
        meter = Meter(engine)
        for model in (engine.model, *engine.parts.values()):
            _drop_blocks(model)
        with meter:
            engine.step(batch, observer=meter)
    return _Run(share=share, meter=meter)


def _drop_blocks(model: nn.Module) -> None:
    """Leaves the first blocks of each side."""
    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        if stack is not None:
            stack.block = nn.ModuleDict(dict(list(stack.block.items())[:NUM_RUN]))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Microbatch:
    """What a microbatch takes on one rank."""

    flops: PhaseFlops
    saved: Saved
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A rank of which a part was run."""

    share: Share
    meter: Meter

    def trace(self, share: Share, shape: StepShape) -> RankTrace:
        """What was run, put together to the whole of a rank whose stage is of the same kind."""
        num_microbatches = len(microbatch_sizes(shape.num_sequences, share.layout.microbatches))
        (stage,) = share.stages
        run = self._microbatches()
        first, last, num_first = run[0], run[-1], num_microbatches - 1
        figures = dataclasses.replace(
            self.meter.figures(),
            coordinate=share.coordinate,
            events=_added((first.events, num_first), (last.events, 1), (self._step_events(), 1)),
            flops=first.flops.times(num_first) + last.flops,
            saved_bytes=first.saved.total,
            peak_saved_bytes=peak_over(
                share.plan.table[share.coordinate.pp],
                {
                    (stage.index, microbatch): (first if microbatch < num_first else last).saved
                    for microbatch in range(num_microbatches)
                },
            ),
        )
        if stage != self.share.stages[0]:
            figures = dataclasses.replace(figures, events=_renamed(figures.events, self.share, share))
        return RankTrace(figures=figures, num_ranks=share.num_ranks, operators=_distinct(self.meter))

    def _microbatches(self) -> list[_Microbatch]:
        """Each microbatch that was run, all blocks put together."""
        forwards = [figures for figures in self.meter.actions if figures.action.kind == "forward"]
        backwards = [figures for figures in self.meter.actions if figures.action.kind == "backward"]
        # The first backward leaves what the other microbatch keeps too.
        shared = sum(segment.kept for figures in (forwards[0], backwards[0]) for segment in figures.segments)
        if len(forwards) == 1:
            shared = 0
        edges = self._edge_events()
        told = []
        for forward, backward in zip(forwards, backwards, strict=True):
            there, back = self._whole(forward), self._whole(backward)
            total = sum(segment.kept for segment in there) + (0 if forward is forwards[0] else shared)
            microbatch = _Microbatch(
                flops=sum((segment.flops for segment in (*there, *back)), start=PhaseFlops()),
                saved=Saved(by_part={"all": total}, shared={"all": shared}, on_top=_on_top(back)),
                events=(*self._all_blocks(forward), *self._all_blocks(backward), *edges[forward.action.microbatch]),
            )
            told.append(microbatch)
        return told

    def _whole(self, figures: ActionFigures) -> list[Segment]:
        """The stretches of an action with every block of the stage in its place."""
        whole = []
        for segment in figures.segments:
            whole += [segment] * len(self._stands_for(segment.block))
        return whole

    def _all_blocks(self, figures: ActionFigures) -> list[Event]:
        """The events of an action with those of every block of the stage, under its name."""
        events = []
        for event in figures.events:
            block = _block_of(event.site)
            rest = event.site[len(block) :]
            events += [dataclasses.replace(event, site=name + rest) for name in self._stands_for(block)]
        return events

    def _stands_for(self, block: str) -> tuple[str, ...]:
        """Names of the blocks that one which was run stands for, itself first; what is no block stands for itself."""
        if not block:
            return ("",)
        side, _, index = block.rpartition(".block.")
        held = self.share.blocks("encoder" if side == "encoder" else "decoder")
        is_last_run = int(index) == held[min(len(held), NUM_RUN) - 1]
        return (block, *(f"{side}.block.{other}" for other in held[NUM_RUN:] if is_last_run))

    def _edge_events(self) -> list[list[Event]]:
        """Transfers of each microbatch: those that are alike but for their size go by in the order of microbatches."""
        told: list[list[Event]] = [[] for _ in range(NUM_RUN)]
        seen: Counter[tuple[str, ...]] = Counter()
        for event in self.meter.events:
            if event.operation in ("send", "receive"):
                alike = (event.operation, event.site, event.stream, event.phase)
                told[seen[alike]].append(event)
                seen[alike] += 1
        return told

    def _step_events(self) -> tuple[Event, ...]:
        return tuple(event for event in self.meter.events if event.phase == "step")


def _on_top(segments: Sequence[Segment]) -> int:
    """Most by which stretches, one after the other, exceed what is kept at their start."""
    level = most = 0
    for segment in segments:
        most = max(most, level + segment.on_top)
        level += segment.kept
    return most


def _added(*counted: tuple[Iterable[Event], int]) -> tuple[Total, ...]:
    """Events, each group so many times over."""
    added: Counter[Event] = Counter()
    for events, times in counted:
        for event in events:
            added[event] += times
    return tuple(Total(event=event, count=count) for event, count in added.items() if count)


# ---- names ----------------------------------------------------------------------------------------------------------

_BLOCK = re.compile(r"(?P<side>encoder|decoder)\.block\.(?P<index>\d+)")
_EDGE = re.compile(r"edge\.(?P<first>\d+)-(?P<last>\d+)")


def _block_of(site: str) -> str:
    """The block that a site lies in, empty outside of blocks."""
    match = _BLOCK.match(site)
    return match[0] if match else ""


def _renamed(events: Iterable[Total], run: Share, share: Share) -> tuple[Total, ...]:
    """Events of the stage that was run, under the names that they have on another of its kind."""

    def rename(site: str) -> str:
        block, edge = _BLOCK.match(site), _EDGE.fullmatch(site)
        if block is not None:
            side: Side = "encoder" if block["side"] == "encoder" else "decoder"
            index = int(block["index"]) - run.blocks(side)[0] + share.blocks(side)[0]
            return f"{side}.block.{index}{site[block.end() :]}"
        if edge is not None:
            shift = share.stages[0].index - run.stages[0].index
            return f"edge.{int(edge['first']) + shift}-{int(edge['last']) + shift}"
        return site

    return tuple(
        dataclasses.replace(total, event=dataclasses.replace(total.event, site=rename(total.event.site)))
        for total in events
    )
