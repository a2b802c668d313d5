"""What can fairscale not run of these models? Each limit in one line, told before anything starts. Torch-free.

Left out: what this machine lacks (`fairscale_sharded.py`, `fairscale_pipe.py`).
"""

import itertools
from collections.abc import Iterator

from models.config import ModelConfig
from parallel.layouts import Layout


def unsupported(config: ModelConfig, layout: Layout) -> str | None:
    """Why fairscale cannot run a model on a layout, as one line; None when it can."""
    limits = (_axis_limits(layout), _pipeline_limits(layout), _uneven(config, layout))
    return next(itertools.chain(*limits), None)


def _axis_limits(layout: Layout) -> Iterator[str]:
    if layout.cp > 1:
        yield f"fairscale does not shard a sequence over ranks: cp = {layout.cp}; use cp = 1"
    if layout.sp:
        yield f"fairscale's tensor-parallel layers keep whole sequences: sp over tp = {layout.tp}; use sp = false"


def _pipeline_limits(layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    if layout.tp > 1 or layout.dp > 1:
        yield (
            f"fairscale's Pipe drives all stages from one process, which shares them with no other: pp = {layout.pp}, "
            f"tp = {layout.tp}, dp = {layout.dp}; use tp = 1 and dp = 1"
        )
    if layout.schedule != "gpipe":
        yield (
            "fairscale's Pipe runs every forward before the first backward: "
            f"schedule = {layout.schedule!r}; use schedule = 'gpipe'"
        )
    if layout.chunks > 1:
        yield f"fairscale's Pipe has one stage a device: chunks = {layout.chunks}; use chunks = 1"
    if layout.transport != "relay":
        yield (
            f"fairscale's stages hand on to their neighbours only: transport = {layout.transport!r}; "
            "use transport = 'relay'"
        )


def _uneven(config: ModelConfig, layout: Layout) -> Iterator[str]:
    rows = (
        ("rows of the vocabulary", config.vocabulary),
        ("rows of the source vocabulary", config.source_vocabulary),
    )
    for told, number in (("KV heads", config.num_kv_heads), *(rows if layout.shards_vocabulary else ())):
        if number % layout.tp:
            yield f"fairscale cuts evenly: tp = {layout.tp} must divide {number} {told}"
