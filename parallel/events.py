"""What does a rank send in one step? Every event that the ledger of the native engine will hold, told before it runs.

For a microbatch of b sequences, with M = L b D e bytes of a stream's padded length L (width D, e bytes an element), t =
tp:

    module                            forward                 backward
    colwise, copy (tp)                                        all-reduce M
    colwise, gather (sp)              all-gather M            all-gather M (its shard again), reduce-scatter M
    colwise, gather_once (sp)         all-gather M            reduce-scatter M
    rowwise, reduce / scatter         all-reduce M / reduce-scatter M        - / all-gather M
    token embedding                   the same as rowwise
    memory, once where it enters      - / all-gather M        all-reduce M / reduce-scatter M
    head                              the same as colwise
    loss                              all-gather of 2 L b numbers a rank

A vocabulary that is whole on every rank is without the lines of token embedding, head and loss.

Full recomputation repeats the forward events of blocks in the phase `recompute`. Edges between pipeline ranks carry
what `parallel/edges.py` says: a send on one side, a receive on the other. After the last backward, once a step whatever
the number of microbatches:

    gradient.sequence     all-reduce over tp of what every tp rank holds whole (sp)
    gradient.kv_replica   all-reduce over the ranks that share a KV head
    gradient.tied.*       all-reduce over the pipeline ranks that hold a copy
    gradient.dp           all-reduce over dp of all gradients; in buckets, in the backward (`parallel/buckets.py`)
    gradient.norm         all-reduce of one scalar over pp and tp
    loss.tokens           all-reduce of one count over dp;      loss.sum    of one scalar over dp, then over pp

With ZeRO gradients are reduce-scattered and parameters gathered over dp instead, in slices of equal length, and the
scalar of the norm is reduced over dp too (arXiv 1910.02054, section 7): stage 1 once a step; stages 2 and 3, which the
native engine does not run, scatter gradients after each microbatch, and stage 3 gathers the parameters before each
forward and each backward.
"""

from collections import Counter
from collections.abc import Iterator

from parallel.buckets import bucket_parameters
from parallel.edges import carried_size
from parallel.figures import StepShape
from parallel.layouts import microbatch_sizes
from parallel.ledger import Event, Operation, Phase, Total
from parallel.parameters import parameter_counts, replicated_parameters, token_matrices, whole_parameters
from parallel.plan import Entry, Plan
from parallel.share import Share

TOKEN_COUNT_BYTES = 8
"""Counts of labels are int64."""


def step_events(share: Share, shape: StepShape) -> tuple[Total, ...]:
    """All events of one rank in one step, equal ones counted."""
    counted: Counter[Event] = Counter()
    sizes = Counter(microbatch_sizes(shape.num_sequences, share.layout.microbatches))
    entries = [entry for entry in share.plan.entries if share.holds(entry.module)]
    for size, count in sizes.items():
        for event in _microbatch_events(share, shape, size, entries):
            counted[event] += count
    for event in gradient_events(share, shape):
        counted[event] += 1
    return tuple(Total(event=event, count=count) for event, count in counted.items() if event.group_size > 1)


def padded_length(plan: Plan, shape: StepShape, stream: str) -> int:
    """Positions of a stream as the ranks see it; the memory is as long as the source."""
    return plan.sharded_length(shape.target_length if stream == "target" else shape.source_length)


# ---- one microbatch -------------------------------------------------------------------------------------------------


def _microbatch_events(share: Share, shape: StepShape, size: int, entries: list[Entry]) -> Iterator[Event]:
    num_readers = sum(bool(chunk.kv_blocks) for chunk in share.chunks)
    for entry in entries:
        # The memory enters once a stage, everything else once a block or a rank.
        times = num_readers if entry.style == "memory_entry" else 1
        positions = padded_length(share.plan, shape, entry.stream) * size
        if entry.style == "vocabulary_loss":
            gathered_bytes = share.layout.tp * 2 * positions * shape.accumulated_bytes
            yield _in_model(share, entry, "all_gather", gathered_bytes, "forward")
            continue
        is_again = share.layout.recompute == "full" and share.runs(entry.module)
        for operation, phase in _entry_operations(entry, is_again=is_again):
            event = _in_model(share, entry, operation, positions * share.config.width * shape.dtype_bytes, phase)
            yield from [event] * times
    yield from _edge_events(share, shape, size)


def _entry_operations(entry: Entry, *, is_again: bool) -> Iterator[tuple[Operation, Phase]]:
    """Collectives of one module for one microbatch: those of its forward, repeated by recomputation, and backward."""
    forward: dict[str, Operation] = {
        "gather": "all_gather",
        "gather_once": "all_gather",
        "reduce": "all_reduce",
        "scatter": "reduce_scatter",
    }
    backward: dict[str, tuple[Operation, ...]] = {
        "copy": ("all_reduce",),
        "gather": ("reduce_scatter",) if entry.style == "memory_entry" else ("all_gather", "reduce_scatter"),
        "gather_once": ("reduce_scatter",),
        "scatter": ("all_gather",),
    }
    for choice in (entry.entering, entry.leaving):
        if choice in forward:
            yield forward[choice], "forward"
            if is_again:
                yield forward[choice], "recompute"
        for operation in backward.get(choice, ()):
            yield operation, "backward"


