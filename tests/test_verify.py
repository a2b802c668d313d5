"""Does `twinshard verify` answer as it says: last line, exit code, one line for a mistake?"""

import dataclasses
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch import verify
from launch.case import Case
from launch.cli import answer
from launch.matrix import cases as matrix_cases
from launch.parity import KINDS, Parity, Worst
from launch.proof import Verdict
from parallel.engines.choice import EngineChoice
from parallel.engines.engine import unsupported

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def no_process() -> Iterator[None]:
    with mock.patch.object(subprocess, "Popen", side_effect=AssertionError("a process was started")):
        yield


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "3"], "4 heads over tp=3: tp must divide 4; try 1, 2, 4"),
        (["--pp", "5"], "pp = 5 stages over 4 blocks: every stage needs a block; try pp <= 4"),
        (["--sp"], "sp shards the sequence over the tp ranks: it needs tp >= 2, got tp = 1"),
        (["--pp", "2", "--cut", "4"], "cuts must rise from 1 to 3, got [4]"),
        (
            ["--pp", "2", "--cut", "half"],
            "cut = 'half'; choose one of even, aligned, parameters, flops, times, memory or first blocks such as 2,5",
        ),
        (["--dp", "0"], "dp = 0; it must be at least 1"),
        (["--microbatches", "two"], "'two' is not a valid integer"),
        (["--cut", "aligned"], "cut = 'aligned' needs pp >= 2"),
        (["--model", "t5-smal"], "unknown model 't5-smal'; did you mean t5-small"),
        (["--model", "t5-small", "--tp", "16"], "8 heads over tp=16"),
        (["--model", "t5-small", "--architecture", "decoder_only"], "leave --architecture out"),
        (["--matrix", "--memory-gather", "per_block"], "--memory-gather chooses one case, --matrix has all of them"),
        (["--quick"], "--quick is a choice of cases: it needs --matrix"),
        (["--timeout", "0"], "timeout = 0 s; it must be positive"),
        (["--degree", "2"], "No such option"),
        (
            ["--engine", "pytorch"],
            "'pytorch' is not one of 'native', 'torch', 'deepspeed', 'fairscale', 'transformers'",
        ),
        (["--engine", "torch", "--pp", "2"], "nothing to prove: torch's 1F1B wants at least as many microbatches as"),
    ],
)
@pytest.mark.usefixtures("no_process")
def test_a_mistake_is_one_line_before_any_process_starts(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert answer(["verify", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert message in told.err


def parity(error: float, **changes: Any) -> Parity:
    worst = dict.fromkeys(KINDS, Worst(error=1e-16, name="head.weight"))
    equal = Parity(**worst, missing=(), extra=(), ledger=None)
    return dataclasses.replace(equal, gradient=Worst(error=error, name="head.weight"), **changes)


class Judged:
    """Stands for `Proof`: gives the cases the verdicts of a list, one after the other."""

    def __init__(self, given: Sequence[Parity | None]) -> None:
        self.given = given
        self.cases: Sequence[Case] = ()

    def __call__(self, cases: Sequence[Case], **_: Any) -> "Judged":
        self.cases = cases
        return self

    def verdicts(self) -> Iterator[Verdict]:
        for case, found in zip(self.cases, self.given, strict=True):
            yield Verdict(case=case, parity=found, failures=("rank 1 ended",) if found is None else found.failures)


@pytest.mark.parametrize(
    ("given", "line", "code"),
    [
        ([parity(3.14e-15)] * 3, "3 passed, 0 failed, worst relative error 3.1e-15", 0),
        ([parity(1e-10), parity(0.0), parity(0.0)], "3 passed, 0 failed, worst relative error 1.0e-10", 0),
        ([parity(0.0), parity(1.1e-10), parity(0.0)], "2 passed, 1 failed, worst relative error 1.1e-10", 1),
        ([parity(0.0), parity(math.inf), parity(0.0)], "2 passed, 1 failed, worst relative error inf", 1),
        ([parity(2e-16), None, parity(0.0)], "2 passed, 1 failed, worst relative error 2.0e-16", 1),
        ([parity(0.0, ledger="differs")] * 3, "0 passed, 3 failed, worst relative error 1.0e-16", 1),
        ([None, None, None], "0 passed, 3 failed, worst relative error nan", 1),
    ],
)
def test_last_line_and_exit_code_tell_what_came_out(
    given: list[Parity | None], line: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with mock.patch.object(verify, "Proof", Judged(given)):
        assert answer(["verify"]) == code
    told = capsys.readouterr()
    assert told.out.splitlines()[-1] == line
    assert told.err.count("failed tiny-") == sum(found is None or bool(found.failures) for found in given)


def test_what_an_engine_cannot_run_is_told_and_the_rest_is_proved(capsys: pytest.CaptureFixture[str]) -> None:
    cases = matrix_cases(quick=True)
    reasons = [unsupported(EngineChoice("torch"), case.config, case.layout) for case in cases]
    num_able = reasons.count(None)
    assert 0 < num_able < len(cases)
    judged = Judged([parity(0.0)] * num_able)
    with mock.patch.object(verify, "Proof", judged):
        assert answer(["verify", "--engine", "torch", "--matrix", "--quick"]) == 0
    assert {case.engine for case in judged.cases} == {EngineChoice("torch")}
    told = capsys.readouterr().out.splitlines()
    assert told[-1].startswith(f"{num_able} passed, 0 failed, {len(cases) - num_able} unsupported, worst")
    for reason in {reason for reason in reasons if reason}:
        assert f"{reasons.count(reason)} unsupported: {reason}" in told


def test_the_table_names_the_worst_parameter_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(verify, "Proof", Judged([parity(1e-16), parity(5e-15), parity(1e-16)])):
        answer(["verify", "--pp", "2"])
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gradient  ")]
    assert row.split()[1:4] == ["5.0e-15", "head.weight", "tiny-encoder-decoder"]


@pytest.mark.timeout(200)
def test_a_layout_is_proved_on_ranks_of_its_own() -> None:
    command = [sys.executable, "-m", "launch", "verify", "--architecture", "encoder_decoder", "--tp", "2", "--sp"]
    told = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    *_, last = told.stdout.splitlines()
    passed, _, error = last.rpartition(" ")
    assert passed == "1 passed, 0 failed, worst relative error"
    assert 0.0 < float(error) < 1e-10
