"""Why did a launch end? The first culprit, not the first victim.

When a rank raises, the others fail soon after it, in collectives that miss a partner. Each rank that raises leaves a
note in the folder of the launch; the culprit is told from them:

    1. a rank that ended without a note, and not because torchrun told it to    its signal or exit code
    2. the earliest note about anything but a lost partner                      its error
    3. the earliest note at all                                                 its error, and who left none

Memory that ran out is told apart, by the error or, for a rank that the kernel killed, by the kernel's count of such
kills.
"""

import dataclasses
import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

Kind = Literal["error", "lost_partner", "out_of_memory", "ended"]

_LOST_PARTNER = re.compile(
    r"gloo|nccl|connection (was )?(closed|reset)|broken pipe|timed out|wait timeout|socket|store->|recvvalue",
    re.IGNORECASE,
)
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|cannot allocate memory", re.IGNORECASE)
_SENT_BY_TORCHRUN = (signal.SIGTERM, signal.SIGINT)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Note:
    """What a rank that ends before its time leaves behind."""

    rank: int
    """Negative when it is no rank's word but that of who watched."""
    coordinate: str
    """`dp=0 pp=1 cp=0 tp=1`; empty before the rank knew."""
    cell: str
    """Name of the cell that it was at; empty before the first."""
    phase: str
    kind: Kind
    error: str
    """Type and first line of the message."""
    seconds: float
    """Wall clock of the node, since the epoch."""

    @property
    def reason(self) -> str:
        """One line for a record."""
        if self.rank < 0:
            return self.error
        where = f"rank {self.rank}" + (f" ({self.coordinate})" if self.coordinate else "")
        during = f" during {self.phase}" if self.phase else ""
        return f"{where}{during}: {self.error}"


def note_of(error: BaseException, *, rank: int, coordinate: str, cell: str, phase: str) -> Note:
    """The note about an error that a rank raised just now."""
    lines = str(error).strip().splitlines()
    # A line that ends in a colon promises what follows.
    told = " ".join(line.strip() for line in lines[: 1 + lines[0].rstrip().endswith(":")]) if lines else ""
    return Note(
        rank=rank,
        coordinate=coordinate,
        cell=cell,
        phase=phase,
        kind=_kind(error),
        error=f"{type(error).__name__}: {told}" if told else type(error).__name__,
        seconds=time.time(),
    )


def _kind(error: BaseException) -> Kind:
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or _NO_MEMORY.search(str(error)):
        return "out_of_memory"
    is_from_torch = isinstance(error, RuntimeError) and bool(_LOST_PARTNER.search(str(error)))
    return "lost_partner" if is_from_torch or isinstance(error, ConnectionError) else "error"


def leave_note(folder: Path, note: Note) -> None:
    """Writes a rank's note into the folder of its launch."""
    unfinished = folder / f".rank{note.rank}.note"
    unfinished.write_text(json.dumps(dataclasses.asdict(note)), encoding="utf-8")
    unfinished.replace(folder / f"rank{note.rank}.note")


def read_notes(folder: Path) -> list[Note]:
    """The notes in the folder of a launch, earliest first."""
    notes = [Note(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("rank*.note")]
    return sorted(notes, key=lambda note: note.seconds)


def culprit(
    notes: Sequence[Note], exits: Mapping[int, int], *, world_size: int, num_kills: int, cell: str, phase: str
) -> Note | None:
    """The note that tells why a launch ended, None when nothing tells.

    Args:
        notes: of the ranks, earliest first.
        exits: exit code by rank, minus the signal for one that was killed.
        world_size: ranks that were started.
        num_kills: processes that the kernel killed for memory meanwhile.
        cell: where the launch was, for ranks that left no note.
        phase: likewise.
    """
    told = {note.rank for note in notes}
    for rank, code in sorted(exits.items()):
        if code and -code not in _SENT_BY_TORCHRUN and rank not in told:
            is_memory = -code == signal.SIGKILL and num_kills > 0
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            return Note(
                rank=rank,
                coordinate="",
                cell=cell,
                phase=phase,
                kind="out_of_memory" if is_memory else "ended",
                error="killed by the kernel, out of memory" if is_memory else how,
                seconds=time.time(),
            )
    for note in notes:
        if note.kind != "lost_partner":
            return note
    silent = [str(rank) for rank in range(world_size) if rank not in told]
    if notes and silent:
        return dataclasses.replace(notes[0], error=f"{notes[0].error} (no word from rank {', '.join(silent)})")
    return notes[0] if notes else None


def num_memory_kills() -> int:
    """Processes that the kernel has killed for memory since it started, 0 where it does not tell."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
