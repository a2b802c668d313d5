"""How does DTensor shard a model over the tp ranks? A dictionary of styles by module name, for `parallelize_module`.

    module                          tp                               tp + sp
    embedding.token                 rows sharded, output summed      output scattered along the sequence
    position, token_type, features  each rank the whole              each rank its part of the output
    norm                            each rank the whole              SequenceParallel
    qkv, query, up                  input replicated, columns        input gathered once for all maps, columns
    output, down                    rows, output summed              rows, output scattered
    memory, kv                      one DTensor for all blocks (per_stage), or one a block (per_block)
    relative_bias.table             columns: the heads of the rank
    head                            columns: logits stay sharded, the loss reads them so (`loss_parallel`)

A vocabulary that is whole on every rank has no style at token and head: plain tensors, as norms are without sp.

What passes between sublayers is a plain tensor, whole or a part of the sequence, so that models need not know. Hidden
states are sequence-first: the sequence is dim 0. Sources: torch.distributed.tensor.parallel; Korthikanti et al. 2022
(arXiv 2205.05198) for sequence parallelism.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from models.model import Model
from models.stack import Stack
from models.sublayers import Sublayer
from parallel.layouts import Layout

_SEQUENCE = 0


def parallelize(model: Model, layout: Layout, mesh: DeviceMesh) -> None:
    """Shards a rewritten model with values over the mesh, which has one axis."""
    parallelize_module(model, mesh, styles(model, layout), src_data_rank=None)


def styles(model: Model, layout: Layout) -> dict[str, ParallelStyle]:
    """The style of each module, by its name."""
    stream: Placement = Shard(_SEQUENCE) if layout.sp else Replicate()
    told: dict[str, ParallelStyle] = {}
    for side, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        if stack is not None:
            told |= {f"{side}.{name}": style for name, style in _stack_styles(stack, layout, stream).items()}
    if model.head is not None:
        if layout.sp and any(True for _ in model.head.get_submodule("transform").parameters()):
            told["head.transform"] = SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)
        if layout.shards_vocabulary:
            told["head.projection"] = ColwiseParallel(
                input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
            )
    return told


def _stack_styles(stack: Stack, layout: Layout, stream: Placement) -> dict[str, ParallelStyle]:
    told: dict[str, ParallelStyle] = {}
    names = dict(stack.named_modules())
    if "embedding.token" in names and layout.shards_vocabulary:
        told["embedding.token"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=stream)
    if layout.sp:
        for name in ("embedding.position", "embedding.token_type", "embedding.features"):
            if name in names:
                told[name] = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=stream)
    if stack.memory is not None and layout.memory_gather == "per_stage":
        told["memory"] = PrepareModuleOutput(
            output_layouts=stream, desired_output_layouts=Replicate(), use_local_output=False
        )
    if stack.relative_bias is not None:
        told["relative_bias.table"] = ColwiseParallel()
    for name, module in names.items():
        if isinstance(module, Sublayer):
            told |= {f"{name}.{key}": style for key, style in _sublayer_styles(module, layout, stream).items()}
        if layout.sp and name.endswith("norm") and any(True for _ in module.parameters()):
            told[name] = SequenceParallel(sequence_dim=_SEQUENCE, use_local_output=True)
    return told


def _sublayer_styles(sublayer: Sublayer, layout: Layout, stream: Placement) -> dict[str, ParallelStyle]:
    told: dict[str, ParallelStyle] = {}
    for name, _ in sublayer.named_children():
        if name in ("qkv", "query", "up") or (name == "kv" and layout.memory_gather == "per_block"):
            told[name] = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),))
        if name in ("qkv", "query", "up", "kv"):
            told[f"{name}.maps.*"] = ColwiseParallel()
        if name in ("output", "down"):
            told[name] = RowwiseParallel(output_layouts=stream)
    return told


def complete_gradients(model: nn.Module) -> None:
    """Places every gradient as its parameter is.

    DTensor leaves some otherwise: a norm's as a partial sum under sp, and an embedding's whole on every rank.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            parameter.grad = gradient.redistribute(placements=parameter.placements)
