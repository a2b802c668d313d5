"""What do published accounts of training say that a model holds and computes, in their own conventions?

What this project counts exactly, papers count by rules of thumb. Here their rules are built from the same terms, so
that a figure can be recomputed as it was meant. For b sequences of L positions (S of the memory), width D, N heads
and K KV heads of width H, F ffn columns, t = tp:

    activations of a block, bytes                         each rank             between products: whole, or / t under sp
    norm                    input                                               2 L b D
    self-attention          input                                               2 L b D
                            query, key, value             2 L b (N + 2K) H / t
                            scores' softmax, its mask, its dropout              2 + 1 + 2 = 5 b N L L / t
                            input of the output product   2 L b N H / t
                            mask of the dropout                                 1 L b D
    cross-attention         as self-attention, but key and value are 4 S b K H / t, scores 5 b N L S / t
    ffn                     input                                               2 L b D
                            up (g = 2 if gated), product  2 L b (g + 1 [+ 1 if gated]) F / t
                            mask of the dropout                                 1 L b D

With D = N H = K H and F = 4 D this is L b D (10 + 24 / t) + 5 b N L L / t for a block of one stack, 34 / t under sp,
and 43 L b D + 4 S b D + 5 b N (L L + L S) for a decoder block that reads a memory, whose 2 S b D are kept once a stage
and belong to no block. Recomputation: `selective` drops the scores' terms, `full` keeps the block's input alone.

Two bytes an activation and one a mask whatever the config drops out. Left out: embeddings, final norm, head, logits,
statistics of norms, labels. What autograd really keeps is told by `parallel/activations.py`.

Sources: Korthikanti et al. 2022 (arXiv 2205.05198), section 4 and appendix A; Rajbhandari et al. 2019 (arXiv
1910.02054), section 5; Narayanan et al. 2021 (arXiv 2104.04473), section 3. Terms of cross-attention are derived
here.
"""

from fractions import Fraction
from typing import Literal

from models.config import ModelConfig
from models.costs import Side, block_flops, forward_flops, num_blocks, sides
from parallel.layouts import Recompute
from parallel.parameters import MASTER_BYTES

ACTIVATION_BYTES = 2
MASK_BYTES = 1
HALF_BYTES = 2
MOMENTS_BYTES = 8
"""AdamW's two moments in float32."""

RecomputedCore = Literal["forward", "forward_and_backward"]
"""What selective recomputation adds to hardware FLOPs: the forward of the cores, as it is executed; or as much as their
forward and backward together, which is what the published 1 + s / 3h comes to."""


# ---- activations ----------------------------------------------------------------------------------------------------


def block_activation_bytes(
    config: ModelConfig,
    side: Side,
    *,
    source_length: int = 0,
    target_length: int = 0,
    microbatch: int = 1,
    tp: int = 1,
    sp: bool = False,
    recompute: Recompute = "none",
) -> Fraction:
    """Bytes that one rank keeps of one block and microbatch; a fraction where tp does not divide.

    Args:
        config: the model.
        side: whose block.
        source_length: positions of the memory, or of an encoder's own stream.
        target_length: positions of a decoder's stream.
        microbatch: sequences.
        tp: degree of tensor parallelism.
        sp: whether what lies between sharded products is sharded too.
        recompute: what the backward computes again.

    Raises:
        ValueError: no such side, or tp below 1.
    """
    if tp < 1:
        raise ValueError(f"tp = {tp}; it must be at least 1")
    if side not in sides(config):
        raise ValueError(f"{config.architecture} has no {side}; its sides are {', '.join(sides(config))}")
    length = source_length if side == "encoder" else target_length
    hidden = length * microbatch * config.width
    between = Fraction(hidden, tp if sp else 1)
    if recompute == "full":
        return ACTIVATION_BYTES * between
    has_cross = side == "decoder" and config.has_cross_attention
    num_attentions = 1 + has_cross

    norms = (num_attentions + 1) * ACTIVATION_BYTES * between
    ends = (num_attentions + 1) * (ACTIVATION_BYTES + MASK_BYTES) * between
    inside = _attention_bytes(config, length, length, microbatch)
    scores = _scores_bytes(config, length, length, microbatch)
    if has_cross:
        inside += _attention_bytes(config, length, source_length, microbatch)
        scores += _scores_bytes(config, length, source_length, microbatch)
    num_columns = 4 if config.is_gated else 2
    inside += ACTIVATION_BYTES * length * microbatch * num_columns * config.ffn_width
    kept = inside + (0 if recompute == "selective" else scores)
    return norms + ends + Fraction(kept, tp)


