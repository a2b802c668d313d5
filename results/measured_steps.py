"""What did a measured step of a pipeline look like, and what does the simulator make of its costs?

    spans of the typical step   ->  table as executed, measured timeline
    costs of actions            ->  simulated timeline of the same table
    costs by the profile        ->  another one, that owes nothing to the run

Costs of a stage's kind of action are means over the microbatches of a step; medians over the steps count. Wall seconds
make timelines that are held against wall time; busy seconds those of ranks that have a core each, which is all that can
be told where ranks share cores. Two more costs are read off the spans of the step:

    message   from the end of what made it to the start of what used it, where the user had nothing else to do
    gap       between two actions of a rank that waits for nobody: the executor's own work

Bytes held are those of the closed forms, along these times. Left out: what ranks do after the pipeline.
"""

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from models.config import ModelConfig
from parallel.edges import Edge
from parallel.figures import Optimizer, StepShape
from parallel.layouts import Layout
from parallel.plan import Plan
from parallel.plans import plan
from parallel.schedule import Action, Direction, Kind, Product, Table
from parallel.simulate import StageSeconds, TransferCost, TransferSeconds, every_message, simulate
from parallel.step_time import held_bytes, microbatch_scale
from parallel.timeline import Message, Span, Steps, Timeline
from results.schema import ActionFacts, ProfileFacts, Record

CLOCKS = ("busy_seconds", "wall_seconds")


def steps_of(records: Iterable[Record]) -> "list[MeasuredStep]":
    """Every run of a pipeline whose spans are told."""
    return [MeasuredStep(record) for record in records if is_pipeline(record)]


def is_pipeline(record: Record) -> bool:
    """Whether a record tells the spans of several pipeline ranks."""
    is_timed = bool(record.actions) and all(action.busy_seconds for action in record.actions)
    is_looked_into = is_timed and bool(record.spans) and bool(record.stages)
    return record.status == "ok" and is_looked_into and any(rank.pp for rank in record.ranks)


