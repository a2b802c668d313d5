"""What do the measurements of all ranks say about a cell? One `Report` a rank, put together into the rows of a record.

    reports of all ranks  ->  ranks, stages, blocks, communication, edges, operators

Every rank reports what it alone knows; rank 0 adds up, takes the largest or the mean as each field of
`results/schema.py` says. Everything here is arithmetic on plain numbers and runs without processes. Left out: medians
and ratios, which readers derive.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from launch.engine_run import Counted, EngineRun, TimedBlocks, TimedStep
from launch.parts import TimedParts
from models.batch import Batch
from models.config import ModelConfig, Stream
from parallel.engines.native import NativeEngine
from parallel.ledger import Event, totals
from parallel.mesh import Coordinate
from parallel.partition import Stage
from parallel.plan import NO_BLOCK, Plan, Shard
from results.schema import (
    BlockFacts,
    CommunicationFacts,
    EdgeFacts,
    OperatorFacts,
    PartFacts,
    PlanFacts,
    RankFacts,
    StageFacts,
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank tells rank 0."""

    facts: RankFacts
    coordinate: Coordinate
    counted: Counted
    steps: tuple[TimedStep, ...]
    block_steps: tuple[TimedBlocks, ...]
    parts: tuple[TimedParts, ...]
    shards: dict[str, tuple[Shard, tuple[int, ...]]]
    """Part of the whole and local shape of every parameter, by canonical name; of the native engine."""


def report(
    run: EngineRun,
    counted: Counted,
    steps: Sequence[TimedStep],
    block_steps: Sequence[TimedBlocks],
    parts: Sequence[TimedParts],
) -> Report:
    """The report of this rank, when all its passes are done."""
    engine, at = run.engine, run.comm.coordinate
    valid, padded = positions(run.share, run.plan, at, engine.held_blocks)
    facts = RankFacts(
        rank=run.comm.rank,
        dp=at.dp,
        pp=at.pp,
        tp=at.tp,
        parameters=engine.num_parameters,
        parameter_bytes=engine.parameter_bytes,
        gradient_bytes=engine.gradient_bytes,
        optimizer_bytes=engine.optimizer_bytes,
        peak_saved_bytes=counted.peak_saved_bytes,
        peak_allocated_bytes=counted.peak_allocated_bytes,
        valid_tokens=valid,
        padded_tokens=padded,
        startup_seconds=run.startup_seconds,
        step_seconds=[step.wall for step in steps],
        busy_seconds=[step.busy for step in steps if step.busy is not None],
        wait_seconds=[max(0.0, step.wall - step.busy) for step in steps if step.busy is not None],
        pipeline_seconds=[step.actions[-1].end for step in steps if step.actions],
    )
    shards = {}
    if isinstance(engine, NativeEngine):
        shards = {name: (shard, tuple(weight.shape)) for name, (shard, weight) in engine.named_shards("weight").items()}
    return Report(
        facts=facts,
        coordinate=at,
        counted=counted,
        steps=tuple(steps),
        block_steps=tuple(block_steps),
        parts=tuple(parts),
        shards=shards,
    )


def positions(share: Batch, plan: Plan, at: Coordinate, blocks: Sequence[int]) -> tuple[int, int]:
    """Valid and padding positions that a rank computes on in a step, over the streams of its blocks."""
    layout = plan.layout
    valid = padded = 0
    for stream in _streams(plan.config, blocks):
        length = plan.sharded_length(share.stream_length(stream))
        size = length // (layout.cp * layout.tp if layout.sp else layout.cp)
        first = size * (at.cp * layout.tp + at.tp if layout.sp else at.cp)
        kept = sum(min(max(own - first, 0), size) for own in share.lengths(stream))
        valid += kept
        padded += share.num_sequences * size - kept
    return valid, padded


