"""What does each rank hold, send and compute under context parallelism? Closed forms of a ring, which no engine runs.

With c = cp, every rank holds L / c positions of every stream, and all parameters that it would hold without. So a rank
is predicted as one of a layout with dp x c replicas and streams of l = L / c positions; attention adds

    scores       l queries meet all L keys, l at a time: c times the FLOPs, and what is kept of them, of l x l
    ring         keys and values of l positions travel, B = 2 l b K H e bytes (b sequences, K KV heads, H head width)
                 forward    c - 1 hops of B            recompute    the same, where cores are computed again
                 backward   c - 1 hops of B, and c hops of their gradients, which return to their owner: 2 l b K H a
                            bytes (a = max(4, e), as sums over ranks are accumulated in float32)
    gradients    one group of dp x c ranks, named `dp_cp`, for gradients, ZeRO, counts and loss

Cross-attention rings the memory's shards in the same way, l and L those of the source. Every score is counted, causal
or not: in a ring of contiguous shards the last rank has as many, and the others wait for it.

What grows with l x l is read off the closed forms without cp: x + y l + z l^2 has the second difference 2 z l^2 at l,
2 l and 3 l. Source: Liu et al. 2023, Ring Attention (arXiv 2310.01889). Left out: Ulysses, zig-zag shards, gathered
keys, and the buffers of a ring under way.
"""

import dataclasses
from collections.abc import Callable, Iterator

from parallel.activations import Saved, peak_over, saved_bytes
from parallel.figures import Optimizer, PhaseFlops, StepShape
from parallel.flops import step_flops
from parallel.layouts import microbatch_sizes
from parallel.ledger import Event, Operation, Phase, Total
from parallel.plan import Plan
from parallel.predict import RankPrediction, predict
from parallel.share import Share, shares

STRETCHES = (1, 2, 3)


