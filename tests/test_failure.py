"""Is the first culprit named, and not the first victim?"""

import dataclasses
import signal
from pathlib import Path

import pytest
import torch

from launch.failure import Note, culprit, leave_note, note_of, read_notes


def note(error: BaseException, rank: int, seconds: float) -> Note:
    made = note_of(error, rank=rank, coordinate=f"dp=0 pp={rank} cp=0 tp=0", cell="cell", phase="timing")
    return dataclasses.replace(made, seconds=seconds)


LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:3242")
TIMED_OUT = RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation")


def told(notes: list[Note], exits: dict[int, int] | None = None, num_kills: int = 0) -> Note:
    found = culprit(notes, exits or {}, world_size=3, num_kills=num_kills, cell="last", phase="parity")
    assert found is not None
    return found


def test_an_error_counts_before_a_lost_partner_even_when_it_came_later() -> None:
    found = told([note(LOST, 0, 1.0), note(KeyError("q"), 2, 2.0), note(LOST, 1, 3.0)])
    assert found.reason == "rank 2 (dp=0 pp=2 cp=0 tp=0) during timing: KeyError: 'q'"


def test_of_several_errors_the_earliest_counts() -> None:
    assert told([note(ValueError("first"), 1, 1.0), note(ValueError("second"), 0, 2.0)]).rank == 1


def test_a_first_line_that_promises_more_is_told_with_the_next() -> None:
    error = RuntimeError("Monitored barrier failed. Error: \n  rank 1 timed out\nstack")
    assert note(error, 0, 1.0).error == "RuntimeError: Monitored barrier failed. Error: rank 1 timed out"
    assert note(RuntimeError("one\ntwo"), 0, 1.0).error == "RuntimeError: one"
    assert note(RuntimeError(""), 0, 1.0).error == "RuntimeError"


def test_a_rank_that_was_killed_without_a_word_is_the_culprit() -> None:
    found = told([note(LOST, 0, 1.0)], {0: 1, 1: -signal.SIGSEGV})
    assert found.reason == "rank 1 during parity: killed by SIGSEGV"
    assert found.cell == "last"


def test_a_rank_that_torchrun_ended_is_no_culprit() -> None:
    assert told([note(ValueError("mine"), 0, 1.0)], {0: 1, 1: -signal.SIGTERM}).rank == 0


def test_a_kill_is_for_memory_when_the_kernel_counted_one() -> None:
    assert told([], {1: -signal.SIGKILL}).kind == "ended"
    assert told([], {1: -signal.SIGKILL}, num_kills=1).kind == "out_of_memory"


def test_a_rank_that_left_nothing_but_an_exit_code_is_told_with_it() -> None:
    assert told([], {2: 3}).reason == "rank 2 during parity: ended with exit code 3"


def test_when_all_lost_a_partner_the_silent_rank_is_named() -> None:
    found = told([note(TIMED_OUT, 0, 1.0), note(LOST, 2, 2.0)])
    assert found.rank == 0
    assert found.error.endswith("(no word from rank 1)")


def test_nothing_tells_nothing() -> None:
    assert culprit([], {}, world_size=2, num_kills=0, cell="", phase="") is None


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (MemoryError(), "out_of_memory"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), "out_of_memory"),
        (LOST, "lost_partner"),
        (TIMED_OUT, "lost_partner"),
        (ConnectionResetError("reset"), "lost_partner"),
        (ValueError("connection closed"), "error"),
        (RuntimeError("shape mismatch"), "error"),
    ],
)
def test_kinds_of_errors_are_told_apart(error: BaseException, kind: str) -> None:
    assert note(error, 0, 0.0).kind == kind


def test_notes_are_read_back_in_the_order_of_time(tmp_path: Path) -> None:
    notes = [note(ValueError("second"), 0, 2.0), note(ValueError("first\nline"), 1, 1.0)]
    for one in notes:
        leave_note(tmp_path, one)
    assert read_notes(tmp_path) == [notes[1], notes[0]]
    assert notes[1].error == "ValueError: first"