def _streams(config: ModelConfig, blocks: Sequence[int]) -> list[Stream]:
    streams: list[Stream] = ["source"] if any(block < config.num_encoder_blocks for block in blocks) else []
    return [*streams, "target"] if any(block >= config.num_encoder_blocks for block in blocks) else streams


def part_facts(reports: Sequence[Report]) -> list[PartFacts]:
    """One row a rank whose steps were watched."""
    return [
        PartFacts(
            rank=one.facts.rank,
            products_seconds=[step.products for step in one.parts],
            copies_seconds=[step.copies for step in one.parts],
            other_operators_seconds=[step.others for step in one.parts],
            products_alone_seconds=[step.products_alone for step in one.parts if step.products_alone is not None],
            messages_alone_seconds=[step.messages_alone for step in one.parts if step.messages_alone is not None],
        )
        for one in reports
        if one.parts
    ]


def plan_facts(plan: Plan) -> list[PlanFacts]:
    """The entries of the plan, each with the block that its module belongs to."""
    rows = []
    for entry in plan.entries:
        side = entry.module.partition(".")[0]
        rows.append(
            PlanFacts(
                module=entry.module,
                block=plan.block_number(entry.module),
                side=side if side in ("encoder", "decoder") else "none",
                style=entry.style,
                detail=entry.detail,
            )
        )
    return rows


def stage_facts(plan: Plan, reports: Sequence[Report]) -> list[StageFacts]:
    """One row a stage."""
    config, num_encoder_blocks = plan.config, plan.config.num_encoder_blocks
    rows = []
    for stage, rank in zip(plan.stages, plan.ranks, strict=True):
        holders = [one for one in reports if one.coordinate.pp == rank]
        encoder = max(0, min(stage.last, num_encoder_blocks) - stage.first)
        has_embedding = stage.first == 0 or stage.first <= num_encoder_blocks < stage.last
        rows.append(
            StageFacts(
                stage=stage.index,
                first_block=stage.first,
                last_block=stage.last - 1,
                num_encoder_blocks=encoder,
                num_decoder_blocks=stage.num_blocks - encoder,
                has_embedding=has_embedding,
                has_head=stage.last == config.num_blocks,
                parameters=sum(
                    size for name, size in parameters(holders).items() if _owner(name, plan, rank) == stage.index
                ),
                forward_flops=sum(_of_stage(one.counted.forward_flops, stage) for one in holders),
                peak_saved_bytes=max(one.facts.peak_saved_bytes or 0 for one in holders),
                forward_busy_seconds=_means([[step.forward[stage.index] for step in one.steps] for one in holders]),
                backward_busy_seconds=_means([[step.backward[stage.index] for step in one.steps] for one in holders]),
            )
        )
    return rows


def _of_stage(flops: Mapping[tuple[int, int], int], stage: Stage) -> int:
    return sum(count for (index, _), count in flops.items() if index == stage.index)


def _owner(name: str, plan: Plan, rank: int) -> int:
    """The stage of a rank that a parameter counts under: the first that uses it."""
    mine, block = plan.stages_of(rank), plan.block_number(name)
    boundary = plan.config.num_encoder_blocks
    if block != NO_BLOCK:
        holding = [stage for stage in mine if stage.first <= block < stage.last]
        # For a block elsewhere, keys and values are made where the memory is.
        return (holding or [stage for stage in mine if stage.first < boundary <= stage.last])[0].index
    side = name.partition(".")[0]
    using = [stage for stage in mine if side != "encoder" or stage.first < boundary]
    using = [stage for stage in using if side != "decoder" or stage.last > boundary]
    using = [stage for stage in using if side != "head" or stage.last == plan.config.num_blocks]
    if name.startswith(f"{side}.norm."):
        # A stack's final norm stands behind its last block.
        return using[-1].index
    # A tied parameter has the name of its first user in the model, which may live on another rank.
    return (using or mine)[0].index


