"""How many FLOPs does a rank execute in one step, and how many does the mathematics need?

Counted are matrix products and the products of attention, a multiply-add as 2. For a microbatch of b sequences of
padded length L (S of the memory), t = tp, with N heads, K KV heads, F ffn columns and V vocabulary rows of the rank, H
head width:

    forward         self-attention    2 b L D (N + 2K) H  query, key, value   2 b L N H D  output   4 b N L L H  core
                    cross-attention   2 b L D N H  query    2 b S D 2K H  key, value    2 b L N H D    4 b N L S H  core
                    ffn               2 b L D g F  up       2 b L F D  down      (g = 2 if gated)
                    features          2 b S E D             transform  2 b L D D  (L / t under sp)     head  2 b L D V
    backward        twice a product, once for each operand's gradient; features get none for their input: once
    core backward   materialised: twice the forward. fused: 2.5 times, because the kernel computes the scores again
    recompute       full: the forward of blocks once more; selective: the cores

Where keys and values are shipped (`parallel/edges.py`), their products run on the stage that makes the memory, outside
of blocks: recomputation does not repeat them.

A vocabulary that is whole on every rank is multiplied on every rank: V is then that of the model.

Causal attention counts every score: the kernels of matrix products compute them all, and what a fused kernel skips
depends on its tile size. `models.costs` halves causal scores on request. Hardware FLOPs are these, with padding,
replicated work and recomputation; model FLOPs are three times the forward of the unpadded sequences, whatever is
executed.

Sources: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A; the fused backward's five products: Dao et al. 2022
(arXiv 2205.14135), algorithm 4. Left out: norms, activations, softmax, lookups, sums of biases.
"""

from collections import Counter

from models.config import ModelConfig
from models.costs import Side, forward_flops
from parallel.events import padded_length
from parallel.figures import PhaseFlops, StepShape
from parallel.kernels import Attention, core_kernel
from parallel.layouts import microbatch_sizes
from parallel.share import Share


def model_flops(config: ModelConfig, shape: StepShape) -> int:
    """FLOPs that the mathematics of a data-parallel rank's sequences needs: the forward, and twice as much backward."""
    return 3 * forward_flops(config, shape.source_length, shape.target_length, shape.num_sequences)


def step_flops(share: Share, shape: StepShape) -> dict[str, PhaseFlops]:
    """FLOPs of one rank in a step, by component: embedding, self_attention, cross_attention, ffn, head."""
    parts: dict[str, PhaseFlops] = {}
    for size, count in Counter(microbatch_sizes(shape.num_sequences, share.layout.microbatches)).items():
        for part, flops in _microbatch(share, shape, size).items():
            parts[part] = parts.get(part, PhaseFlops()) + flops.times(count)
    return parts


def _microbatch(share: Share, shape: StepShape, size: int) -> dict[str, PhaseFlops]:
    config = share.config
    parts = {part: PhaseFlops() for part in ("embedding", "self_attention", "cross_attention", "ffn", "head")}
    source = padded_length(share.plan, shape, "source") * size
    if "encoder" in share.sides and share.has_embedding("encoder") and config.feature_width:
        product = 2 * source * config.feature_width * config.width
        parts["embedding"] = PhaseFlops(forward=product, backward=product)
    for side in share.sides:
        count = len(share.blocks(side))
        for part, flops in _block(share, shape, side, size).items():
            parts[part] += flops.times(count)
    shipped = keys_values_flops(share, shape, size)
    if share.num_shipped > 0:
        # Made outside of blocks, and so never again.
        parts["cross_attention"] += PhaseFlops(forward=shipped, backward=2 * shipped).times(share.num_shipped)
    if share.has_head:
        positions = padded_length(share.plan, shape, config.predicted_stream) * size
        product = 2 * positions * config.width * share.vocabulary("head.weight")
        product += 2 * share.sequence_shard(positions) * config.width**2 * config.head_transform
        parts["head"] = PhaseFlops(forward=product, backward=2 * product)
    return parts


def _block(share: Share, shape: StepShape, side: Side, size: int) -> dict[str, PhaseFlops]:
    config = share.config
    length = padded_length(share.plan, shape, "source" if side == "encoder" else "target")
    query, key = share.num_heads * config.head_width, share.num_kv_heads * config.head_width
    num_up = 2 if config.is_gated else 1

    qkv = 2 * size * length * config.width * (query + 2 * key)
    output = 2 * size * length * query * config.width
    ffn = 2 * size * length * (num_up + 1) * config.width * share.ffn_width
    parts = {
        "self_attention": _products(share, qkv + output) + _core(share, "self", 4 * size * query * length * length),
        "ffn": _products(share, ffn),
    }
    if side == "decoder" and config.has_cross_attention:
        memory_length = padded_length(share.plan, shape, "memory")
        entering = 2 * size * config.width * length * query
        if share.kv_blocks:
            entering += keys_values_flops(share, shape, size)
        core = _core(share, "cross", 4 * size * query * length * memory_length)
        parts["cross_attention"] = _products(share, entering + output) + core
    return parts


def keys_values_flops(share: Share, shape: StepShape, size: int) -> int:
    """Of the product that makes keys and values of a decoder block, 2 b S D 2K H, forward."""
    width = 2 * share.num_kv_heads * share.config.head_width
    return 2 * size * padded_length(share.plan, shape, "memory") * share.config.width * width


def _products(share: Share, forward: int) -> PhaseFlops:
    """Matrix products of a block with parameters."""
    is_again = share.layout.recompute == "full"
    return PhaseFlops(forward=forward, recompute=forward * is_again, backward=2 * forward)


def _core(share: Share, attention: Attention, forward: int) -> PhaseFlops:
    """The products of scores and of weighted values."""
    is_fused = core_kernel(share, attention) == "fused"
    is_again = share.layout.recompute != "none"
    return PhaseFlops(
        forward=forward, recompute=forward * is_again, backward=forward * 5 // 2 if is_fused else forward * 2
    )
