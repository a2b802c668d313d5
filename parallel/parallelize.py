"""How a whole model becomes what one rank holds: the one place that changes a model.

    whole model (meta device)  ->  slice of its stages  ->  shards of its parameters  ->  modules that communicate

Read `parallelize` from top to bottom: its body is the list of steps. Nothing here asks which architecture it has; the
plan's entries say all. With degree 1 everywhere no module is changed.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from models.architectures import build
from models.attention import fused_attention, materialised_attention
from models.dropout import Dropout
from models.head import Head
from models.initial import draw
from models.layers import FusedLinear, Linear
from models.model import Model
from models.slicing import slice_model, tie
from models.sublayers import Attention
from parallel.collectives import slice_sequence
from parallel.comm import Comm
from parallel.compiled import compile_blocks
from parallel.deferral import Deferral, Writers, product
from parallel.plan import Entry, Plan, Shard
from parallel.recompute import apply_recompute
from parallel.tensor import ColumnLinear, MemoryEntry, RowLinear
from parallel.vocabulary import VocabularyCrossEntropy, VocabularyEmbedding, VocabularyHead


def parallelize(model: Model, plan: Plan, comm: Comm, *, compiled: bool = False) -> Model:
    """Cuts, shards and swaps a whole model on the meta device into this rank's part; returns the same object.

    Parameters stay without values: `materialise` draws them. With `compiled`, blocks are compiled when they first run.
    """
    ranges = [(stage.first, stage.last) for stage in plan.stages_of(comm.coordinate.pp)]
    slice_model(model, plan.config, *ranges, ships_keys_values=plan.layout.transport == "kv")
    shard_parameters(model, plan, comm)
    swap_modules(model, plan, comm)
    tie(model, plan.config)
    choose_attention(model, plan)
    if compiled:
        compile_blocks(model)
    apply_recompute(model, plan.layout.recompute)
    return model


def shard_parameters(model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Replaces every parameter by one of the shape of this rank's shard."""
    for name, module, leaf, parameter in _parameters(model):
        shape = plan.shard(name, comm.coordinate.tp).shape(tuple(parameter.shape))
        setattr(module, leaf, nn.Parameter(torch.empty(shape, device="meta")))


def swap_modules(model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Carries out the entries whose modules this stage holds."""
    held = dict(model.named_modules())
    for entry in plan.entries:
        module = held.get(entry.module)
        if module is None:
            continue
        swapped = _STYLES[entry.style](module, entry, comm)
        if swapped is not module:
            parent, _, leaf = entry.module.rpartition(".")
            setattr(held[parent], leaf, swapped)


def choose_attention(model: nn.Module, plan: Plan) -> None:
    """Installs the layout's attention kernel."""
    kernel = fused_attention if plan.layout.attention == "fused" else materialised_attention
    for module in model.modules():
        if isinstance(module, Attention):
            module.use(kernel)


def split_backward(model: nn.Module, deferral: Deferral) -> Writers:
    """Makes `deferral` say when products compute their weights' gradients; tells which parameters each then writes."""
    writers: Writers = {}
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear | VocabularyHead):
            module.deferral = deferral
        elif isinstance(module, FusedLinear | Linear | Head):
            module.product = functools.partial(product, deferral=deferral)
        else:
            continue
        # The bias of a row-parallel product is added behind it.
        own = (module.weight,) if isinstance(module, RowLinear) else (module.weight, module.bias)
        writers[module] = tuple(one for one in own if isinstance(one, nn.Parameter))
    return writers


def materialise(
    model: nn.Module, plan: Plan, comm: Comm, *, seed: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Gives every parameter its values: the whole named tensor is drawn, this rank's shard is kept."""
    with torch.device("meta"):
        whole_model = build(plan.config)
    full_shapes = {name: tuple(whole.shape) for name, _, _, whole in _parameters(whole_model)}
    for name, module, leaf, _ in _parameters(model):
        whole = draw(plan.config, name, full_shapes[name], seed=seed)
        value = take(whole, plan.shard(name, comm.coordinate.tp))
        setattr(module, leaf, nn.Parameter(value.to(device=device, dtype=dtype).contiguous()))
    tie(model, plan.config)


def take(whole: Tensor, shard: Shard) -> Tensor:
    """The rows or columns of a whole parameter that a shard consists of."""
    if shard.is_whole:
        return whole
    pieces = [whole.narrow(shard.dim, start, stop - start) for start, stop in shard.ranges]
    return torch.cat(pieces, dim=shard.dim)


def _parameters(model: nn.Module) -> list[tuple[str, nn.Module, str, nn.Parameter]]:
    """(qualified name, module, leaf, parameter) of every parameter, tied ones under each of their names."""
    return [
        (f"{prefix}.{leaf}" if prefix else leaf, module, leaf, parameter)
        for prefix, module in model.named_modules()
        for leaf, parameter in module.named_parameters(recurse=False)
    ]


# ---- one function a style: (module, entry, comm) -> what stands in its place -------------------------------------


def _colwise(module: nn.Module, entry: Entry, comm: Comm) -> nn.Module:
    assert isinstance(module, FusedLinear)
    return ColumnLinear(weight=module.weight, bias=module.bias, entry=entry, comm=comm, divide=module.divide)


def _rowwise(module: Linear, entry: Entry, comm: Comm) -> nn.Module:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return RowLinear(weight=weight, bias=module.bias, entry=entry, comm=comm)


def _vocabulary_embedding(module: nn.Module, entry: Entry, comm: Comm) -> nn.Module:
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    return VocabularyEmbedding(weight=weight, entry=entry, comm=comm)


def _vocabulary_head(module: nn.Module, entry: Entry, comm: Comm) -> nn.Module:
    assert isinstance(module, Head)
    return VocabularyHead(head=module, entry=entry, comm=comm)


def _vocabulary_loss(module: nn.Module, entry: Entry, comm: Comm) -> nn.Module:
    return VocabularyCrossEntropy(entry=entry, comm=comm)


def _memory_entry(module: nn.Module, entry: Entry, comm: Comm) -> nn.Module:
    return MemoryEntry(entry=entry, comm=comm)


def _sequence_slice(module: nn.Module, entry: Entry, comm: Comm) -> nn.Module:
    """What a module gives for the whole sequence is cut to this rank's shard; its name and parameters stay."""
    module.register_forward_hook(lambda _module, _inputs, whole: slice_sequence(whole, comm))
    return module


def _sharded_dropout(module: nn.Module, entry: Entry, comm: Comm) -> nn.Module:
    """Ranks drop out different elements: they hold different shards."""
    assert isinstance(module, Dropout)
    module.salt = 1 + comm.coordinate.tp
    return module


def _unchanged(module: nn.Module, entry: Entry, comm: Comm) -> nn.Module:
    """The parameters' shards or gradient sums are all there is to do."""
    return module


_STYLES: dict[str, Callable[[Any, Entry, Comm], nn.Module]] = {
    "colwise": _colwise,
    "rowwise": _rowwise,
    "vocabulary_embedding": _vocabulary_embedding,
    "vocabulary_head": _vocabulary_head,
    "vocabulary_loss": _vocabulary_loss,
    "memory_entry": _memory_entry,
    "sequence_slice": _sequence_slice,
    "sharded_dropout": _sharded_dropout,
    "head_bias_table": _unchanged,
    "sequence_replicated": _unchanged,
}
