"""What does every test start from?

One thread a process: tests start several ranks on few cores, and sums split over threads would differ in their last
bits from machine to machine.
"""

import sys

import pytest

from tests.spawn import four_ranks, two_ranks  # noqa: F401 - tests ask for these fixtures by name

STARTS_RANKS = (
    *("bench", "capabilities", "deepspeed_engine", "dropout_regions", "edges", "env", "failure", "fairscale_engine"),
    *("native_engine", "parity", "predict", "profile_command", "proof", "recorder", "sharded_modules"),
    *("sharded_vocabulary", "spawn", "sweep", "torch_engine", "verify", "worker"),
)
"""Files of tests that start processes, two or four at once."""


@pytest.hookimpl(tryfirst=True)  # before the plugin reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where tests run in several processes, those that start ranks stay in one: ranks of two would share the cores.

    The tests of any other file stay together too, because they share what they have built.
    """
    for item in items:
        name = item.path.stem.removeprefix("test_")
        item.add_marker(pytest.mark.xdist_group("ranks" if name in STARTS_RANKS else name))


@pytest.fixture(scope="session", autouse=True)
def one_thread_per_process() -> None:
    """Hold torch to one thread, if any collected test imports it; the torch-free tests never pay for the import."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
