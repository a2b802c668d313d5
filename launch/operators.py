"""Which operators ran, on which shapes, and how many FLOPs did the forward take? As dispatched, not as planned.

Counted are matrix products and attention, a multiply-add as 2 FLOPs and every score that the kernel computes, masked or
not: the convention of `models/costs.py`, read off the operators instead of the formulas. Left out: communication
(`parallel/recorder.py`) and what an operator costs in time.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from parallel.schedule import Action

_COMMUNICATION = ("c10d", "_c10d_functional")
_OUTSIDE = -1
"""Index that stands for everything outside of the blocks."""


def _attention_flops(query_BNLH: Tensor, key_BNSH: Tensor, value_BNSH: Tensor, *_: Any, **__: Any) -> int:
    flops: int = sdpa_flop_count(query_BNLH.shape, key_BNSH.shape, value_BNSH.shape)
    return flops


# torch's counter knows the CUDA kernels of attention, but not this one.
_ATTENTION_ON_CPU = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)


class Operators(TorchDispatchMode):
    """Context and observer of one step.

    Attributes:
        counts: how often each (operator, shapes, phase) ran; phases are `forward`, `backward` and `step`.
        forward_flops: by block of the flat list, -1 for what lies outside of the blocks.
    """

    def __init__(self, blocks: dict[int, nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.forward_flops: Counter[int] = Counter()
        self._phase = "step"
        self._block = _OUTSIDE
        self._blocks = blocks

    def __enter__(self) -> Self:
        self._hooks = [
            handle
            for index, block in self._blocks.items()
            for handle in (
                block.register_forward_pre_hook(lambda *_, index=index: self._stand(index)),
                block.register_forward_hook(lambda *_: self._stand(_OUTSIDE)),
            )
        ]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._hooks:
            handle.remove()

    def _stand(self, index: int) -> None:
        self._block = index

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.namespace in _COMMUNICATION:
            return out
        self.counts[str(func), ", ".join(_shapes([*args, *kwargs.values()])), self._phase] += 1
        if self._phase == "forward":
            self.forward_flops[self._block] += _flops(func, args, kwargs, out)
        return out

    @contextlib.contextmanager
    def _during(self, phase: str) -> Iterator[None]:
        self._phase = phase
        yield
        self._phase = "step"

    def action(self, action: Action) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if action.is_transfer else self._during(action.kind)

    def synchronise(self) -> contextlib.AbstractContextManager[None]:
        return self._during("step")


def _shapes(arguments: Sequence[Any]) -> list[str]:
    """Shapes of the tensors among the arguments; a list of tensors is told by its length and elements."""
    told = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            told.append("x".join(map(str, argument.shape)) or "scalar")
        elif isinstance(argument, list | tuple) and argument and all(isinstance(item, Tensor) for item in argument):
            told.append(f"[{len(argument)} tensors, {sum(item.numel() for item in argument)} elements]")
    return told


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    packet = func.overloadpacket
    if packet is _ATTENTION_ON_CPU:
        return _attention_flops(*args, **kwargs)
    count = flop_registry.get(packet)
    return int(count(*args, **kwargs, out_val=out)) if count else 0
