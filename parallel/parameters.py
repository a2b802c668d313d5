"""How many parameters does a rank hold, by component, and in how many bytes do they, gradients and optimizer stand?

    t = tp    D width    Q = heads / t x head width    K = KV heads of the rank x head width    F = ffn width / t
    g = 2 if gated, else 1    V = vocabulary rows of the rank    [x] = only where the config has it

    self- or cross-attention    D (Q + 2K) [+ Q + 2K]  query, key, value      Q D [+ D]  output
    ffn                         g D F [+ g F]          up                     F D [+ D]  down
    embedding, first stage of a stack                  V D tokens, or E D + D for features of width E;
                                                       [(max_length + offset) D] [types x D]
    relative bias, every stage of a stack              [buckets x heads / t]
    norms, each                                        D [+ D]
    head, last stage                                   V D [+ V] [+ D^2 + D + a norm]

Where keys and values are shipped, D 2K [+ 2K] of every cross-attention stand on the stage that makes the memory.

The biases of row-parallel products, norms, positions, types and features are whole on every tp rank. A tied tensor with
several names on one stage counts once, under the first of them; on each further stage a copy counts again.

Left out: activations (`parallel/activations.py`), and buffers of an allocator.
"""

import dataclasses

from models.costs import ParameterCounts, Side, norm_parameters, sides
from parallel.figures import Optimizer
from parallel.layouts import Layout
from parallel.share import Share

COUNTER_BYTES = 4
"""torch's AdamW keeps the number of its steps as a float32 scalar beside every tensor."""
MASTER_BYTES = 4
"""Master weights, and moments beside them, are float32."""


def parameter_counts(share: Share) -> ParameterCounts:
    """Parameters of a rank by component, as `models.costs.parameter_counts` counts those of the whole model."""
    config, here = share.config, share.sides
    num_self = sum(len(share.blocks(side)) for side in here)
    num_cross = len(share.blocks("decoder")) * config.has_cross_attention
    ends = [side for side in here if share.has_embedding(side)]
    num_norms = 2 * num_self + num_cross + sum(config.final_norm * share.has_end(side) for side in here)
    num_norms += config.embedding_norm * len(ends)
    matrices = token_matrices(share)
    return ParameterCounts(
        embedding=sum(matrices.get(f"{side}.embedding.token.weight", 0) + around_tokens(share, side) for side in ends),
        relative_bias=len(here) * relative_parameters(share),
        self_attention=num_self * attention_parameters(share),
        cross_attention=num_cross * attention_parameters(share) + share.num_shipped * kv_parameters(share),
        ffn=num_self * ffn_parameters(share),
        norms=num_norms * norm_parameters(config),
        head=around_head(share) + matrices.get("head.weight", 0) if share.has_head else 0,
    )


def attention_parameters(share: Share) -> int:
    """D (Q + 2K) + Q D, and Q + 2K and D of biases; cross-attention has as many, key and value reading the memory."""
    config = share.config
    query, key = share.num_heads * config.head_width, share.num_kv_heads * config.head_width
    matrices = config.width * (query + 2 * key) + query * config.width
    return matrices + (query + 2 * key) * config.qkv_bias + config.width * config.attention_output_bias


def kv_parameters(share: Share) -> int:
    """Of these, what makes keys and values: 2 D K [+ 2K]."""
    config = share.config
    return 2 * share.num_kv_heads * config.head_width * (config.width + config.qkv_bias)


def ffn_parameters(share: Share) -> int:
    """(g + 1) D F, and g F and D of biases."""
    config = share.config
    num_up = 2 if config.is_gated else 1
    matrices = (num_up + 1) * config.width * share.ffn_width
    return matrices + (num_up * share.ffn_width + config.width) * config.ffn_bias


def relative_parameters(share: Share) -> int:
    """Of one table of relative biases: buckets x heads."""
    config = share.config
    return config.relative_buckets * share.num_heads * (config.positions == "relative")


def token_matrices(share: Share) -> dict[str, int]:
    """Elements, V D, of each matrix of vocabulary rows here, under the first of its names that this stage knows."""
    first: dict[str, str] = {}
    for group in share.config.tie_groups:
        held = [name for name in group if name in share.token_weights]
        first |= dict.fromkeys(held, *held[:1])
    owners = dict.fromkeys(first.get(name, name) for name in share.token_weights)
    return {name: share.vocabulary(name) * share.config.width for name in owners}


def around_tokens(share: Share, side: Side) -> int:
    """What stands in front of a stack beside the token matrix and the norm: features, positions, token types."""
    config = share.config
    rows = config.feature_width + 1 if side == "encoder" and config.feature_width else 0
    if config.positions == "learned":
        rows += config.max_length + config.position_offset
    if side == sides(config)[0]:
        rows += config.num_token_types
    return rows * config.width


