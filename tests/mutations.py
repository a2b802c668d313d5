"""Which defects must a proof notice? Some that are easily made and hardly seen, each as a context around a step.

Every rank enters the same one, so that nothing hangs: the numbers are wrong, and only the numbers. Nothing of the
product knows about these.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from parallel.arrivals import Arrivals
from parallel.comm import Comm, Done, Pending, Site
from parallel.gradients import Gradients
from parallel.ledger import Event, Ledger
from parallel.plan import Plan


@contextlib.contextmanager
def broken_all_reduce(site: str) -> Iterator[None]:
    """Partial sums stay partial at one place of the model."""
    with _skipped_all_reduce(lambda _, where: where.name == site):
        yield


@contextlib.contextmanager
def broken_loss() -> Iterator[None]:
    """Every rank takes its own rows of the vocabulary for all of them."""
    all_gather = Comm.all_gather

    def repeating(comm: Comm, shard: Any, axis: str, *, site: Site, **options: Any) -> tuple[Any, Pending]:
        whole, pending = all_gather(comm, shard, axis, site=site, **options)
        if site.name == "loss":
            pending.wait()
            whole.copy_(shard.repeat(comm.size(axis), *[1] * (shard.dim() - 1)))
        return whole, pending

    with mock.patch.object(Comm, "all_gather", repeating):
        yield


@contextlib.contextmanager
def gradient_scaled_twice(microbatches: int) -> Iterator[None]:
    """The mean over microbatches is taken again, after the loss was divided by all tokens."""
    synchronise = Gradients.synchronise

    def scaling(gradients: Gradients) -> None:
        synchronise(gradients)
        gradients.flat.div_(microbatches)

    with mock.patch.object(Gradients, "synchronise", scaling):
        yield


@contextlib.contextmanager
def norm_not_summed() -> Iterator[None]:
    """Under sp every rank keeps the gradient that its own shard of the sequence gives a norm."""
    sums_over_sequence = Plan.sums_over_sequence

    def summing(plan: Plan, parameter: str) -> bool:
        return "norm" not in parameter and sums_over_sequence(plan, parameter)

    with mock.patch.object(Plan, "sums_over_sequence", summing):
        yield


@contextlib.contextmanager
def drifting_tied_copy() -> Iterator[None]:
    """Every stage updates its copy of a tied parameter with the gradient of its own use."""
    with _skipped_all_reduce(lambda axis, _: axis.startswith("tied:")):
        yield


@contextlib.contextmanager
def gradient_kept() -> Iterator[None]:
    """The gradient of a step stays where the next one adds its own."""
    with mock.patch.object(Gradients, "zero"):
        yield


@contextlib.contextmanager
def sent_after_the_first_microbatch(microbatches: int) -> Iterator[None]:
    """A bucket of gradients leaves while microbatches that will add to it are still to come."""
    begin, arrived = Arrivals.begin, Arrivals._arrived

    def beginning(arrivals: Arrivals) -> None:
        begin(arrivals)
        missing = arrivals._missing
        missing.update({parameter: count // microbatches for parameter, count in missing.items()})

    def arriving(arrivals: Arrivals, parameter: Any) -> None:
        if arrivals._missing[id(parameter)]:
            arrived(arrivals, parameter)

    with mock.patch.multiple(Arrivals, begin=beginning, _arrived=arriving):
        yield


@contextlib.contextmanager
def untold_event(site: str) -> Iterator[None]:
    """The ledger lacks what was sent at one place."""
    write = Ledger.write

    def writing(ledger: Ledger, event: Event) -> None:
        if event.site != site:
            write(ledger, event)

    with mock.patch.object(Ledger, "write", writing):
        yield


@contextlib.contextmanager
def _skipped_all_reduce(is_skipped: Callable[[str, Site], bool]) -> Iterator[None]:
    all_reduce = Comm.all_reduce

    def skipping(comm: Comm, tensor: Any, axis: str, *, site: Site, **options: Any) -> Pending:
        if is_skipped(axis, site):
            return Done()
        return all_reduce(comm, tensor, axis, site=site, **options)

    with mock.patch.object(Comm, "all_reduce", skipping):
        yield


@contextlib.contextmanager
def embedding_summed_over_tp() -> Iterator[None]:
    """Gradients of a whole embedding, which are the same on every tp rank, are summed as if each were a part."""
    synchronise = Gradients.synchronise

    def summing(gradients: Gradients) -> None:
        for name, view in gradients.views.items():
            if name.endswith("token.weight"):
                gradients._comm.all_reduce(view, "tp", site=Site(name="gradient.sequence"), phase="step").wait()
        synchronise(gradients)

    with mock.patch.object(Gradients, "synchronise", summing):
        yield


@contextlib.contextmanager
def whole_counted_by_every_rank() -> Iterator[None]:
    """What every tp rank holds whole counts towards the norm on each of them."""
    counted = Gradients._counted

    def counting(gradients: Gradients, name: str) -> list[Any]:
        return counted(gradients, name) or [gradients.views[name]]

    with mock.patch.object(Gradients, "_counted", counting):
        yield
