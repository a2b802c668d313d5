"""What can DeepSpeed not run of these models? Each limit in one line, told before anything starts. Torch-free."""

import itertools
from collections.abc import Iterator

from models.config import ModelConfig
from parallel.layouts import Layout


def unsupported(config: ModelConfig, layout: Layout) -> str | None:
    """Why DeepSpeed cannot run a layout, as one line; None when it can."""
    limits = itertools.chain(
        _world_limits(layout),
        _tensor_limits(config, layout),
        _sequence_limits(config, layout),
        _pipeline_limits(layout),
    )
    return next(limits, None)


def _world_limits(layout: Layout) -> Iterator[str]:
    if layout.world_size == 1:
        yield "deepspeed needs a process group: a layout of one rank is plain PyTorch; use 2 ranks or more"


def _tensor_limits(config: ModelConfig, layout: Layout) -> Iterator[str]:
    """AutoTP cuts the parts of a product evenly, and knows nothing of heads."""
    if layout.tp == 1:
        return
    if layout.sp:
        yield f"deepspeed's AutoTP keeps whole sequences: sp over tp = {layout.tp}; use sp = false"
    for axis in ("pp", "cp"):
        if getattr(layout, axis) > 1:
            degree = getattr(layout, axis)
            yield f"deepspeed's AutoTP has no ranks for {axis}: tp = {layout.tp}, {axis} = {degree}; use {axis} = 1"
    if config.num_kv_heads % layout.tp:
        heads = config.num_kv_heads
        yield (
            f"deepspeed's AutoTP gives no KV head to two ranks: {heads} KV heads over tp = {layout.tp}; "
            f"try tp = {_divisors(heads)}"
        )


def _sequence_limits(config: ModelConfig, layout: Layout) -> Iterator[str]:
    """Ulysses attention deals whole heads to the ranks that share a sequence."""
    if layout.cp == 1:
        return
    if layout.pp > 1:
        yield (
            "deepspeed's pipeline has no ranks that share a sequence: Ulysses attention with "
            f"cp = {layout.cp}, pp = {layout.pp}; use pp = 1 or cp = 1"
        )
    if config.num_kv_heads < layout.cp:
        heads = config.num_kv_heads
        yield (
            f"deepspeed's Ulysses attention needs a KV head for each rank: {heads} KV heads over cp = {layout.cp}; "
            f"use cp <= {heads}"
        )


def _pipeline_limits(layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    if layout.zero > 1:
        yield f"deepspeed's PipelineModule refuses ZeRO 2 and 3: zero = {layout.zero}, pp = {layout.pp}; use zero <= 1"
    if layout.schedule != "1f1b":
        yield f"deepspeed's pipeline runs 1F1B only: schedule = {layout.schedule!r}; use schedule = '1f1b'"
    if layout.transport != "relay":
        yield (
            f"deepspeed's stages send to their neighbours only: transport = {layout.transport!r}; "
            "use transport = 'relay'"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
