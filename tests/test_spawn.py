"""Do the ranks of the tests stay alive, name the culprit, and end when they should?"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.rank import Worker
from tests.spawn import RankError, Ranks

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def fragile_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2, timeout_seconds=12.0)
    yield ranks
    ranks.stop()


def identified(worker: Worker, word: str) -> tuple[int, int, str, int]:
    return worker.rank, worker.world_size, word, os.getpid()


def summed(worker: Worker) -> float:
    number = torch.tensor(float(worker.rank + 1))
    dist.all_reduce(number)
    return number.item()


def raising_on_rank_1(worker: Worker) -> None:
    if worker.rank == 1:
        raise ValueError("on purpose")
    dist.all_reduce(torch.zeros(1))


def ending_on_rank_1(worker: Worker) -> None:
    if worker.rank == 1:
        os._exit(3)
    dist.all_reduce(torch.zeros(1))


def differing(worker: Worker) -> None:
    dist.all_reduce(torch.zeros(1 + worker.rank))


def sleeping_on_rank_1(worker: Worker) -> None:
    if worker.rank == 1:
        time.sleep(600.0)


def test_processes_stay_and_results_come_in_the_order_of_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(identified, "hello"), two_ranks.run(identified, word="again")
    assert [answer[:3] for answer in first] == [(0, 2, "hello"), (1, 2, "hello")]
    assert [answer[3] for answer in first] == [answer[3] for answer in second]
    assert len({answer[3] for answer in first} | {os.getpid()}) == 3
    assert two_ranks.run(summed) == [3.0, 3.0]


def test_the_rank_that_failed_first_is_told_and_the_next_call_works(fragile_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"(?s)^rank 1 raised.*in raising_on_rank_1.*ValueError: on purpose"):
        fragile_ranks.run(raising_on_rank_1)
    assert fragile_ranks.run(summed) == [3.0, 3.0]


def test_a_rank_that_ends_is_the_cause(fragile_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"^rank 1 ended with exit code 3$"):
        fragile_ranks.run(ending_on_rank_1)


def test_collectives_that_differ_are_named_and_not_waited_for(fragile_ranks: Ranks) -> None:
    fragile_ranks.run(summed)
    with pytest.raises(RankError, match=r"(?s)mismatch between collectives.*Tensor shapes"):
        fragile_ranks.run(differing)


def test_silence_ends_with_the_place_where_ranks_stand(fragile_ranks: Ranks) -> None:
    with pytest.raises(TimeoutError, match=r"(?s)no answer of ranks \[1\] within 12 s.*in sleeping_on_rank_1"):
        fragile_ranks.run(sleeping_on_rank_1)


PARENT = """
import time
from tests.spawn import Ranks
from tests.test_spawn import identified
if __name__ == "__main__":
    print(Ranks(1).run(identified, "hello")[0][3], flush=True)
    time.sleep(600)
"""


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{PARENT}")
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20.0
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()
