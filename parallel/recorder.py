"""What was really sent: an independent witness of the ledger.

The recorder looks at the operators that reach the dispatcher and knows nothing of `Comm`: it sees every engine's
traffic, in forward and backward, sends and receives included. On the native engine it must agree with the ledger event
for event: operation, group size, payload bytes, in order. Sites, streams and phases are the ledger's own.

Control messages between steps are collectives too: record a step, not what is around it.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work, _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parallel.ledger import Event, Operation

Call = tuple[Any, Any, Any]
"""An operator with its arguments, by place and by name."""

_OPERATIONS: dict[str, Operation] = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "receive",
}
_NOTHING_SENT = frozenset({"wait_tensor", "_wrap_tensor_autograd"})
_COALESCED = frozenset({"allreduce_coalesced_"})
"""Their payload is all of the tensors that the operator gets."""
_ONE_TO_ONE = frozenset({"send", "recv_"})
_LARGEST = frozenset({"all_gather", "reduce_scatter"})
"""Their payload is the larger of the two tensors that the operator gets."""


def is_communication(func: Any) -> bool:
    """Whether an operator sends, receives or both, and gives work to wait for."""
    return func.namespace == "c10d" and func.overloadpacket.__name__ in _OPERATIONS


def issue_again(calls: Iterable[Call]) -> None:
    """Sends and receives once more, outside of any ledger. Collective: every rank of the world repeats its own list.

    Collectives are waited for one by one; messages between two ranks at the end, because a stage posts a receive before
    it sends what that waits for.
    """
    under_way = []
    for func, args, kwargs in calls:
        returned = func(*args, **kwargs)
        work = Work.unbox(returned[-1] if isinstance(returned, tuple) else returned)
        if func.overloadpacket.__name__ in _ONE_TO_ONE:
            under_way.append(work)
        else:
            work.wait()
    for work in under_way:
        work.wait()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """One communication as the dispatcher saw it."""

    operation: Operation
    group_size: int
    payload_bytes: int


class Recorder(TorchDispatchMode):
    """Context in which communication operators are written down.

    Attributes:
        events: in the order in which they were issued.
        unknown: names of c10d operators that are no communication known here.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.events: list[Observed] = []
        self.unknown: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._write(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def first_difference(self, ledger: Sequence[Event]) -> str | None:
        """The first place where the ledger tells something else, as a line; None when both agree."""
        if self.unknown:
            return self.first_unknown()
        for index, (seen, event) in enumerate(zip(self.events, ledger, strict=False)):
            told = Observed(operation=event.operation, group_size=event.group_size, payload_bytes=event.payload_bytes)
            if seen != told:
                return f"event {index} at {event.site}: the ledger says {told}, the recorder saw {seen}"
        if len(self.events) != len(ledger):
            return f"the ledger has {len(ledger)} events, the recorder saw {len(self.events)}"
        return None

    def first_unknown(self) -> str | None:
        """A line that names the operators that are no communication known here; None when all are known."""
        return f"unknown communication operators {', '.join(sorted(set(self.unknown)))}" if self.unknown else None

    def _write(self, func: Any, args: Any, kwargs: Any) -> None:
        name = func.overloadpacket.__name__
        if name in _NOTHING_SENT:
            return
        operation = _OPERATIONS.get(name)
        if operation is None:
            self.unknown.append(name)
            return
        leaves = tree_leaves((args, kwargs))
        sizes = [leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor)]
        group_size = 2 if operation in ("send", "receive") else _group_size(leaves)
        if operation in _LARGEST:
            # A functional all-gather gets the shard only and makes the whole.
            is_made = operation == "all_gather" and func.namespace == "_c10d_functional"
            payload = sizes[0] * group_size if is_made else max(sizes)
        else:
            payload = sum(sizes) if name in _COALESCED else sizes[0]
        self.events.append(
            Observed(
                operation=operation,
                group_size=group_size,
                payload_bytes=payload,
            )
        )


def _group_size(leaves: Sequence[Any]) -> int:
    """Of the group among an operator's arguments: c10d's take the group itself, functional ones its name."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and _is_group(leaf):
            return torch.distributed.ProcessGroup.unbox(leaf).size()
    names = [leaf for leaf in leaves if isinstance(leaf, str)]
    return _resolve_process_group(names[-1]).size() if names else 0  # type: ignore[arg-type]


def _is_group(leaf: torch.ScriptObject) -> bool:
    return "ProcessGroup" in str(leaf)