def _attention_bytes(config: ModelConfig, num_queries: int, num_keys: int, microbatch: int) -> int:
    """Query, key and value, and the input of the output product, before they are divided among ranks."""
    query, key = config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    return ACTIVATION_BYTES * microbatch * (2 * num_queries * query + 2 * num_keys * key)


def _scores_bytes(config: ModelConfig, num_queries: int, num_keys: int, microbatch: int) -> int:
    """Softmax, mask and what dropout leaves of it; every score, causal or not."""
    return (2 * ACTIVATION_BYTES + MASK_BYTES) * microbatch * config.num_heads * num_queries * num_keys


def first_stage_blocks(num_blocks: int, *, pp: int, interleave: int = 1) -> Fraction:
    """Blocks, times microbatches in flight, whose activations the first stage of 1F1B keeps at once.

    L / p blocks of p microbatches: L. With v chunks a rank, L (1 + (p - 1) / (p v)): that many more are in flight.
    """
    if pp < 1 or interleave < 1:
        raise ValueError(f"pp = {pp}, interleave = {interleave}; both must be at least 1")
    return num_blocks * (1 + (Fraction(pp - 1, pp * interleave) if interleave > 1 else Fraction(0)))


# ---- states ---------------------------------------------------------------------------------------------------------


def zero_state_bytes(
    num_parameters: int | Fraction, *, dp: int, zero: int, gradient_bytes: int = HALF_BYTES
) -> Fraction:
    """Bytes of parameters, gradients, master weights and AdamW's moments of one of dp ranks.

    Half-precision parameters 2, gradients 2 (4 where they are accumulated in float32), and 4 + 8 of master weights
    and moments. ZeRO stage 1 deals the last over dp ranks, stage 2 gradients too, stage 3 parameters too.

    Raises:
        ValueError: dp below 1 or an unknown stage.
    """
    if dp < 1 or zero not in (0, 1, 2, 3):
        raise ValueError(f"dp = {dp}, zero = {zero}; dp must be at least 1, zero 0 to 3")
    optimizer = Fraction(MASTER_BYTES + MOMENTS_BYTES, dp if zero >= 1 else 1)
    gradients = Fraction(gradient_bytes, dp if zero >= 2 else 1)
    parameters = Fraction(HALF_BYTES, dp if zero >= 3 else 1)
    return num_parameters * (parameters + gradients + optimizer)


def square_block_parameters(config: ModelConfig) -> int:
    """12 L D^2: the matrices of L blocks of one stack with F = 4 D, no biases, norms or embeddings."""
    return 12 * config.num_blocks * config.width**2


def gpt_parameters(config: ModelConfig) -> int:
    """12 L D^2 (1 + 13 / (12 D) + (V + s) / (12 L D)) with s learned positions: all but the final norm's 2 D."""
    width = config.width
    rows = config.vocabulary + config.max_length
    return square_block_parameters(config) + 13 * config.num_blocks * width + rows * width


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


def model_flops(config: ModelConfig, *, length: int, num_sequences: int) -> int:
    """FLOPs of an iteration that the mathematics of one stack needs: 72 B L s D^2 (1 + s / (6 D) + V / (12 L D)).

    Three times the forward, every score counted; `models.costs` holds the terms.
    """
    return 3 * forward_flops(config, *_lengths(config, length), num_sequences)


def hardware_flops(
    config: ModelConfig,
    *,
    length: int,
    num_sequences: int,
    recompute: Recompute,
    recomputed_core: RecomputedCore = "forward",
) -> int:
    """FLOPs of an iteration with recomputation.

    `full` adds all blocks' forward, `selective` their cores', once or as `recomputed_core` says.
    """
    flops = model_flops(config, length=length, num_sequences=num_sequences)
    for side in sides(config):
        block = block_flops(config, side, *_lengths(config, length), num_sequences)
        again = 0
        if recompute == "full":
            again = block.total
        elif recompute == "selective":
            again = (block.self_core + block.cross_core) * (3 if recomputed_core == "forward_and_backward" else 1)
        flops += num_blocks(config, side) * again
    return flops


def _lengths(config: ModelConfig, length: int) -> tuple[int, int]:
    return length * config.has_encoder, length * config.has_decoder
