"""What does DeepSpeed's AutoTP need of these models beside its configuration?

    AutoTP, by name           qkv, query, kv and up: SubParamLinearLayer, which cuts each part of a fused product
                              output and down:       LinearAllreduce
    whole on every rank       embeddings, norms, head and loss
    here                      its fused layers give parts side by side: they are split again
                              heads of a relative bias, whose table is whole, and its gradient summed by AutoTP

AutoTP replaces whatever has a matrix for its weight and a name in the configuration, nn.Linear or not. Each of its
column-parallel layers sums its input's gradient on its own: a memory's gradient is summed once for each block, whatever
`memory_gather` says. It sums `gradient.contiguous()` and returns the gradient: one that is not contiguous would lose
the sum; those of these models are products, and contiguous.
Source: deepspeed 0.19, module_inject. Left out: what it is told (`parallel/engines/deepspeed_config.py`).
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from models.dropout import Dropout
from parallel.comm import Comm
from parallel.plan import Entry, Plan


def held_plan(plan: Plan) -> Plan:
    """The plan of what AutoTP shards, all other parameters whole."""
    sharded = tuple(entry for entry in plan.entries if entry.style in ("colwise", "rowwise"))
    return dataclasses.replace(plan, entries=sharded)


def complete(model: nn.Module, plan: Plan, comm: Comm) -> None:
    """Adds to a model that AutoTP has sharded what AutoTP does not do."""
    held = dict(model.named_modules())
    for entry in plan.entries:
        module = held[entry.module]
        if entry.style == "colwise":
            _split(module, entry, comm)
        elif entry.style == "head_bias_table":
            module.register_forward_hook(
                lambda _module, _inputs, bias_NQK: bias_NQK.chunk(comm.mesh.tp)[comm.coordinate.tp]
            )
        elif entry.style == "sharded_dropout":
            assert isinstance(module, Dropout)
            module.salt = 1 + comm.coordinate.tp


def _split(module: nn.Module, entry: Entry, comm: Comm) -> None:
    shares = (part.share(comm.mesh.tp, comm.coordinate.tp) for part in entry.parts)
    sizes = [stop - start for start, stop in shares]

    def parts(_module: nn.Module, _inputs: Any, out: Tensor) -> tuple[Tensor, ...]:
        return torch.split(out, sizes, dim=-1)

    module.register_forward_hook(parts)
