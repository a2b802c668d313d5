"""How long does a training step take on a machine, whether or not anybody here has it?

    profile of the pieces -> seconds of every stage -> simulated pipeline -> sums of gradients -> update

Stages cost what a profile in seconds says, in closed form (`parallel/machine_profile.py`) or measured. Messages leave a
rank by NVLink or by its network card, one after the other on each. A rank that has run its row sums its gradients in
the order of the native engine, while others may still run; then all need the global norm, and update:

    rank 0  |----------- actions -----------|-tp-|-tied-|---dp---|-norm-|-update-|
    rank 1  |------- actions -------|-tp-|.......|-tied-|---dp---|-norm-|-update-|

Gradients that leave in buckets (`parallel/buckets.py`) are summed over dp while the last backward runs, which they do
not slow down; what is left of them at its end comes before the other sums. Collectives are rings on the links that join
their ranks (`parallel/machine.py`). An update reads and writes every byte of the states once. Replicas along dp and
ranks along tp run alike, one stands for all: thousands of ranks take no longer than their pipeline. Left out: that ZeRO
2 and 3 send during the pipeline what is told at its end here; loading of data; noise.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from models.config import ModelConfig
from parallel.activations import saved_bytes
from parallel.buckets import bucket_parameters
from parallel.edges import Edge
from parallel.events import gradient_events
from parallel.figures import Optimizer, StepShape
from parallel.flops import model_flops
from parallel.layouts import Layout, microbatch_sizes
from parallel.ledger import Event
from parallel.machine import Machine
from parallel.machine_profile import machine_profile
from parallel.mesh import Coordinate, Mesh
from parallel.parameters import StateBytes, state_bytes
from parallel.plan import Plan
from parallel.plans import plan
from parallel.profile import Profile
from parallel.schedule import Direction, is_split
from parallel.share import Share, shares
from parallel.simulate import StageSeconds, TransferCost, TransferSeconds, simulate
from parallel.stage_costs import stage_seconds
from parallel.timeline import Span, Steps, Timeline


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One step of all ranks.

    Attributes:
        plan: of the model and the layout.
        seconds: of the stages' actions.
        timeline: of the pipeline.
        gradient_seconds: from the last action of all ranks to the known norm.
        update_seconds: of the rank with most states.
        model_flops: that the mathematics of all ranks' sequences needs.
        peak_flops_per_second: of all devices together.
    """

    plan: Plan
    seconds: StageSeconds
    timeline: Timeline
    gradient_seconds: float
    update_seconds: float
    model_flops: int
    peak_flops_per_second: float

    @property
    def step_seconds(self) -> float:
        return self.timeline.makespan_seconds + self.gradient_seconds + self.update_seconds

    @property
    def model_flops_utilisation(self) -> float:
        """Share of the devices' peak that the mathematics uses."""
        return self.model_flops / (self.step_seconds * self.peak_flops_per_second)


def step_time(
    machine: Machine,
    config: ModelConfig,
    layout: Layout,
    shape: StepShape,
    *,
    profile: Profile | None = None,
    optimizer: Optimizer = "adamw",
    master_weights: bool = False,
) -> StepTime:
    """Predicts a step.

    Args:
        machine: whose links, and whose pieces if there is no profile.
        config: the model.
        layout: its partitioning. Cuts and schedules that depend on costs are made for this machine.
        shape: sequences of a data-parallel rank, lengths, dtype.
        profile: of the pieces in seconds, when they were measured.
        optimizer: whose states are updated.
        master_weights: whether it updates a float32 copy.

    Raises:
        ValueError: as `machine_profile` does, or a profile in FLOPs or of another model.
    """
    if profile is None:
        profile = machine_profile(machine, config, layout, shape)
    elif profile.unit != "seconds":
        raise ValueError("the profile counts FLOPs, a time needs seconds: measure one with twinshard profile")
    profile.check(config, layout, shape)
    made = plan(config, layout, profile)
    seconds = stage_seconds(profile, made.stages)
    timeline = simulate(
        made.table,
        seconds,
        edges=made.edges,
        transfer_seconds=edge_transfers(machine, made, profile.edge_bytes),
        scale=microbatch_scale(layout, shape),
    )
    kinds = shares(made)
    states = [state_bytes(share, shape.dtype_bytes, optimizer, master_weights=master_weights) for share in kinds]
    done_seconds = _gradients(machine, made, kinds, shape, timeline)
    return StepTime(
        plan=made,
        seconds=seconds,
        timeline=timeline,
        gradient_seconds=done_seconds - timeline.makespan_seconds,
        update_seconds=max(machine.traffic_seconds(updated_bytes(held, layout)) for held in states),
        model_flops=layout.dp * model_flops(config, shape),
        peak_flops_per_second=layout.world_size * machine.peak_flops_per_second(shape.dtype_bytes),
    )


