"""What are blocks made of? Self-attention, cross-attention and ffn: each a residual branch with its norm.

    pre-norm    x + dropout(f(norm(x)))
    post-norm   norm(x + dropout(f(x)))

Hidden states are sequence-first, [L, B, D]. Heads are split with -1, so a sublayer whose projections hold a part of the
heads needs no change. A pre-norm cross-attention norms the hidden states and never the memory.
"""

import functools
from collections.abc import Callable

from torch import Tensor, nn

from models.attention import AttentionMask, CoreAttention, fused_attention
from models.config import ModelConfig
from models.dropout import Dropout
from models.elementwise import split
from models.layers import ACTIVATIONS, FusedLinear, Norm, linear
from models.positions import Rope


class Sublayer(nn.Module):
    """A residual branch: `enter` gives what the branch computes on, `leave` what comes after it."""

    norm: nn.Module
    dropout: nn.Module

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.is_pre_norm = config.norm_position == "pre"
        self.norm = Norm(config)

    def enter(self, hidden_LBD: Tensor) -> Tensor:
        """The input of the branch."""
        entered_LBD: Tensor = self.norm(hidden_LBD) if self.is_pre_norm else hidden_LBD
        return entered_LBD

    def leave(self, hidden_LBD: Tensor, branch_LBD: Tensor) -> Tensor:
        """Residual and branch together."""
        sum_LBD: Tensor = hidden_LBD + self.dropout(branch_LBD)
        return sum_LBD if self.is_pre_norm else self.norm(sum_LBD)


class Attention(Sublayer):
    """What self- and cross-attention share.

    Attributes:
        core: the core attention, a plain attribute that others may replace.
        scale: factor of the scores.
        core_dropout: dropout of the probabilities; the two given cores apply it.
    """

    core: CoreAttention

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.head_width = config.head_width
        self.scale = config.head_width**-0.5 if config.attention_scale else 1.0

    def use(self, kernel: Callable[..., Tensor]) -> None:
        """Make `fused_attention` or `materialised_attention` the core."""
        self.core = functools.partial(kernel, scale=self.scale, dropout=self.core_dropout)

    def _add_output(self, config: ModelConfig) -> None:
        """The second half of the children, so that they stand in the order of the computation."""
        self.core_dropout = Dropout(config.attention_dropout)
        self.output = linear(config.num_heads * config.head_width, config.width, config.attention_output_bias)
        self.dropout = Dropout(config.dropout)
        self.use(fused_attention)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.reshape(*projected.shape[:2], -1, self.head_width)


class SelfAttention(Attention):
    """Positions of one stream read each other."""

    def __init__(self, config: ModelConfig, rope: Rope | None) -> None:
        super().__init__(config)
        query_width = config.num_heads * config.head_width
        key_width = config.num_kv_heads * config.head_width
        self.rope = rope
        self.qkv = FusedLinear(config.width, (query_width, key_width, key_width), config.qkv_bias)
        self._add_output(config)

    def forward(self, hidden_LBD: Tensor, mask: AttentionMask) -> Tensor:
        """hidden_LBD -> hidden_LBD."""
        q, k, v = self.qkv(self.enter(hidden_LBD))
        q_LBNH, k_LBKH, v_LBKH = self._heads(q), self._heads(k), self._heads(v)
        if self.rope is not None:
            q_LBNH, k_LBKH = self.rope.rotate(q_LBNH, k_LBKH)
        out_LBNH = self.core(q_LBNH, k_LBKH, v_LBKH, mask)
        return self.leave(hidden_LBD, self.output(out_LBNH.flatten(2)))


class CrossAttention(Attention):
    """Positions of the target read the memory.

    Attributes:
        kv: makes keys and values of the memory; None where they are made elsewhere and enter in the memory's place.
    """

    kv: nn.Module | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        key_width = config.num_kv_heads * config.head_width
        self.query = FusedLinear(config.width, (config.num_heads * config.head_width,), config.qkv_bias)
        self.kv = FusedLinear(config.width, (key_width, key_width), config.qkv_bias)
        self._add_output(config)

    def forward(self, hidden_LBD: Tensor, memory_SBD: Tensor, mask: AttentionMask) -> Tensor:
        """hidden_LBD and memory_SBD, or its keys and values side by side -> hidden_LBD."""
        (q,) = self.query(self.enter(hidden_LBD))
        k, v = memory_SBD.chunk(2, dim=-1) if self.kv is None else self.kv(memory_SBD)
        out_LBNH = self.core(self._heads(q), self._heads(k), self._heads(v), mask)
        return self.leave(hidden_LBD, self.output(out_LBNH.flatten(2)))


class Ffn(Sublayer):
    """Two linear maps with an activation between them; gated ones multiply it with a third (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.activation = ACTIVATIONS[config.activation]
        self.up = FusedLinear(config.width, (config.ffn_width,) * (2 if config.is_gated else 1), config.ffn_bias, split)
        self.inner_dropout = Dropout(config.ffn_dropout)
        self.down = linear(config.ffn_width, config.width, config.ffn_bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, hidden_LBD: Tensor) -> Tensor:
        """hidden_LBD -> hidden_LBD."""
        inner = self.activation(*self.up(self.enter(hidden_LBD)))
        return self.leave(hidden_LBD, self.down(self.inner_dropout(inner)))
