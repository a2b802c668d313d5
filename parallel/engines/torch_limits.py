"""What can PyTorch's own means not run? Each limit in one line, told before anything starts.

They are those of torch 2.13 as it was found here: where an adapter can make something right without replacing torch's
part (a ragged last microbatch, tied weights on two stages), `parallel/engines/torch.py` does. Torch-free.
"""

import itertools
from collections.abc import Iterator

from models.config import ModelConfig
from parallel.layouts import SPLIT_SCHEDULES, Layout

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")


def unsupported(config: ModelConfig, layout: Layout) -> str | None:
    """Why torch cannot run a layout, as one line; None when it can."""
    limits = itertools.chain(_tensor_limits(config, layout), _pipeline_limits(layout), _data_limits(layout))
    return next(limits, None)


def _tensor_limits(config: ModelConfig, layout: Layout) -> Iterator[str]:
    if layout.cp > 1:
        yield (
            "torch's context_parallel shards the attention of one stream and has no causal kernel on CPUs: "
            f"cp = {layout.cp}; use cp = 1"
        )
    if config.num_kv_heads % layout.tp:
        yield (
            f"DTensor shards rows and gives no KV head to two ranks: {config.num_kv_heads} KV heads over "
            f"tp = {layout.tp}; try a tp that divides them"
        )


def _pipeline_limits(layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    if layout.transport != "relay":
        yield f"torch's stages send to the next stage only: transport = {layout.transport!r}; use transport = 'relay'"
    if layout.schedule not in SCHEDULES:
        yield f"the torch engine has no schedule {layout.schedule!r}; use one of {', '.join(SCHEDULES)}"
    if layout.schedule == "gpipe" and layout.placement == "v":
        yield "torch's GPipe deals stages to ranks in turn: placement = 'v'; use placement = 'interleaved'"
    if layout.schedule == "1f1b" and layout.microbatches < layout.pp:
        yield (
            f"torch's 1F1B wants at least as many microbatches as stages: {layout.microbatches} over {layout.pp}; "
            f"try microbatches = {layout.pp}"
        )
    num_rounds = max(1, layout.microbatches // layout.pp)
    if layout.schedule in ("interleaved", "zb_h1") and layout.microbatches % num_rounds:
        yield (
            f"torch's {layout.schedule} wants equal rounds: {layout.microbatches} microbatches in {num_rounds}; "
            f"try microbatches = {num_rounds * layout.pp}"
        )


def _data_limits(layout: Layout) -> Iterator[str]:
    if layout.dp > 1 and layout.chunks > 1:
        yield f"chunks of a rank share modules, which torch wraps once: dp = {layout.dp} with chunks; use chunks = 1"
    if layout.zero == 1 and layout.tp > 1:
        yield f"torch's ZeroRedundancyOptimizer takes no DTensor: zero = 1 with tp = {layout.tp}; use zero = 3"
    if layout.pp > 1 and layout.schedule in SPLIT_SCHEDULES:
        # Both would give wrong gradients without a word.
        if layout.zero == 1:
            yield (
                "DistributedDataParallel, which ZeroRedundancyOptimizer wants, never sums gradients of a backward in "
                f"two pieces: zero = 1 with {layout.schedule}; use zero = 2"
            )
        if layout.zero == 3:
            yield (
                "FSDP2 has sharded weights again when torch's backward in two pieces looks for them: "
                f"zero = 3 with {layout.schedule}; use zero = 2"
            )
