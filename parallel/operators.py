"""Which operators ran, on which shapes, and how many FLOPs were that? As dispatched, dry or for real, not as planned.

Counted are matrix products and attention, a multiply-add as 2 and every score as computed: the convention of
`parallel/flops.py`, read off the operators instead of the formulas.

    product     m k n      2 m k n
    attention   forward    2 products of b N L S H: scores, weighted values
                backward   5 of them: scores again, gradients of probabilities, values, queries and keys

PyTorch's own counter knows CUDA's attention kernels but not the CPU's. An operator belongs to a recomputation if the
node of the graph that runs it is a region of `parallel/recompute.py`. Left out: communication (`parallel/recorder.py`)
and time.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from parallel.figures import PhaseFlops
from parallel.ledger import Phase

Operator = tuple[str, str, Phase]
"""Name with overload, shapes of its tensor arguments, phase."""

_NO_COMPUTATION = ("c10d", "_c10d_functional", "prim")
"""Communication is the recorder's; fake tensors answer questions after their device as operators `prim`."""
_REGION = "_RegionBackward"
_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001, operators have such names
_ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward  # noqa: SLF001

ATTENTIONS = frozenset({_ATTENTION, _ATTENTION_BACKWARD})
_IN_PLACE = {torch.ops.aten.addmm_: torch.ops.aten.addmm}
"""Operators that PyTorch's counter knows under another name only."""


def multiplies(func: Any) -> bool:
    """Whether an operator is a matrix product or attention: one that has FLOPs here."""
    packet = func.overloadpacket
    return packet in ATTENTIONS or _IN_PLACE.get(packet, packet) in flop_registry


class Operators(TorchDispatchMode):
    """Context in which operators are counted.

    Attributes:
        phase: what the executor does at this moment; whoever knows sets it.
        counts: how often each operator ran on equal shapes.
        flops: by phase.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.phase: Phase = "step"
        self.counts: Counter[Operator] = Counter()
        self.flops: Counter[Phase] = Counter()

    @property
    def phase_flops(self) -> PhaseFlops:
        """FLOPs so far; nothing in the step's end multiplies matrices."""
        return PhaseFlops(
            forward=self.flops["forward"], recompute=self.flops["recompute"], backward=self.flops["backward"]
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace not in _NO_COMPUTATION:
            phase = self._phase_now()
            shapes = " ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in _tensors(args))
            self.counts[str(func), shapes, phase] += 1
            flops = _flops(func, args, kwargs, out)
            if flops:
                self.flops[phase] += flops
        return out

    def _phase_now(self) -> Phase:
        if self.phase != "backward":
            return self.phase
        node: torch.autograd.graph.Node | None = torch._C._current_autograd_node()  # noqa: SLF001, has no public name
        return "recompute" if node is not None and node.name() == _REGION else "backward"


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list | tuple):
            yield from _tensors(argument)


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func.overloadpacket
    if packet is _ATTENTION:
        return 2 * _product_flops(args[0], args[1])
    if packet is _ATTENTION_BACKWARD:
        return 5 * _product_flops(args[1], args[2])
    count = flop_registry.get(_IN_PLACE.get(packet, packet))
    return int(count(*args, **kwargs, out_val=out)) if count else 0


def _product_flops(query_BNLH: Tensor, key_BKSH: Tensor) -> int:
    """Scores of all query heads: 2 b N L S H."""
    return 2 * query_BNLH.numel() * key_BKSH.shape[2]
