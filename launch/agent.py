"""How does a launch end with whoever started it, and what do its ranks leave? torchrun, with two things added.

`python -m launch.agent EXITS ...` is `python -m torch.distributed.run ...`. Before, it asks the kernel for a signal
when the process that started it ends; torchrun then ends its ranks, and each of them asked for the same on its own.
After, the exit codes of the ranks that ended badly stand in the file EXITS, a line each: rank and exit code.
"""

import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.env import RanksFailed, announce_agent, end_with_parent


def main(arguments: Sequence[str]) -> None:
    """Runs torchrun in this process."""
    exits, *sys.argv[1:] = arguments
    end_with_parent(signal.SIGTERM)
    announce_agent()
    try:
        runpy.run_module("torch.distributed.run", run_name="__main__", alter_sys=True)
    except RanksFailed as failed:
        told = [f"{rank} {failure.exitcode}\n" for rank, failure in failed.failures.items()]
        Path(exits).write_text("".join(told), encoding="utf-8")
        raise


if __name__ == "__main__":
    main(sys.argv[1:])
