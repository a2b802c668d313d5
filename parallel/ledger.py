"""What was sent: one event for each communication of one rank, and how a payload becomes bytes on the wire.

Payload is what the operation is about; wire bytes are what one rank sends under a ring (received bytes are equal),
after Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH" (2005):

    operation        payload_bytes                    wire_bytes of a rank, n ranks
    all_reduce       the tensor                       2 (n - 1) / n * payload
    all_gather       the gathered tensor              (n - 1) / n * payload
    reduce_scatter   the tensor before scattering     (n - 1) / n * payload
    all_to_all       the local tensor                 (n - 1) / n * payload
    broadcast        the tensor                       payload * (n - 1) / n (pipelined ring, mean over ranks)
    reduce           the tensor                       the same
    send             the tensor                       payload
    receive          the tensor                       0 (counted by its sender)

Bytes of both kinds are exact: wire bytes are kept as integers, and a payload that n does not divide is rounded up as
a ring that pads its last piece would send it. Left out: who issues an event (`parallel/comm.py`).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal

Operation = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send", "receive"
]
Phase = Literal["forward", "recompute", "backward", "step", "unknown"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One communication of one rank.

    `axis` names the group (`tp`, `dp`, `pp`, `model` for tp x pp, `tied`, `kv_replica`), `site` the place in the model,
    `stream` the stream whose tensor it is (`source`, `memory`, `target`, keys and values of a decoder block as they
    cross an edge, `kv.3`, or `none` for gradients and scalars).
    Where only the recorder saw it, the four are `unknown`.
    """

    operation: Operation
    axis: str
    group_size: int
    payload_bytes: int
    site: str
    stream: str
    phase: Phase

    @property
    def wire_bytes(self) -> int:
        return wire_bytes(self.operation, self.payload_bytes, self.group_size)


def wire_bytes(operation: Operation, payload_bytes: int, group_size: int) -> int:
    """Bytes one rank sends under a ring; the formulas stand in the module's docstring."""
    if operation == "send":
        return payload_bytes
    if operation == "receive":
        return 0
    share = -(-payload_bytes // group_size) * (group_size - 1)
    return 2 * share if operation == "all_reduce" else share


class Ledger:
    """The events of one rank, in the order in which they were issued."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)

    def __len__(self) -> int:
        return len(self.events)

    def write(self, event: Event) -> None:
        self.events.append(event)

    def clear(self) -> None:
        self.events.clear()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """Equal events added up: one row of `communication.csv` before the rank is named."""

    event: Event
    count: int

    @property
    def payload_bytes(self) -> int:
        return self.count * self.event.payload_bytes

    @property
    def wire_bytes(self) -> int:
        return self.count * self.event.wire_bytes


def totals(events: Iterable[Event]) -> tuple[Total, ...]:
    """Equal events counted, in the order of their first appearance."""
    return tuple(Total(event=event, count=count) for event, count in Counter(events).items())
