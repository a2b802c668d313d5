"""How do queries read keys and values, and what may they read?

    out = softmax(scale * q k^T + mask) v        per head; query head n reads key-value head n // (N / K)

A core attention is a function of (q, k, v, mask). It is the one place where positions meet, so every attention module
holds its core as a plain attribute that others may replace. Two are given: `fused_attention`, one kernel that never
stores the scores where the device has such a kernel, and `materialised_attention`, the formula as written
(arXiv 1706.03762, section 3.2.1; grouped queries: arXiv 2305.13245). Left out: windows, caches, packed sequences.

Shapes: L queries, S keys, B sequences, N query heads, K key-value heads, H head width.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from models.dropout import Dropout


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class AttentionMask:
    """What a query may read, as rules and, where rules do not suffice, as a tensor.

    Attributes:
        is_causal: query i reads keys 0 to i only.
        key_lengths: valid keys of each sequence, or None if all are valid. A causal mask over right-padded
            sequences needs none: a valid query never reaches the padding.
        bias_NQK: a number added to each score (T5), or None.
        added_BNQK: all of the above as one tensor to add to the scores, dimensions of size 1 where it does not vary;
            None where `is_causal` says all. `attention_mask` makes it, once for all blocks of a stack.
    """

    is_causal: bool
    key_lengths: tuple[int, ...] | None = None
    bias_NQK: Tensor | None = None
    added_BNQK: Tensor | None = None

    def added(self, key_length: int, *, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """`added_BNQK`, made here if the mask was built from rules alone."""
        if self.added_BNQK is not None or (self.key_lengths is None and self.bias_NQK is None):
            return self.added_BNQK
        if self.bias_NQK is None:
            added_BNQK = torch.zeros(1, 1, 1, key_length, device=device, dtype=dtype)
        else:
            added_BNQK = self.bias_NQK[None]
            if self.is_causal:
                added_BNQK = added_BNQK.masked_fill(_future(added_BNQK), float("-inf"))
        if self.key_lengths is not None:
            lengths = torch.tensor(self.key_lengths, device=device)
            padding_BS = torch.arange(key_length, device=device) >= lengths[:, None]
            added_BNQK = added_BNQK.masked_fill(padding_BS[:, None, None], float("-inf"))
        return added_BNQK


CoreAttention: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionMask], Tensor]
"""(q_LBNH, k_SBKH, v_SBKH, mask) -> out_LBNH."""


def attention_mask(
    *, is_causal: bool, key_lengths: tuple[int, ...], key_length: int, like: Tensor, bias_NQK: Tensor | None = None
) -> AttentionMask:
    """The mask of one attention, its tensor included.

    Args:
        is_causal: whether queries read the past only.
        key_lengths: valid keys of each sequence.
        key_length: padded number of keys.
        like: gives device and dtype of the tensor.
        bias_NQK: added to each score.
    """
    are_all_valid = all(length == key_length for length in key_lengths)
    rules = AttentionMask(
        is_causal=is_causal, key_lengths=None if is_causal or are_all_valid else key_lengths, bias_NQK=bias_NQK
    )
    return dataclasses.replace(rules, added_BNQK=rules.added(key_length, device=like.device, dtype=like.dtype))


def fused_attention(
    q_LBNH: Tensor, k_SBKH: Tensor, v_SBKH: Tensor, mask: AttentionMask, *, scale: float, dropout: Dropout
) -> Tensor:
    """Attention in one kernel -> out_LBNH.

    While `dropout` is active this is `materialised_attention`: no kernel draws a mask that depends on a key alone.
    """
    if dropout.is_active:
        return materialised_attention(q_LBNH, k_SBKH, v_SBKH, mask, scale=scale, dropout=dropout)
    added_BNQK = mask.added(k_SBKH.shape[0], device=q_LBNH.device, dtype=q_LBNH.dtype)
    out_BNLH = F.scaled_dot_product_attention(
        q_LBNH.permute(1, 2, 0, 3),
        k_SBKH.permute(1, 2, 0, 3),
        v_SBKH.permute(1, 2, 0, 3),
        attn_mask=added_BNQK,
        is_causal=mask.is_causal and added_BNQK is None,
        scale=scale,
        enable_gqa=q_LBNH.shape[2] != k_SBKH.shape[2],
    )
    return out_BNLH.permute(2, 0, 1, 3)


def materialised_attention(
    q_LBNH: Tensor, k_SBKH: Tensor, v_SBKH: Tensor, mask: AttentionMask, *, scale: float, dropout: Dropout
) -> Tensor:
    """Attention step by step, scores and probabilities [B, N, L, S] stored -> out_LBNH."""
    num_queries_per_key = q_LBNH.shape[2] // k_SBKH.shape[2]
    q_BNLH = q_LBNH.permute(1, 2, 0, 3)
    k_BNHS = _expand_heads(k_SBKH, num_queries_per_key).permute(1, 2, 3, 0)
    v_BNSH = _expand_heads(v_SBKH, num_queries_per_key).permute(1, 2, 0, 3)
    scores_BNLS = torch.matmul(q_BNLH * scale, k_BNHS)
    added_BNQK = mask.added(k_SBKH.shape[0], device=q_LBNH.device, dtype=q_LBNH.dtype)
    if added_BNQK is not None:
        scores_BNLS = scores_BNLS + added_BNQK
    elif mask.is_causal:
        scores_BNLS = scores_BNLS.masked_fill(_future(scores_BNLS), float("-inf"))
    probabilities_BNLS = dropout(scores_BNLS.softmax(-1))
    return torch.matmul(probabilities_BNLS, v_BNSH).permute(2, 0, 1, 3)


def _expand_heads(keys_SBKH: Tensor, num_queries_per_key: int) -> Tensor:
    return keys_SBKH if num_queries_per_key == 1 else keys_SBKH.repeat_interleave(num_queries_per_key, dim=2)


def _future(scores_BNQK: Tensor) -> Tensor:
    return torch.ones(scores_BNQK.shape[-2:], dtype=torch.bool, device=scores_BNQK.device).triu(1)