class MeasuredStep:
    """The typical step of a run. Of ranks that differ in dp and tp alone the first stands for all."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.layout = Layout.from_dict(record.layout)

    # ---- what was run -------------------------------------------------------------------------------------------

    @functools.cached_property
    def rows(self) -> tuple[tuple[Span, ...], ...]:
        """Spans by wall time, one row a pipeline rank."""
        found: dict[int, list[Span]] = {pp: [] for pp in range(self.layout.pp)}
        place = {rank.rank: rank.pp for rank in self.record.ranks if rank.dp == rank.tp == 0}
        for span in self.record.spans:
            if span.rank in place:
                action = Action.parse(span.action)
                found[place[span.rank]].append(Span(action, span.start_seconds, span.end_seconds))
        return tuple(map(tuple, found.values()))

    @functools.cached_property
    def table(self) -> Table:
        """As it was executed."""
        return tuple(tuple(span.action for span in row) for row in self.rows)

    @functools.cached_property
    def plan(self) -> Plan:
        """Of the stages and the table that ran, whatever they were made from."""
        config = ModelConfig.from_dict(self.record.model)
        cut = tuple(stage.first_block for stage in self.record.stages[1:])
        # Any placement runs gpipe, and its table is made without costs.
        made = plan(config, self.layout.replace(cut=cut, schedule="gpipe"))
        return dataclasses.replace(made, table=self.table)

    @functools.cached_property
    def measured(self) -> Timeline:
        """Spans, and messages from the end of what made them to the start of what used them."""
        return Timeline(spans=self.rows, messages=tuple(self._messages()))

    @property
    def shape(self) -> StepShape:
        """Of a data-parallel rank's step."""
        data, rank = self.record.data, self.record.ranks[0]
        assert data is not None, "a run that ended well had a batch"
        return StepShape(
            num_sequences=data.num_sequences // self.layout.dp,
            source_length=data.source_length,
            target_length=data.target_length,
            dtype_bytes=rank.parameter_bytes // rank.parameters,
            is_ragged=data.source_valid_tokens < data.num_sequences * data.source_length,
        )

    @property
    def pipeline_seconds(self) -> list[float]:
        """Wall time from the beginning of each timed step to the end of the last action."""
        lists = [rank.pipeline_seconds for rank in self.record.ranks]
        return [max(samples) for samples in zip(*lists, strict=True)]

    def held(self, timeline: Timeline) -> tuple[Steps, ...]:
        """Bytes of each pipeline rank over a timeline, by the closed forms."""
        optimizer: Optimizer = "adamw" if self.record.ranks[0].optimizer_bytes else "sgd"
        return held_bytes(self.plan, self.shape, timeline, optimizer=optimizer)

    # ---- what it cost -------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        return len(self.record.step_seconds)

    def costs(self, clock: str, step: int | None = None) -> StageSeconds:
        """Costs of a whole microbatch in one timed step; the medians of all when none is named."""
        return self._costs[clock][-1 if step is None else step]

    @functools.cached_property
    def _costs(self) -> Mapping[str, Sequence[StageSeconds]]:
        grouped: dict[tuple[int, str], list[ActionFacts]] = defaultdict(list)
        for action in self.record.actions:
            grouped[action.stage, action.kind].append(action)
        # The last microbatch may be smaller: what it lacks is no saving of the others.
        factor = self.layout.microbatches / sum(self.scale)
        found: dict[str, list[StageSeconds]] = {}
        for clock in CLOCKS:
            samples = {
                key: [
                    factor * statistics.fmean(one) for one in zip(*(getattr(row, clock) for row in rows), strict=True)
                ]
                for key, rows in grouped.items()
            }
            by_step = [{key: values[index] for key, values in samples.items()} for index in range(self.num_steps)]
            medians = {key: statistics.median(values) for key, values in samples.items()}
            found[clock] = [self._stage_seconds(costs) for costs in (*by_step, medians)]
        return found

    def _stage_seconds(self, costs: Mapping[tuple[int, str], float]) -> StageSeconds:
        def of(kind: Kind) -> list[float]:
            return [costs.get((stage.stage, kind), 0.0) for stage in self.record.stages]

        whole = of("backward")
        inputs = tuple(map(sum, zip(whole, of("backward_input"), strict=True)))
        return StageSeconds(
            forward=tuple(of("forward")), backward_input=inputs, backward_weight=tuple(of("backward_weight"))
        )

    @property
    def scale(self) -> tuple[float, ...]:
        """Size of each microbatch against the first."""
        return microbatch_scale(self.layout, self.shape)

    @functools.cached_property
    def message_seconds(self) -> float:
        """Median of the messages that their users waited for; 0 where nobody waited."""
        return statistics.median(self._waits[0] or [0.0])

    @functools.cached_property
    def gap_seconds(self) -> float:
        """Median between two actions of a rank of which the second waited for nobody; 0 where all waited."""
        return statistics.median(self._waits[1] or [0.0])

    @functools.cached_property
    def _waits(self) -> tuple[list[float], list[float]]:
        arrivals: dict[Product, float] = {}
        for message in self.measured.messages:
            used = _used(message)
            arrivals[used] = max(arrivals.get(used, 0.0), message.start_seconds)
        waited, gaps = [], []
        for row in self.measured.spans:
            free = 0.0
            for span in row:
                made = arrivals.get(span.action.gives) if span.action.gives else None
                if made is not None and made > free:
                    waited.append(max(0.0, span.start_seconds - made))
                elif free:
                    gaps.append(span.start_seconds - free)
                free = span.end_seconds
        return waited, gaps

    # ---- what is made of it -------------------------------------------------------------------------------------

    @functools.cached_property
    def simulated(self) -> Timeline:
        """With the medians of the run's own wall seconds, messages and gaps."""
        return self.simulated_step(None)

    def simulated_step(self, step: int | None) -> Timeline:
        """With the wall seconds of one timed step, and the messages and gaps of the typical one."""
        return self._simulate(
            self.costs("wall_seconds", step),
            transfer_seconds=every_message(TransferSeconds(latency=self.message_seconds)),
            gap_seconds=self.gap_seconds,
        )

    def played(self, step: int | None = None) -> Timeline:
        """With the run's busy seconds alone: every rank on a core of its own, messages free."""
        return self._simulate(self.costs("busy_seconds", step))

    def profiled(self, *, with_messages: bool) -> Timeline | None:
        """With the costs of the profile; None where there is none."""
        profile = self.record.profile
        if profile is None:
            return None
        return self._simulate(profile_seconds(profile), transfer_seconds=self._sent(profile) if with_messages else None)

    def _sent(self, profile: ProfileFacts) -> TransferCost:
        """Cost of a message by a profile and by the bytes that were counted."""
        size_bytes: dict[str, float] = defaultdict(float)
        for fact in self.record.edges:
            size_bytes[fact.edge] += fact.payload_bytes / fact.count

        def transfer_seconds(edge: Edge, direction: Direction) -> TransferSeconds:
            first, last = (edge.first, edge.last) if direction == "forward" else (edge.last, edge.first)
            occupancy = profile.seconds_per_byte * size_bytes[f"{first}>{last}"]
            return TransferSeconds(latency=profile.latency_seconds, occupancy=occupancy)

        return transfer_seconds

    def _simulate(
        self, seconds: StageSeconds, *, transfer_seconds: TransferCost | None = None, gap_seconds: float = 0.0
    ) -> Timeline:
        """Each action is followed by a gap, which is no part of it."""
        kinds = {action.kind for row in self.table for action in row}

        def longer(costs: Sequence[float], *, is_run: bool) -> tuple[float, ...]:
            return tuple(cost + gap_seconds * is_run for cost in costs)

        found = simulate(
            self.table,
            StageSeconds(
                forward=longer(seconds.forward, is_run=True),
                backward_input=longer(seconds.backward_input, is_run=True),
                # A whole backward is one action: its gap stands with the first half.
                backward_weight=longer(seconds.backward_weight, is_run="backward_weight" in kinds),
            ),
            edges=self.plan.edges,
            transfer_seconds=transfer_seconds,
            scale=self.scale,
        )
        rows = (
            tuple(
                span._replace(end_seconds=span.end_seconds - gap_seconds * self.scale[span.action.microbatch])
                for span in row
            )
            for row in found.spans
        )
        return dataclasses.replace(found, spans=tuple(rows))

    def _messages(self) -> Iterator[Message]:
        made = {span.action.gives: span for row in self.rows for span in row if span.action.gives}
        ranks = self.plan.ranks
        for edge in self.plan.edges:
            if ranks[edge.first] == ranks[edge.last]:
                continue
            for microbatch in range(self.layout.microbatches):
                ways: tuple[tuple[Direction, int, int], ...] = (
                    ("forward", edge.first, edge.last),
                    ("backward", edge.last, edge.first),
                )
                for way, source, target in ways:
                    maker, user = made[way, source, microbatch], made[way, target, microbatch]
                    yield Message(edge, way, microbatch, maker.end_seconds, user.start_seconds)


def _used(message: Message) -> Product:
    """What is made with a message."""
    edge = message.edge
    return message.direction, edge.last if message.direction == "forward" else edge.first, message.microbatch


def profile_seconds(profile: ProfileFacts) -> StageSeconds:
    """Durations that a profile tells."""
    return StageSeconds(
        forward=tuple(profile.forward_seconds),
        backward_input=tuple(profile.backward_input_seconds),
        backward_weight=tuple(profile.backward_weight_seconds),
    )
