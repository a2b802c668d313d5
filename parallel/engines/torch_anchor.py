"""What must a stage be, so that torch's backward in two pieces finds every weight at one place?

    x   what enters the stage            I   runs from what leaves back to x, and keeps the gradients of the nodes
    e   what begins inside of it             where weights join this way
    w   its weights                      W   starts at these nodes, weight after weight

torch 2.13 starts W of a weight that joins at several nodes from all of them at once, and frees what lies between, which
other weights still need. So it goes where a decoder begins on a stage that the memory enters: its embedding joins at
every use of the memory. So it goes with a relative bias that several attentions read, and with a head tied to an
embedding of its stage. Each of these gets an edge to x, and joins there:

    forward    y = e                     backward    of e: g, of x: nothing

After I, torch detaches what left the stage in place. A memory that is handed on is what entered, and recomputation
would find it without a gradient; a view cannot be detached. What leaves is therefore a tensor of its own, of the same
numbers. Nothing else is computed than before. The first stage needs none of this: its backward runs whole, as W.

Source: `torch.distributed.pipelining._backward`; pytorch/pytorch#180952 tells what was counted twice before. Left out:
weights that blocks share, of which these models have none.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from models.batch import Batch
from models.model import Hidden, Model


class Anchor:
    """Runs a part of a model whose modules are changed as told above; other parts keep theirs.

    Args:
        part: of any stage but the first.
    """

    def __init__(self, part: Model) -> None:
        self._part = part
        self._entered: Tensor | None = None
        embedded: set[nn.Parameter] = set()
        for stack in (part.encoder, part.decoder):
            if stack is not None and stack.embedding is not None:
                embedded |= set(stack.embedding.parameters())
                stack.embedding = _AnchoredResult(stack.embedding, self)
            if stack is not None and stack.relative_bias is not None:
                stack.relative_bias = _AnchoredResult(stack.relative_bias, self)
        if part.head is not None:
            tied = tuple(name for name, parameter in part.head.named_parameters() if parameter in embedded)
            part.head = _AnchoredWeights(part.head, tied, self) if tied else part.head

    def run(self, batch: Batch, hidden: Hidden) -> Hidden:
        """What the part does."""
        self._entered = next(iter(hidden.values()))
        left = self._part(batch, hidden)
        self._entered = None
        return {name: tensor if name == "logits" else _own(tensor) for name, tensor in left.items()}

    def hold(self, tensor: Tensor) -> Tensor:
        """The tensor, with an edge to what has entered."""
        assert self._entered is not None
        held: Tensor = _Edge.apply(tensor, self._entered)  # type: ignore[no-untyped-call]
        return held


def _own(tensor: Tensor) -> Tensor:
    own: Tensor = _Own.apply(tensor)  # type: ignore[no-untyped-call]
    return own


class _Edge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, entered: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class _AnchoredResult(nn.Module):
    """A module whose result has the edge."""

    def __init__(self, module: nn.Module, anchor: Anchor) -> None:
        super().__init__()
        self.module, self._anchor = module, anchor

    def forward(self, *arguments: Any) -> Tensor:
        """As the module."""
        return self._anchor.hold(self.module(*arguments))


class _AnchoredWeights(nn.Module):
    """A head whose weights of some names have the edge."""

    def __init__(self, module: nn.Module, names: tuple[str, ...], anchor: Anchor) -> None:
        super().__init__()
        self.module, self._names, self._anchor = module, names, anchor

    def forward(self, hidden_LBD: Tensor) -> Tensor:
        """As the head."""
        weights = {name: self._anchor.hold(self.module.get_parameter(name)) for name in self._names}
        logits_LBV: Tensor = functional_call(self.module, weights, (hidden_LBD,))
        return logits_LBV
