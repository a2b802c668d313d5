"""How does fairscale's FullyShardedDataParallel hold a model: zero 3?

    unit         each block, and the root for what is around them: tables, relative biases, norms, head
    parameters   a unit's one after the other, cut evenly over the dp ranks, the last cut padded
    forward      a unit is gathered, computed, and let go; the root stays
    backward     a block is gathered again; the unit's gradient is scattered to where its parameters are

Tied weights are all the root's, which flattens them once. A unit's gradient is one message, in a group of its own
beside that of the parameters, as fairscale has it by default; its bucket of 25 MiB is not used, because gradients would
stay in it, however small. Nor is `no_sync`: until the last microbatch it keeps whole gradients, the bytes that zero 3
is there to save. So every microbatch scatters, and shards are summed.

It needs CUDA: its streams are made where CUDA is, and looked up for every gather (`KeyError: 'all_gather'` without);
what is let go is first told to `record_stream`, which CPU tensors do not have. It takes float32 alone, and is converted
afterwards; values are drawn in float32, so that none changes. Source: fairscale 0.4.13,
nn/data_parallel/fully_sharded_data_parallel.py. Left out: its mixed precision, and parameters on the host.
"""

from collections.abc import Iterator
from typing import Any

import torch
from fairscale.nn.data_parallel import FullyShardedDataParallel
from torch import Tensor, nn

from parallel.engines.engine import Quantity
from parallel.engines.gathered import cut_of
from parallel.engines.scored_model import ScoredModel

_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module", "model")
"""In the path of a module: fairscale's two, and `ScoredModel`'s."""


def no_streams(device: torch.device | None = None) -> str | None:
    """Why parameters cannot be sharded here, or not for a rank on this device, as one line; None when they can."""
    if not torch.cuda.is_available():
        return "fairscale's FullyShardedDataParallel needs CUDA streams, and there is no GPU: use zero <= 2"
    if device is not None and device.type != "cuda":
        return f"fairscale's FullyShardedDataParallel needs CUDA streams, and ranks compute on {device}: use zero <= 2"
    return None


def shard(module: ScoredModel, *, group: Any, gradient_group: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Wraps blocks one by one, then all; every rank has drawn the same float32 values.

    Args:
        module: a model with its loss.
        group: what parameters are gathered over.
        gradient_group: the same ranks, for gradients.
        device: where the rank computes.
        dtype: of parameters from here on.
    """
    options = {
        "process_group": group,
        "process_group_reduce_scatter": gradient_group,
        "bucket_cap_mb": 0,
        "compute_device": device,
        "buffer_dtype": dtype,
    }
    for stack in (module.model.encoder, module.model.decoder):
        if stack is not None:
            for index, block in stack.block.items():
                stack.block[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(module, **options).to(dtype)


def pieces(root: nn.Module, quantity: Quantity) -> Iterator[tuple[str, int, Tensor]]:
    """(qualified name, first element, elements) of what this rank holds; no gradients before the first step."""
    for path, unit in root.named_modules():
        if isinstance(unit, FullyShardedDataParallel):
            (flat,) = unit.params
            cut = flat if quantity == "weight" else flat.grad
            names, _, sizes = flat.metadata()
            for index, start, values in () if cut is None else cut_of(cut.detach(), sizes, unit.rank):
                parts = f"{path}.{names[index]}".split(".")
                yield ".".join(part for part in parts if part and part not in _WRAPPERS), start, values