# ---- the pipeline ---------------------------------------------------------------------------------------------------


def edge_transfers(machine: Machine, made: Plan, size_of: Callable[[Edge], int]) -> TransferCost:
    """Messages between the ranks of a plan: over the slowest link of all replicas, which share a step's end.

    `size_of` tells the bytes of an edge's message, of a microbatch of scale 1.
    """

    @functools.cache
    def cost(first: int, last: int, size_bytes: int) -> TransferSeconds:
        reach = machine.reach_over(made.layout.mesh, first, last)
        link = machine.link(reach)
        return TransferSeconds(latency=link.latency_seconds, occupancy=link.occupancy_seconds(size_bytes), port=reach)

    def transfer_seconds(edge: Edge, _: Direction) -> TransferSeconds:
        return cost(made.ranks[edge.first], made.ranks[edge.last], size_of(edge))

    return transfer_seconds


def microbatch_scale(layout: Layout, shape: StepShape) -> tuple[float, ...]:
    """Size of each microbatch against the first: only the last may be smaller."""
    sizes = microbatch_sizes(shape.num_sequences, layout.microbatches)
    return tuple(size / sizes[0] for size in sizes)


def held_bytes(
    made: Plan,
    shape: StepShape,
    timeline: Timeline,
    *,
    optimizer: Optimizer = "adamw",
    master_weights: bool = False,
) -> tuple[Steps, ...]:
    """Bytes of each pipeline rank over time: states, and what is kept for backwards.

    Of the tp ranks the one that holds most is told. What is kept once for all microbatches counts as states.
    """
    sizes = microbatch_sizes(shape.num_sequences, made.layout.microbatches)
    rows: dict[int, tuple[Share, StateBytes]] = {}
    for share in shares(made):
        states = state_bytes(share, shape.dtype_bytes, optimizer, master_weights=master_weights)
        at = share.coordinate.pp
        if at not in rows or states.total > rows[at][1].total:
            rows[at] = (share, states)
    kept, deferred, on_top = ([0.0] * len(made.stages) for _ in range(3))
    base = []
    for share, states in (rows[at] for at in sorted(rows)):
        tables: dict[str, int] = {}
        for chunk, stage in zip(share.chunks, share.stages, strict=True):
            saved = saved_bytes(chunk, shape, sizes[0])
            tables |= saved.shared
            kept[stage.index] = saved.total - sum(saved.shared.values())
            deferred[stage.index] = saved.deferred
            on_top[stage.index] = saved.on_top_split if is_split(made.table) else saved.on_top
        base.append(float(states.total + sum(tables.values())))
    return timeline.held(kept, deferred, on_top=on_top, base=base, scale=microbatch_scale(made.layout, shape))


# ---- what comes after it --------------------------------------------------------------------------------------------


