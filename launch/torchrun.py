"""How are ranks started on this machine, and how do they surely end?

A launch is a torchrun in a session of its own, so that a Ctrl-C reaches only whoever started it, who then ends the
launch. torchrun chooses a free port (`--standalone`): several launches can run at once. Whatever its ranks print stands
in the log.

    this process  ->  agent (torchrun)  ->  ranks        each ends when the one before it does, even when that is killed
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from launch.env import torchrun_environment

_PATIENCE_SECONDS = 15.0
"""torchrun's own patience with ranks that do not end is longer; then they are killed with it."""


class Launch:
    """Ranks that were started together.

    Attributes:
        folder: holds the log, and what else the launch leaves.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", folder: Path) -> None:
        self._process = process
        self.folder = folder

    def poll(self) -> int | None:
        """Exit code, None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Exit code once it has ended, None when it still runs after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=seconds)
        return self._process.poll()

    def end(self) -> None:
        """Ends it: politely, then not. No rank is left when this returns."""
        self._process.send_signal(signal.SIGTERM)
        if self.wait(_PATIENCE_SECONDS) is None:
            self._process.kill()
            self._process.wait()
            # The kernel tells the ranks, who are no children of this process, just now.
            time.sleep(0.2)

    def exits(self) -> dict[int, int]:
        """Exit codes of the ranks that ended badly, minus the signal for one that was killed."""
        try:
            lines = (self.folder / "exits").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        return {int(rank): int(code) for rank, code in map(str.split, lines)}

    def last_words(self) -> str:
        """Last line of the log that says something."""
        text = (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip(" =-*")]
        return lines[-1] if lines else "nothing was printed"


@contextlib.contextmanager
def launched(
    module: str, arguments: Sequence[str], *, num_ranks: int, folder: Path, names_mismatches: bool = False
) -> Iterator[Launch]:
    """Start `python -m module arguments` on so many ranks; whatever happens inside, none is left behind.

    Args:
        module: what each rank runs.
        arguments: of each rank.
        num_ranks: on this machine.
        folder: exists; the log goes there.
        names_mismatches: see `launch.env.torchrun_environment`.
    """
    command = [sys.executable, "-m", "launch.agent", str(folder / "exits")]
    command += ["--standalone", "--nproc-per-node", str(num_ranks), "-m", module, *arguments]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=torchrun_environment(names_mismatches=names_mismatches),
        )
    launch = Launch(process, folder)
    try:
        yield launch
    finally:
        if launch.poll() is None:
            launch.end()