def block_facts(plan: Plan, reports: Sequence[Report]) -> list[BlockFacts]:
    """One row a block."""
    rows = []
    for stage, rank in zip(plan.stages, plan.ranks, strict=True):
        holders = [one for one in reports if one.coordinate.pp == rank]
        sizes = parameters(holders)
        for block in range(stage.first, stage.last):
            is_encoder = block < plan.config.num_encoder_blocks
            side = "encoder" if is_encoder else "decoder"
            index = block if is_encoder else block - plan.config.num_encoder_blocks
            prefix = f"{side}.block.{index}."
            rows.append(
                BlockFacts(
                    block=block,
                    side=side,
                    index=index,
                    stage=stage.index,
                    parameters=sum(size for name, size in sizes.items() if name.startswith(prefix)),
                    forward_flops=sum(one.counted.forward_flops.get((stage.index, block), 0) for one in holders),
                    forward_busy_seconds=_means([[step.forward[block] for step in one.block_steps] for one in holders]),
                    backward_busy_seconds=_means(
                        [[step.backward[block] for step in one.block_steps] for one in holders]
                    ),
                )
            )
    return rows


def parameters(holders: Iterable[Report]) -> dict[str, int]:
    """Size of every whole parameter of a stage, put together from the shards of its ranks, copies counted once."""
    ranges: dict[str, set[tuple[int, int]]] = defaultdict(set)
    rest: dict[str, int] = {}
    for one in holders:
        for name, (shard, shape) in one.shards.items():
            size = 1
            for dim, length in enumerate(shape):
                size *= length if shard.is_whole or dim != shard.dim else 1
            rest[name] = size
            ranges[name] |= {(0, 1)} if shard.is_whole else set(shard.ranges)
    # Equal ranges are copies; different ones never overlap, because a unit is never cut.
    return {name: size * sum(stop - start for start, stop in ranges[name]) for name, size in rest.items()}


def communication_facts(reports: Sequence[Report]) -> list[CommunicationFacts]:
    """Equal events of each rank, added up."""
    return [
        CommunicationFacts(
            rank=one.facts.rank,
            operation=total.event.operation,
            axis=total.event.axis,
            group_size=total.event.group_size,
            site=total.event.site,
            stream=total.event.stream,
            phase=total.event.phase,
            count=total.count,
            payload_bytes=total.payload_bytes,
            wire_bytes=total.wire_bytes,
        )
        for one in reports
        for total in totals(one.counted.events)
    ]


def edge_facts(reports: Sequence[Report]) -> list[EdgeFacts]:
    """What each pair of stages on different ranks sends, by direction and tensor."""
    counts: Counter[tuple[str, str]] = Counter()
    payload: Counter[tuple[str, str]] = Counter()
    for one in reports:
        for event in one.counted.events:
            if event.operation == "send":
                key = (_direction(event), event.stream)
                counts[key] += 1
                payload[key] += event.payload_bytes
    return [
        EdgeFacts(edge=edge, tensor=tensor, count=count, payload_bytes=payload[edge, tensor])
        for (edge, tensor), count in sorted(counts.items())
    ]


def _direction(event: Event) -> str:
    first, _, last = event.site.removeprefix("edge.").partition("-")
    return f"{first}>{last}" if event.phase == "forward" else f"{last}>{first}"


def operator_facts(reports: Sequence[Report]) -> list[OperatorFacts]:
    """Distinct operators of one rank of every stage, counts added over the stages."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for one in reports:
        if one.coordinate.dp == one.coordinate.tp == 0:
            counts.update(one.counted.operators)
    return [
        OperatorFacts(operator=operator, shapes=shapes, phase=phase, count=count)
        for (operator, shapes, phase), count in sorted(counts.items())
    ]


def _means(lists: Sequence[Sequence[float]]) -> list[float]:
    """Mean over the ranks, one entry a step."""
    return [fmean(samples) for samples in zip(*lists, strict=True)]
