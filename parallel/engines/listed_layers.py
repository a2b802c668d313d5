"""What are the layers of a model that a pipeline cuts as a list, and what goes from one to the next?

    encoder_decoder   token  embedding  block ...  token  embedding  block ...  (transform)  head  (bias)
    passes            hidden source     memory     hidden target     target                  logits
                                                   memory memory     memory (but after the last block)

Every block, with the final norm after the last of its stack, is a layer; so are embedding and head, in two parts each
where they are tied, because DeepSpeed ties whole layers. A relative bias is made once, by the embedding's layer, and
goes along with the hidden states, so that its gradient comes back to one place: N L^2 numbers an edge.

Every floating tensor that crosses a stage must have a gradient: without, DeepSpeed fails and fairscale's checkpoints
pair gradients with the wrong tensors; these have. Token ids, lengths and labels cross none: each layer reads its
`Current` microbatch. DeepSpeed would send them, into receive buffers that it shares between activations and gradients
by position and size, whatever their dtype; fairscale would cut them along dim 0.
Source: deepspeed 0.19, runtime/pipe; fairscale 0.4.13, nn/pipe. Left out: their order
(`parallel/engines/layer_list.py`), and who runs them (`deepspeed_pipeline.py`, `fairscale_pipe.py` beside this file).
"""

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import AttentionMask, attention_mask
from models.batch import Batch
from models.config import Stream
from models.dropout import Dropout
from models.embedding import Embedding, TokenEmbedding
from models.head import Head
from models.initial import canonical_name, draw
from models.model import Model
from models.stack import Side, Stack
from parallel.parallelize import choose_attention
from parallel.plan import Plan
from parallel.recompute import apply_recompute

States = Tensor | tuple[Tensor, ...]
"""What one layer hands to the next: a tensor, or several in a tuple."""


class Current:
    """The microbatch that is computed on."""

    def __init__(self) -> None:
        self.batches: Sequence[Batch] = ()
        self.index = -1

    @property
    def batch(self) -> Batch:
        return self.batches[self.index]


