"""Do our closed forms meet what others measured on GPUs?

    saved by sequence parallelism     what all blocks keep for the backward under tp, less what they keep under tp + sp
    allocated after a step            a figure a stage: parameters, gradients and optimizer states
    weight and optimizer              what Megatron-LM prints of the most loaded stage before it trains
    model FLOP rate                   model FLOPs of an iteration over seconds and GPUs

The prediction is the one that `twinshard account` makes, but for the bytes a parameter and the kept activations,
which follow the convention of what was run. An allocator holds more than the states, and a peak is reached where
something else is held too: such figures have a tolerance, with the reason. Left out: fragmentation, workspaces,
communication buffers.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.costs import norm_parameters, num_blocks, sides
from models.named import named_model
from parallel.layouts import Layout
from parallel.parameters import parameter_counts
from parallel.plans import plan
from parallel.published_costs import block_activation_bytes, model_flops, zero_state_bytes
from parallel.share import Share, shares
from results.validation.conventions import MEGATRON_ALLOCATED, MEGATRON_LOG, MIB, Convention
from results.validation.rows import FOLDER, Check, Printed, Row, as_printed, over, read, within

PEAK_TOLERANCE = Fraction(2, 100)
PEAK_REASON = "a difference of two peaks, which other tensors share"
ALLOCATED_TOLERANCE = Fraction(1, 100)
ALLOCATED_REASON = "the allocator holds batches, masks and received tensors too"

SAVED = Convention(name="kept by blocks", unit_bytes=MIB)
RATE = Convention(name="three times the forward")


def check_measured(folder: Path = FOLDER) -> Iterator[Check]:
    """`measured_memory.csv`: every figure of a run on GPUs."""
    kinds = {
        "saved by sequence parallelism": _saved,
        "allocated after a step": _allocated,
        "weight and optimizer": _weight_and_optimizer,
        "model FLOP rate": _rate,
    }
    for row in read("measured_memory", folder):
        quantity = row.text("quantity")
        if quantity not in kinds:
            raise ValueError(f"{row.place}: quantity {quantity!r}; known are {', '.join(kinds)}")
        yield from kinds[quantity](row, named_model(row.text("model")))


def _saved(row: Row, config: ModelConfig) -> Iterator[Check]:
    tp, length = row.whole("tp"), row.whole("sequence")
    kept = [
        sum(
            num_blocks(config, side)
            * block_activation_bytes(
                config,
                side,
                source_length=length,
                target_length=length,
                microbatch=row.whole("microbatch"),
                tp=tp,
                sp=sp,
            )
            for side in sides(config)
        )
        for sp in (False, True)
    ]
    ours = Fraction(kept[0] - kept[1], row.whole("pp", 1) * SAVED.unit_bytes)
    yield within(row, "value", ours, PEAK_TOLERANCE, PEAK_REASON, **_told(row, SAVED))


def _allocated(row: Row, config: ModelConfig) -> Iterator[Check]:
    figures = row.text("value").split()
    stages = _stages(row, config)
    if len(figures) != len(stages):
        raise ValueError(f"{row.place}: {len(figures)} figures, expected one for each of {len(stages)} stages")
    for stage, (share, figure) in enumerate(zip(stages, figures, strict=True)):
        one = Row(table=row.table, line=row.line, cells=row.cells | {"value": figure})
        told = _told(row, MEGATRON_ALLOCATED, f", stage {stage}")
        ours = _states(row, share, MEGATRON_ALLOCATED)
        yield within(one, "value", ours, ALLOCATED_TOLERANCE, ALLOCATED_REASON, **told)


def _weight_and_optimizer(row: Row, config: ModelConfig) -> Iterator[Check]:
    ours = max(_states(row, share, MEGATRON_LOG) for share in _stages(row, config))
    yield as_printed(row, "value", ours, **_told(row, MEGATRON_LOG, ", most loaded stage"))


def _rate(row: Row, config: ModelConfig) -> Iterator[Check]:
    flops = model_flops(config, length=row.whole("sequence"), num_sequences=row.whole("global_batch"))
    rate = over(Fraction(flops, row.whole("gpus") * 10**12), row.printed("seconds"))
    yield as_printed(row, "value", rate, **_told(row, RATE))


def _stages(row: Row, config: ModelConfig) -> list[Share]:
    """The first rank of every stage, which has the most vocabulary rows or as many as any other."""
    zero = Printed.of(row.text("zero")).value if row.has("zero") else 0
    layout = Layout(
        tp=row.whole("tp", 1),
        pp=row.whole("pp", 1),
        dp=row.whole("dp", 1),
        zero=int(zero),
        microbatches=row.whole("pp", 1),
    )
    layout.check_model(config)
    most: dict[int, Share] = {}
    for share in shares(plan(config, layout)):
        held = most.setdefault(share.coordinate.pp, share)
        if parameter_counts(share).total > parameter_counts(held).total:
            most[share.coordinate.pp] = share
    return list(most.values())


def _states(row: Row, share: Share, convention: Convention) -> Fraction:
    count = parameter_counts(share).total
    if convention.norm == "layernorm" and share.config.norm == "rmsnorm":
        count += parameter_counts(share).norms // norm_parameters(share.config) * share.config.width
    states = zero_state_bytes(
        count, dp=row.whole("dp", 1), zero=share.layout.zero, gradient_bytes=convention.gradient_bytes
    )
    return states / convention.unit_bytes


def _told(row: Row, convention: Convention, where: str = "") -> dict[str, Any]:
    quantity = f"{row.text('quantity')}{where}, {row.text('unit')}"
    return {"name": row.text("model"), "quantity": quantity, "convention": convention}
