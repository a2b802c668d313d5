"""Where is a launch? Rank 0 writes a line for each thing that begins or ends; whoever started the launch reads them.

    <cell> TAB <phase> TAB begin | end        tracing, parity, counting, warm-up, blocks, timing, recording
    <cell> TAB ok | failed TAB recorded

Every rank keeps its own place, so that an error can say where it happened. Left out: how it is shown.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from launch.settings import NUM_PART_STEPS, Settings

FILE_NAME = "progress"

Event = Literal["begin", "end", "recorded"]


def num_steps(settings: Settings) -> int:
    """Things done of one cell that goes well: tracing, parity, counting, every step, and the record."""
    return 4 + settings.warmup + 2 * settings.repeats + NUM_PART_STEPS * settings.parts


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of progress; `phase` is the status when the event is `recorded`."""

    cell: str
    phase: str
    event: Event


NOWHERE = Line(cell="", phase="", event="begin")
"""Before the first cell."""


class Place:
    """Where this rank is.

    Attributes:
        cell, phase: what is under way; empty before the first cell.
        coordinate: of this rank in the cell's layout.
    """

    def __init__(self, folder: Path, *, is_writer: bool) -> None:
        self.cell = self.phase = self.coordinate = ""
        self._path = folder / FILE_NAME if is_writer else None

    def begin(self, cell: str, phase: str, coordinate: str) -> None:
        """This rank begins a phase of a cell."""
        self.cell, self.phase, self.coordinate = cell, phase, coordinate
        self._write(Line(cell=cell, phase=phase, event="begin"))

    def end(self) -> None:
        """The phase is done."""
        self._write(Line(cell=self.cell, phase=self.phase, event="end"))

    def recorded(self, status: str) -> None:
        """The record of the cell is written."""
        self._write(Line(cell=self.cell, phase=status, event="recorded"))

    def _write(self, line: Line) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{line.cell}\t{line.phase}\t{line.event}\n")


def read_lines(folder: Path, start: int = 0) -> tuple[list[Line], int]:
    """Whole lines from byte `start` on, and where to go on reading."""
    try:
        with (folder / FILE_NAME).open("rb") as file:
            file.seek(start)
            told = file.read()
    except FileNotFoundError:
        return [], start
    whole = told[: told.rfind(b"\n") + 1]
    fields = [line.split("\t") for line in whole.decode().splitlines()]
    events: dict[str, Event] = {"begin": "begin", "end": "end", "recorded": "recorded"}
    return [Line(cell=cell, phase=phase, event=events[event]) for cell, phase, event in fields], start + len(whole)
