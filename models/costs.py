"""How many parameters does a model have, and how many FLOPs does its forward take?

Closed forms, per sublayer, block, stack and model. Letters:

    D width                  Q = num_heads x head_width          F ffn_width            b sequences of a microbatch
    V vocabulary             K = num_kv_heads x head_width       g = 2 if gated else 1
    L length of the stream a stack reads; S source length, T target length

Conventions. A tied tensor is counted once. One multiply-add is 2 FLOPs. Counted are matrix products and the two
products of attention; lookups, norms, activations, softmax and residuals are not. Attention is counted as executed by
kernels that compute every score, causal or not; `causal_half=True` takes half of the causal scores, as kernels that
skip masked tiles do and as some papers count. Backward takes twice the forward: one product for the gradient of each
operand. A decoder-only model reads `target_length` alone, an encoder-only model `source_length` alone.

Sources: Kaplan et al. 2020 (arXiv 2001.08361) section 2.1 and Korthikanti et al. 2022 (arXiv 2205.05198) appendix A for
decoder-only models; the terms of cross-attention are derived here. Left out: bytes, time, and what partitioning adds.
"""

import dataclasses
from typing import Literal

from models.config import ModelConfig

Side = Literal["encoder", "decoder"]


# ---- parameters -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockParameters:
    """Parameters of one block, by sublayer; the norms of all its sublayers stand apart."""

    self_attention: int
    cross_attention: int
    ffn: int
    norms: int

    @property
    def total(self) -> int:
        return self.self_attention + self.cross_attention + self.ffn + self.norms


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCounts:
    """Parameters of one model, by component.

    `embedding` holds the tables of tokens, positions and token types and the front end of features; `norms` every norm
    but that of the head's transform; `head` the transform, the bias, and the matrix unless it is tied to an embedding.
    """

    embedding: int
    relative_bias: int
    self_attention: int
    cross_attention: int
    ffn: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


def norm_parameters(config: ModelConfig) -> int:
    """Parameters of one norm: D weights, and D biases for a layernorm."""
    return config.width * (2 if config.norm == "layernorm" else 1)


def block_parameters(config: ModelConfig, side: Side) -> BlockParameters:
    """Parameters of one block of a side; all blocks of a side are alike.

    Self-attention: D(Q + 2K) for query, key and value and QD for the output; Q + 2K and D of biases. Cross-attention
    has the same matrices, key and value reading the memory. Ffn: gDF up and FD down; gF and D of biases. A norm each.

    Raises:
        ValueError: the architecture has no such side.
    """
    _check_side(config, side)
    width, query, key = config.width, config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    num_up = 2 if config.is_gated else 1
    has_cross_attention = side == "decoder" and config.has_cross_attention

    attention = width * (query + 2 * key) + query * width
    attention += (query + 2 * key) * config.qkv_bias + width * config.attention_output_bias
    ffn = (num_up + 1) * width * config.ffn_width
    ffn += (num_up * config.ffn_width + width) * config.ffn_bias
    return BlockParameters(
        self_attention=attention,
        cross_attention=attention * has_cross_attention,
        ffn=ffn,
        norms=(2 + has_cross_attention) * norm_parameters(config),
    )


def stack_parameters(config: ModelConfig, side: Side) -> int:
    """Parameters of a side without its embedding: its blocks, its final norm, its table of relative positions."""
    relative_bias = config.relative_buckets * config.num_heads * (config.positions == "relative")
    final_norm = norm_parameters(config) * config.final_norm
    return num_blocks(config, side) * block_parameters(config, side).total + final_norm + relative_bias


def embedding_parameters(config: ModelConfig, side: Side) -> int:
    """Parameters of the tables in front of a side, without the norm behind them, as if nothing were tied.

    Tokens: VD (features of width E: ED + D). Learned positions: max_length + position_offset rows of D. Token types:
    one row of D each, in front of the only stack or of the source's.
    """
    _check_side(config, side)
    is_source = side == "encoder"
    if is_source and config.feature_width:
        rows = config.feature_width + 1
    else:
        rows = config.source_vocabulary if is_source else config.vocabulary
    if config.positions == "learned":
        rows += config.max_length + config.position_offset
    if side == sides(config)[0]:
        rows += config.num_token_types
    return rows * config.width


def head_parameters(config: ModelConfig) -> int:
    """Parameters of the head: VD unless tied, V of bias, and for a transform D^2 + D and a norm."""
    width = config.width
    matrix = 0 if config.tying in ("head", "all") else config.vocabulary * width
    bias = config.vocabulary * config.head_bias
    transform = (width * width + width + norm_parameters(config)) * config.head_transform
    return matrix + bias + transform


def parameter_counts(config: ModelConfig) -> ParameterCounts:
    """Parameters of the whole model by component; every tensor, tied or not, is counted once."""
    blocks = [(num_blocks(config, side), block_parameters(config, side)) for side in sides(config)]
    num_sides = len(blocks)
    embedding = sum(embedding_parameters(config, side) for side in sides(config))
    if config.tying in ("source_target", "all"):
        embedding -= config.vocabulary * config.width
    norms_outside = num_sides * (config.final_norm + config.embedding_norm) * norm_parameters(config)
    return ParameterCounts(
        embedding=embedding,
        relative_bias=num_sides * config.relative_buckets * config.num_heads * (config.positions == "relative"),
        self_attention=sum(count * block.self_attention for count, block in blocks),
        cross_attention=sum(count * block.cross_attention for count, block in blocks),
        ffn=sum(count * block.ffn for count, block in blocks),
        norms=sum(count * block.norms for count, block in blocks) + norms_outside,
        head=head_parameters(config),
    )


