"""What is repeated to make a stack deep: an encoder's and a decoder's block.

    encoder block   self-attention -> ffn
    decoder block   self-attention -> (cross-attention, if there is a memory to read) -> ffn

Both are called alike, so that whoever runs blocks need not ask which it has. Of a decoder block that lives elsewhere, a
slice may hold what makes keys and values of the memory, and nothing else.
"""

from torch import Tensor, nn

from models.attention import AttentionMask
from models.config import ModelConfig
from models.positions import Rope
from models.sublayers import CrossAttention, Ffn, SelfAttention


class EncoderBlock(nn.Module):
    """Self-attention and ffn."""

    def __init__(self, config: ModelConfig, rope: Rope | None) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config, rope)
        self.ffn = Ffn(config)

    def forward(
        self,
        hidden_LBD: Tensor,
        self_mask: AttentionMask,
        memory_SBD: Tensor | None = None,
        memory_mask: AttentionMask | None = None,
    ) -> Tensor:
        """hidden_LBD -> hidden_LBD. There is never a memory."""
        hidden_LBD = self.self_attention(hidden_LBD, self_mask)
        left_LBD: Tensor = self.ffn(hidden_LBD)
        return left_LBD


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention if the model has an encoder, and ffn."""

    def __init__(self, config: ModelConfig, rope: Rope | None) -> None:
        super().__init__()
        self.self_attention = SelfAttention(config, rope)
        self.cross_attention = CrossAttention(config) if config.has_cross_attention else None
        self.ffn = Ffn(config)

    def forward(
        self,
        hidden_LBD: Tensor,
        self_mask: AttentionMask,
        memory_SBD: Tensor | None = None,
        memory_mask: AttentionMask | None = None,
    ) -> Tensor:
        """hidden_LBD -> hidden_LBD, having read memory_SBD if there is one."""
        hidden_LBD = self.self_attention(hidden_LBD, self_mask)
        if self.cross_attention is not None:
            hidden_LBD = self.cross_attention(hidden_LBD, memory_SBD, memory_mask)
        left_LBD: Tensor = self.ffn(hidden_LBD)
        return left_LBD


class KeysAndValues(nn.Module):
    """What stands for a decoder block of another slice where its keys and values are made; no name changes."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        kv = block.get_submodule("cross_attention.kv")
        self.cross_attention = nn.ModuleDict({"kv": kv})

    def forward(self, memory_SBD: Tensor) -> Tensor:
        """memory_SBD -> keys and values of all heads side by side, [S, B, 2 K H]."""
        made: Tensor = self.cross_attention["kv"].joined(memory_SBD)  # type: ignore[operator]
        return made
