"""How do hidden states become logits, and logits a loss?

    logits = (1/sqrt(D))? * transform(hidden) weight^T + bias
    loss   = sum over positions with a label of -log softmax(logits)[label]

The loss is a sum: whoever knows the number of labels of the whole step divides.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import IGNORED
from models.config import ModelConfig
from models.layers import ACTIVATIONS, Norm, Product, linear


class HeadTransform(nn.Module):
    """Dense, activation, norm: BERT's step before the vocabulary (arXiv 1810.04805)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        self.dense = linear(config.width, config.width, bias=True)
        self.norm = Norm(config)

    def forward(self, hidden_LBD: Tensor) -> Tensor:
        """hidden_LBD -> hidden_LBD."""
        transformed_LBD: Tensor = self.norm(self.activation(self.dense(hidden_LBD)))
        return transformed_LBD


class Head(nn.Module):
    """The linear map to the vocabulary, its weight and bias its own."""

    transform: nn.Module
    product: Product = staticmethod(F.linear)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.scale = config.width**-0.5 if config.head_scale else 1.0
        self.transform = HeadTransform(config) if config.head_transform else nn.Identity()
        self.weight = nn.Parameter(torch.empty(config.vocabulary, config.width))
        self.bias = nn.Parameter(torch.empty(config.vocabulary)) if config.head_bias else None

    def forward(self, hidden_LBD: Tensor) -> Tensor:
        """hidden_LBD -> logits_LBV."""
        hidden_LBD = self.transform(hidden_LBD)
        if self.scale != 1.0:
            hidden_LBD = hidden_LBD * self.scale
        return self.product(hidden_LBD, self.weight, self.bias)


class CrossEntropy(nn.Module):
    """Summed cross-entropy of the positions that have a label; half precision is raised to float32."""

    def forward(self, logits_LBV: Tensor, labels_BL: Tensor) -> Tensor:
        """A scalar in float32, or in the dtype of the logits if that is wider."""
        logits_LBV = logits_LBV.to(torch.promote_types(logits_LBV.dtype, torch.float32))
        return F.cross_entropy(logits_LBV.flatten(0, 1), labels_BL.t().flatten(), ignore_index=IGNORED, reduction="sum")
