"""What stands where a tensor-parallel module stood, in fairscale's own layers and with fairscale's own groups?

    colwise                ColumnParallelLinear, its result split into the parts of a fused projection
    rowwise                RowParallelLinear
    vocabulary_embedding   VocabParallelEmbedding
    vocabulary_head        ColumnParallelLinear; transform and scale come before it
    vocabulary_loss        vocab_parallel_cross_entropy
    head_bias_table        the whole table everywhere, its columns through scatter_to_model_parallel_region

Which module has which style is read off the plan. The layers cut evenly, so every part must divide over the ranks. Each
`ColumnParallelLinear` sums its input's gradient on its own: a memory's gradient is summed once for each block, whatever
`memory_gather` says.

fairscale keeps its groups in globals of a module, one topology for a process. Here an engine keeps its own three groups
and puts them there while it runs, so that engines of several topologies live side by side.
Source: fairscale 0.4.13, nn/model_parallel (after Megatron-LM, arXiv 1909.08053). Left out: its CUDA random numbers.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize
from fairscale.nn.model_parallel.cross_entropy import vocab_parallel_cross_entropy
from fairscale.nn.model_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from fairscale.nn.model_parallel.mappings import scatter_to_model_parallel_region
from torch import Tensor, nn

from models.batch import IGNORED
from models.dropout import Dropout
from models.embedding import TokenEmbedding
from models.head import Head
from models.layers import FusedLinear, Linear
from models.positions import RelativeBias
from parallel.engines.foreign import unchecked_groups
from parallel.engines.silence import silence
from parallel.plan import Plan, Style

_GLOBALS = (
    "_MODEL_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP",
    "_PIPELINE_PARALLEL_GROUP",
    "_PIPELINE_PARALLEL_RANKS",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """fairscale's groups of one tensor degree over the whole world."""

    tp: int
    tp_coordinate: int
    values: tuple[Any, ...]
    """Of its module's globals."""

    @property
    def tensor_group(self) -> Any:
        return self.values[0]

    @property
    def data_group(self) -> Any:
        return self.values[1]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Inside, fairscale's layers send over these groups; after it, over those from before."""
        before = _globals()
        _set_globals(self.values)
        try:
            yield
        finally:
            _set_globals(before)


def topology(tp: int) -> Topology:
    """The groups for a tensor degree; collective over the world when they are new."""
    return _made(tp, dist.group.WORLD)


@functools.lru_cache(maxsize=64)
def _made(tp: int, world: Any) -> Topology:
    """Making groups takes sockets: layouts of one degree share them for as long as the world lives."""
    before = _globals()
    initialize.destroy_model_parallel()
    with unchecked_groups(), silence():
        initialize.initialize_model_parallel(tp)
    values = _globals()
    _set_globals(before)
    return Topology(tp=tp, tp_coordinate=dist.get_rank(world) % tp, values=values)


def _globals() -> tuple[Any, ...]:
    return tuple(getattr(initialize, name) for name in _GLOBALS)


def _set_globals(values: tuple[Any, ...]) -> None:
    for name, value in zip(_GLOBALS, values, strict=True):
        setattr(initialize, name, value)


def swap_modules(model: nn.Module, plan: Plan, where: Topology) -> None:
    """Puts fairscale's layers where the plan has tensor-parallel modules; parameters have no values yet."""
    held = dict(model.named_modules())
    styles = _Styles(where)
    for entry in plan.entries:
        swapped = styles.swapped(entry.style, held[entry.module])
        parent, _, leaf = entry.module.rpartition(".")
        setattr(held[parent], leaf, swapped)


def _no_values(weight: Tensor) -> Tensor:
    """Values are drawn later: a whole matrix of random numbers for nothing would be the alternative."""
    return weight


