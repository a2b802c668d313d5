"""When is the gradient of a weight computed? Not before somebody has nothing better to do.

    y = x W^T + b       input    dx = dy W                              asked for by the stage before, at once
                        weight   W.grad += dy^T x    b.grad += sum dy   asked for by nobody until the step ends

    collected   while a `Deferral` collects, a product's backward gives the first and leaves the second as a job; `run`
                does the jobs of one stage and microbatch (Qi et al. 2023, arXiv 2401.10241, section 2)
    behind      a product before which no message leaves leaves its job to the next one before which one does:
                `catch_up` does them while that message is on its way
    at once     otherwise

Only products are split, their weights are nearly all of the work: norms, tables and embeddings get their gradients at
once. Between the two halves x and dy are kept. Gradients are written to where they are added up: those that `begin`
names are overwritten by the first of a step, so that nobody need zero them. Left out: when each half runs
(`parallel/schedule.py`).
"""

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.schedule import Key

Gather: TypeAlias = Callable[[Tensor], Tensor]
"""Makes the whole input of a product from what was kept of it."""
Writers: TypeAlias = dict[nn.Module, tuple[nn.Parameter, ...]]
"""Modules whose products write gradients themselves, and of which parameters; autograd then knows nothing of these."""


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
        written: called with every parameter whose gradient was added to.
    """

    pack: Callable[[Tensor], Any]
    unpack: Callable[[Any], Tensor]
    written: Callable[[Tensor], None]

    def __init__(self) -> None:
        self.count_nothing()
        self.written = _unheard
        self._jobs: dict[Key, list[_Job]] = defaultdict(list)
        self._behind: list[_Job] = []
        self._now: Key | None = None
        self._unwritten: dict[int, Tensor] = {}

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

    def begin(self, weights: Iterable[Tensor]) -> None:
        """A step begins: what stands in the `grad` of these weights, which only products have, is worth nothing."""
        # Nor are jobs of a step that did not end.
        self._jobs.clear()
        self._behind.clear()
        self._unwritten = {id(weight): weight for weight in weights}

    def finish(self) -> None:
        """The last backward has run: gradients that no product has written are zero."""
        assert not self._jobs, f"weight gradients of {sorted(self._jobs)} were never computed"
        assert not self._behind, "weight gradients wait for a message that never came"
        for weight in self._unwritten.values():
            _gradient(weight).zero_()
        self._unwritten = {}

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
                self.write(x if job.gather is None else job.gather(x), gradient, job.weight, job.bias)

    def leave_behind(self, x: Tensor, gradient: Tensor, weight: Tensor) -> None:
        """Leaves a job, as in `add`, until a message of the same backward is on its way."""
        self._behind.append(_Job(x, gradient, weight, None, None))

    def catch_up(self) -> None:
        """A message is on its way: does what was left behind."""
        for job in self._behind:
            self.write(job.x, job.gradient, job.weight, job.bias)
        self._behind.clear()

    def write(self, x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Adds to the `grad` of a product's weight, or writes its first, and bias: x [..., D], gradient [..., U]."""
        flat = gradient.reshape(-1, gradient.shape[-1])
        beta = 0 if self._unwritten.pop(id(weight), None) is not None else 1
        _gradient(weight).addmm_(flat.t(), x.reshape(-1, x.shape[-1]), beta=beta)
        self.written(weight)
        if bias is not None:
            _gradient(bias).add_(flat.sum(0))
            self.written(bias)


def _unheard(_: Tensor) -> None:
    pass


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "gradients have no buffer"
    return parameter.grad


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
            ctx.deferral.write(x, gradient, *ctx.parameters)
        return gradient_x, None, None, None


def product(x: Tensor, weight: Tensor, bias: Tensor | None, deferral: Deferral) -> Tensor:
    """Computes x weight^T + bias; the backward adds to `grad` itself, when the deferral says so."""
    out: Tensor = _Product.apply(x, weight, bias, deferral)  # type: ignore[no-untyped-call]
    return out


def _itself(tensor: Any) -> Any:
    return tensor
