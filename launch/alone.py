"""How long do a step's products take if nothing else is done, and its messages? The floor under a step.

    one step, watched  ->  its products and its communication, in their order  ->  each list alone, with other numbers

A product is repeated on tensors of the same shapes and strides, a message with the same group and bytes, and what a
step hides behind computation shows here. All ranks of a world repeat their lists at the same time.
Left out: what a step adds to this floor (`launch/parts.py`).
"""

import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from parallel.operators import multiplies
from parallel.recorder import Call, is_communication, issue_again


class Floor(TorchDispatchMode):
    """Context of one step, whose products and messages can be repeated afterwards.

    Attributes:
        products: in the order in which they ran.
        messages: collectives, sends and receives, in the order in which they were issued.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.products: list[Call] = []
        self.messages: list[Call] = []
        self._stand_ins: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_sent = is_communication(func)
        if is_sent or multiplies(func):
            others = [self._other(leaf, place, is_sent=is_sent) for place, leaf in enumerate(args)]
            (self.messages if is_sent else self.products).append((func, others, kwargs))
        return func(*args, **kwargs)

    def _other(self, leaf: Any, place: int, *, is_sent: bool) -> Any:
        """An argument with stand-ins for its tensors: one of each shape, strides and place among the arguments."""
        if isinstance(leaf, list | tuple):
            return [self._other(one, place + index, is_sent=is_sent) for index, one in enumerate(leaf)]
        return self._stand_in(leaf, place, is_sent=is_sent) if isinstance(leaf, Tensor) else leaf

    def _stand_in(self, tensor: Tensor, place: int, *, is_sent: bool) -> Tensor:
        key = (is_sent, place, tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if key not in self._stand_ins:
            other = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            # Zeros, which stay what they are however often they are summed; a product of zeros may be a fast one.
            self._stand_ins[key] = other.zero_() if is_sent or not other.is_floating_point() else other.uniform_()
        return self._stand_ins[key]

    def time_products(self) -> float:
        """Seconds of all products, one after the other."""
        start = time.perf_counter()
        with torch.no_grad():
            for func, args, kwargs in self.products:
                func(*args, **kwargs)
        return time.perf_counter() - start

    def time_messages(self) -> float:
        """Seconds of all messages. Collective."""
        start = time.perf_counter()
        issue_again(self.messages)
        return time.perf_counter() - start
