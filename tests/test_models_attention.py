"""Does attention read what its mask allows, whichever core computes it?"""

import functools
import math

import pytest
import torch
from torch import Tensor

from models.attention import AttentionMask, attention_mask, fused_attention, materialised_attention
from models.dropout import Dropout
from models.positions import RelativeBias, Rope
from tests.small_models import small_config
from tests.tolerances import EXACT_RTOL

L, S, B, H = 5, 7, 3, 4
NO_DROPOUT = Dropout(0.0)


def heads(length: int, num_heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, B, num_heads, H, generator=generator, dtype=torch.float64, requires_grad=True)


def by_loops(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, scale: float) -> Tensor:
    """Attention one query at a time, from the rules of the mask alone."""
    num_queries, _, num_heads, _ = q.shape
    out = torch.zeros_like(q)
    for row in range(B):
        for head in range(num_heads):
            key_head = head // (num_heads // k.shape[2])
            for query in range(num_queries):
                last = min(
                    query + 1 if mask.is_causal else k.shape[0],
                    k.shape[0] if mask.key_lengths is None else mask.key_lengths[row],
                )
                scores = scale * k[:last, row, key_head] @ q[query, row, head]
                if mask.bias_NQK is not None:
                    scores = scores + mask.bias_NQK[head, query, :last]
                out[query, row, head] = scores.softmax(0) @ v[:last, row, key_head]
    return out


def bias(num_heads: int, num_queries: int, num_keys: int) -> Tensor:
    return torch.randn(
        num_heads, num_queries, num_keys, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    ).requires_grad_()


MASKS = {
    "all": (S, AttentionMask(is_causal=False)),
    "padded": (S, AttentionMask(is_causal=False, key_lengths=(2, S, 1))),
    "biased": (S, AttentionMask(is_causal=False, bias_NQK=bias(4, L, S))),
    "biased_padded": (S, AttentionMask(is_causal=False, key_lengths=(2, S, 1), bias_NQK=bias(4, L, S))),
    "causal": (L, AttentionMask(is_causal=True)),
    "causal_biased": (L, AttentionMask(is_causal=True, bias_NQK=bias(4, L, L))),
}


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("core", [fused_attention, materialised_attention])
def test_attention_is_its_formula(core: functools.partial[Tensor], kind: str, num_kv_heads: int) -> None:
    num_keys, mask = MASKS[kind]
    inputs = heads(L, 4, 1), heads(num_keys, num_kv_heads, 2), heads(num_keys, num_kv_heads, 3)
    differentiable = [*inputs] if mask.bias_NQK is None else [*inputs, mask.bias_NQK]
    out = core(*inputs, mask, scale=0.3, dropout=NO_DROPOUT)
    expected = by_loops(*inputs, mask, 0.3)
    torch.testing.assert_close(out, expected, rtol=EXACT_RTOL, atol=1e-12)
    weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()
    gradients = torch.autograd.grad((out * weights).sum(), differentiable)
    expected_gradients = torch.autograd.grad((expected * weights).sum(), differentiable)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=EXACT_RTOL, atol=1e-12)


def test_grouped_queries_are_full_attention_with_repeated_heads() -> None:
    q, k, v = heads(L, 6, 1), heads(S, 2, 2), heads(S, 2, 3)
    mask = AttentionMask(is_causal=False)
    grouped = fused_attention(q, k, v, mask, scale=1.0, dropout=NO_DROPOUT)
    k, v = k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2)
    full = fused_attention(q, k, v, mask, scale=1.0, dropout=NO_DROPOUT)
    torch.testing.assert_close(grouped, full, rtol=EXACT_RTOL, atol=1e-12)


def test_a_mask_tensor_exists_only_where_rules_do_not_suffice() -> None:
    like = torch.zeros(1)
    full = attention_mask(is_causal=False, key_lengths=(S, S), key_length=S, like=like)
    assert full.key_lengths is None
    assert full.added_BNQK is None
    causal = attention_mask(is_causal=True, key_lengths=(1, S), key_length=S, like=like)
    assert causal.is_causal
    assert causal.key_lengths is None
    assert causal.added_BNQK is None
    padded = attention_mask(is_causal=False, key_lengths=(1, S), key_length=S, like=like)
    assert padded.added_BNQK is not None
    assert padded.added_BNQK.shape == (2, 1, 1, S)
    assert padded.added(S, device=like.device, dtype=like.dtype) is padded.added_BNQK


