"""When a rank does what: schedules as tables of actions, without durations and without any process.

A table has one row for each rank of the pipeline, a row is a list of actions. An action is one stage's work on one
microbatch; its text form is stage, mark, microbatch:

    2F0   forward           2B0   backward, whole
    2I0   backward, gradient of the input only        2W0   the rest of it: gradients of the weights

    1f1b, 2 stages, 3 microbatches, backward as long as forward
    0: 0F0 0F1 .   0B0 0F2 0B1 .   0B2
    1: .   1F0 1B0 1F1 1B1 1F2 1B2 .

Which rank has which stage can be read off a table. What depends on what follows from the edges of a partitioning
(`parallel/edges.py`); here consecutive stages depend on each other, which every edge implies. Who makes tables:
`parallel/schedules.py` by name, `parallel/list_schedule.py` by cost. Left out: transfers (`parallel/transfers.py`) and
time (`parallel/simulate.py`).
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
_MARKS: dict[Kind, str] = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}
_KINDS: dict[str, Kind] = {mark: kind for kind, mark in _MARKS.items()}
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """One cell of a schedule: what a stage does with one microbatch."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{_MARKS[self.kind]}{self.microbatch}"

    @property
    def gives(self) -> "Product | None":
        """What other stages may wait for: the forward's tensors or their gradients; None of a weight gradient."""
        if self.kind == "backward_weight":
            return None
        return ("forward" if self.kind == "forward" else "backward", self.stage, self.microbatch)

    def needs(self, num_stages: int) -> "Product | None":
        """What a neighbouring stage must have given before this starts; its own stage's forward aside."""
        if self.kind == "forward" and self.stage > 0:
            return ("forward", self.stage - 1, self.microbatch)
        if self.kind in ("backward", "backward_input") and self.stage < num_stages - 1:
            return ("backward", self.stage + 1, self.microbatch)
        return None

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The inverse of `str`; ValueError for anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no action; write stage, one of F B I W, and microbatch: 2F0")
        return cls(kind=_KINDS[match[2]], stage=int(match[1]), microbatch=int(match[3]))


Direction = Literal["forward", "backward"]
Product: TypeAlias = tuple[Direction, int, int]
"""Direction, stage and microbatch of what an action gives to others."""
Key: TypeAlias = tuple[int, int]
"""Stage and microbatch."""
Row = tuple[Action, ...]
"""What one rank does, in order."""
Table = tuple[Row, ...]
"""One row a rank of the pipeline."""


def parse(*rows: str) -> Table:
    """A table from its text, one string a rank: `parse("0F0 0B0", "1F0 1B0")`."""
    return tuple(tuple(Action.parse(word) for word in row.split()) for row in rows)


def ranks_of(table: Table) -> tuple[int, ...]:
    """Rank of every stage. Raises ValueError for a stage on two ranks, or a number without a stage."""
    ranks: dict[int, int] = {}
    for rank, row in enumerate(table):
        for stage in {action.stage for action in row}:
            if ranks.setdefault(stage, rank) != rank:
                raise ValueError(f"stage {stage} stands on ranks {ranks[stage]} and {rank}")
    if sorted(ranks) != list(range(len(ranks))):
        raise ValueError(f"stages {sorted(ranks)} are not 0 to {len(ranks) - 1}")
    return tuple(ranks[stage] for stage in range(len(ranks)))


def check_rows(table: Table, microbatches: int) -> None:
    """Raises ValueError unless every stage runs forward and backward of every microbatch once, in this order."""
    ranks = ranks_of(table)
    for rank, row in enumerate(table):
        for stage in (stage for stage, holder in enumerate(ranks) if holder == rank):
            _check_stage([action for action in row if action.stage == stage], stage, microbatches)


def _check_stage(actions: Sequence[Action], stage: int, microbatches: int) -> None:
    done: dict[int, list[Kind]] = {microbatch: [] for microbatch in range(microbatches)}
    for action in actions:
        done.setdefault(action.microbatch, []).append(action.kind)
    for microbatch, kinds in done.items():
        is_whole = kinds in (["forward", "backward"], ["forward", "backward_input", "backward_weight"])
        if microbatch >= microbatches or not is_whole:
            told = " ".join(str(action) for action in actions if action.microbatch == microbatch) or "nothing"
            raise ValueError(
                f"stage {stage} runs {told} of microbatch {microbatch} of {microbatches}; it must run F B or F I W"
            )


def is_split(table: Table) -> bool:
    """Whether a backward comes in two pieces."""
    return any(action.kind == "backward_input" for row in table for action in row)


def max_in_flight(row: Iterable[Action], weight: Sequence[float] | None = None) -> float:
    """Most microbatches, over the stages of a rank, whose forward is done and whose backward is not.

    `weight` counts a microbatch of each stage differently, by stage: its bytes, for instance. A backward in two pieces
    ends with the second.
    """
    now = most = 0.0
    for action in row:
        step = {"forward": 1, "backward": -1, "backward_weight": -1}.get(action.kind, 0)
        now += step * (1 if weight is None else weight[action.stage])
        most = max(most, now)
    return most


def grid(table: Table) -> str:
    """The table as text, one line a rank, every action in the earliest slot that dependencies allow.

    Raises ValueError when no rank can go on.
    """
    num_stages = len(ranks_of(table))
    finish: dict[Product | None, int] = {}
    slots: list[dict[int, Action]] = [{} for _ in table]
    at, clock = [0] * len(table), [0] * len(table)
    while any(index < len(row) for index, row in zip(at, table, strict=True)):
        before = list(at)
        for rank, row in enumerate(table):
            if at[rank] == len(row):
                continue
            action = row[at[rank]]
            need = action.needs(num_stages)
            if need is not None and need not in finish:
                continue
            start = max(clock[rank], finish[need] if need is not None else 0)
            slots[rank][start] = action
            clock[rank] = finish[action.gives] = start + 1
            at[rank] += 1
        if at == before:
            where = "; ".join(
                f"rank {rank} waits at {row[at[rank]]}" for rank, row in enumerate(table) if at[rank] < len(row)
            )
            raise ValueError(f"the schedule deadlocks: {where}")
    width = max(len(str(action)) for row in table for action in row)
    lines = []
    for rank, taken in enumerate(slots):
        cells = [str(taken.get(slot, ".")).ljust(width) for slot in range(max(clock))]
        lines.append(f"{rank}: {' '.join(cells)}".rstrip())
    return "\n".join(lines)
