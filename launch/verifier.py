"""What does each rank of `twinshard verify` do? Prove the cases of its world size, one after the other.

Rank 0 writes a line when it begins a case and one with the result; `launch/proof.py`, which started the ranks, reads
them. A rank that raises leaves a note that names it (`launch/failure.py`), and the launch ends.

    python -m launch.verifier CASES FOLDER BACKEND TIMEOUT
"""

import dataclasses
import json
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.case import Case
from launch.env import BackendChoice, World, naming_errors, world
from launch.failure import leave_note, note_of
from launch.parity import Parity, check_parity
from parallel.comm import Groups

_RESULTS = "results"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """One line of rank 0: a case begins, or what came out."""

    case: str
    parity: Parity | None


def prove(cases: Sequence[Case], here: World, groups: Groups, folder: Path) -> None:
    """Proves cases together with the other ranks; whatever is raised goes on, noted."""
    for case in cases:
        _tell(here, folder, {"case": case.name, "parity": None})
        try:
            parity = check_parity(case, groups=groups, rank=here.rank, device=here.device)
        except BaseException as error:
            traceback.print_exc()
            coordinate = str(case.layout.mesh.coordinate(here.rank))
            note = note_of(error, rank=here.rank, coordinate=coordinate, cell=case.name, phase="")
            leave_note(folder, note)
            raise
        _tell(here, folder, {"case": case.name, "parity": parity.to_dict()})


def _tell(here: World, folder: Path, line: Mapping[str, Any]) -> None:
    if here.rank == 0:
        with (folder / _RESULTS).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read_told(folder: Path, start: int = 0) -> tuple[list[Told], int]:
    """Whole lines from byte `start` on, and where to go on reading."""
    try:
        with (folder / _RESULTS).open("rb") as file:
            file.seek(start)
            read = file.read()
    except FileNotFoundError:
        return [], start
    whole = read[: read.rfind(b"\n") + 1]
    return list(_lines(whole.decode())), start + len(whole)


def _lines(text: str) -> Iterator[Told]:
    for line in map(json.loads, text.splitlines()):
        yield Told(case=line["case"], parity=Parity.from_dict(line["parity"]) if line["parity"] else None)


@naming_errors
def main(arguments: Sequence[str]) -> None:
    """One rank of a launch by `launch/proof.py`, which has checked the cases."""
    cases_file, folder, backend, timeout = arguments
    cases = [Case.from_dict(fields) for fields in json.loads(Path(cases_file).read_text(encoding="utf-8"))]
    choice: BackendChoice = "nccl" if backend == "nccl" else "gloo"
    with world(choice, timeout_seconds=float(timeout)) as here:
        prove(cases, here, Groups(float(timeout)), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
