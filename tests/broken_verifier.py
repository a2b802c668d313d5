"""A rank of `twinshard verify` that breaks where the name of a case says so; `tests/test_proof.py` starts it."""

import os
import signal
import sys
import time
from typing import Any
from unittest import mock

from launch import verifier
from launch.case import Case
from launch.parity import Parity, check_parity
from tests.mutations import broken_all_reduce


def check(case: Case, *, rank: int, **given: Any) -> Parity:
    """The proof, unless something is to happen on rank 1 before."""
    if rank == 1 and "raises" in case.name:
        raise RuntimeError("broken on purpose")
    if rank == 1 and "is killed" in case.name:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and "hangs" in case.name:
        time.sleep(600.0)
    if "is wrong" in case.name:
        with broken_all_reduce("decoder.block.0.ffn.down"):
            return check_parity(case, rank=rank, **given)
    return check_parity(case, rank=rank, **given)


if __name__ == "__main__":
    with mock.patch.object(verifier, "check_parity", check):
        verifier.main(sys.argv[1:])
