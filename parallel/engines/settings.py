"""What is every engine made with, however it partitions: seed, dtype, device and optimizer.

Optimizers are torch's own: SGD, or AdamW whose update is one kernel for all tensors. Left out: who runs
(`parallel/engines/choice.py`), and how cells of an experiment are run (`launch/settings.py`).
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from parallel.engines.engine import OptimizerName


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """What an engine reads besides a plan and its place."""

    seed: int
    """Of weights and dropout masks."""
    dtype: torch.dtype
    """Of parameters, activations and gradients."""
    device: torch.device
    """Where this rank computes."""
    optimizer: OptimizerName = "sgd"
    learning_rate: float = 1e-2

    @property
    def optimizer_class(self) -> type[torch.optim.SGD | torch.optim.AdamW]:
        return torch.optim.SGD if self.optimizer == "sgd" else torch.optim.AdamW

    @property
    def optimizer_options(self) -> dict[str, Any]:
        """What its constructor is given besides the parameters."""
        return {"lr": self.learning_rate} | ({"fused": True} if self.optimizer == "adamw" else {})

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Of plain tensors that are all on this rank."""
        return self.optimizer_class(parameters, **self.optimizer_options)
