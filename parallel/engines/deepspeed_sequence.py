"""How does DeepSpeed's Ulysses attention run these models on a shard of every stream? Heads for positions, and back.

    batch     whole            every rank of the cp axis is given all ids, lengths and labels
    hidden    L/c  N heads     embedding, products, norms, head and loss see positions r L/c to (r + 1) L/c only
    core      L    N/c heads   q, k and v by an all-to-all each, and the result back by a fourth

Around each core stands DeepSpeed's `DistributedAttention`; that of cross-attention has two lengths, L of the target and
S of the source. What counts positions or heads is told which are meant: added positions, rotations, the heads of a
relative bias. A mask is that of the whole sequence. Lengths are padded to multiples of c (`parallel/sequence.py`).
Where c does not divide the KV heads, DeepSpeed gives the first ranks one more, with their query heads.

How DeepSpeed learns of these ranks is told in `parallel/engines/deepspeed_groups.py`.
Source: Jacobs et al. 2023, DeepSpeed Ulysses (arXiv 2309.14509); deepspeed 0.19, sequence/layer.py. Left out: fewer KV
heads than ranks.
"""

import functools
from typing import Any

import torch
from deepspeed.sequence.layer import DistributedAttention
from torch import Tensor, nn

from models.attention import AttentionMask, CoreAttention
from models.config import ModelConfig
from models.dropout import Dropout
from models.embedding import Embedding
from models.model import Model
from models.positions import Rope
from models.sublayers import Attention, SelfAttention
from parallel.comm import Comm


def shard_sequence(model: Model, config: ModelConfig, comm: Comm) -> None:
    """Makes a whole model compute this rank's positions of every stream; its parameters stay."""
    shard = functools.partial(_shard, comm.coordinate.cp, comm.mesh.cp)
    heads = heads_of_ranks(config, comm.mesh.cp)
    for stack in (model.encoder, model.decoder):
        if stack is None:
            continue
        embedding = stack.embedding
        assert isinstance(embedding, Embedding)
        embedding.register_forward_pre_hook(
            lambda _module, inputs: tuple(None if ids is None else shard(ids, 1) for ids in inputs)
        )
        if embedding.position is not None:
            # It is asked for as many positions as the rank has, and counts from 0.
            embedding.position.register_forward_pre_hook(
                lambda _module, inputs: (inputs[0] * comm.mesh.cp, *inputs[1:])
            )
            embedding.position.register_forward_hook(lambda _module, _inputs, whole_L1D: shard(whole_L1D, 0))
        if stack.relative_bias is not None:
            stack.relative_bias.register_forward_hook(
                lambda _module, _inputs, bias_NQK: bias_NQK.split(heads)[comm.coordinate.cp]
            )
        _rotate_shards(stack, config, comm)
    assert model.loss is not None
    model.loss.register_forward_pre_hook(lambda _module, inputs: (inputs[0], shard(inputs[1], 1)))
    for module in model.modules():
        if isinstance(module, Attention):
            module.core = _over_ranks(module.core, comm.group("cp"))
        if isinstance(module, Dropout):
            module.salt = 1 + comm.coordinate.cp


def _shard(coordinate: int, degree: int, whole: Tensor, dim: int) -> Tensor:
    """The slice of a dim that a rank holds."""
    return whole.chunk(degree, dim)[coordinate]


def heads_of_ranks(config: ModelConfig, degree: int) -> list[int]:
    """Query heads of each rank in a core: those of whole KV heads, of which the first ranks have one more."""
    each, more = divmod(config.num_kv_heads, degree)
    grouped = config.num_heads // config.num_kv_heads
    return [(each + (rank < more)) * grouped for rank in range(degree)]


def _rotate_shards(stack: nn.Module, config: ModelConfig, comm: Comm) -> None:
    if config.positions != "rope":
        return
    rope = ShardOfRope(config, comm)
    for module in stack.modules():
        if isinstance(module, SelfAttention):
            module.rope = rope


class ShardOfRope(Rope):
    """Rotation of queries and keys of a rank's positions."""

    def __init__(self, config: ModelConfig, comm: Comm) -> None:
        super().__init__(config)
        self._shard = functools.partial(_shard, comm.coordinate.cp, comm.mesh.cp)
        self._degree = comm.mesh.cp

    def _make(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        whole = super()._make(length * self._degree, device, dtype)
        return tuple(self._shard(table_L11F, 0) for table_L11F in whole)


def _over_ranks(core: CoreAttention, group: Any) -> CoreAttention:
    """The core attention of a sharded sequence: DeepSpeed's exchanges before it and after it."""
    attention = DistributedAttention(core, group)

    def exchanged(q_LBNH: Tensor, k_SBKH: Tensor, v_SBKH: Tensor, mask: AttentionMask) -> Tensor:
        batch_dim, rotation = 1, None
        out_LBNH: Tensor = attention(q_LBNH, k_SBKH, v_SBKH, batch_dim, rotation, mask)
        return out_LBNH

    return exchanged
