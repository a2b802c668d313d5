"""A model and its loss as one module, because data parallelism wraps what is called."""

from torch import Tensor, nn

from models.batch import Batch
from models.model import Model


class ScoredModel(nn.Module):
    """Called with a microbatch, gives its summed cross-entropy."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> Tensor:
        """A scalar."""
        assert self.model.loss is not None
        loss: Tensor = self.model.loss(self.model(batch, {})["logits"], batch.labels)
        return loss
