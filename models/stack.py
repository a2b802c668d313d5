"""What does an encoder or a decoder consist of? Embedding, blocks, final norm, and what all blocks share.

Names of children are the qualified names of weights. Embedding and norm are None where they live on another stage.
"""

from typing import Literal

from torch import Tensor, nn

from models.attention import AttentionMask, attention_mask
from models.blocks import DecoderBlock, EncoderBlock, KeysAndValues
from models.config import ModelConfig
from models.embedding import Embedding
from models.layers import Norm
from models.positions import RelativeBias, Rope

Side = Literal["encoder", "decoder"]


class Stack(nn.Module):
    """One side of a model.

    Attributes:
        memory: what the memory passes through once, where it enters the stack; None where it does not.
        relative_bias: the bias of the scores that all self-attentions share, or None.
        block: blocks by their index in the whole stack, "0" first; in a slice also what makes keys and values for
            blocks of others.
        norm: the final norm, an identity if the config has none.
    """

    embedding: nn.Module | None
    memory: nn.Module | None
    relative_bias: nn.Module | None
    norm: nn.Module | None

    def __init__(self, config: ModelConfig, side: Side) -> None:
        super().__init__()
        self.is_causal = side == "decoder"
        num_blocks = config.num_decoder_blocks if self.is_causal else config.num_encoder_blocks
        rope = Rope(config) if config.positions == "rope" else None
        make_block = DecoderBlock if self.is_causal else EncoderBlock
        self.embedding = Embedding(config, "target" if self.is_causal else "source")
        self.memory = nn.Identity() if self.is_causal and config.has_cross_attention else None
        self.relative_bias = RelativeBias(config, is_causal=self.is_causal) if config.positions == "relative" else None
        self.block = nn.ModuleDict({str(index): make_block(config, rope) for index in range(num_blocks)})
        self.norm = Norm(config) if config.final_norm else nn.Identity()

    @property
    def blocks_here(self) -> dict[str, nn.Module]:
        """Blocks that run here, by index."""
        return {index: block for index, block in self.block.items() if not isinstance(block, KeysAndValues)}

    @property
    def makers(self) -> dict[str, nn.Module]:
        """What makes keys and values for blocks that run elsewhere, by the index of the block."""
        return {index: block for index, block in self.block.items() if isinstance(block, KeysAndValues)}

    def self_mask(self, lengths: tuple[int, ...], length: int, like: Tensor) -> AttentionMask:
        """The mask of every self-attention of this stack.

        Args:
            lengths: valid positions of each sequence.
            length: padded length.
            like: gives device and dtype.
        """
        bias_NQK = None if self.relative_bias is None else self.relative_bias(length, length)
        return attention_mask(
            is_causal=self.is_causal, key_lengths=lengths, key_length=length, like=like, bias_NQK=bias_NQK
        )