def local_part(plan: Plan, shape: StepShape) -> tuple[Plan, StepShape]:
    """A layout without cp, and a step, whose ranks hold as much as those of the layout that is given.

    Raises ValueError for lengths that the ranks cannot share evenly.
    """
    layout = plan.layout
    if layout.cp == 1:
        return plan, shape
    shards = layout.cp * (layout.tp if layout.sp else 1)
    for stream in ("source", "target"):
        length: int = getattr(shape, f"{stream}_length")
        if length % shards:
            over = f"cp={layout.cp}" + (f" and tp={layout.tp} with sp" if layout.sp else "")
            raise ValueError(
                f"{stream}_length = {length} over {over}: {shards} must divide it; try {_nearest(length, shards)}"
            )
    local = plan.layout.replace(cp=1, dp=layout.dp * layout.cp)
    lengths = {f"{stream}_length": getattr(shape, f"{stream}_length") // layout.cp for stream in ("source", "target")}
    return dataclasses.replace(plan, layout=local), dataclasses.replace(shape, **lengths)


def predict_context(
    plan: Plan, shape: StepShape, *, optimizer: Optimizer = "adamw", master_weights: bool = False
) -> tuple[RankPrediction, ...]:
    """Predicts one step for one rank of each kind of a layout with cp > 1, as `parallel.predict.predict` does without.

    Raises ValueError as `predict` does, and for lengths that the ranks cannot share evenly.
    """
    shape.check(plan.config)
    local_plan, local_shape = local_part(plan, shape)
    predictions = predict(local_plan, local_shape, optimizer=optimizer, master_weights=master_weights)
    return tuple(
        _with_ring(prediction, share, local_shape, plan.layout.cp)
        for share, prediction in zip(shares(local_plan), predictions, strict=True)
    )


def _with_ring(prediction: RankPrediction, share: Share, shape: StepShape, cp: int) -> RankPrediction:
    sizes = microbatch_sizes(shape.num_sequences, share.layout.microbatches)
    saved = [{size: _saved(chunk, shape, size, cp) for size in set(sizes)} for chunk in share.chunks]
    by_action = {
        (stage.index, microbatch): held[size]
        for stage, held in zip(share.stages, saved, strict=True)
        for microbatch, size in enumerate(sizes)
    }
    flops = _flops(share, shape, cp)
    figures = dataclasses.replace(
        prediction.figures,
        events=(*map(_renamed, prediction.figures.events), *_ring(share, shape, cp)),
        flops=sum(flops.values(), start=PhaseFlops()),
        saved_bytes=saved[0][sizes[0]].total,
        peak_saved_bytes=peak_over(share.plan.table[share.coordinate.pp], by_action),
    )
    return dataclasses.replace(prediction, figures=figures, flops=flops, saved=saved[0][sizes[0]])


# ---- scores ---------------------------------------------------------------------------------------------------------


def _stretched(shape: StepShape, times: int) -> StepShape:
    return dataclasses.replace(
        shape, source_length=times * shape.source_length, target_length=times * shape.target_length
    )


def _with_all_keys(form: Callable[[int], int], cp: int) -> int:
    """A closed form at l positions, what grows with l x l taken cp times; `form` is given how often l is stretched."""
    once, twice, thrice = (form(times) for times in STRETCHES)
    return once + (cp - 1) * max(0, once - 2 * twice + thrice) // 2


def _flops(share: Share, shape: StepShape, cp: int) -> dict[str, PhaseFlops]:
    stretched = {times: step_flops(share, _stretched(shape, times)) for times in STRETCHES}

    def phase(part: str, name: str) -> int:
        return _with_all_keys(lambda times: int(getattr(stretched[times][part], name)), cp)

    return {
        part: PhaseFlops(
            forward=phase(part, "forward"), recompute=phase(part, "recompute"), backward=phase(part, "backward")
        )
        for part in stretched[1]
    }


def _saved(share: Share, shape: StepShape, size: int, cp: int) -> Saved:
    # A table of positions as long as the stretched streams, which keep nothing of it.
    longest = max(STRETCHES) * max(shape.source_length, shape.target_length)
    config = share.config.replace(max_length=max(share.config.max_length, longest))
    roomy = dataclasses.replace(share, plan=dataclasses.replace(share.plan, config=config))
    stretched = {times: saved_bytes(roomy, _stretched(shape, times), size) for times in STRETCHES}

    def kept(part: str) -> int:
        return _with_all_keys(lambda times: stretched[times].by_part[part], cp)

    parts = {part: kept(part) for part in stretched[1].by_part}
    return dataclasses.replace(
        stretched[1],
        by_part=parts,
        on_top=_with_all_keys(lambda times: stretched[times].on_top, cp),
    )


# ---- events ---------------------------------------------------------------------------------------------------------


def _renamed(total: Total) -> Total:
    """Groups of all replicas are of dp x cp."""
    if total.event.axis != "dp":
        return total
    return dataclasses.replace(total, event=dataclasses.replace(total.event, axis="dp_cp"))


def _ring(share: Share, shape: StepShape, cp: int) -> Iterator[Total]:
    sizes = microbatch_sizes(shape.num_sequences, share.layout.microbatches)
    for size in dict.fromkeys(sizes):
        for site, stream, length in _attentions(share, shape):
            elements = 2 * length * size * share.num_kv_heads * share.config.head_width
            block, gradient = elements * shape.dtype_bytes, elements * shape.accumulated_bytes
            hops: list[tuple[Phase, int, int]] = [("forward", block, cp - 1), ("backward", block, cp - 1)]
            hops.append(("backward", gradient, cp))
            if share.layout.recompute != "none":
                hops.append(("recompute", block, cp - 1))
            for phase, payload_bytes, count in hops:
                operations: tuple[Operation, ...] = ("send", "receive")
                for operation in operations:
                    event = Event(
                        operation=operation,
                        axis="cp",
                        group_size=cp,
                        payload_bytes=payload_bytes,
                        site=site,
                        stream=stream,
                        phase=phase,
                    )
                    yield Total(event=event, count=count * sizes.count(size))


def _attentions(share: Share, shape: StepShape) -> Iterator[tuple[str, str, int]]:
    """Site, stream and positions of the keys and values of every core attention here."""
    for side in share.sides:
        stream, length = ("source", shape.source_length) if side == "encoder" else ("target", shape.target_length)
        for index in share.blocks(side):
            yield f"{side}.block.{index}.self_attention.core", stream, length
            if side == "decoder" and share.config.has_cross_attention:
                yield f"{side}.block.{index}.cross_attention.core", "memory", shape.source_length


def _nearest(length: int, multiple: int) -> int:
    return max(1, round(length / multiple)) * multiple
