"""Does a process learn the right things from its environment, and does it end with its parent?"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from launch import env
from launch.env import choose_backend, launched_rank, launched_world_size, torchrun_environment, world

ROOT = Path(__file__).resolve().parent.parent


def launched_with(monkeypatch: pytest.MonkeyPatch, **variables: int | str) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture(autouse=True)
def not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)


def test_nccl_is_taken_when_every_rank_has_a_gpu() -> None:
    assert choose_backend("auto", num_local_ranks=4, num_gpus=4) == "nccl"
    assert choose_backend("auto", num_local_ranks=4, num_gpus=3) == "gloo"
    assert choose_backend("auto", num_local_ranks=1, num_gpus=0) == "gloo"
    assert choose_backend("gloo", num_local_ranks=1, num_gpus=8) == "gloo"


def test_more_ranks_than_gpus_is_an_error_that_offers_gloo() -> None:
    with pytest.raises(ValueError, match=r"4 ranks on a node with 2 GPUs: .* at most 2 ranks, or take --backend gloo"):
        choose_backend("nccl", num_local_ranks=4, num_gpus=2)
    with pytest.raises(ValueError, match=r"1 ranks on a node without GPUs: .* --backend gloo"):
        choose_backend("nccl", num_local_ranks=1, num_gpus=0)


def test_an_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match="backend = 'mpi'; choose one of auto, gloo, nccl"):
        choose_backend("mpi", num_local_ranks=1, num_gpus=0)  # type: ignore[arg-type]


def test_a_process_on_its_own_is_a_world_of_one() -> None:
    with world("gloo") as here:
        assert (here.rank, here.world_size, here.local_rank) == (0, 1, 0)
        assert here.device == torch.device("cpu")
        assert here.share("value") == "value"
        assert not here.is_oversubscribed
        assert not torch.distributed.is_initialized()
        assert torch.get_num_threads() == 1


def test_torchrun_tells_rank_and_world(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (launched_rank(), launched_world_size()) == (0, 1)
    launched_with(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    assert (launched_rank(), launched_world_size()) == (5, 8)
    here = env._here("gloo")
    assert (here.rank, here.world_size, here.local_rank, here.local_world_size) == (5, 8, 1, 4)


def test_more_ranks_than_cores_are_oversubscribed(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_with(monkeypatch, RANK=0, WORLD_SIZE=4096, LOCAL_RANK=0, LOCAL_WORLD_SIZE=4096)
    assert env._here("gloo").is_oversubscribed


def test_a_library_is_told_the_local_rank_and_the_device() -> None:
    code = "import os, torch; from launch.env import announce_place; announce_place(3, torch.device('cuda', 3))"
    words = (sys.executable, "-c", f"{code}; print(os.environ['LOCAL_RANK'], os.environ['DS_ACCELERATOR'])")
    told = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
    assert told.stdout.split() == ["3", "cuda"]


def test_the_environment_of_a_launch_is_not_that_of_an_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    launched_with(monkeypatch, OMP_NUM_THREADS=8)
    environment = torchrun_environment()
    assert not any(name.startswith("TORCHELASTIC_") for name in environment)
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["TORCH_DISTRIBUTED_DEBUG"] == "OFF"
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(ROOT)
    assert torchrun_environment(names_mismatches=True)["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"


PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", '''
import time
from launch.env import end_with_parent
end_with_parent()
print("ready", flush=True)
time.sleep(600)
'''], stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_a_child_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=torchrun_environment()) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.kill()
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


def test_a_child_whose_parent_has_ended_already_ends_too() -> None:
    program = "from launch.env import end_with_parent; end_with_parent(); print('alive')"
    environment = {**torchrun_environment(), env._AGENT: "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, env=environment, capture_output=True, text=True
    )
    assert result.returncode == -9
    assert result.stdout == ""
