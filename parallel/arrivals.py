"""When is a bucket of gradients whole, so that its sum over dp may leave while the backward goes on?

    a parameter of the bucket gets    one share of each microbatch from autograd, in each stage's backward that uses it
                                      one from each product that writes on its own (`parallel/deferral.py`)
    the last of them has come         the bucket's all-reduce is on its way, after those of the buckets before it
    the step ends                     everybody waits for all of them

Shares are counted, so neither the schedule nor a split backward nor a parameter of several stages needs to be known of.
A share that comes when its bucket has left would be lost: it is an error. One that never comes (a parameter that a
microbatch does not use) leaves its bucket for the end of the step. Every dp rank runs the same row of the schedule, so
all send in the same order. Left out: what is in a bucket (`parallel/buckets.py`).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from parallel.comm import Comm, Pending, Site
from parallel.deferral import Deferral, Writers
from parallel.ledger import Phase

SITE = Site(name="gradient.dp")


@dataclasses.dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are one message: a flat tensor, and the parameters whose gradients are views of it."""

    flat: Tensor
    parameters: Sequence[nn.Parameter]


class Arrivals:
    """The buckets of one rank, sent in their order.

    Args:
        buckets: in the order of sending.
        stages: the rank's stages, each a model of its own; they may share parameters.
        writers: modules whose products write gradients through `deferral`.
        deferral: tells what they have written.
        microbatches: of a step.
        comm: sends.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        stages: Iterable[nn.Module],
        writers: Writers,
        deferral: Deferral,
        microbatches: int,
        comm: Comm,
    ) -> None:
        self._buckets, self._comm = buckets, comm
        self._bucket_of = {id(one): index for index, bucket in enumerate(buckets) for one in bucket.parameters}
        from_autograd, from_products = _shares(stages, writers)
        self._expected = {key: microbatches * (from_autograd[key] + from_products[key]) for key in self._bucket_of}
        deferral.written = self._arrived
        for bucket in buckets:
            for parameter in bucket.parameters:
                if from_autograd[id(parameter)]:
                    parameter.register_post_accumulate_grad_hook(self._arrived)
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing has come."""
        self._missing = dict(self._expected)
        # Parameters of each bucket that wait for a share.
        self._waiting = Counter(self._bucket_of.values())
        self._sent: list[Pending] = []

    def finish(self) -> None:
        """The last backward has run: sends what is left, and waits for all of it."""
        while len(self._sent) < len(self._buckets):
            self._send("step")
        for pending in self._sent:
            pending.wait()

    def _arrived(self, parameter: Tensor) -> None:
        """A share of a parameter's gradient has been added."""
        key = id(parameter)
        self._missing[key] -= 1
        assert self._missing[key] >= 0, "a share of a gradient came after all that were expected"
        if self._missing[key]:
            return
        self._waiting[self._bucket_of[key]] -= 1
        while len(self._sent) < len(self._buckets) and not self._waiting[len(self._sent)]:
            self._send("backward")

    def _send(self, phase: Phase) -> None:
        bucket = self._buckets[len(self._sent)]
        self._sent.append(self._comm.all_reduce(bucket.flat, "dp", site=SITE, phase=phase))


def _shares(stages: Iterable[nn.Module], writers: Writers) -> tuple[Counter[int], Counter[int]]:
    """How many shares of its gradient a parameter, by its id, gets of one microbatch: from autograd, from products.

    Autograd tells of a parameter once in every stage that uses it, even if a product kept its share there to itself. Of
    a parameter that only products write it is not asked.
    """
    from_autograd: Counter[int] = Counter()
    from_products: Counter[int] = Counter()
    asked: set[int] = set()
    for stage in stages:
        for module in stage.modules():
            written = {id(parameter) for parameter in writers.get(module, ())}
            from_products.update(written)
            asked |= {id(parameter) for parameter in module.parameters(recurse=False)} - written
        from_autograd.update(id(parameter) for parameter in stage.parameters())
    return Counter({key: count for key, count in from_autograd.items() if key in asked}), from_products
