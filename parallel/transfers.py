"""Who sends what when: the sends and receives that a table of actions needs, and a proof that they cannot hang.

A send stands right after the action that makes its tensors. A receive only posts a buffer: it stands one action ahead
of the action that uses the tensors, so that data moves while that action computes, and in the order in which the
sender sends. A transfer's text form is direction and edge, then the microbatch:

    >0-1F2   stage 0 sends the forward tensors of microbatch 2 to stage 1        <0-1F2   stage 1 posts their receive
    >1-0B2   stage 1 sends their gradients back                                  <1-0B2   stage 0 posts their receive

    1f1b, 2 stages, 2 microbatches
    0: 0F0 >0-1F0 <1-0B0 0F1 >0-1F1 0B0 ...

Messages from one rank to another in one direction form a channel, first in, first out. `check` plays a table whose
sender stops when so many messages of a channel have no buffer waiting for them; a table that passes cannot hang on a
backend with so few buffers. Left out: tensors (`parallel/pipeline.py`) and time (`parallel/simulate.py`).
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Literal, TypeAlias

from parallel.edges import Edge, chain
from parallel.schedule import Action, Direction, Product, Table, check_rows, ranks_of

Channel: TypeAlias = tuple[int, int, Direction]
"""Sending rank, receiving rank, direction."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One end of one message."""

    operation: Literal["send", "receive"]
    direction: Direction
    edge: Edge
    microbatch: int

    def __str__(self) -> str:
        first, last = self.edge.first, self.edge.last
        path = f"{first}-{last}F" if self.direction == "forward" else f"{last}-{first}B"
        return f"{'>' if self.operation == 'send' else '<'}{path}{self.microbatch}"

    @property
    def stage(self) -> int:
        """Whose end this is."""
        return self.edge.first if (self.operation == "send") == (self.direction == "forward") else self.edge.last

    @property
    def peer(self) -> int:
        """The stage at the other end."""
        return self.edge.last if self.stage == self.edge.first else self.edge.first

    @property
    def other_end(self) -> "Transfer":
        return dataclasses.replace(self, operation="receive" if self.operation == "send" else "send")


Step: TypeAlias = Action | Transfer
Steps: TypeAlias = tuple[Step, ...]
"""What one rank does, transfers and all."""


def with_transfers(table: Table, edges: Sequence[Edge] | None = None) -> tuple[Steps, ...]:
    """The table with its sends and receives; `edges` default to those of a model with one stack."""
    ranks = ranks_of(table)
    links = [edge for edge in (chain(len(ranks)) if edges is None else edges) if ranks[edge.first] != ranks[edge.last]]
    sends = [[_sent(action, links) for action in row] for row in table]
    channels: dict[Channel, list[Transfer]] = defaultdict(list)
    for sending in sends:
        for sent in sending:
            for transfer in sent:
                channels[_channel(transfer, ranks)].append(transfer)
    posts = [_posts(rank, table, channels) for rank in range(len(table))]
    full = []
    for rank, row in enumerate(table):
        steps: list[Step] = []
        for index, action in enumerate(row):
            steps += [*posts[rank][index], action, *sends[rank][index]]
        full.append(tuple(steps))
    return tuple(full)


def channels(edges: Sequence[Edge], ranks: Sequence[int]) -> tuple[Channel, ...]:
    """All channels of a partitioning, each once."""
    pairs = [(ranks[edge.first], ranks[edge.last]) for edge in edges if ranks[edge.first] != ranks[edge.last]]
    forward: list[Channel] = [(first, last, "forward") for first, last in pairs]
    backward: list[Channel] = [(last, first, "backward") for first, last in pairs]
    return tuple(dict.fromkeys((*forward, *backward)))


def acknowledged(table: Table) -> dict[Product, tuple[int, ...]]:
    """Microbatches whose backward a stage has run before it runs a forward: by that forward.

    Whoever gets the tensors of that forward knows that the gradients which it sent to the stage have been used.
    """
    known: dict[Product, tuple[int, ...]] = {}
    for row in table:
        done: dict[int, tuple[int, ...]] = defaultdict(tuple)
        for action in row:
            if action.gives is None:
                continue
            direction, stage, microbatch = action.gives
            if direction == "forward":
                known[action.gives] = done.pop(stage, ())
            else:
                done[stage] += (microbatch,)
    return known


def _places(row: Sequence[Action]) -> dict[Product, int]:
    """Where a rank uses what arrives for a stage and a microbatch: in the action that gives the same of its own."""
    return {action.gives: index for index, action in enumerate(row) if action.gives is not None}