class Parts:
    """Makes parts of a model that lives on the meta device: copies, with their values.

    Args:
        model: the whole model.
        plan: tells config, recomputation and kernel.
        seed: of the values.
        dtype: of parameters.
        device: where they live.
    """

    def __init__(self, model: Model, plan: Plan, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.model, self.plan, self._seed, self._dtype, self._device = model, plan, seed, dtype, device

    def part(self, name: str) -> nn.Module:
        """The module of a qualified name."""
        module = copy.deepcopy(self.model.get_submodule(name))
        return self._filled(module, name)

    def embedding(self, side: Side) -> nn.Module:
        """The embedding of a stack, to be given the rows that a layer before it looked up."""
        module = copy.deepcopy(self.model.get_submodule(f"{side}.embedding"))
        assert isinstance(module, Embedding)
        if module.token is not None:
            module.token = _Given()
        return self._filled(module, f"{side}.embedding")

    def _filled(self, module: nn.Module, prefix: str) -> nn.Module:
        for name, owner in list(module.named_modules()):
            if isinstance(owner, Dropout):
                owner.key = self.model.mask_key
            for leaf, parameter in list(owner.named_parameters(recurse=False)):
                qualified = ".".join(filter(None, (prefix, name, leaf)))
                value = draw(self.plan.config, qualified, tuple(parameter.shape), seed=self._seed)
                setattr(owner, leaf, nn.Parameter(value.to(device=self._device, dtype=self._dtype)))
        # After the copy: a block that recomputes itself holds on to what it was made of.
        choose_attention(module, self.plan)
        apply_recompute(module, self.plan.layout.recompute)
        return module


class _Given(nn.Module):
    """Stands for a token embedding whose rows were looked up before."""

    def __init__(self) -> None:
        super().__init__()
        self.rows_LBD: Tensor | None = None

    def forward(self, ids_LB: Tensor) -> Tensor:
        assert self.rows_LBD is not None
        rows_LBD, self.rows_LBD = self.rows_LBD, None
        return rows_LBD


class PartLayer(nn.Module):
    """A layer that consists of named parts of the model.

    Attributes:
        prefixes: qualified name of each part by the attribute that holds it.
    """

    def __init__(self, current: Current, prefixes: dict[str, str]) -> None:
        super().__init__()
        self.current, self.prefixes = current, prefixes


class TokenLayer(PartLayer):
    """Looks up token ids: (memory or anything) -> hidden_LBD (and the memory)."""

    def __init__(self, parts: Parts, current: Current, side: Side) -> None:
        super().__init__(current, {"token": f"{side}.embedding.token"})
        self.token = parts.part(f"{side}.embedding.token")
        self._look_up = functools.partial(look_up, current, parts, side)

    def forward(self, states: States) -> States:
        """See `look_up`."""
        return self._look_up(self.token, states)


def look_up(current: Current, parts: Parts, side: Side, token: nn.Module, states: States) -> States:
    """What a token layer does, tied or not."""
    hidden_LBD = token(current.batch.stream(stream_of(side)).t())
    return packed(hidden_LBD, *_memory(parts, side, states))


class EmbeddingLayer(PartLayer):
    """The rest of an embedding: hidden_LBD (and the memory) -> the same (and the relative bias)."""

    def __init__(self, parts: Parts, current: Current, side: Side) -> None:
        super().__init__(current, {"embedding": f"{side}.embedding", "relative_bias": f"{side}.relative_bias"})
        self.embedding = parts.embedding(side)
        stack = parts.model.get_submodule(side)
        assert isinstance(stack, Stack)
        self.relative_bias = None if stack.relative_bias is None else parts.part(f"{side}.relative_bias")
        self._stream = stream_of(side)
        self._has_token_types = self._stream == "source" or not parts.plan.config.has_cross_attention

    def forward(self, states: States) -> States:
        """Features have no layer before this one: then the first state is the memory, or nothing."""
        batch, tensors = self.current.batch, list(unpacked(states))
        assert isinstance(self.embedding, Embedding)
        if isinstance(self.embedding.token, _Given):
            self.embedding.token.rows_LBD = tensors.pop(0)
        else:
            tensors = []
        ids_BL = batch.stream(self._stream)
        hidden_LBD = self.embedding(ids_BL, batch.token_types if self._has_token_types else None)
        if self.relative_bias is not None:
            tensors.append(self.relative_bias(ids_BL.shape[1], ids_BL.shape[1]))
        return packed(hidden_LBD, *tensors)


class BlockLayer(PartLayer):
    """A block; the last of a stack has the final norm, and hands nothing but hidden states on."""

    def __init__(self, parts: Parts, current: Current, side: Side, index: int) -> None:
        super().__init__(current, {"block": f"{side}.block.{index}", "norm": f"{side}.norm"})
        stack = parts.model.get_submodule(side)
        assert isinstance(stack, Stack)
        self.block = parts.part(f"{side}.block.{index}")
        self.norm = parts.part(f"{side}.norm") if index == len(stack.block) - 1 else None
        self._stream: Stream = stream_of(side)
        self._is_causal = stack.is_causal
        self._reads_memory = side == "decoder" and parts.plan.config.has_cross_attention

    def forward(self, states: States) -> States:
        """(hidden_LBD, memory_SBD if it is read, bias_NQK if there is one) -> the same."""
        batch, (hidden_LBD, *others) = self.current.batch, unpacked(states)
        memory_SBD = others[0] if self._reads_memory else None
        biases = others[1:] if self._reads_memory else others
        mask = self._mask(batch, self._stream, hidden_LBD, biases[0] if biases else None)
        memory_mask = None if memory_SBD is None else self._mask(batch, "source", hidden_LBD, None)
        hidden_LBD = self.block(hidden_LBD, mask, memory_SBD, memory_mask)
        return packed(hidden_LBD, *others) if self.norm is None else self.norm(hidden_LBD)

    def _mask(self, batch: Batch, keys: Stream, like: Tensor, bias_NQK: Tensor | None) -> AttentionMask:
        return attention_mask(
            is_causal=self._is_causal and keys == self._stream,
            key_lengths=batch.lengths(keys),
            key_length=batch.stream_length(keys),
            like=like,
            bias_NQK=bias_NQK,
        )


class HeadLayer(PartLayer):
    """A head with a weight of its own: hidden_LBD -> logits_LBV."""

    def __init__(self, parts: Parts, current: Current) -> None:
        super().__init__(current, {"head": "head"})
        self.head = parts.part("head")

    def forward(self, hidden_LBD: Tensor) -> Tensor:
        """The logits."""
        logits_LBV: Tensor = self.head(hidden_LBD)
        return logits_LBV


class TransformLayer(PartLayer):
    """What comes before a tied head: hidden_LBD -> hidden_LBD."""

    def __init__(self, parts: Parts, current: Current) -> None:
        super().__init__(current, {"transform": "head.transform"})
        self.transform = parts.part("head.transform")
        head = parts.model.get_submodule("head")
        assert isinstance(head, Head)
        self._scale = head.scale

    def forward(self, hidden_LBD: Tensor) -> Tensor:
        """The same shape."""
        transformed_LBD: Tensor = self.transform(hidden_LBD) * self._scale
        return transformed_LBD


class BiasLayer(PartLayer):
    """What comes after a tied head: logits_LBV -> logits_LBV."""

    def __init__(self, parts: Parts, current: Current) -> None:
        super().__init__(current, {"bias": "head.bias"})
        head = parts.part("head")
        assert isinstance(head, Head)
        self.bias = head.bias

    def forward(self, logits_LBV: Tensor) -> Tensor:
        """The same shape."""
        assert self.bias is not None
        return logits_LBV + self.bias


class TiedRows(TokenEmbedding):
    """The rows that embeddings and head share; `prefixes` as of a `PartLayer`."""

    def __init__(self, parts: Parts, name: str) -> None:
        nn.Module.__init__(self)
        self.prefixes = {"weight": name}
        part = parts.part(name.removesuffix(".weight"))
        assert isinstance(part.weight, nn.Parameter)
        self.weight = part.weight


def tied_product(rows: TiedRows, hidden_LBD: Tensor) -> Tensor:
    """The product of a tied head."""
    return F.linear(hidden_LBD, rows.weight)


def qualified_name(plan: Plan, layers: Callable[[str], nn.Module], local: str) -> str:
    """Canonical name of a parameter of the list, as in `12.block.ffn.up.weight`.

    Args:
        plan: tells names that are tied.
        layers: gives the layer of a number.
        local: the parameter's name there.
    """
    number, _, rest = local.partition(".")
    if number == "tied_modules":
        return plan.config.tie_groups[0][0]
    layer: Any = layers(number)
    attribute, _, name = rest.partition(".")
    return canonical_name(plan.config, ".".join(filter(None, (layer.prefixes[attribute], name))))


def stream_of(side: Side) -> Stream:
    """The stream that a stack reads."""
    return "target" if side == "decoder" else "source"


def _memory(parts: Parts, side: Side, states: States) -> tuple[Tensor, ...]:
    """The memory among what arrives at a stack: a decoder's alone, if it has an encoder before it."""
    return unpacked(states) if side == "decoder" and parts.plan.config.has_cross_attention else ()


def packed(*tensors: Tensor) -> States:
    """One tensor as it is, several as a tuple: what a pipeline knows how to hand on."""
    return tensors[0] if len(tensors) == 1 else tensors


def unpacked(states: States) -> tuple[Tensor, ...]:
    """The inverse of `packed`."""
    return states if isinstance(states, tuple) else (states,)
