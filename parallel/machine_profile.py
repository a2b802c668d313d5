"""What would the pieces of a model cost on a machine: a profile in seconds, in closed form.

    seconds of a piece = FLOPs / (peak x efficiency) + traffic / (bytes per second x efficiency) + collectives over tp

FLOPs are those of `Profile.of_flops`, traffic is what moves between the products (`parallel/traffic.py`), collectives
are those of `parallel/events.py`, each as long as a ring takes between the tp ranks (`parallel/machine.py`). All of
them stand in the way; those of a backward in its input half, but for the gathering of inputs for weight gradients.

`transfer_cost` and `byte_cost`, which cuts read, are those of the slowest link between neighbours of the pipeline. Left
out: what of collectives hides behind products, starts of kernels, context parallelism.
"""

import dataclasses
from collections import defaultdict

from models.config import ModelConfig
from parallel.events import step_events
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.ledger import Event
from parallel.machine import Link, Machine
from parallel.mesh import Coordinate
from parallel.plan import Plan
from parallel.plans import plan
from parallel.profile import PIECES, Profile
from parallel.share import share_of
from parallel.traffic import traffic_bytes
from parallel.work import Work


def machine_profile(machine: Machine, config: ModelConfig, layout: Layout, shape: StepShape) -> Profile:
    """Seconds of one microbatch's pieces on one rank of a layout.

    Args:
        machine: the cluster.
        config: the model.
        layout: its degrees tell which links are used.
        shape: of a data-parallel rank's step.

    Raises:
        ValueError: lengths that the model cannot read, a layout that cannot partition it, context parallelism, or
            sequences that do not fill the microbatches.
    """
    layout.check_model(config)
    counted = Profile.of_flops(config, layout, shape)
    # Pieces are those of whole blocks, whoever makes keys and values.
    moved = traffic_bytes(config, layout.replace(transport="relay"), counted.shape)
    collectives = _collectives(machine, config, layout, counted.shape)
    per_flop, per_byte = machine.flops_seconds(1.0, shape.dtype_bytes), machine.traffic_seconds(1.0)
    link = slowest_link(machine, layout)
    pieces = {
        piece: per_flop * getattr(counted, piece) + per_byte * moved.get(piece, Work()) + collectives[piece]
        for piece in (*PIECES, "keys_values", "memory_entry")
    }
    return dataclasses.replace(
        counted,
        unit="seconds",
        transfer_cost=link.latency_seconds,
        byte_cost=link.occupancy_seconds(1),
        machine={"name": machine.name},
        **pieces,
    )


def slowest_link(machine: Machine, layout: Layout) -> Link:
    """Of those between neighbours of a layout's pipeline."""
    neighbours = (machine.reach_over(layout.mesh, first, first + 1) for first in range(layout.pp - 1))
    return machine.link("cluster" if "cluster" in neighbours else "node")


def _collectives(machine: Machine, config: ModelConfig, layout: Layout, shape: StepShape) -> dict[str, Work]:
    """Seconds of the collectives over tp, by piece."""
    works: dict[str, Work] = defaultdict(Work)
    if layout.tp == 1:
        return works
    # One block of a side stands for all.
    small = config.replace(
        num_encoder_blocks=min(1, config.num_encoder_blocks), num_decoder_blocks=min(1, config.num_decoder_blocks)
    )
    linear = layout.replace(pp=1, chunks=1, placement="linear", schedule="1f1b", cut="even", transport="relay")
    alone = linear.replace(dp=1, zero=0, gradient_bucket_bytes=0, microbatches=1)
    made = plan(small, alone)
    share = share_of(made, Coordinate(dp=0, pp=0, cp=0, tp=0))
    # Where groups begin within a node repeats after so many.
    num_groups = min(layout.world_size // layout.tp, machine.devices_per_node)
    groups = [range(first * layout.tp, (first + 1) * layout.tp) for first in range(num_groups)]
    for total in step_events(share, shape):
        event = total.event
        if event.phase == "step":
            continue
        slowest = max(machine.collective_seconds(event.operation, event.payload_bytes, group) for group in groups)
        seconds = total.count * slowest
        if event.phase == "forward":
            work = Work(seconds, 0.0, 0.0)
        elif _is_for_weights(made, event):
            work = Work(0.0, 0.0, seconds)
        else:
            work = Work(0.0, seconds, 0.0)
        works[_piece(event.site)] += work
        if event.site == "decoder.memory":
            works["memory_entry"] += work
        elif event.site.endswith("cross_attention.kv") and event.phase != "recompute":
            works["keys_values"] += work
    return works


def _is_for_weights(made: Plan, event: Event) -> bool:
    """Whether a backward's collective brings a product's input together again."""
    entry = next(entry for entry in made.entries if entry.module == event.site and entry.stream == event.stream)
    return event.phase == "backward" and event.operation == "all_gather" and entry.entering == "gather"


def _piece(site: str) -> str:
    stack, _, rest = site.partition(".")
    if stack in ("head", "loss"):
        return "head"
    child = rest.partition(".")[0]
    return f"{stack}_{child if child in ('block', 'embedding') else 'stage'}"