def _gradients(machine: Machine, made: Plan, kinds: Sequence[Share], shape: StepShape, timeline: Timeline) -> float:
    """When the sums of all gradients, their norm and the loss are known."""
    mesh = made.layout.mesh
    seconds: dict[tuple[int, str], float] = defaultdict(float)
    for share in kinds:
        own: dict[str, float] = defaultdict(float)
        for event, count in Counter(gradient_events(share, shape)).items():
            if event.group_size > 1:
                group = _group(made, mesh, share.coordinate, event)
                own[event.site] += count * machine.collective_seconds(event.operation, event.payload_bytes, group)
        for site, taken in own.items():
            at = (share.coordinate.pp, site)
            seconds[at] = max(seconds[at], taken)
    ends = [row[-1].end_seconds for row in timeline.spans]
    if made.layout.gradient_bucket_bytes:
        for share in kinds:
            rank = share.coordinate.pp
            ends[rank] = max(ends[rank], _in_buckets(machine, share, shape, timeline.spans[rank]))
            seconds[rank, "gradient.dp"] = 0.0
    for rank in range(mesh.pp):
        ends[rank] += seconds[rank, "gradient.sequence"] + seconds[rank, "gradient.kv_replica"]
    for shared in made.shared:
        taken = max(seconds[rank, f"gradient.tied.{shared.name}"] for rank in shared.ranks)
        done = max(ends[rank] for rank in shared.ranks) + taken
        for rank in shared.ranks:
            ends[rank] = done
    for rank in range(mesh.pp):
        ends[rank] += seconds[rank, "gradient.dp"] + seconds[rank, "parameter.dp"]
    last = ("loss.tokens", "gradient.norm", "loss.sum")
    return max(ends) + sum(max(seconds[rank, site] for rank in range(mesh.pp)) for site in last)


def _in_buckets(machine: Machine, share: Share, shape: StepShape, row: Sequence[Span]) -> float:
    """When the last bucket is summed over dp: each leaves with its last block's gradient, and after the one before.

    In the last backward of a stage blocks are done in equal time, from the last to the first.
    """
    done: dict[int, float] = {}
    for stage in share.stages:
        *_, last = (span for span in row if span.action.stage == stage.index)
        block_seconds = (last.end_seconds - last.start_seconds) / stage.num_blocks
        done |= {
            block: last.end_seconds - (block - stage.first) * block_seconds for block in range(stage.first, stage.last)
        }
    mesh = share.layout.mesh
    group = mesh.peers(mesh.rank(share.coordinate), "dp")
    end = 0.0
    for blocks, count in bucket_parameters(share, shape.dtype_bytes).items():
        # What is of no block here, a norm of all under sp or shipped keys and values, is there when all is.
        left = max((done.get(block, row[-1].end_seconds) for block in blocks), default=row[-1].end_seconds)
        end = max(end, left) + machine.collective_seconds("all_reduce", count * shape.dtype_bytes, group)
    return end


def _group(made: Plan, mesh: Mesh, at: Coordinate, event: Event) -> Sequence[int]:
    """Ranks of the world that take part in an event of a step."""
    rank = mesh.rank(at)
    match event.axis:
        case "dp" | "pp" | "tp":
            return mesh.peers(rank, event.axis)
        case "model":
            return mesh.peers(rank, "pp", "tp")
        case "kv_replica":
            first = rank - at.tp % event.group_size
            return range(first, first + event.group_size)
        case "tied":
            name = event.site.removeprefix("gradient.tied.")
            holders = next(shared.ranks for shared in made.shared if shared.name == name)
            return [mesh.rank(dataclasses.replace(at, pp=pp)) for pp in holders]
    raise AssertionError(f"no group is known by {event.axis}")


def updated_bytes(states: StateBytes, layout: Layout) -> float:
    """What an update reads and writes of a rank's states: its share of each, once."""
    # ZeRO 1 and 2 leave parameters whole, and gradients in the first case, but update a share only.
    whole = states.parameters + (states.gradients if layout.zero < 2 else 0)
    dealt = states.total - whole
    if layout.zero == 3:
        return 2.0 * states.total
    return 2.0 * (whole / (layout.dp if layout.zero else 1) + dealt)
