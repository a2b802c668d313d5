"""When a stage does what: schedules as tables of actions, checked and drawn without any process.

A schedule is one list of actions for each stage (stage = pipeline coordinate here). It is written down as compute
actions only; `with_transfers` adds the sends and receives that the cut asks for and groups them so that neighbours
never wait for each other. Text form: `F2` forward of microbatch 2, `B2` its backward, `>F2` send forward, `<F2` receive
forward (likewise `>B2`, `<B2`).

    gpipe, 2 stages, 3 microbatches        1f1b, 2 stages, 3 microbatches
    0: F0 F1 F2 .  .  B0 B1 B2             0: F0 F1 .  B0 F2 B1 .  B2         (drawn with backward as long as forward)
    1: .  F0 F1 F2 B0 B1 B2 .              1: .  F0 B0 F1 B1 F2 B2 .

Sources: GPipe, Huang et al. 2019 (arXiv 1811.06965); 1F1B, Narayanan et al. 2019 (PipeDream), 2021 (arXiv 2104.04473).
Left out: durations (a simulator's business) and tensors (`parallel/pipeline.py` executes a table).
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

Kind = Literal["forward", "backward", "send_forward", "receive_forward", "send_backward", "receive_backward"]
_MARKS: dict[Kind, str] = {
    "forward": "F",
    "backward": "B",
    "send_forward": ">F",
    "receive_forward": "<F",
    "send_backward": ">B",
    "receive_backward": "<B",
}
_KINDS: dict[str, Kind] = {mark: kind for kind, mark in _MARKS.items()}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One cell of a schedule: what a stage does with one microbatch."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{_MARKS[self.kind]}{self.microbatch}"

    @property
    def is_transfer(self) -> bool:
        return self.kind not in ("forward", "backward")

    @property
    def peer(self) -> int:
        """Stage offset of the other side of a transfer: +1 for the next stage, -1 for the one before."""
        return +1 if self.kind in ("send_forward", "receive_backward") else -1

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The inverse of `str`; ValueError for anything else."""
        mark = text.rstrip("0123456789")
        if mark not in _KINDS or mark == text:
            raise ValueError(f"{text!r} is no action; write F0, B0, >F0, <F0, >B0 or <B0")
        return cls(kind=_KINDS[mark], microbatch=int(text[len(mark) :]))


Table = tuple[tuple[Action, ...], ...]
"""Actions of every stage in order."""


def gpipe(num_stages: int, microbatches: int) -> Table:
    """All forwards, then all backwards, in the order of the microbatches."""
    forwards = [Action(kind="forward", microbatch=index) for index in range(microbatches)]
    backwards = [Action(kind="backward", microbatch=index) for index in range(microbatches)]
    return tuple((*forwards, *backwards) for _ in range(num_stages))


def one_forward_one_backward(num_stages: int, microbatches: int) -> Table:
    """Warm up with as many forwards as stages follow, then alternate, then drain.

    Microbatches may be fewer than stages.
    """
    table = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, microbatches)
        actions = [Action(kind="forward", microbatch=index) for index in range(warmup)]
        for index in range(microbatches - warmup):
            actions.append(Action(kind="forward", microbatch=warmup + index))
            actions.append(Action(kind="backward", microbatch=index))
        actions += [Action(kind="backward", microbatch=microbatches - warmup + index) for index in range(warmup)]
        table.append(tuple(actions))
    return tuple(table)


BUILDERS = {"gpipe": gpipe, "1f1b": one_forward_one_backward}


def with_transfers(table: Table) -> Table:
    """Adds the transfers: a receive right before its consumer, a send right after its producer.

    A receive from the stage that was just sent to follows that send directly, so that both go out as one batch: two
    neighbours that send to each other at the same time then meet instead of waiting (see `batches`).
    """
    last = len(table) - 1
    full = []
    for stage, actions in enumerate(table):
        row: list[Action] = []
        for action in actions:
            if action.kind == "forward":
                if stage > 0:
                    row.append(Action(kind="receive_forward", microbatch=action.microbatch))
                row.append(action)
                if stage < last:
                    row.append(Action(kind="send_forward", microbatch=action.microbatch))
            else:
                if stage < last:
                    row.append(Action(kind="receive_backward", microbatch=action.microbatch))
                row.append(action)
                if stage > 0:
                    row.append(Action(kind="send_backward", microbatch=action.microbatch))
        full.append(tuple(row))
    return tuple(full)


