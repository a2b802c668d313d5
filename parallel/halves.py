"""How many bytes wait between the two halves of a split backward: what the weights' gradients still need.

Of every product y = x W^T that has a weight, x and dy (`parallel/deferral.py`). For b sequences of padded length L (S
of the memory), l = L / t under sequence parallelism, with N heads, K KV heads, F ffn columns and V rows of the rank:

                     x                       dy
    qkv              l b D                   L b (N + 2K) H
    query            l b D                   L b N H
    key, value       the memory, once        S b 2K H  each block
    output           L b N H                 L b D
    up               l b D                   L b g F             (g = 2 if gated)
    down             L b F                   L b D
    head             l b D                   L b V               transform: l b D and l b D besides
    features         S b E                   S b D

All in elements of e bytes. Where inputs that are gathered are kept whole (`saved_input` of a layout), x has L for l in
qkv, query, up and head, and each block's keys and values have a memory S b D of their own if each gathers it. Source:
the split itself, Qi et al. 2023 (arXiv 2401.10241). Left out: what the first half holds for a moment only.
"""

from typing import Literal

from models.costs import Side
from parallel.keeps import Microbatch

Product = Literal["qkv", "query", "kv", "output", "up", "down", "head", "features"]


def waiting_bytes(micro: Microbatch, side: Side, product: Product) -> int:
    """Kept of one microbatch for the weight's gradient of a product, but for the memory."""
    share, config = micro.share, micro.config
    width, query, key = config.width, share.num_heads * config.head_width, share.num_kv_heads * config.head_width
    up = (2 if config.is_gated else 1) * share.ffn_width
    # Elements of a position that are whole on every rank.
    whole = {
        "qkv": query + 2 * key,
        "query": query,
        "kv": 2 * key,
        "output": query + width,
        "up": up,
        "down": share.ffn_width + width,
        "head": share.vocabulary("head.weight") if share.has_head else 0,
        "features": config.feature_width + width,
    }[product]
    positions = micro.positions("encoder" if product == "kv" else side)
    waiting = positions * whole * micro.element_bytes
    if product in ("qkv", "query", "up", "head"):
        waiting += micro.input_bytes(side)
    if product == "head" and config.head_transform:
        waiting += 2 * micro.hidden_bytes(side)
    return waiting
