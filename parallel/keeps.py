"""How many bytes does autograd keep of each module's forward, for one microbatch on one rank?

A storage counts once, whoever keeps it or views of it; parameters never count. Letters, for b sequences: L padded
length of the module's stream, l = L, or L / t under sp; S length of the memory; D width; N heads, K KV heads, F ffn
columns, V vocabulary rows of the rank; H head width; e bytes an element, a = max(4, e) bytes where half precision is
accumulated.

    norm          layernorm: input l b D e, mean and deviation 2 l b e
                  rmsnorm: input l b D a, deviation l b a, normalised l b D a (float32 copies of half precision)
    projection    its input l b D e (under sp the shard, which is gathered again; the whole, L b D e, if that is kept)
    ffn           up L b F e, activation L b F e; relu its result only; gated: up 2 L b F e, activated gate, product
    dropout       one byte an element, and what it leaves where a product keeps that
    embedding     ids 8 L b; rows dealt over ranks also L b of flags; token types 8 L b; features S b E e
    head          its input, as a projection; transform: its input and one or two hidden states, and a norm
    loss          whole vocabulary: log-probabilities L b V a, labels 8 L b, one scalar a
                  dealt out: probabilities L b V e, labels 8 L b, two flags a position

Every line was read off PyTorch 2.13 on a CPU, by listing what a small model's functions keep. Core attention is apart,
in `parallel/cores.py`. Left out: what CUDA kernels keep instead, and what is held outside of autograd.
"""

import dataclasses

from models.config import ModelConfig
from models.costs import Side, sides
from parallel.events import padded_length
from parallel.figures import StepShape
from parallel.share import Share

INDEX_BYTES = 8
"""Token ids and labels are int64."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One microbatch on one rank: `size` sequences of the step."""

    share: Share
    shape: StepShape
    size: int

    @property
    def config(self) -> ModelConfig:
        return self.share.config

    @property
    def element_bytes(self) -> int:
        return self.shape.dtype_bytes

    def length(self, side: Side) -> int:
        """Padded length of a side's stream."""
        return padded_length(self.share.plan, self.shape, "source" if side == "encoder" else "target")

    def positions(self, side: Side) -> int:
        """L b."""
        return self.length(side) * self.size

    def sharded_positions(self, side: Side) -> int:
        """The positions, l b, of this rank between sharded products."""
        return self.share.sequence_shard(self.positions(side))

    def hidden_bytes(self, side: Side) -> int:
        """Hidden states, l b D e, between sharded products."""
        return self.sharded_positions(side) * self.config.width * self.element_bytes

    def input_bytes(self, side: Side) -> int:
        """What a product that sp makes gather its input keeps of it: the shard, or the whole."""
        if not self.share.layout.keeps_whole_inputs:
            return self.hidden_bytes(side)
        return self.positions(side) * self.config.width * self.element_bytes

    @property
    def memory_bytes(self) -> int:
        """The memory as it comes to the blocks: gathered S b D e, or the shard that is gathered for each block."""
        layout = self.share.layout
        positions = (
            self.positions("encoder") if layout.memory_gather == "per_stage" else self.sharded_positions("encoder")
        )
        return positions * self.config.width * self.element_bytes

    @property
    def block_memory_bytes(self) -> int:
        """What each block's key-value product keeps of the memory alone; else all keep the one that comes to them."""
        layout = self.share.layout
        is_own = layout.keeps_whole_inputs and layout.memory_gather == "per_block"
        return self.input_bytes("encoder") * is_own

    @property
    def has_masked_keys(self) -> bool:
        """Whether source positions are padding: sequences are ragged, or sp padded them to divide."""
        return self.shape.is_ragged or self.length("encoder") != self.shape.source_length


def norm_bytes(micro: Microbatch, side: Side) -> int:
    """Kept by one norm over hidden states, its input included."""
    positions, width = micro.sharded_positions(side), micro.config.width
    if micro.config.norm == "layernorm":
        return positions * (width + 2) * micro.element_bytes
    return positions * (2 * width + 1) * micro.shape.accumulated_bytes


def norm_keeps_input(micro: Microbatch) -> bool:
    """Whether a norm keeps its very input; in half precision an rmsnorm keeps a float32 copy."""
    return micro.config.norm == "layernorm" or micro.element_bytes >= 4


