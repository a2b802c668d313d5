"""How are many cases proved? One launch a world size, and another one after each failure.

    cases  ->  by world size: launch ranks, read results as they come  ->  a verdict each

Starting ranks costs seconds, a case a second. When a rank raises or dies, or nothing comes for long, the launch ends,
the case under way fails and says which rank it was, and the cases behind it go on in a new launch. Left out: what a
rank does (`launch/verifier.py`) and how verdicts are shown (`launch/verify.py`).
"""

import dataclasses
import itertools
import json
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from launch.case import Case
from launch.env import Backend, BackendChoice, local_backend
from launch.failure import Note, culprit, num_memory_kills, read_notes
from launch.parity import Parity
from launch.torchrun import Launch, launched
from launch.verifier import read_told

WORKER = "launch.verifier"
_POLL_SECONDS = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came out of one case."""

    case: Case
    parity: Parity | None
    """None when the ranks did not get to the end."""
    failures: tuple[str, ...]
    """One line each; none when the case equals one process."""


class Proof:
    """Cases to prove.

    Args:
        cases: with names of their own.
        backend: asked for.
        timeout_seconds: after which a collective without its partners fails.
        worker: module that each rank runs.

    Raises:
        ValueError: a timeout that is not positive, a backend that this machine cannot serve.
    """

    def __init__(
        self, cases: Sequence[Case], *, backend: BackendChoice, timeout_seconds: float, worker: str = WORKER
    ) -> None:
        if timeout_seconds <= 0:
            raise ValueError(f"timeout = {timeout_seconds:g} s; it must be positive")
        self._cases = sorted(cases, key=lambda case: case.layout.world_size)
        self._timeout, self._worker = timeout_seconds, worker
        sizes = {case.layout.world_size for case in cases}
        self._backends: dict[int, Backend] = {size: local_backend(backend, size) for size in sizes}

    def verdicts(self) -> Generator[Verdict, None, None]:
        """Starts ranks and yields the verdict on each case when it is known."""
        for _, group in itertools.groupby(self._cases, key=lambda case: case.layout.world_size):
            left = list(group)
            while left:
                num_left = len(left)
                for verdict in self._launch(left):
                    left.remove(verdict.case)
                    yield verdict
                assert len(left) < num_left, "a launch settles a case at least"

    def _launch(self, cases: Sequence[Case]) -> Iterator[Verdict]:
        """One launch: yields what it proves, and when it fails, the case at which it did."""
        world_size = cases[0].layout.world_size
        left = list(cases)
        kills = num_memory_kills()
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file = folder / "cases"
            file.write_text(json.dumps([case.to_dict() for case in cases]), encoding="utf-8")
            arguments = [str(file), name, self._backends[world_size], str(self._timeout)]
            with launched(
                self._worker, arguments, num_ranks=world_size, folder=folder, names_mismatches=True
            ) as launch:
                has_begun = False
                for told in self._watch(launch):
                    has_begun = True
                    if told is not None:
                        yield _verdict(left.pop(0), told)
                is_stuck = launch.poll() is None
            if not left:
                return
            note = culprit(
                read_notes(folder),
                launch.exits(),
                world_size=world_size,
                num_kills=num_memory_kills() - kills,
                cell=left[0].name,
                phase="",
            )
            reason = f"nothing was done for {self._patience:.0f} s" if is_stuck else launch.last_words()
            if note is not None and not is_stuck:
                reason = _located(note, left[0]).reason
            # What goes wrong before the first case would go wrong before the others too.
            for case in left[:1] if has_begun else left:
                yield Verdict(case=case, parity=None, failures=(reason,))

    @property
    def _patience(self) -> float:
        """Seconds without a line after which a launch is stuck; a collective gives up long before."""
        return 2 * self._timeout + 60

    def _watch(self, launch: Launch) -> Iterator[Parity | None]:
        """Yields each parity, and None where a case begins, until the launch has ended or is stuck."""
        position, alive_at = 0, time.monotonic()
        while True:
            has_ended = launch.wait(_POLL_SECONDS) is not None
            lines, position = read_told(launch.folder, position)
            for line in lines:
                alive_at = time.monotonic()
                yield line.parity
            if has_ended or time.monotonic() - alive_at > self._patience:
                return


def _verdict(case: Case, parity: Parity) -> Verdict:
    return Verdict(case=case, parity=parity, failures=parity.failures)


def _located(note: Note, case: Case) -> Note:
    """The note with the coordinates of its rank, which a rank that was killed could not tell itself."""
    return dataclasses.replace(note, coordinate=note.coordinate or str(case.layout.mesh.coordinate(note.rank)))