# ---- FLOPs ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockFlops:
    """Forward FLOPs of one block, by part: `core` is scores and weighted sum, `memory` the key and value of memory."""

    self_projections: int
    self_core: int
    cross_projections: int
    cross_memory: int
    cross_core: int
    ffn: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockCost:
    """One entry of the flat list of blocks: where the block stands, what it holds, what its forward takes."""

    side: Side
    index: int
    """Position within its stack, as in the name `decoder.block.3`."""
    parameters: BlockParameters
    flops: BlockFlops


def block_flops(
    config: ModelConfig,
    side: Side,
    source_length: int = 0,
    target_length: int = 0,
    microbatch: int = 1,
    *,
    causal_half: bool = False,
) -> BlockFlops:
    """Forward FLOPs of one block of a side.

    With L the length of the side's own stream:
        self_projections   2bL D(Q + 2K) query, key, value, and 2bL QD output
        self_core          2bQ L^2 scores and as many for the weighted sum; halved by `causal_half` in a decoder
        cross_projections  2bT DQ query and 2bT QD output
        cross_memory       2bS D2K key and value
        cross_core         2bQ TS scores and as many for the weighted sum; never causal
        ffn                2bL gDF up and 2bL FD down

    Raises:
        ValueError: no such side, or a length that the side reads is below 1.
    """
    _check_side(config, side)
    length = _length(config, side, source_length, target_length)
    width, query, key = config.width, config.num_heads * config.head_width, config.num_kv_heads * config.head_width
    num_up = 2 if config.is_gated else 1
    self_core = 4 * microbatch * query * length * length
    cross_length = 0
    if side == "decoder" and config.has_cross_attention:
        cross_length = _length(config, "encoder", source_length, target_length)
    query_length = length if cross_length else 0
    return BlockFlops(
        self_projections=2 * microbatch * length * width * (query + 2 * key + query),
        self_core=self_core // 2 if causal_half and side == "decoder" else self_core,
        cross_projections=2 * microbatch * query_length * width * (query + query),
        cross_memory=2 * microbatch * cross_length * width * 2 * key,
        cross_core=4 * microbatch * query * query_length * cross_length,
        ffn=2 * microbatch * length * (num_up + 1) * width * config.ffn_width,
    )


def embedding_flops(config: ModelConfig, source_length: int, microbatch: int = 1) -> int:
    """Forward FLOPs in front of the blocks: 2bS ED for features of width E; looking tokens up is free."""
    return 2 * microbatch * source_length * config.feature_width * config.width


def head_flops(config: ModelConfig, length: int, microbatch: int = 1) -> int:
    """Forward FLOPs of the head over `length` predicted positions: 2bL DV, and 2bL D^2 for a transform."""
    return 2 * microbatch * length * config.width * (config.vocabulary + config.width * config.head_transform)


def block_costs(
    config: ModelConfig,
    source_length: int = 0,
    target_length: int = 0,
    microbatch: int = 1,
    *,
    causal_half: bool = False,
) -> tuple[BlockCost, ...]:
    """Return the flat list of blocks, the encoder's first and then the decoder's, each with what it costs."""
    costs = []
    for side in sides(config):
        parameters = block_parameters(config, side)
        flops = block_flops(config, side, source_length, target_length, microbatch, causal_half=causal_half)
        costs += [
            BlockCost(side=side, index=index, parameters=parameters, flops=flops)
            for index in range(num_blocks(config, side))
        ]
    return tuple(costs)


def forward_flops(
    config: ModelConfig,
    source_length: int = 0,
    target_length: int = 0,
    microbatch: int = 1,
    *,
    causal_half: bool = False,
) -> int:
    """Forward FLOPs of the whole model on one microbatch: front end, blocks, and the head over the predicted stream."""
    blocks = block_costs(config, source_length, target_length, microbatch, causal_half=causal_half)
    length = target_length if config.has_decoder else source_length
    ends = embedding_flops(config, source_length, microbatch) + head_flops(config, length, microbatch)
    return ends + sum(block.flops.total for block in blocks)


# ---- sides ----------------------------------------------------------------------------------------------------------


def sides(config: ModelConfig) -> tuple[Side, ...]:
    """Return the sides the model has, in the order of the flat list of blocks."""
    present: dict[Side, bool] = {"encoder": config.has_encoder, "decoder": config.has_decoder}
    return tuple(side for side, is_present in present.items() if is_present)


def num_blocks(config: ModelConfig, side: Side) -> int:
    """Return the number of blocks of a side, 0 where the architecture has none."""
    return config.num_encoder_blocks if side == "encoder" else config.num_decoder_blocks


def _check_side(config: ModelConfig, side: Side) -> None:
    if side not in sides(config):
        raise ValueError(f"{config.architecture} has no {side}; its sides are {', '.join(sides(config))}")


def _length(config: ModelConfig, side: Side, source_length: int, target_length: int) -> int:
    stream, length = ("source", source_length) if side == "encoder" else ("target", target_length)
    if length < 1:
        raise ValueError(f"{config.architecture} reads {stream}_length = {length}; it must be at least 1")
    return length
