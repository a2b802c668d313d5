"""How a backward is split: the gradients of inputs now, those of the weights of products later.

    y = x W^T + b       input    dx = dy W                              asked for by the stage before, at once
                        weight   W.grad += dy^T x    b.grad += sum dy   asked for by nobody until the step ends

While a `Deferral` collects, a product's backward gives the first and leaves the second as a job; `run` does the jobs of
one stage and microbatch. Only products are split, their weights are nearly all of the work: norms, tables and
embeddings get their gradients at once. Between the two halves x and dy are kept.

Source: Qi et al. 2023 (arXiv 2401.10241), section 2. Left out: when each half runs (`parallel/schedule.py`).
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.schedule import Key

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""Makes the whole input of a product from what was kept of it."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    x: Any
    gradient: Any
    weight: Tensor
    bias: Tensor | None
    gather: Gather | None


class Deferral:
    """The weight gradients that one rank still owes.

    Attributes:
        pack, unpack: what tensors pass through when they are kept and when they are used; who counts bytes sets both.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]

    def __init__(self) -> None:
        self.count_nothing()
        self._jobs: dict[Key, list[_Job]] = defaultdict(list)
        self._now: Key | None = None

    def count_nothing(self) -> None:
        """Tensors are kept as they are."""
        self.pack = self.unpack = _itself

    @property
    def is_collecting(self) -> bool:
        return self._now is not None

    @contextlib.contextmanager
    def collect(self, stage: int, microbatch: int) -> Iterator[None]:
        """Context of a backward whose weight gradients are left for `run`."""
        self._now = (stage, microbatch)
        try:
            yield
        finally:
            self._now = None

    def add(
        self, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, gather: Gather | None = None
    ) -> None:
        """Leaves the gradient of a product's weight, and of its bias, for later.

        Args:
            x: [..., D], or what `gather` makes that from.
            gradient: of the product, [..., U].
            weight: parameter [U, D] that has a `grad` to add to.
            bias: parameter [U] that has one, or None.
            gather: called when the job is done.
        """
        assert self._now is not None, "nobody collects"
        self._jobs[self._now].append(_Job(self.pack(x), self.pack(gradient), weight, bias, gather))

    def run(self, stage: int, microbatch: int) -> None:
        """Does the jobs of one backward, in the order in which they came, and lets go of what they kept."""
        with torch.no_grad():
            for job in self._jobs.pop((stage, microbatch), []):
                x, gradient = self.unpack(job.x), self.unpack(job.gradient)
                add_weight_gradient(x if job.gather is None else job.gather(x), gradient, job.weight, job.bias)


def add_weight_gradient(x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Adds to the `grad` of a product's weight and bias: x [..., D], gradient [..., U]."""
    flat = gradient.reshape(-1, gradient.shape[-1])
    assert weight.grad is not None, "gradients have no buffer"
    weight.grad.addmm_(flat.t(), x.reshape(-1, x.shape[-1]))
    if bias is not None:
        assert bias.grad is not None, "gradients have no buffer"
        bias.grad.add_(flat.sum(0))


class _Product(torch.autograd.Function):
    """x [..., D], weight [U, D], bias [U] -> [..., U]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Not a saved tensor: its `grad` is needed, and what is saved comes back as another object.
        ctx.parameters, ctx.deferral = (weight, bias), deferral
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        gradient_x = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        if ctx.deferral.is_collecting:
            ctx.deferral.add(x, gradient, *ctx.parameters)
        else:
            add_weight_gradient(x, gradient, *ctx.parameters)
        return gradient_x, None, None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral | None) -> Tensor:
    """Computes x weight^T + bias; with a `Deferral` the backward may be split, and adds to `grad` itself."""
    if deferral is None:
        return F.linear(x, weight, bias)
    out: Tensor = _Product.apply(x, weight, bias, deferral)  # type: ignore[no-untyped-call]
    return out


def _itself(tensor: Any) -> Any:
    return tensor
