"""What is kept for the backward: everything, everything but the scores, or the input of each block only.

    none        all activations                                    nothing is computed twice
    selective   all but what the core attention stores             the core attention twice
    full        the input of each block                            each block's forward twice, its collectives too

A region is one autograd function that keeps its inputs and runs again in the backward. Inputs that blocks share
(memory, mask) are kept as they are, not copied. Dropout masks depend on their key alone, so the second run draws the
same ones. Sources: Chen et al. 2016 (arXiv 1604.06174); Korthikanti et al. 2022 (arXiv 2205.05198), section 5.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.attention import AttentionMask, CoreAttention
from models.blocks import DecoderBlock, EncoderBlock
from models.sublayers import Attention
from parallel.layouts import Recompute

Region = Callable[..., Tensor]


class _Region(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, region: Region, *inputs: Tensor) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(*inputs)
        return region(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [tensor.detach() for tensor in ctx.saved_tensors]
        for tensor, needs_gradient in zip(inputs, ctx.needs_input_grad[1:], strict=True):
            tensor.requires_grad_(needs_gradient)
        with torch.enable_grad():
            again = ctx.region(*inputs)
        torch.autograd.backward((again,), gradients)
        return (None, *(tensor.grad for tensor in inputs))


def _run(region: Region, *inputs: Tensor) -> Tensor:
    out: Tensor = _Region.apply(region, *inputs)  # type: ignore[no-untyped-call]
    return out


def _tensors(mask: AttentionMask) -> list[Tensor]:
    """The mask's tensor, apart: a tensor with a gradient must be an input of the region."""
    return [] if mask.added_BNQK is None else [mask.added_BNQK]


def _with_tensors(mask: AttentionMask, tensors: Sequence[Tensor]) -> AttentionMask:
    return dataclasses.replace(mask, bias_NQK=None, added_BNQK=tensors[0]) if tensors else mask


def recompute_core(core: CoreAttention) -> CoreAttention:
    """A core attention that keeps q, k, v and the mask only."""

    def recomputed(q_LBNH: Tensor, k_SBKH: Tensor, v_SBKH: Tensor, mask: AttentionMask) -> Tensor:
        def region(q: Tensor, k: Tensor, v: Tensor, *added: Tensor) -> Tensor:
            return core(q, k, v, _with_tensors(mask, added))

        return _run(region, q_LBNH, k_SBKH, v_SBKH, *_tensors(mask))

    return recomputed


def recompute_block(block: nn.Module) -> None:
    """Makes a block keep its inputs only: hidden states, memory and the tensors of the masks."""
    forward: Callable[..., Tensor] = block.forward

    def recomputed(
        hidden_LBD: Tensor,
        self_mask: AttentionMask,
        memory_SBD: Tensor | None = None,
        memory_mask: AttentionMask | None = None,
    ) -> Tensor:
        inputs = [hidden_LBD, *_tensors(self_mask)]
        num_self = len(inputs)
        if memory_SBD is None or memory_mask is None:

            def region(hidden: Tensor, *added: Tensor) -> Tensor:
                return forward(hidden, _with_tensors(self_mask, added))

            return _run(region, *inputs)

        def region_with_memory(hidden: Tensor, *others: Tensor) -> Tensor:
            added, (memory, *memory_added) = others[: num_self - 1], others[num_self - 1 :]
            return forward(hidden, _with_tensors(self_mask, added), memory, _with_tensors(memory_mask, memory_added))

        return _run(region_with_memory, *inputs, memory_SBD, *_tensors(memory_mask))

    block.forward = recomputed


def apply_recompute(model: nn.Module, recompute: Recompute) -> None:
    """Installs the layout's choice on every block of a model or slice."""
    if recompute == "none":
        return
    for module in model.modules():
        if recompute == "full" and isinstance(module, EncoderBlock | DecoderBlock):
            recompute_block(module)
        if recompute == "selective" and isinstance(module, Attention):
            module.core = recompute_core(module.core)
