"""What do closed forms say of every named model: parameters by component, shares, tying, caches, FLOPs over lengths?

Tables that no record stands behind, the same for every study (`models/costs.py`, `parallel/kv_cache.py`):

    counts      one row a named model: parameters by component and block, the block at twice the width, what tying would
                change, FLOPs of its blocks and of all at its longest sequence, the published count
    caches      one row a model and tensor-parallel degree: bytes of keys and values in generation, in half precision;
                the 70B model also with as many KV heads as query heads
    lengths     one row a model and pair of lengths: FLOPs of the cores of attention
    structure   one row a fact that was read off a built model (`results/structure.csv`)

`point` names a row. Tiny models are left out, and so is all that depends on a layout but for the caches.
"""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from models.config import ModelConfig, Tying
from models.costs import block_flops, block_parameters, forward_flops, num_blocks, parameter_counts, sides
from models.named import MODEL_NAMES, named_model
from parallel.kv_cache import cache_bytes
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.share import shares
from results.validation.counts import published_counts

NAMES = tuple(name for name in MODEL_NAMES if not name.startswith("tiny-"))
CACHE_DEGREES = (1, 2, 4, 8, 16, 32, 64)
HALF_BYTES = 2
LENGTH_MODELS = ("bert-base", "gpt2", "bart-base")
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
TYINGS: dict[bool, tuple[Tying, ...]] = {True: ("none", "head", "source_target", "all"), False: ("none", "head")}
"""Ways to tie, by whether there are two sides."""

Row = dict[str, Any]


@functools.cache
def counts() -> pd.DataFrame:
    """One row a named model."""
    published = published_counts()
    return pd.DataFrame([_count(named_model(name), published.get(name)) for name in NAMES])


def _count(config: ModelConfig, published: int | None) -> Row:
    parameters = parameter_counts(config)
    row: Row = {
        "point": config.name,
        "architecture": config.architecture,
        "num_encoder_blocks": config.num_encoder_blocks,
        "num_decoder_blocks": config.num_decoder_blocks,
        "width": config.width,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "ffn_width": config.ffn_width,
        "vocabulary": config.vocabulary,
        "tying": config.tying,
        "parameters": parameters.total,
        "published_parameters": published,
        **{
            name: getattr(parameters, name)
            for name in ("embedding", "relative_bias", "self_attention", "cross_attention", "ffn", "norms", "head")
        },
        "block_parameters": 0,
    }
    doubled = config.replace(
        width=2 * config.width,
        num_heads=2 * config.num_heads,
        num_kv_heads=2 * config.num_kv_heads,
        ffn_width=2 * config.ffn_width,
    )
    for side in ("encoder", "decoder"):
        block = block_parameters(config, side) if side in sides(config) else None
        row |= {
            f"{side}_block": block.total if block else None,
            f"{side}_block_attention": block.self_attention + block.cross_attention if block else None,
            f"{side}_block_ffn": block.ffn if block else None,
            f"{side}_block_doubled": block_parameters(doubled, side).total if block else None,
        }
        row["block_parameters"] += num_blocks(config, side) * block.total if block else 0
    for tying in TYINGS[True]:
        is_known = tying in TYINGS[config.has_cross_attention] and not (config.feature_width and tying != "none")
        row[f"parameters_tying_{tying}"] = parameter_counts(config.replace(tying=tying)).total if is_known else None
    lengths = (config.max_length * config.has_encoder, config.max_length * config.has_decoder)
    row["source_length"], row["target_length"] = lengths
    row["block_flops"] = sum(
        num_blocks(config, side) * block_flops(config, side, *lengths).total for side in sides(config)
    )
    row["forward_flops"] = forward_flops(config, *lengths)
    return row


@functools.cache
def caches() -> pd.DataFrame:
    """One row a model and tensor-parallel degree that can partition it."""
    configs = [named_model(name) for name in NAMES]
    grouped = named_model("llama-2-70b")
    configs.append(grouped.replace(name="llama-2-70b of 64 KV heads", num_kv_heads=grouped.num_heads))
    return pd.DataFrame([row for config in configs for row in _caches(config)])


def _caches(config: ModelConfig) -> Iterator[Row]:
    for tp in CACHE_DEGREES:
        layout = Layout(tp=tp)
        try:
            layout.check_model(config)
        except ValueError:
            continue
        share = shares(plan(config, layout))[0]
        one = cache_bytes(share, source_length=1, target_length=1, dtype_bytes=HALF_BYTES)
        length = config.max_length
        request = cache_bytes(share, source_length=length, target_length=length, dtype_bytes=HALF_BYTES)
        yield {
            "point": f"{config.name} tp{tp}",
            "model": config.name,
            "architecture": config.architecture,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "tp": tp,
            "num_caches": (one.self_attention > 0) + (one.cross_attention > 0),
            "self_bytes_per_target_position": one.self_attention,
            "cross_bytes_per_source_position": one.cross_attention,
            "source_length": length * config.has_cross_attention,
            "target_length": length * config.has_decoder,
            "request_bytes": request.total,
        }


@functools.cache
def lengths() -> pd.DataFrame:
    """One row a model and pair of lengths, source and target as far as it has them."""
    rows = []
    for name in LENGTH_MODELS:
        config = named_model(name)
        for source in LENGTHS if config.has_encoder else (0,):
            for target in LENGTHS if config.has_decoder else (0,):
                cores = {side: block_flops(config, side, source, target) for side in sides(config)}
                encoder, decoder = cores.get("encoder"), cores.get("decoder")
                rows.append(
                    {
                        "point": f"{name} {source}/{target}",
                        "model": name,
                        "architecture": config.architecture,
                        "source_length": source,
                        "target_length": target,
                        "encoder_self_flops": encoder.self_core if encoder else None,
                        "cross_flops": decoder.cross_core if decoder and config.has_cross_attention else None,
                        "decoder_self_flops": decoder.self_core if decoder else None,
                        "forward_flops": forward_flops(config, source, target),
                    }
                )
    return pd.DataFrame(rows)


@functools.cache
def structure() -> pd.DataFrame:
    """One row a fact of a built model; `point` is its model."""
    table = pd.read_csv(Path(__file__).with_name("structure.csv"), dtype=str)
    return table.rename(columns={"model": "point"})
