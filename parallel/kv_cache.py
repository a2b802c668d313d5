"""How many bytes does a rank's cache of keys and values take in generation?

For one sequence, K KV heads of the rank, H head width, e bytes an element, L_d decoder blocks of the rank's stage:

    self-attention     2 L_d T K H e    one entry more with every generated position, up to T target positions
    cross-attention    2 L_d S K H e    made once from the memory of S source positions, read by every step

A decoder-only model has the first alone, an encoder-decoder both, an encoder-only model none: it generates nothing.
Grouped queries keep K instead of N heads; with fewer KV heads than tensor-parallel ranks, each rank keeps one, a copy
of its neighbours'. Left out: pages and blocks of an allocator, the prompt's activations, quantised caches.
"""

import dataclasses

from parallel.share import Share


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CacheBytes:
    """Bytes of one rank's caches for one sequence."""

    self_attention: int
    cross_attention: int

    @property
    def total(self) -> int:
        return self.self_attention + self.cross_attention


def cache_bytes(share: Share, *, source_length: int, target_length: int, dtype_bytes: int) -> CacheBytes:
    """Caches of one sequence when `target_length` positions are cached and the source has `source_length`.

    Lengths in positions; `dtype_bytes` an element of the cache.
    """
    config = share.config
    num_blocks = len(share.blocks("decoder"))
    per_position = 2 * num_blocks * share.num_kv_heads * config.head_width * dtype_bytes
    return CacheBytes(
        self_attention=per_position * target_length,
        cross_attention=per_position * source_length * config.has_cross_attention,
    )