def batches(actions: Sequence[Action]) -> tuple[tuple[Action, ...], ...]:
    """Groups one stage's actions: neighbouring transfers with one peer form one batch, everything else stands alone."""
    groups: list[list[Action]] = []
    for action in actions:
        before = groups[-1][-1] if groups else None
        if before is not None and before.is_transfer and action.is_transfer and before.peer == action.peer:
            groups[-1].append(action)
        else:
            groups.append([action])
    return tuple(tuple(group) for group in groups)


def check(table: Table, microbatches: int) -> None:
    """Raises ValueError unless the table is complete, ordered and free of deadlock without any buffering.

    The table is played with rendezvous semantics: a batch of transfers ends when the peer stands at the batch with the
    matching transfers. A table that passes cannot hang on a backend that buffers nothing.
    """
    for stage, actions in enumerate(table):
        for kind in ("forward", "backward"):
            seen = [action.microbatch for action in actions if action.kind == kind]
            if sorted(seen) != list(range(microbatches)):
                raise ValueError(f"stage {stage} runs {kind} of microbatches {seen}, not each of {microbatches} once")
        order = [action for action in actions if not action.is_transfer]
        for microbatch in range(microbatches):
            forward = order.index(Action(kind="forward", microbatch=microbatch))
            if order.index(Action(kind="backward", microbatch=microbatch)) < forward:
                raise ValueError(f"stage {stage} runs B{microbatch} before F{microbatch}")
    _play(with_transfers(table))


def _play(table: Table) -> None:
    rows = [list(batches(actions)) for actions in table]
    matching: dict[Kind, Kind] = {
        "send_forward": "receive_forward",
        "receive_forward": "send_forward",
        "send_backward": "receive_backward",
        "receive_backward": "send_backward",
    }
    pending = [set(row[0]) if row else set() for row in rows]
    at = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for stage, row in enumerate(rows):
            if at[stage] == len(row):
                continue
            for action in list(pending[stage]):
                if not action.is_transfer:
                    pending[stage].discard(action)
                    moved = True
                    continue
                other = stage + action.peer
                match = Action(kind=matching[action.kind], microbatch=action.microbatch)
                if match in pending[other]:
                    pending[stage].discard(action)
                    pending[other].discard(match)
                    moved = True
            for index in range(len(rows)):
                if at[index] < len(rows[index]) and not pending[index]:
                    at[index] += 1
                    moved = True
                    if at[index] < len(rows[index]):
                        pending[index] = set(rows[index][at[index]])
    stuck = {stage: row[at[stage]] for stage, row in enumerate(rows) if at[stage] < len(row)}
    if stuck:
        where = "; ".join(f"stage {stage} waits at {' '.join(map(str, batch))}" for stage, batch in stuck.items())
        raise ValueError(f"the schedule deadlocks: {where}")


def max_in_flight(actions: Sequence[Action]) -> int:
    """Most microbatches whose forward is done and whose backward is not, on one stage."""
    now = most = 0
    for action in actions:
        now += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


def grid(table: Table) -> str:
    """The table as text, one line a stage, compute actions in the earliest slot that dependencies allow."""
    finish: dict[tuple[int, Action], int] = {}
    lines = [""] * len(table)
    slots: list[dict[int, Action]] = [{} for _ in table]
    rows = [[action for action in actions if not action.is_transfer] for actions in table]
    at, clock = [0] * len(rows), [0] * len(rows)
    while any(index < len(row) for index, row in zip(at, rows, strict=True)):
        before = list(at)
        for stage, row in enumerate(rows):
            if at[stage] == len(row):
                continue
            action = row[at[stage]]
            needs = stage - 1 if action.kind == "forward" else stage + 1
            if 0 <= needs < len(rows) and (needs, action) not in finish:
                continue
            start = max(clock[stage], finish.get((needs, action), 0))
            slots[stage][start] = action
            clock[stage] = finish[(stage, action)] = start + 1
            at[stage] += 1
        if at == before:
            raise ValueError("the schedule deadlocks: no stage can go on")
    width = max(len(str(action)) for row in rows for action in row)
    for stage, taken in enumerate(slots):
        cells = [str(taken.get(slot, ".")).ljust(width) for slot in range(max(clock))]
        lines[stage] = f"{stage}: {' '.join(cells)}".rstrip()
    return "\n".join(lines)
