"""What does each way of bringing the memory to the decoder's stages cost: bytes of every edge, of a rank, and time?

    relay     from stage to stage: every decoder edge carries memory and target     L b D e + l b D e
    direct    from the encoder's last stage to each decoder stage                   L b D e a stage
    kv        keys and values of each cross-attention instead, sent directly        L b 2 K/t e a block

with L and l source and target positions, b sequences, D width, K/t a rank's width of keys, e element bytes. Gradients
take the same way back with as many bytes. With kv the encoder's last stage computes keys and values for all decoder
blocks elsewhere, 4 L b D K/t FLOPs each, and holds their weights; cuts that balance costs know it. Every number is read
off the plan that is run: stages, edges and their tensors (`parallel/edges.py`).

    sent        by a rank in a step, forward and backward; the most of any rank is its egress
    waiting     sent and not yet used: what receivers must have room for, all ranks together, at its peak

Ways that no engine runs are predicted all the same. Left out: bytes that stages keep for backwards.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from models.config import ModelConfig
from parallel.edges import Edge, not_run
from parallel.figures import StepShape
from parallel.layouts import TRANSPORTS, Layout, Transport
from parallel.machine import Machine
from parallel.machine_profile import machine_profile
from parallel.partition import Stage
from parallel.plan import Plan
from parallel.plans import plan
from parallel.simulate import simulate
from parallel.stage_costs import stage_seconds
from parallel.step_time import edge_transfers, microbatch_scale
from parallel.timeline import Message, Timeline

CLOSE = 0.01
"""Ways whose pipelines take at most so much longer than the fastest are told apart by what they send."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EdgeBytes:
    """What one microbatch sends over an edge forward; backward it is the same. Zero within a rank."""

    edge: Edge
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TransportCost:
    """One way to bring the memory to those who read it.

    Attributes:
        way: which.
        stages: of the cut.
        edges: of one microbatch.
        egress_bytes: that the rank which sends most sends in a step.
        egress_rank: that rank, of the pipeline.
        sent_bytes: of all pipeline ranks in a step.
        waiting_bytes: most that is sent and not yet used.
        timeline: of the pipeline.
        is_run: whether an engine runs it.
    """

    way: Transport
    stages: tuple[Stage, ...]
    edges: tuple[EdgeBytes, ...]
    egress_bytes: int
    egress_rank: int
    sent_bytes: int
    waiting_bytes: int
    timeline: Timeline
    is_run: bool


def chosen_way(costs: Sequence[TransportCost]) -> TransportCost:
    """Of the ways that are run, and close to the fastest of them, the one whose busiest rank sends least."""
    able = [cost for cost in costs if cost.is_run]
    fastest = min(cost.timeline.makespan_seconds for cost in able)
    close = [cost for cost in able if cost.timeline.makespan_seconds <= fastest * (1 + CLOSE)]
    return min(close, key=lambda cost: (cost.egress_bytes, cost.waiting_bytes, cost.timeline.makespan_seconds))


def transport_costs(machine: Machine, config: ModelConfig, layout: Layout, shape: StepShape) -> list[TransportCost]:
    """Costs of every way on a machine, in the order of `TRANSPORTS`.

    Args:
        machine: whose devices and links.
        config: a model with cross-attention.
        layout: its partitioning; its own transport is not read.
        shape: sequences of a data-parallel rank, lengths, dtype.

    Raises:
        ValueError: a model without a memory, a pipeline of one rank, or as `machine_profile` and `plan` do.
    """
    if not config.has_cross_attention:
        raise ValueError(
            f"{config.name} is {config.architecture}: there is no memory to bring; take an encoder_decoder"
        )
    if layout.pp == 1:
        raise ValueError("pp = 1: nothing is sent; try pp >= 2")
    return [_cost(machine, way, config, layout, shape) for way in TRANSPORTS]


def _cost(machine: Machine, way: Transport, config: ModelConfig, layout: Layout, shape: StepShape) -> TransportCost:
    own = layout.replace(transport=way)
    profile = machine_profile(machine, config, own, shape)
    made = plan(config, own, profile)
    size_of, scale = profile.edge_bytes, microbatch_scale(own, shape)
    timeline = simulate(
        made.table,
        stage_seconds(profile, made.stages),
        edges=made.edges,
        transfer_seconds=edge_transfers(machine, made, size_of),
        scale=scale,
    )
    sent = _sent(made, timeline, size_of, scale)
    rank, most = max(sent.items(), key=lambda item: (item[1], -item[0]))
    crosses = {edge: made.ranks[edge.first] != made.ranks[edge.last] for edge in made.edges}
    return TransportCost(
        way=way,
        stages=made.stages,
        edges=tuple(EdgeBytes(edge=edge, size_bytes=size_of(edge) * crosses[edge]) for edge in made.edges),
        egress_bytes=round(most),
        egress_rank=rank,
        sent_bytes=round(sum(sent.values())),
        waiting_bytes=round(_most_waiting(timeline, size_of, scale)),
        timeline=timeline,
        is_run=not_run(own) is None,
    )


def _sent(made: Plan, timeline: Timeline, size_of: Callable[[Edge], int], scale: tuple[float, ...]) -> dict[int, float]:
    """Bytes that each pipeline rank sends in a step."""
    sent = dict.fromkeys(range(made.layout.pp), 0.0)
    for message in timeline.messages:
        edge = message.edge
        sender = made.ranks[edge.first if message.direction == "forward" else edge.last]
        sent[sender] += size_of(edge) * scale[message.microbatch]
    return sent


def _most_waiting(timeline: Timeline, size_of: Callable[[Edge], int], scale: tuple[float, ...]) -> float:
    """Peak over time of what was sent and is not yet used."""
    changes = sorted(
        change
        for message, used_seconds in _used(timeline)
        for change in (
            (message.start_seconds, size_of(message.edge) * scale[message.microbatch]),
            (used_seconds, -size_of(message.edge) * scale[message.microbatch]),
        )
    )
    now = most = 0.0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def _used(timeline: Timeline) -> Iterator[tuple[Message, float]]:
    """Every message with the start of the action that needs it."""
    starts = {
        (action.stage, action.microbatch, "forward" if action.kind == "forward" else "backward"): start_seconds
        for row in timeline.spans
        for action, start_seconds, _ in row
        if action.kind != "backward_weight"
    }
    for message in timeline.messages:
        stage = message.edge.last if message.direction == "forward" else message.edge.first
        yield message, starts[stage, message.microbatch, message.direction]
