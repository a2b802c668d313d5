"""What do the three architectures have in common? Two possible stacks, a head, a loss.

A model, or a slice of one, is called as `model(batch, hidden) -> hidden`, where `hidden` names the states that enter or
leave it. A whole model is called with {} and returns {"logits": logits_LBV}.
"""

from typing import TypeAlias

from torch import Tensor, nn

from models.batch import Batch
from models.config import ModelConfig
from models.dropout import Dropout, MaskKey
from models.head import CrossEntropy, Head
from models.stack import Stack

Hidden: TypeAlias = dict[str, Tensor]
"""States by name, sequence-first: "source", "memory", "target" are [L, B, D], "logits" is [L, B, V]. "kv.3" are keys
and values of decoder block 3, [S, B, 2 K H], where another slice makes them."""


class Model(nn.Module):
    """Base of the three architectures. Parts are None where the architecture or the slice has none.

    Attributes:
        mask_key: which dropout masks are current; shared by all dropouts of the model.
    """

    encoder: Stack | None
    decoder: Stack | None
    head: nn.Module | None
    loss: nn.Module | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = Stack(config, "encoder") if config.has_encoder else None
        self.decoder = Stack(config, "decoder") if config.has_decoder else None
        self.head = Head(config)
        self.loss = CrossEntropy()
        self.mask_key = MaskKey()
        for name, module in self.named_modules():
            if isinstance(module, Dropout):
                module.site = name
                module.key = self.mask_key

    def forward(self, batch: Batch, hidden: Hidden) -> Hidden:
        """What enters -> what leaves."""
        raise NotImplementedError
