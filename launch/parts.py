"""Where does a step go? Busy seconds of one rank by what it did, told by torch's profiler for every engine alike.

    products     matrix products and attention
    copies       copies, concatenations, fills
    others       every other operator that computes: norms, activations, softmax, the optimizer
    dispatch     busy time outside of these: Python, autograd, the dispatcher, views, allocation
    waiting      wall time in which this rank's thread was not busy

Seconds of an operator are its own, without those that it calls. The profiler makes a step longer, between operators
more than inside: so dispatch is what a step without it was busy, less the operators. On gloo another thread sends and
adds; it takes a core from who waits for one, and shows as waiting. Left out: GPUs, whose kernels run apart.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal

import torch

from parallel.operators import multiplies

Part = Literal["products", "copies", "others", "dispatch"]

_COPIES = frozenset({"aten::copy_", "aten::cat", "aten::fill_", "aten::zero_"})
_ALLOCATIONS = frozenset({"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::resize_", "aten::set_"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TimedParts:
    """Seconds of one step's operators on one rank; of its products and its messages alone where they are known."""

    products: float
    copies: float
    others: float
    products_alone: float | None = None
    messages_alone: float | None = None


def timed_parts(events: Iterable[Any]) -> TimedParts:
    """Adds up a profile.

    Args:
        events: what `torch.profiler.profile.key_averages()` gives: a name and its own CPU time in microseconds each.
    """
    seconds: defaultdict[Part, float] = defaultdict(float)
    for event in events:
        seconds[part_of(event.key)] += event.self_cpu_time_total / 1e6
    return TimedParts(products=seconds["products"], copies=seconds["copies"], others=seconds["others"])


@cache
def part_of(name: str) -> Part:
    """What the profiler's event of a name is a part of; what is no operator of torch's is dispatch."""
    namespace, _, short = name.partition("::")
    if namespace != "aten" or name in _ALLOCATIONS:
        return "dispatch"
    if name in _COPIES:
        return "copies"
    packet = getattr(torch.ops.aten, short, None)
    if packet is None:
        return "dispatch"
    overloads = [getattr(packet, name) for name in packet.overloads()]
    if any(map(multiplies, overloads)):
        return "products"
    return "others" if any(map(_computes, overloads)) else "dispatch"


def _computes(overload: Any) -> bool:
    """Whether an operator has a kernel of its own, and does not only give a view or call others."""
    returned = [value.alias_info for value in overload._schema.returns]  # noqa: SLF001, has no public name
    is_view = any(info is not None and not info.is_write for info in returned)
    name = overload.name()
    # Some overloads are TorchScript's alone, and the dispatcher does not know them.
    is_known = torch._C._dispatch_has_kernel(name)  # noqa: SLF001, as the next
    return not is_view and is_known and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")  # noqa: SLF001