def _sent(action: Action, links: Sequence[Edge]) -> list[Transfer]:
    if action.gives is None:
        return []
    direction, _, microbatch = action.gives
    return [
        Transfer(operation="send", direction=direction, edge=edge, microbatch=microbatch)
        for edge in links
        if (edge.first if direction == "forward" else edge.last) == action.stage
    ]


def _channel(transfer: Transfer, ranks: Sequence[int]) -> Channel:
    ends = (ranks[transfer.stage], ranks[transfer.peer])
    return (*(ends if transfer.operation == "send" else ends[::-1]), transfer.direction)


def _posts(rank: int, table: Table, channels: dict[Channel, list[Transfer]]) -> list[list[Transfer]]:
    """Receives of a rank by the action before which they are posted."""
    places = _places(table[rank])
    posts: list[list[Transfer]] = [[] for _ in table[rank]]
    for (_, receiver, _), sent in channels.items():
        if receiver != rank:
            continue
        latest = len(table[rank])
        for transfer in reversed(sent):
            end = transfer.other_end
            # Not later than what the sender sends after it, or the channel would mix them up.
            latest = min(latest, places[end.direction, end.stage, end.microbatch])
            posts[max(0, latest - 1)].insert(0, end)
    return posts


def check(table: Table, microbatches: int, edges: Sequence[Edge] | None = None, *, buffers: int | None = None) -> None:
    """Raises ValueError unless a table is complete, ordered, and ends with so few buffers a channel.

    Args:
        table: actions only.
        microbatches: of a step.
        edges: of the partitioning; those of a model with one stack by default.
        buffers: messages of a channel that may be under way before their receive is posted; None stands for any number.
    """
    check_rows(table, microbatches)
    stuck = _play(
        with_transfers(table, edges),
        ranks_of(table),
        microbatches * len(ranks_of(table)) if buffers is None else buffers,
    )
    if stuck:
        raise ValueError(f"the schedule deadlocks: {'; '.join(stuck)}")


def fewest_buffers(table: Table, edges: Sequence[Edge] | None = None) -> int:
    """Least number of buffers a channel with which a table ends. Raises ValueError when no number does."""
    full, ranks = with_transfers(table, edges), ranks_of(table)
    most = sum(map(len, table))
    for buffers in range(1, most + 1):
        if not _play(full, ranks, buffers):
            return buffers
    raise ValueError(f"the schedule deadlocks: {'; '.join(_play(full, ranks, most))}")


def _play(full: Sequence[Steps], ranks: Sequence[int], buffers: int) -> list[str]:
    """Runs all ranks until none can go on; who has not ended, and where it waits."""
    posted: dict[Channel, deque[Transfer]] = defaultdict(deque)
    under_way: dict[Channel, deque[Transfer]] = defaultdict(deque)
    arrived: set[tuple[Direction, int, int, int]] = set()
    given: set[Product | None] = set()
    at = [0] * len(full)
    wanted = _wanted(full)

    def can_do(step: Step) -> bool:
        if isinstance(step, Action):
            need = step.needs(len(ranks))
            is_local = need is not None and ranks[need[1]] == ranks[step.stage]
            return wanted.get(step, frozenset()) <= arrived and (not is_local or need in given)
        channel = _channel(step, ranks)
        return step.operation == "receive" or len(under_way[channel]) < buffers or bool(posted[channel])

    def do(step: Step) -> None:
        if isinstance(step, Action):
            given.add(step.gives)
            return
        channel = _channel(step, ranks)
        (posted if step.operation == "receive" else under_way)[channel].append(step)
        while posted[channel] and under_way[channel]:
            buffer, message = posted[channel].popleft(), under_way[channel].popleft()
            assert buffer == message.other_end, f"{message} meets the buffer of {buffer}"
            arrived.add((buffer.direction, buffer.stage, buffer.peer, buffer.microbatch))

    moved = True
    while moved:
        moved = False
        for rank, steps in enumerate(full):
            while at[rank] < len(steps) and can_do(steps[at[rank]]):
                do(steps[at[rank]])
                at[rank] += 1
                moved = True
    return [f"rank {rank} waits at {steps[at[rank]]}" for rank, steps in enumerate(full) if at[rank] < len(steps)]


def _wanted(full: Sequence[Steps]) -> dict[Action, frozenset[tuple[Direction, int, int, int]]]:
    """Messages without which an action cannot start."""
    messages: dict[Product | None, set[tuple[Direction, int, int, int]]] = defaultdict(set)
    for steps in full:
        for step in steps:
            if isinstance(step, Transfer) and step.operation == "receive":
                product = (step.direction, step.stage, step.microbatch)
                messages[product].add((step.direction, step.stage, step.peer, step.microbatch))
    actions = (step for steps in full for step in steps if isinstance(step, Action))
    return {action: frozenset(messages[action.gives]) for action in actions if action.gives is not None}