def test_a_mask_made_in_advance_is_the_mask_made_in_the_core() -> None:
    q, k, v = heads(S, 4, 1), heads(S, 2, 2), heads(S, 2, 3)
    made = attention_mask(is_causal=False, key_lengths=(3, S, 2), key_length=S, like=q, bias_NQK=bias(4, S, S))
    rules = AttentionMask(is_causal=made.is_causal, key_lengths=made.key_lengths, bias_NQK=made.bias_NQK)
    outs = [fused_attention(q, k, v, mask, scale=1.0, dropout=NO_DROPOUT) for mask in (made, rules)]
    assert torch.equal(*outs)


def test_attention_dropout_is_the_same_in_both_cores_and_when_computed_again() -> None:
    dropout = Dropout(0.4)
    q, k, v = heads(L, 4, 1), heads(S, 2, 2), heads(S, 2, 3)
    mask = AttentionMask(is_causal=False, key_lengths=(2, S, 1))
    first = fused_attention(q, k, v, mask, scale=1.0, dropout=dropout)
    assert torch.equal(first, fused_attention(q, k, v, mask, scale=1.0, dropout=dropout))
    assert torch.equal(first, materialised_attention(q, k, v, mask, scale=1.0, dropout=dropout))
    assert not torch.equal(first, fused_attention(q, k, v, mask, scale=1.0, dropout=NO_DROPOUT))
    dropout.key.microbatch = 1
    assert not torch.equal(first, fused_attention(q, k, v, mask, scale=1.0, dropout=dropout))


def bucket_by_rule(distance: int, num_buckets: int, max_distance: int, *, is_causal: bool) -> int:
    """T5's rule for one key position minus query position (arXiv 1910.10683, section 2.1), one number at a time."""
    first = 0
    if is_causal:
        distance = max(-distance, 0)
    else:
        num_buckets //= 2
        first = num_buckets if distance > 0 else 0
        distance = abs(distance)
    near = num_buckets // 2
    if distance < near:
        return first + distance
    share = math.log(distance / near) / math.log(max_distance / near)
    return first + min(near + int(share * (num_buckets - near)), num_buckets - 1)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (4, 5)])
def test_the_relative_bias_follows_the_bucket_rule(is_causal: bool, num_buckets: int, max_distance: int) -> None:
    config = small_config(
        "encoder_only", positions="relative", relative_buckets=num_buckets, relative_max_distance=max_distance
    )
    relative = RelativeBias(config, is_causal=is_causal)
    with torch.no_grad():
        relative.weight.copy_(torch.arange(num_buckets * 4).reshape(num_buckets, 4))
    length = 2 * max_distance
    bias_NQK = relative(length, length)
    assert bias_NQK.shape == (4, length, length)
    for query in (0, 1, length // 2, length - 1):
        for key in range(length):
            bucket = bucket_by_rule(key - query, num_buckets, max_distance, is_causal=is_causal)
            assert bias_NQK[:, query, key].tolist() == [bucket * 4 + head for head in range(4)]


def test_rotation_is_a_complex_product() -> None:
    rope = Rope(small_config("decoder_only", positions="rope", rope_theta=50.0))
    q, k = heads(L, 4, 1).detach(), heads(L, 2, 2).detach()
    for rotated, original in zip(rope.rotate(q, k), (q, k), strict=True):
        for position in range(L):
            for pair in range(H // 2):
                angle = position * 50.0 ** (-2 * pair / H)
                before = torch.complex(original[position, ..., pair], original[position, ..., pair + H // 2])
                after = torch.complex(rotated[position, ..., pair], rotated[position, ..., pair + H // 2])
                turned = before * complex(math.cos(angle), math.sin(angle))
                torch.testing.assert_close(after, turned, rtol=EXACT_RTOL, atol=1e-12)


def test_rotation_tables_are_kept_while_length_and_dtype_stay() -> None:
    rope = Rope(small_config("decoder_only", positions="rope"))
    like = torch.zeros(1, dtype=torch.float64)
    first = rope._tables.get(L, like)
    assert rope._tables.get(L, like) is first
    assert rope._tables.get(S, like)[0].shape[0] == S
    assert rope._tables.get(S, like.float())[0].dtype == torch.float32


def test_rotation_tables_of_half_precision_are_computed_in_float32() -> None:
    rope = Rope(small_config("decoder_only", positions="rope"))
    (half, _), (single, _) = (
        rope._tables.get(99, torch.zeros(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(half, single.bfloat16())


def test_rotation_tables_made_for_inference_serve_training() -> None:
    rope = Rope(small_config("decoder_only", positions="rope"))
    q, k = heads(L, 4, 1), heads(L, 2, 2)
    with torch.inference_mode():
        rope.rotate(q, k)
    rope.rotate(q, k)[0].sum().backward()
