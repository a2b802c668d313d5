"""When would the actions of a synthetic step have run? As simulated with its own costs, without messages.

So that what is measured and what is simulated agree exactly: a test that wants them to differ changes one of the two.
"""

from collections.abc import Sequence

from parallel.plan import Plan
from parallel.simulate import StageSeconds, simulate
from parallel.timeline import Timeline
from results.schema import ActionFacts, SpanFacts, StageFacts


def pipeline_seconds(partition: Plan, stages: Sequence[StageFacts], pp: int) -> list[float]:
    """End of the last action of a pipeline rank, by step."""
    num_steps = len(stages[0].forward_busy_seconds)
    return [_timeline(partition, stages, step).spans[pp][-1].end_seconds for step in range(num_steps)]


def spans(partition: Plan, stages: Sequence[StageFacts], step: int) -> list[SpanFacts]:
    """Of one step, every rank of the mesh: those of one pipeline coordinate alike."""
    rows = _timeline(partition, stages, step).spans
    return [
        SpanFacts(
            rank=rank,
            action=str(span.action),
            start_seconds=span.start_seconds,
            end_seconds=span.end_seconds,
            busy_seconds=span.end_seconds - span.start_seconds,
        )
        for rank in range(partition.layout.world_size)
        for span in rows[partition.layout.mesh.coordinate(rank).pp]
    ]


def actions(partition: Plan, stages: Sequence[StageFacts]) -> list[ActionFacts]:
    """Costs of a microbatch, of every rank of the mesh."""
    rows = []
    num_steps = len(stages[0].forward_busy_seconds)
    for rank in range(partition.layout.world_size):
        at = partition.layout.mesh.coordinate(rank)
        row = partition.table[at.pp]
        for stage, kind in dict.fromkeys((action.stage, action.kind) for action in row):
            taken = [_seconds(partition, stages, step).by_kind[kind][stage] for step in range(num_steps)]
            rows.append(ActionFacts(rank=rank, stage=stage, kind=kind, busy_seconds=taken, wall_seconds=taken))
    return rows


def _timeline(partition: Plan, stages: Sequence[StageFacts], step: int) -> Timeline:
    return simulate(partition.table, _seconds(partition, stages, step), edges=partition.edges)


def _seconds(partition: Plan, stages: Sequence[StageFacts], step: int) -> StageSeconds:
    """Of one microbatch; both halves of a backward alike."""
    microbatches = partition.layout.microbatches
    backward = [stage.backward_busy_seconds[step] / microbatches / 2 for stage in stages]
    return StageSeconds(
        forward=tuple(stage.forward_busy_seconds[step] / microbatches for stage in stages),
        backward_input=tuple(backward),
        backward_weight=tuple(backward),
    )
