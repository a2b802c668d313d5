"""What does every test start from?

One thread a process: tests start several ranks on few cores, and sums split over threads would differ in their last
bits from machine to machine.
"""

import sys

import pytest

from tests.spawn import four_ranks, two_ranks  # noqa: F401 - tests ask for these fixtures by name


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_process() -> None:
    """Hold torch to one thread, if any collected test imports it; the torch-free tests never pay for the import."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
