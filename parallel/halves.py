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

All in elements of e bytes. Source: the split itself, Qi et al. 2023 (arXiv 2401.10241). Left out: what the first half
holds for a moment only.
"""

from models.costs import Side
from parallel.keeps import Microbatch


def deferred_bytes(micro: Microbatch) -> int:
    """Kept of one microbatch by one stage after the input's half of its backward."""
    share, config = micro.share, micro.config
    kept = sum(len(share.blocks(side)) * _block_bytes(micro, side) for side in share.sides)
    if config.has_cross_attention and share.blocks("decoder"):
        kept += micro.memory_bytes
    if "encoder" in share.sides and share.has_embedding("encoder") and config.feature_width:
        kept += micro.positions("encoder") * (config.feature_width + config.width) * micro.element_bytes
    if share.has_head:
        side = share.sides[-1]
        kept += micro.hidden_bytes(side) * (3 if config.head_transform else 1)
        kept += micro.positions(side) * share.vocabulary("head.weight") * micro.element_bytes
    return kept


def _block_bytes(micro: Microbatch, side: Side) -> int:
    share, config, element = micro.share, micro.config, micro.element_bytes
    query, key = share.num_heads * config.head_width, share.num_kv_heads * config.head_width
    num_up = 2 if config.is_gated else 1
    positions, hidden = micro.positions(side), micro.hidden_bytes(side)
    attention = 2 * hidden + positions * (query + 2 * key + query + config.width) * element
    ffn = positions * ((num_up + 1) * share.ffn_width + config.width) * element
    kept = attention + ffn
    if side == "decoder" and config.has_cross_attention:
        kept += hidden + positions * (query + query + config.width) * element
        kept += micro.positions("encoder") * 2 * key * element
    return kept