def around_head(share: Share) -> int:
    """V of bias and the transform: D^2 + D and a norm."""
    config = share.config
    transform = (config.width * (config.width + 1) + norm_parameters(config)) * config.head_transform
    return share.vocabulary("head.weight") * config.head_bias + transform


def num_tensors(share: Share) -> int:
    """How many parameters, as tensors, a rank holds."""
    config = share.config
    per_norm = 2 if config.norm == "layernorm" else 1
    attention = 2 + config.qkv_bias + config.attention_output_bias + per_norm
    ffn = 2 + 2 * config.ffn_bias + per_norm
    count = len(token_matrices(share))
    for side in share.sides:
        has_cross = side == "decoder" and config.has_cross_attention
        # Cross-attention projects queries apart from keys and values.
        count += len(share.blocks(side)) * (attention + has_cross * (attention + 1 + config.qkv_bias) + ffn)
        count += config.positions == "relative"
        count += per_norm * config.final_norm * share.has_end(side)
        if share.has_embedding(side):
            count += 2 * (side == "encoder" and config.feature_width > 0) + (config.positions == "learned")
            count += (side == sides(config)[0] and config.num_token_types > 0) + per_norm * config.embedding_norm
    count += share.num_shipped * (1 + config.qkv_bias)
    if share.has_head:
        count += config.head_bias + (2 + per_norm) * config.head_transform
    return count


# ---- what gradients are summed over ---------------------------------------------------------------------------------


def whole_parameters(share: Share) -> int:
    """Parameters that every tp rank holds whole: norms, output and down biases, what is around tokens and head.

    Of a vocabulary that is whole besides: the matrices of its rows, and the head's bias.
    Under sequence parallelism each rank sees a shard of the sequence, so their gradients are summed over tp.
    """
    config = share.config
    num_self = sum(len(share.blocks(side)) for side in share.sides)
    num_cross = len(share.blocks("decoder")) * config.has_cross_attention
    biases = (num_self + num_cross) * config.attention_output_bias + num_self * config.ffn_bias
    around = sum(around_tokens(share, side) for side in share.sides if share.has_embedding(side))
    is_sharded = share.layout.shards_vocabulary
    if share.has_head:
        around += around_head(share) - share.vocabulary("head.weight") * config.head_bias * is_sharded
    if not is_sharded:
        around += sum(token_matrices(share).values())
    return parameter_counts(share).norms + biases * config.width + around


def replicated_parameters(share: Share) -> int:
    """Parameters of the one KV head that neighbouring tp ranks hold together: 2 H (D [+ 1]) an attention."""
    if share.num_kv_replicas == 1:
        return 0
    num_attentions = sum(len(share.blocks(side)) for side in share.sides) + len(share.kv_blocks)
    return num_attentions * kv_parameters(share)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateBytes:
    """Bytes of one rank that stay from step to step."""

    parameters: int
    master_weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.parameters + self.master_weights + self.gradients + self.optimizer


def state_bytes(share: Share, dtype_bytes: int, optimizer: Optimizer, *, master_weights: bool = False) -> StateBytes:
    """Bytes of parameters, gradients and optimizer states.

    With n parameters in k tensors of e bytes an element, d = dp:

        parameters   n e                              gradients   n e
        sgd          0 (no momentum)                  adamw       2 n e of moments, and 4 k of step counters
        master       4 n; the moments beside them are float32 too: 8 n

    ZeRO (arXiv 1910.02054, section 5) deals elements over dp, rounded up to whole ones: stage 1 the optimizer and
    master weights, of which a rank then has one tensor, stage 2 gradients too, stage 3 parameters too. What stage 3
    gathers to compute is not counted.

    Args:
        share: the rank; its layout tells the ZeRO stage.
        dtype_bytes: of an element of parameters and gradients.
        optimizer: `sgd` or `adamw`.
        master_weights: whether the optimizer updates a float32 copy.
    """
    return states_of(
        parameter_counts(share).total,
        num_tensors(share),
        share.layout,
        dtype_bytes,
        optimizer,
        master_weights=master_weights,
    )


def states_of(
    count: int, num_tensors: int, layout: Layout, dtype_bytes: int, optimizer: Optimizer, *, master_weights: bool
) -> StateBytes:
    """The same of so many parameters in so many tensors; `zero` and `dp` of the layout are read."""
    zero = layout.zero
    dealt = -(-count // layout.dp)
    updated = dealt if zero >= 1 else count
    moments = 0
    if optimizer == "adamw":
        # A slice is one tensor.
        counters = COUNTER_BYTES * (1 if zero else num_tensors)
        moments = 2 * updated * (MASTER_BYTES if master_weights else dtype_bytes) + counters
    return StateBytes(
        parameters=(dealt if zero >= 3 else count) * dtype_bytes,
        master_weights=updated * MASTER_BYTES * master_weights,
        gradients=(dealt if zero >= 2 else count) * dtype_bytes,
        optimizer=moments,
    )