class _Styles:
    """One method a style: a module -> what stands in its place."""

    def __init__(self, where: Topology) -> None:
        self._where = where

    def swapped(self, style: Style, module: nn.Module) -> nn.Module:
        """What stands in place of a module; the module itself where nothing needs to."""
        methods: dict[str, Callable[[nn.Module], nn.Module]] = {
            "colwise": self._colwise,
            "rowwise": self._rowwise,
            "vocabulary_embedding": self._vocabulary_embedding,
            "vocabulary_head": self._vocabulary_head,
            "vocabulary_loss": self._vocabulary_loss,
            "head_bias_table": self._head_bias_table,
            "sharded_dropout": self._sharded_dropout,
            # Every ColumnParallelLinear that reads the memory sums its gradient itself.
            "memory_entry": self._unchanged,
        }
        return methods[style](module)

    def _colwise(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, FusedLinear)
        layer: nn.Module = ColumnParallelLinear(
            module.weight.shape[1],
            sum(module.parts),
            bias=module.bias is not None,
            gather_output=False,
            init_method=_no_values,
        )
        local_parts = [part // self._where.tp for part in module.parts]
        layer.register_forward_hook(lambda _module, _inputs, out: torch.split(out, local_parts, dim=-1))
        return layer

    def _rowwise(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, Linear)
        layer: nn.Module = RowParallelLinear(
            module.in_features,
            module.out_features,
            bias=module.bias is not None,
            input_is_parallel=True,
            init_method=_no_values,
        )
        return layer

    def _vocabulary_embedding(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, TokenEmbedding)
        layer: nn.Module = VocabParallelEmbedding(*module.weight.shape, init_method=_no_values)
        return layer

    def _vocabulary_head(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, Head)
        rows, width = module.weight.shape
        layer: nn.Module = ColumnParallelLinear(
            width, rows, bias=module.bias is not None, gather_output=False, init_method=_no_values
        )
        layer.transform, scale = module.transform, module.scale
        layer.register_forward_pre_hook(lambda head, inputs: (head.transform(inputs[0]) * scale,))
        return layer

    def _vocabulary_loss(self, module: nn.Module) -> nn.Module:
        return VocabularyLoss()

    def _head_bias_table(self, module: nn.Module) -> nn.Module:
        assert isinstance(module, RelativeBias)
        return ScatteredBias(module)

    def _sharded_dropout(self, module: nn.Module) -> nn.Module:
        """Ranks drop out different elements: they hold different shards."""
        assert isinstance(module, Dropout)
        module.salt = 1 + self._where.tp_coordinate
        return module

    def _unchanged(self, module: nn.Module) -> nn.Module:
        return module


class VocabularyLoss(nn.Module):
    """Summed cross-entropy of the positions that have a label, from logits that each rank holds a part of."""

    def forward(self, logits_LBV: Tensor, labels_BL: Tensor) -> Tensor:
        """A scalar in float32, or in the dtype of the logits if that is wider; the same on every rank."""
        logits_LBV = logits_LBV.to(torch.promote_types(logits_LBV.dtype, torch.float32))
        labels_LB = labels_BL.t().contiguous()
        # A label that no rank holds has no logit: what is lost there is multiplied away, and so is its gradient.
        losses_LB: Tensor = vocab_parallel_cross_entropy(logits_LBV, labels_LB)
        return (losses_LB * (labels_LB != IGNORED)).sum()


class ScatteredBias(nn.Module):
    """A relative bias of which each rank reads the columns of its heads."""

    def __init__(self, bias: RelativeBias) -> None:
        super().__init__()
        self.weight = bias.weight
        # Not a child: its parameter is this module's.
        self._forward: Callable[[Tensor, int, int], Tensor] = functools.partial(_biased, bias)

    def forward(self, query_length: int, key_length: int) -> Tensor:
        """bias_NQK of this rank's heads."""
        return self._forward(scatter_to_model_parallel_region(self.weight), query_length, key_length)


def _biased(bias: RelativeBias, columns: Tensor, query_length: int, key_length: int) -> Tensor:
    biased_NQK: Tensor = torch.func.functional_call(bias, {"weight": columns}, (query_length, key_length))
    return biased_NQK
