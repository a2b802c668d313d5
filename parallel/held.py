"""What a rank holds between the actions of one step: inputs, ends of graphs and gradients of each stage and microbatch.

    forward    inputs  ->  part of the model  ->  made: what leaves, and where its backward starts
    backward   gradients of what left  ->  graph  ->  made: gradients of the inputs

Everything is let go when its last user has run. Left out: who sends what where (`parallel/pipeline.py`).
"""

from collections import defaultdict
from collections.abc import Collection

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from models.batch import Batch
from models.model import Hidden, Model
from parallel.schedule import Key, Product


class Held:
    """The tensors of one step on one rank.

    Attributes:
        loss: the sum of the losses of this rank's microbatches so far, divided.
        made: what the latest action made for other stages, by name.
    """

    def __init__(self, *, loss_tokens: int, loss: Tensor) -> None:
        self.loss = loss
        self.made: Hidden = {}
        self._loss_tokens = loss_tokens
        self._inputs: dict[Key, Hidden] = defaultdict(dict)
        self._outputs: dict[Key, dict[str, GradientEdge]] = {}
        self._gradients: dict[Key, Hidden] = defaultdict(dict)

    def enter(self, product: Product, name: str, tensor: Tensor) -> None:
        """A tensor arrives for the action that gives `product`: an input, or a gradient to add to others."""
        direction, *key = product
        stage, microbatch = key
        if direction == "forward":
            self._inputs[stage, microbatch][name] = tensor.requires_grad_()
            return
        gradients = self._gradients[stage, microbatch]
        gradients[name] = gradients[name] + tensor if name in gradients else tensor

    def forward(self, part: Model, batch: Batch, key: Key, leaving: Collection[str]) -> None:
        """Runs a stage on a microbatch; `leaving` names what other stages get of it."""
        left = part(batch, self._inputs[key])
        self.made = {}
        if "logits" in left:
            assert part.loss is not None
            loss = part.loss(left["logits"], batch.labels) / self._loss_tokens
            self.loss = self.loss + loss.detach()
            left = {"loss": loss}
        else:
            self.made = left = {name: left[name] for name in left if name in leaving}
        # An edge of the graph instead of the tensor: what was sent need not be kept to start the backward. What has no
        # gradient is refused where it is sent.
        self._outputs[key] = {name: get_gradient_edge(tensor) for name, tensor in left.items() if tensor.requires_grad}

    def backward(self, key: Key) -> None:
        """Runs the graph of a stage and a microbatch backward."""
        self.made = {}
        outputs, gradients = self._outputs.pop(key), self._gradients.pop(key, {})
        torch.autograd.backward(list(outputs.values()), [gradients.get(name) for name in outputs])
        received = {name: tensor.grad for name, tensor in self._inputs.pop(key).items()}
        assert None not in received.values(), f"no gradient for {[n for n, g in received.items() if g is None]}"
        self.made = {name: gradient for name, gradient in received.items() if gradient is not None}
