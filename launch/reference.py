"""What does one process compute? The answer that every layout is compared with.

    loss = sum over labelled positions of -log softmax(logits)[label] / their number

One forward of the whole global batch, one backward, one SGD step, each as plainly as PyTorch allows: no microbatches,
no schedule, no gradient buffer, and nothing of `parallel/`, so that a mistake there cannot be made here as well. The
loss is written again for the same reason. Left out: dropout, optimizers with a state.
"""

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from models.architectures import build
from models.batch import IGNORED, Batch
from models.config import ModelConfig
from models.initial import canonical_name, initialise


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """One step of one process. Tensors are whole parameters by canonical name; a tied one occurs once."""

    loss: float
    gradient_norm: float
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """After the step."""


def reference(
    config: ModelConfig, batch: Batch, *, seed: int, learning_rate: float, dtype: torch.dtype = torch.float64
) -> Reference:
    """Runs one step of one process on the CPU.

    Args:
        config: the model.
        batch: all sequences of the step, those of every data-parallel rank.
        seed: of the initial weights.
        learning_rate: of the SGD step.
        dtype: of weights, activations and gradients.
    """
    device = torch.device("cpu")
    with torch.device("meta"):
        model = build(config)
    initialise(model, config, seed=seed, dtype=dtype, device=device)
    logits_LBV = model(batch.to(device, dtype), {})["logits"]
    labels_LB = batch.labels.t()
    total = F.cross_entropy(logits_LBV.flatten(0, 1), labels_LB.flatten(), ignore_index=IGNORED, reduction="sum")
    loss = total / batch.num_loss_tokens()
    loss.backward()
    gradients, weights = {}, {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients[canonical_name(config, name)] = gradient
        weights[canonical_name(config, name)] = parameter.detach() - learning_rate * gradient
    squares = [gradient.square().sum() for gradient in gradients.values()]
    return Reference(
        loss=loss.item(),
        gradient_norm=torch.stack(squares).sum().sqrt().item(),
        gradients=gradients,
        weights=weights,
    )
