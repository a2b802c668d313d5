"""What would the ledgers of a run hold? Events of the plan's entries, of the edges and of the gradients of one step."""

from collections.abc import Iterator
from typing import Any

from parallel.layouts import Layout
from parallel.ledger import wire_bytes
from parallel.plan import Entry, Plan
from results.schema import CommunicationFacts, EdgeFacts
from tests.synthetic_facts import NUM_SEQUENCES

_ENTERING = {
    "copy": (("all_reduce", "backward"),),
    "gather": (("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward")),
    "gather_once": (("all_gather", "forward"), ("reduce_scatter", "backward")),
}
_LEAVING = {
    "reduce": (("all_reduce", "forward"),),
    "scatter": (("reduce_scatter", "forward"), ("all_gather", "backward")),
}


def communication(partition: Plan, lengths: tuple[int, int]) -> Iterator[CommunicationFacts]:
    """Events of one step: the plan's, then those between stages, then those of gradients."""
    layout, width = partition.layout, partition.config.width
    size = NUM_SEQUENCES // layout.microbatches // layout.dp
    payload = {"source": size * lengths[0] * width * 4, "target": size * lengths[1] * width * 4}
    payload["memory"] = payload["source"]
    for rank in range(layout.world_size):
        pp = layout.mesh.coordinate(rank).pp
        for entry in partition.entries:
            if _stage_of(entry.module, partition) == pp:
                yield from _entry_events(rank, layout, entry, payload[entry.stream], width)
        for stage in partition.stages[:-1]:
            if pp in (stage.index, stage.index + 1):
                for tensor in stage.outputs:
                    yield from _edge_events(rank, layout, stage.index, tensor, payload[tensor])
        if layout.dp > 1:
            yield _event(rank, "all_reduce", "dp", layout, "gradient.dp", "none", "step", 4096)
        for shared in partition.shared:
            if pp in shared.ranks:
                yield _event(rank, "all_reduce", "tied", layout, f"gradient.tied.{shared.name}", "none", "step", 8192)


def _entry_events(rank: int, layout: Layout, entry: Entry, payload: int, width: int) -> Iterator[CommunicationFacts]:
    events = (*_ENTERING.get(entry.entering, ()), *_LEAVING.get(entry.leaving, ()))
    for operation, phase in events:
        if entry.style != "memory_entry" or (operation, phase) != ("all_gather", "backward"):
            yield _event(rank, operation, "tp", layout, entry.module, entry.stream, phase, payload)
    if entry.style == "vocabulary_loss":
        gathered = layout.tp * 2 * payload // width
        yield _event(rank, "all_gather", "tp", layout, "loss", entry.stream, "forward", gathered)


def _edge_events(rank: int, layout: Layout, left: int, tensor: str, payload: int) -> Iterator[CommunicationFacts]:
    pp = layout.mesh.coordinate(rank).pp
    for sender, phase in ((left, "forward"), (left + 1, "backward")):
        operation = "send" if pp == sender else "receive"
        yield _event(rank, operation, "pp", layout, f"edge.{left}>{left + 1}", tensor, phase, payload)


def _event(
    rank: int, operation: Any, axis: str, layout: Layout, site: str, stream: str, phase: str, payload: int
) -> CommunicationFacts:
    group_size = {"tp": layout.tp, "dp": layout.dp, "pp": 2, "tied": 2}[axis]
    count = layout.microbatches if phase != "step" else 1
    return CommunicationFacts(
        rank=rank,
        operation=operation,
        axis=axis,
        group_size=group_size,
        site=site,
        stream=stream,
        phase=phase,
        count=count,
        payload_bytes=count * payload,
        wire_bytes=count * wire_bytes(operation, payload, group_size),
    )


def _stage_of(module: str, partition: Plan) -> int:
    """Stage of a module of the plan; a memory entry is told for the first stage with a decoder block alone."""
    config, last = partition.config, len(partition.stages) - 1
    side, _, rest = module.partition(".")
    if side not in ("encoder", "decoder"):
        return last
    first = config.num_encoder_blocks if side == "decoder" else 0
    end = config.num_blocks if side == "decoder" else config.num_encoder_blocks
    block = first
    if rest.startswith("block."):
        block = first + int(rest.split(".")[1])
    elif rest.startswith("norm"):
        block = end - 1
    return next(stage.index for stage in partition.stages if stage.first <= block < stage.last)


def edges(partition: Plan, lengths: tuple[int, int]) -> Iterator[EdgeFacts]:
    config, layout = partition.config, partition.layout
    for stage in partition.stages[:-1]:
        for tensor in stage.outputs:
            length = lengths[1] if tensor == "target" else lengths[0]
            for edge in (f"{stage.index}>{stage.index + 1}", f"{stage.index + 1}>{stage.index}"):
                yield EdgeFacts(
                    edge=edge,
                    tensor=tensor,
                    count=layout.microbatches * layout.tp * layout.dp,
                    payload_bytes=NUM_SEQUENCES * length * config.width * 4 * layout.tp,
                )
