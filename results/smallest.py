"""On how few devices does a model train, by axis of model parallelism? Closed forms over a small space.

For each model and device, and each way to divide the model:

    none   one device          tp   tensor parallelism alone          pp   pipeline stages alone
    tp+pp  both                zero ZeRO-3 over replicas alone, for comparison

one row: the fewest devices whose fullest rank fits (`parallel/loads.py`), or a blank. Degrees are powers of two: tp up
to a node of eight, pp up to the number of blocks, dp up to 512; with sequence parallelism and full recomputation where
that needs least. Half precision with AdamW on float32 master weights, eight microbatches of one sequence, as long as
the model reads but at most 2,048. Left out: every other layout (`twinshard fit` knows them), and time.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pandas as pd

from models.config import ModelConfig
from models.costs import block_parameters, sides
from models.named import named_model
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.loads import Load, Loads

MODELS = (
    "bert-large",
    "gpt2-xl",
    "t5-3b",
    "t5-11b",
    "t5-v1_1-xxl",
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3.1-405b",
)
DEVICE_GB = (24, 40, 80)
MAX_LENGTH = 2048
NODE = (2, 4, 8)
POWERS = tuple(2**power for power in range(1, 10))
STATE_BYTES = 16
"""Of a parameter: 2, its gradient 2, master weight 4 and moments 8."""
WAYS = ("none", "tp", "pp", "tp+pp", "zero")


@functools.cache
def build() -> pd.DataFrame:
    """One row a model, device and way to divide it."""
    return pd.DataFrame([row for name in MODELS for row in _rows(named_model(name))])


def _rows(config: ModelConfig) -> Iterator[dict[str, Any]]:
    length = min(config.max_length, MAX_LENGTH)
    shape = StepShape(
        num_sequences=8,
        source_length=length * config.has_encoder,
        target_length=length * config.has_decoder,
        dtype_bytes=2,
    )
    base = Layout(microbatches=8)
    loads = Loads(config=config, shape=shape, base=base, optimizer="adamw", master_weights=True)
    found = {way: [loads.fullest(layout) for layout in _layouts(config, base, way)] for way in WAYS}
    largest = max(block_parameters(config, side).total for side in sides(config))
    for device in DEVICE_GB:
        for way in WAYS:
            fitting = [load for load in found[way] if load.total_bytes <= device * 10**9]
            least = min(fitting, key=_size, default=None)
            yield {
                "point": f"{config.name} on {device} GB by {way}",
                "model": config.name,
                "architecture": config.architecture,
                "device_bytes": device * 10**9,
                "way": way,
                "block_state_bytes": largest * STATE_BYTES,
                "num_devices": least.layout.world_size if least else None,
                "layout_label": least.layout.label if least else None,
                "rank_bytes": least.total_bytes if least else None,
            }


def _size(load: Load) -> tuple[int, int]:
    return load.layout.world_size, load.total_bytes


def _layouts(config: ModelConfig, base: Layout, way: str) -> Iterator[Layout]:
    if way == "zero":
        for dp in POWERS:
            for recompute in ("none", "full"):
                yield base.replace(dp=dp, zero=3, recompute=recompute)
        return
    for tp in NODE if "tp" in way else (1,):
        for pp in (degree for degree in POWERS if degree <= config.num_blocks) if "pp" in way else (1,):
            for recompute in ("none", "full"):
                for sp in (False, True)[: 1 + (tp > 1)]:
                    layout = base.replace(tp=tp, pp=pp, sp=sp, recompute=recompute)
                    if _divides(layout, config):
                        yield layout


def _divides(layout: Layout, config: ModelConfig) -> bool:
    try:
        layout.check_model(config)
    except ValueError:
        return False
    return True
