"""Does a proof come to an end whatever happens on a rank, and does it say what and where?"""

import dataclasses
import re

import pytest

from launch.case import Case, case_of
from launch.proof import Proof, Verdict
from models.named import named_model
from parallel.layouts import Layout

TWO_RANKS = case_of(named_model("tiny-decoder"), Layout(tp=2))
TIMEOUT_SECONDS = 25.0


def verdicts(*names: str, worker: str = "tests.broken_verifier", case: Case = TWO_RANKS) -> dict[str, Verdict]:
    cases = [dataclasses.replace(case, name=name) for name in names]
    proof = Proof(cases, backend="gloo", timeout_seconds=TIMEOUT_SECONDS, worker=worker)
    return {verdict.case.name: verdict for verdict in proof.verdicts()}


@pytest.mark.timeout(280)
def test_a_failing_case_says_why_and_the_others_go_on() -> None:
    found = verdicts("first", "is wrong", "raises", "between", "is killed", "hangs", "last")
    assert list(found) == ["first", "is wrong", "raises", "between", "is killed", "hangs", "last"]
    for name in ("first", "between", "last"):
        assert found[name].failures == ()
    wrong = found["is wrong"]
    assert wrong.parity is not None
    assert wrong.parity.worst_error > 1e-3
    assert found["raises"].failures == ("rank 1 (dp=0 pp=0 cp=0 tp=1): RuntimeError: broken on purpose",)
    assert found["is killed"].failures == ("rank 1 (dp=0 pp=0 cp=0 tp=1): killed by SIGKILL",)
    (hanging,) = found["hangs"].failures
    assert re.search(r"rank 0 .*no word from rank 1", hanging), hanging


@pytest.mark.timeout(200)
def test_what_breaks_before_the_first_case_fails_all_without_trying_each() -> None:
    found = verdicts("one", "two", worker="tests.no_such_module")
    assert [bool(verdict.failures) for verdict in found.values()] == [True, True]
    assert found["one"].failures == found["two"].failures


def test_a_timeout_that_is_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match=r"timeout = 0 s; it must be positive"):
        Proof([TWO_RANKS], backend="gloo", timeout_seconds=0.0)
