"""A worker whose rank 1 breaks in the middle of a step of a pipeline; the number of microbatches says how.

1  raises        2  is killed        3  runs out of memory        4  sleeps        other layouts and numbers: sound
"""

import os
import signal
import sys
import time

import torch

from launch.worker import main
from models.batch import Batch
from parallel.held import Held
from parallel.pipeline import Pipeline
from parallel.schedule import Action


def break_down(microbatches: int) -> None:
    """Break this rank in the way that the number of microbatches asks for."""
    if microbatches == 1:
        raise RuntimeError("broken on purpose")
    if microbatches == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if microbatches == 3:
        raise MemoryError
    if microbatches == 4:
        time.sleep(600)


def install() -> None:
    """Break the second stage of every pipeline; dry runs, and proofs, which are in float64, stay sound."""
    compute = Pipeline._compute

    def broken(self: Pipeline, action: Action, batch: Batch, held: Held) -> None:
        is_last_of_two = self._plan.layout.pp == 2 and self._comm.coordinate.pp == 1
        is_real = torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo"
        if action.kind == "backward" and is_last_of_two and is_real and self._dtype == torch.float32:
            break_down(self._plan.layout.microbatches)
        compute(self, action, batch, held)

    Pipeline._compute = broken  # type: ignore[method-assign]


if __name__ == "__main__":
    install()
    main(sys.argv[1:])
