"""Who runs what needs several ranks? Processes that stay alive from test to test.

    ranks.run(function, *arguments)    every rank calls function(worker, *arguments); results come back in rank order

Starting a rank costs seconds, a call milliseconds. Ranks meet through a file, never a chosen port. A rank that raises
ends the call: the error of the rank that failed first is raised here with its traceback, and new processes serve the
next call, because nobody knows what the others had half sent. A call that takes too long ends likewise, with the place
where every rank stands. Ranks end with the process that started them. Torch-free, as is a session of torch-free tests:
only the ranks import what they run (`tests/rank.py`).
"""

import contextlib
import dataclasses
import importlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import pytest

if TYPE_CHECKING:
    from tests.rank import Worker

TIMEOUT_SECONDS = 90.0
"""Of one call. A collective gives up after two thirds of it, so that a rank can still say which."""
START_SECONDS = 200.0

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How a rank failed, and when, on the clock that all processes of a machine share."""

    seconds: float
    told: str


class RankError(Exception):
    """A function raised on a rank, or a rank ended; the message holds rank and traceback."""


class Ranks:
    """Ranks 0 to world_size - 1, started when first needed."""

    def __init__(self, world_size: int, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.world_size = world_size
        self._timeout = timeout_seconds
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []

    def run(
        self,
        function: "Callable[Concatenate[Worker, Arguments], Result]",
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> list[Result]:
        """Calls a module-level function on every rank. Raises RankError or TimeoutError."""
        if not self._processes:
            self._start()
        with self._stopping_on_error():
            for pipe in self._pipes:
                pipe.send((function, arguments, named))
            return self._answers(self._timeout)

    def stop(self) -> None:
        """Ends the processes; the next call starts others."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._folder, self._processes, self._pipes = None, [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        with self._stopping_on_error():
            for rank in range(self.world_size):
                here, there = context.Pipe()
                rendezvous, stack = f"{self._folder.name}/rendezvous", f"{self._folder.name}/stack.{rank}"
                arguments = (rank, self.world_size, there, rendezvous, stack, self._timeout * 2 / 3)
                process = context.Process(target=_serve, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
            self._answers(START_SECONDS)

    @contextlib.contextmanager
    def _stopping_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # Whatever ends a call, an interrupt from the keyboard too: ranks never stay behind.
            self.stop()
            raise

    def _answers(self, timeout_seconds: float) -> list[Any]:
        deadline = time.monotonic() + timeout_seconds
        answers: dict[int, Any] = {}
        while len(answers) < self.world_size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            ready = multiprocessing.connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                assert isinstance(pipe, Connection)
                answers[waiting[pipe]] = self._answer(waiting[pipe], pipe)
            if any(isinstance(answer, Failure) for answer in answers.values()):
                # The failure that is read first need not be the first: wait for those that come at the same time.
                deadline = min(deadline, time.monotonic() + 0.5)
        failures = [answer for answer in answers.values() if isinstance(answer, Failure)]
        if failures:
            raise RankError(min(failures, key=lambda failure: failure.seconds).told)
        if len(answers) < self.world_size:
            silent = sorted(set(range(self.world_size)) - set(answers))
            raise TimeoutError(f"no answer of ranks {silent} within {timeout_seconds:.0f} s\n{self._stacks()}")
        return [answers[rank] for rank in range(self.world_size)]

    def _answer(self, rank: int, pipe: Connection) -> Any:
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            self._processes[rank].join(timeout=5.0)
            # A process that ended without a word is the cause of what the others say, whenever they said it.
            return Failure(seconds=0.0, told=f"rank {rank} ended with exit code {self._processes[rank].exitcode}")

    def _stacks(self) -> str:
        """Where every rank stands."""
        assert self._folder is not None
        files = [Path(self._folder.name) / f"stack.{rank}" for rank in range(self.world_size)]
        for process, file in zip(self._processes, files, strict=True):
            # The file is there once the rank listens.
            if file.exists() and process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{file.read_text()}" for rank, file in enumerate(files) if file.exists())


def _serve(*arguments: Any) -> None:
    """What runs first in the process of a rank."""
    importlib.import_module("tests.rank").serve(*arguments)


def _fixture(world_size: int) -> Iterator[Ranks]:
    ranks = Ranks(world_size)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    """Two ranks for all tests of a session."""
    yield from _fixture(2)


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[Ranks]:
    """Four ranks for all tests of a session."""
    yield from _fixture(4)
