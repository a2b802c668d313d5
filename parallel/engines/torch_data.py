"""How does torch repeat or shard a stage over the dp ranks?

    zero   wrapped by                                     optimizer
    0      DistributedDataParallel, `replicate` with tp   torch's own
           and with backwards in two pieces
    1      DistributedDataParallel                        ZeroRedundancyOptimizer: each state on one rank
    2      FSDP2, parameters kept from forward to backward
    3      FSDP2, parameters gathered again for the backward

FSDP2 shards parameters between steps at 2 as well: what zero = 2 shares with ZeRO-2 is its traffic. Units are the
blocks, and what is around them. All of these average over the ranks; the engine scales its loss, so that they sum.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from models.blocks import DecoderBlock, EncoderBlock
from parallel.comm import Comm
from parallel.engines.foreign import unchecked_group
from parallel.engines.settings import EngineSettings
from parallel.layouts import SPLIT_SCHEDULES, Layout


def wrap(stage: nn.Module, layout: Layout, comm: Comm, mesh: DeviceMesh | None) -> nn.Module:
    """The stage, repeated or sharded over the one axis of the mesh; itself over one rank."""
    if mesh is None:
        return stage
    if layout.zero >= 2:
        for block in stage.modules():
            if isinstance(block, EncoderBlock | DecoderBlock):
                fully_shard(block, mesh=mesh, reshard_after_forward=layout.zero == 3)
        fully_shard(stage, mesh=mesh, reshard_after_forward=layout.zero == 3)
        return stage
    # DistributedDataParallel waits for autograd to accumulate, which it does not in a backward in two pieces.
    if layout.tp > 1 or (layout.pp > 1 and layout.schedule in SPLIT_SCHEDULES and layout.zero == 0):
        replicate(stage, mesh=mesh)
        return stage
    return DistributedDataParallel(
        stage,
        process_group=unchecked_group(comm, "dp"),
        gradient_as_bucket_view=True,
        # Its own default where the layout names none.
        bucket_cap_mb=layout.gradient_bucket_bytes / 2**20 or None,
    )


def accumulate(stage: nn.Module, *, is_last: bool) -> Any:
    """Context of the forward and backward of one microbatch: gradients are reduced in the last one only."""
    if isinstance(stage, DistributedDataParallel) and not is_last:
        return stage.no_sync()
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(is_last)
        stage.set_is_last_backward(is_last)
    return torch.enable_grad()


def optimizer_of(
    stage: nn.Module, layout: Layout, mesh: DeviceMesh | None, settings: EngineSettings
) -> torch.optim.Optimizer:
    """SGD or AdamW, of torch, its states sharded where the layout says zero = 1."""
    parameters = list(stage.parameters())
    kind = settings.optimizer_class
    # The fused update takes tensors of one kind: DTensors beside plain ones, or of different meshes, it does not.
    is_plain = not any(isinstance(parameter, DTensor) for parameter in parameters)
    options: dict[str, Any] = {"fused": True} if settings.optimizer == "adamw" and is_plain else {"foreach": False}
    if layout.zero == 1 and mesh is not None:
        return ZeroRedundancyOptimizer(
            parameters, optimizer_class=kind, process_group=mesh.get_group(), lr=settings.learning_rate, **options
        )
    return kind(parameters, lr=settings.learning_rate, **options)
