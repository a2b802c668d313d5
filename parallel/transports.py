"""What does each way of bringing the memory to the decoder's stages cost: bytes of every edge, of a rank, and time?

    relay     from stage to stage: every decoder edge carries memory and target     L b D e + l b D e
    direct    from the encoder's last stage to each decoder stage                   L b D e a stage
    kv        keys and values of each cross-attention instead, sent directly        L b 2 K/t e a block

with L and l source and target positions, b sequences, D width, K/t a rank's width of keys, e element bytes. Gradients
take the same way back with as many bytes. With kv the encoder's last stage computes the keys and values of every
decoder block, 4 L b D K/t FLOPs each, and holds their weights; cuts that balance costs know it. Under sp a rank holds
L/t positions of a memory, but all positions of its heads' keys and values.

    sent        by a rank in a step, forward and backward; the most of any rank is its egress
    waiting     sent and not yet used: what receivers must have room for, all ranks together, at its peak

Only relay and direct are run (`parallel/edges.py`); kv is predicted. Left out: bytes that stages keep
for backwards; of kv, orders of actions made for its costs.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, get_args

from models.config import ModelConfig
from parallel.balance import Balance
from parallel.cuts import best
from parallel.edges import Edge, Transport
from parallel.figures import StepShape
from parallel.layouts import COSTED_CUTS, Layout
from parallel.machine import Machine
from parallel.machine_profile import machine_profile
from parallel.partition import Stage
from parallel.plan import Plan
from parallel.plans import plan
from parallel.profile import Profile, Work
from parallel.simulate import simulate
from parallel.stage_costs import seconds_of
from parallel.step_time import edge_transfers, microbatch_scale
from parallel.timeline import Message, Timeline

Way = Literal["relay", "direct", "kv"]
WAYS: tuple[Way, ...] = get_args(Way)
CLOSE = 0.01
"""Ways whose pipelines take at most so much longer than the fastest are told apart by what they send."""
_NANOSECONDS = 1e9
"""Cuts count in whole numbers."""


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
    """

    way: Way
    stages: tuple[Stage, ...]
    edges: tuple[EdgeBytes, ...]
    egress_bytes: int
    egress_rank: int
    sent_bytes: int
    waiting_bytes: int
    timeline: Timeline

    @property
    def is_run(self) -> bool:
        """Whether it is a layout's transport, and not predicted alone."""
        return self.way in get_args(Transport)


def chosen_way(costs: Sequence[TransportCost]) -> TransportCost:
    """Of the ways that are run, and close to the fastest of them, the one whose busiest rank sends least."""
    able = [cost for cost in costs if cost.is_run]
    fastest = min(cost.timeline.makespan_seconds for cost in able)
    close = [cost for cost in able if cost.timeline.makespan_seconds <= fastest * (1 + CLOSE)]
    return min(close, key=lambda cost: (cost.egress_bytes, cost.waiting_bytes, cost.timeline.makespan_seconds))


def transport_costs(machine: Machine, config: ModelConfig, layout: Layout, shape: StepShape) -> list[TransportCost]:
    """Costs of every way on a machine, in the order of `WAYS`.

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
    return [_cost(machine, way, config, layout, shape) for way in WAYS]


def _cost(machine: Machine, way: Way, config: ModelConfig, layout: Layout, shape: StepShape) -> TransportCost:
    own = layout.replace(transport="relay" if way == "relay" else "direct")
    profile = machine_profile(machine, config, own, shape)
    kv = KeysAndValues(machine=machine, profile=profile, layout=own)
    if way == "kv" and own.cut in COSTED_CUTS:
        own = own.replace(cut=kv.first_blocks())
    made = plan(config, own, profile)
    works = [kv.slice(stage.first, stage.last) if way == "kv" else profile.stage(stage) for stage in made.stages]
    size_of = functools.partial(kv.edge_bytes, made) if way == "kv" else profile.edge_bytes
    scale = microbatch_scale(own, shape)
    timeline = simulate(
        made.table,
        seconds_of(works),
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
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeysAndValues:
    """A model whose encoder's last stage makes keys and values for all of the decoder.

    Attributes:
        machine: that computes them.
        profile: of the model as it is, in seconds.
        layout: its tp, and its cut, are read.
    """

    machine: Machine
    profile: Profile
    layout: Layout

    @property
    def _width(self) -> int:
        """Of keys and values of a block, together, on a tp rank; it has one head of each at least."""
        config = self.profile.config
        return 2 * max(1, config.num_kv_heads // self.layout.tp) * config.head_width

    @functools.cached_property
    def block(self) -> Work:
        """Seconds of the product that makes them, for one decoder block; its three parts take equally long."""
        profile = self.profile
        positions = profile.source_length * profile.num_sequences
        seconds = self.machine.flops_seconds(2 * positions * profile.config.width * self._width, profile.dtype_bytes)
        return Work(seconds, seconds, seconds)

    @functools.cached_property
    def _readers(self) -> Profile:
        """The model without these products."""
        own, moved = self.profile.decoder_block, self.block
        left = Work(
            own.forward - moved.forward,
            own.backward_input - moved.backward_input,
            own.backward_weight - moved.backward_weight,
        )
        return dataclasses.replace(self.profile, decoder_block=left)

    def slice(self, first: int, last: int) -> Work:
        """Seconds of blocks [first, last) with what lives with them."""
        config = self.profile.config
        here = self._readers.slice(first, last)
        is_maker = first < config.num_encoder_blocks <= last
        return here + config.num_decoder_blocks * self.block if is_maker else here

    def first_blocks(self) -> tuple[int, ...]:
        """The cut that balances these costs."""
        profile = self.profile
        balance = Balance(
            config=profile.config,
            layout=self.layout,
            shape=profile.shape,
            work=lambda first, last: round(profile.slice(first, last).total * _NANOSECONDS),
            message=lambda names: round(profile.message(names) * _NANOSECONDS),
        )
        return best(
            dataclasses.replace(
                balance.cutting(), held=lambda _, first, last: round(self.slice(first, last).total * _NANOSECONDS)
            )
        )

    def edge_bytes(self, made: Plan, edge: Edge) -> int:
        """Of one microbatch, forward: what a memory would be is keys and values of the blocks that read it."""
        profile = self.profile
        others = sum(profile.carried_bytes(name) for name in edge.carries if name != "memory")
        if "memory" not in edge.carries:
            return others
        reader = made.stages[edge.last]
        num_blocks = reader.last - max(reader.first, profile.config.num_encoder_blocks)
        positions = profile.source_length * profile.num_sequences
        return others + num_blocks * positions * self._width * profile.dtype_bytes


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
