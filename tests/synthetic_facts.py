"""What would the ranks of a run have reported of stages, blocks and themselves? Closed forms with seeded noise."""

import random

from models.costs import block_costs
from parallel.plan import Plan
from results.predicted import Work
from results.schema import BlockFacts, RankFacts, StageFacts
from tests.synthetic_spans import pipeline_seconds

NUM_SEQUENCES = 8
NUM_STEPS = 9
SECONDS_PER_FLOP = 1e-9


class Steps:
    """Samples of timed steps: a duration with noise, in the order in which they are asked for."""

    def __init__(self, *, noise: float, seed: str) -> None:
        self._noise = noise
        self._random = random.Random(seed)

    def samples(self, seconds: float) -> list[float]:
        return [seconds * (1 + self._noise * self._random.uniform(-1, 1)) for _ in range(NUM_STEPS)]


def stages(partition: Plan, lengths: tuple[int, int], steps: Steps) -> list[StageFacts]:
    config = partition.config
    work = Work.of(config, *lengths)
    starts = [stage.first for stage in partition.stages[1:]]
    facts = []
    for stage, flops, parameters in zip(
        partition.stages, work.stage_flops(starts), work.stage_parameters(starts), strict=True
    ):
        forward = flops * NUM_SEQUENCES
        num_encoder_blocks = max(0, min(stage.last, config.num_encoder_blocks) - stage.first)
        in_flight = min(partition.layout.microbatches, partition.layout.pp - stage.index)
        facts.append(
            StageFacts(
                stage=stage.index,
                first_block=stage.first,
                last_block=stage.last - 1,
                num_encoder_blocks=num_encoder_blocks,
                num_decoder_blocks=stage.num_blocks - num_encoder_blocks,
                has_embedding=stage.index == 0,
                has_head=not stage.outputs,
                parameters=parameters,
                forward_flops=forward,
                peak_saved_bytes=forward // 64 * in_flight // partition.layout.microbatches,
                forward_busy_seconds=steps.samples(forward * SECONDS_PER_FLOP),
                backward_busy_seconds=steps.samples(2 * forward * SECONDS_PER_FLOP),
            )
        )
    return facts


def busy(stage: StageFacts) -> float:
    return stage.forward_busy_seconds[0] + stage.backward_busy_seconds[0]


def ranks(
    partition: Plan, stages: list[StageFacts], step_seconds: list[float], lengths: tuple[int, int]
) -> list[RankFacts]:
    mesh, config = partition.layout.mesh, partition.config
    rows = []
    for rank in range(mesh.size):
        at = mesh.coordinate(rank)
        stage = stages[at.pp]
        busy_seconds = [sum(both) for both in zip(stage.forward_busy_seconds, stage.backward_busy_seconds, strict=True)]
        parameters = stage.parameters // mesh.tp
        read = [
            length
            for length, held in zip(lengths, (stage.num_encoder_blocks, stage.num_decoder_blocks), strict=True)
            if held and length
        ]
        rows.append(
            RankFacts(
                rank=rank,
                dp=at.dp,
                pp=at.pp,
                tp=at.tp,
                parameters=parameters,
                parameter_bytes=4 * parameters,
                gradient_bytes=4 * parameters,
                optimizer_bytes=8 * parameters,
                peak_saved_bytes=stage.peak_saved_bytes // mesh.tp,
                peak_allocated_bytes=0,
                valid_tokens=NUM_SEQUENCES * sum(read) // mesh.dp - (rank % 2) * config.num_heads,
                padded_tokens=(rank % 2) * config.num_heads,
                step_seconds=step_seconds,
                busy_seconds=busy_seconds,
                wait_seconds=[max(0.0, step - own) for step, own in zip(step_seconds, busy_seconds, strict=True)],
                startup_seconds=0.25,
                pipeline_seconds=pipeline_seconds(partition, stages, at.pp),
            )
        )
    return rows


def blocks(partition: Plan, lengths: tuple[int, int], steps: Steps) -> list[BlockFacts]:
    rows = []
    for index, cost in enumerate(block_costs(partition.config, *lengths, NUM_SEQUENCES)):
        (stage,) = (stage.index for stage in partition.stages if stage.first <= index < stage.last)
        rows.append(
            BlockFacts(
                block=index,
                side=cost.side,
                index=cost.index,
                stage=stage,
                parameters=cost.parameters.total,
                forward_flops=cost.flops.total,
                forward_busy_seconds=steps.samples(cost.flops.total * SECONDS_PER_FLOP),
                backward_busy_seconds=steps.samples(2 * cost.flops.total * SECONDS_PER_FLOP),
            )
        )
    return rows