def dropout_bytes(micro: Microbatch, side: Side) -> int:
    """Kept by the dropout at the end of a sublayer or an embedding."""
    return micro.sharded_positions(side) * micro.config.width * (micro.config.dropout > 0.0)


def ffn_bytes(micro: Microbatch, side: Side) -> int:
    """Kept between the two products of an ffn: what `up` gives, and what activation, gate and dropout make of it."""
    config = micro.config
    columns = micro.positions(side) * micro.share.ffn_width
    tensor = columns * micro.element_bytes
    if config.is_gated:
        kept = 4 * tensor
    else:
        kept = tensor if config.activation == "relu" else 2 * tensor
    if config.ffn_dropout == 0.0:
        return kept
    # The mask, and what it leaves; the activation itself stays only where its own backward reads it.
    return kept + columns + (tensor if config.activation == "relu" else 0)


def embedding_bytes(micro: Microbatch, side: Side) -> int:
    """Kept in front of a stack, norm and dropout apart."""
    config, length, positions = micro.config, micro.length(side), micro.positions(side)
    if side == "encoder" and config.feature_width:
        kept = positions * config.feature_width * micro.element_bytes
    else:
        kept = positions * INDEX_BYTES + positions * micro.share.layout.shards_vocabulary
    if side == sides(config)[0] and config.num_token_types:
        kept += positions * INDEX_BYTES
    if config.positions == "learned" and length > config.max_length:
        # Padded past the table, positions are looked up instead of sliced.
        kept += length * INDEX_BYTES
    return kept


def whole_features_bytes(micro: Microbatch) -> int:
    """What a shard of projected features keeps beyond itself: under sp it is a view of the whole, S b D e.

    Whoever keeps it keeps the whole, unless something was added to it before: positions, or token types.
    """
    config = micro.config
    is_view = config.feature_width > 0 and micro.share.layout.sp and config.num_token_types == 0
    if not is_view or config.positions in ("learned", "sinusoidal"):
        return 0
    positions = micro.positions("encoder") - micro.sharded_positions("encoder")
    return positions * config.width * micro.element_bytes


def relative_bias_bytes(micro: Microbatch, side: Side) -> int:
    """Kept where a stack's table becomes the bias of its scores: buckets, and flags of what is masked."""
    if micro.config.positions != "relative":
        return 0
    length = micro.length(side)
    is_padded = side == "encoder" and micro.has_masked_keys
    masks = length * length * (side == "decoder") + micro.size * length * is_padded
    return length * length * INDEX_BYTES + masks


def mask_bytes(micro: Microbatch, side: Side) -> int:
    """The tensor that a side's self-attentions add to their scores, e each; 0 where a rule says all."""
    length = micro.length(side)
    is_padded = side == "encoder" and micro.has_masked_keys
    if micro.config.positions == "relative":
        copies = micro.size if is_padded else 1
        return copies * micro.share.num_heads * length * length * micro.element_bytes
    return micro.size * length * micro.element_bytes * is_padded


def memory_mask_bytes(micro: Microbatch) -> int:
    """The tensor that cross-attentions add to their scores."""
    return micro.size * micro.length("encoder") * micro.element_bytes * micro.has_masked_keys


def head_bytes(micro: Microbatch, side: Side) -> int:
    """Kept by the head but for the norm of its transform: the product's input, and the transform's own states."""
    config, hidden, entering = micro.config, micro.hidden_bytes(side), micro.input_bytes(side)
    if not config.head_transform:
        return entering
    # The dense map keeps its input; the activation its input, or if it is relu its result, which the norm keeps too.
    return entering + hidden + (0 if config.activation == "relu" and norm_keeps_input(micro) else hidden)


def loss_bytes(micro: Microbatch, side: Side) -> int:
    """Kept by head's logits and the cross-entropy; the logits themselves are not."""
    positions = micro.positions(side)
    logits = positions * micro.share.vocabulary("head.weight")
    labels = positions * INDEX_BYTES
    if micro.share.layout.shards_vocabulary:
        return logits * micro.element_bytes + labels + 2 * positions
    return logits * micro.shape.accumulated_bytes + labels + micro.shape.accumulated_bytes