def _edge_events(share: Share, shape: StepShape, size: int) -> Iterator[Event]:
    """Hidden states forward, their gradients backward, over every edge between a stage here and one elsewhere."""
    ranks = share.plan.ranks
    for edge in share.plan.edges:
        first, last = (ranks[stage] == share.coordinate.pp for stage in (edge.first, edge.last))
        if first == last:
            continue
        directions: tuple[tuple[Operation, Phase], ...] = (
            ("receive" if last else "send", "forward"),
            ("send" if last else "receive", "backward"),
        )
        for name in edge.carries:
            positions, width = carried_size(
                share.config,
                name,
                source_length=shape.source_length,
                target_length=shape.target_length,
                tp=share.layout.tp,
                sp=share.layout.sp,
            )
            for operation, phase in directions:
                yield Event(
                    operation=operation,
                    axis="pp",
                    group_size=2,
                    payload_bytes=positions * width * size * shape.dtype_bytes,
                    site=edge.name,
                    stream=name,
                    phase=phase,
                )


def _in_model(share: Share, entry: Entry, operation: Operation, payload_bytes: int, phase: Phase) -> Event:
    return Event(
        operation=operation,
        axis="tp",
        group_size=share.layout.tp,
        payload_bytes=payload_bytes,
        site=entry.module,
        stream=entry.stream,
        phase=phase,
    )


# ---- once a step ----------------------------------------------------------------------------------------------------


def gradient_events(share: Share, shape: StepShape) -> Iterator[Event]:
    """What one rank sends once a step, most of it after its last backward; some of it to itself alone."""
    layout, element = share.layout, shape.dtype_bytes
    yield _in_step("all_reduce", "dp", layout.dp, TOKEN_COUNT_BYTES, "loss.tokens")
    if layout.sp:
        yield _in_step("all_reduce", "tp", layout.tp, whole_parameters(share) * element, "gradient.sequence")
    replicated = replicated_parameters(share)
    if replicated:
        yield _in_step("all_reduce", "kv_replica", share.num_kv_replicas, replicated * element, "gradient.kv_replica")
    for shared in share.plan.shared:
        name = dict(shared.holders).get(share.coordinate.pp)
        if name is not None:
            count = _shared_elements(share, name)
            yield _in_step("all_reduce", "tied", len(shared.ranks), count * element, f"gradient.tied.{shared.name}")
    yield from _data_parallel_events(share, element)
    yield _in_step("all_reduce", "model", layout.pp * layout.tp, shape.accumulated_bytes, "gradient.norm")
    if layout.zero:
        yield _in_step("all_reduce", "dp", layout.dp, shape.accumulated_bytes, "gradient.norm")
    yield _in_step("all_reduce", "dp", layout.dp, shape.accumulated_bytes, "loss.sum")
    yield _in_step("all_reduce", "pp", layout.pp, shape.accumulated_bytes, "loss.sum")


def _shared_elements(share: Share, name: str) -> int:
    """Elements of a rank's copy of a parameter that several stages hold: vocabulary rows, or relative biases."""
    if name.endswith("relative_bias.weight"):
        return share.config.relative_buckets * share.num_heads
    return token_matrices(share)[name]


def _data_parallel_events(share: Share, element: int) -> Iterator[Event]:
    """Gradients over dp: all-reduced, or what the ZeRO stage puts in its place; parameters are as many bytes."""
    layout, count = share.layout, parameter_counts(share).total
    if layout.zero == 0:
        if not layout.gradient_bucket_bytes:
            yield _in_step("all_reduce", "dp", layout.dp, count * element, "gradient.dp")
            return
        for bucket in bucket_parameters(share, element).values():
            yield _in_step("all_reduce", "dp", layout.dp, bucket * element, "gradient.dp", "backward")
        return
    # Slices are equally long: the last one is padded.
    payload_bytes = -(-count // layout.dp) * layout.dp * element
    num_scatters = layout.microbatches if layout.zero >= 2 else 1
    for _ in range(num_scatters):
        yield _in_step("reduce_scatter", "dp", layout.dp, payload_bytes, "gradient.dp")
    num_gathers = 2 * layout.microbatches if layout.zero == 3 else 1
    for _ in range(num_gathers):
        yield _in_step("all_gather", "dp", layout.dp, payload_bytes, "parameter.dp")


def _in_step(
    operation: Operation, axis: str, group_size: int, payload_bytes: int, site: str, phase: Phase = "step"
) -> Event:
    return Event(
        operation=operation,
        axis=axis,
        group_size=group_size,
        payload_bytes=payload_bytes,
        site=site,
        stream="none",
        phase=phase,
    )
