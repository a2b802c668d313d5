"""Does a verdict follow from evidence by the rule, whatever the evidence is?"""

import math
from typing import Any

import pytest

from results.claims import CLAIMS, chosen
from results.claims.verdict import ARTICLES, Claim, Evidence, Findings, Says, conclude, of_time, opposite
from results.intervals import Interval

CLAIM = Claim(
    id="X1",
    article="A",
    section="§1",
    statement="It is so.",
    quantity="this",
    rule="that",
    find=lambda _: Findings(evidence=()),
)


def evidence(says: Says, quantity: str = "count") -> Evidence:
    return Evidence(quantity=quantity, value="1", says=says, basis="measured", table="runs", cells=("a/b",))


def outcome(*says: Says | tuple[Says, str], **findings: Any) -> str:
    rows = [evidence(*one) if isinstance(one, tuple) else evidence(one) for one in says]
    return conclude(CLAIM, Findings(evidence=tuple(rows), **findings)).outcome


def test_rows_that_all_say_the_same_decide() -> None:
    assert outcome("supports", "supports") == "supported"
    assert outcome("contradicts") == "contradicted"


def test_rows_that_disagree_are_conditional_with_the_condition_found() -> None:
    verdict = conclude(
        CLAIM, Findings(evidence=(evidence("supports"), evidence("contradicts")), condition="where it rains")
    )
    assert verdict.outcome == "conditional"
    assert verdict.reason == "where it rains; 1 rows support, 1 contradict"


def test_nothing_decides_nothing() -> None:
    assert outcome() == outcome("undecided") == outcome("context", "context") == "undecided"


def test_context_never_counts() -> None:
    assert outcome("supports", "context") == "supported"


def test_missing_rows_leave_a_claim_undecided_whatever_the_others_say() -> None:
    verdict = conclude(CLAIM, Findings(evidence=(evidence("supports"),), missing=("twins under tp",)))
    assert verdict.outcome == "undecided"
    assert verdict.reason == "rows are missing: twins under tp"


def test_a_quantity_of_which_nothing_is_known_keeps_a_claim_open() -> None:
    assert outcome("supports", ("undecided", "time")) == "undecided"
    assert outcome("supports", ("undecided", "time"), ("supports", "time")) == "supported"
    assert outcome("supports", "contradicts", ("undecided", "time")) == "conditional"


def interval(low: float, high: float) -> Interval:
    return Interval(value=math.sqrt(low * high), low=low, high=high)


@pytest.mark.parametrize(
    ("low", "high", "noise", "says"),
    [
        (0.9, 1.0, 1.0, "supports"),
        (1.2, 1.3, 1.0, "contradicts"),
        (1.0, 1.2, 1.0, "undecided"),
        (0.9, 1.0, 1.05, "supports"),
        (0.9, 1.0, 1.2, "undecided"),
        (1.2, 1.3, 1.05, "contradicts"),
        (1.2, 1.3, 1.1, "undecided"),
        (0.1, 0.2, None, "undecided"),
        (math.nan, math.nan, 1.0, "undecided"),
    ],
)
def test_a_time_decides_only_beyond_its_interval_and_noise(low: float, high: float, noise: float, says: Says) -> None:
    assert of_time(interval(low, high), 1.1, noise) == says


def test_the_opposite_of_an_open_question_is_open() -> None:
    assert [opposite(says) for says in ("supports", "contradicts", "undecided")] == [
        "contradicts",
        "supports",
        "undecided",
    ]


def test_every_claim_is_told_once_and_stands_in_a_known_article() -> None:
    ids = [claim.id for claim in CLAIMS]
    numbers = {"P": (*range(1, 10), 11), "C": (1, 2, 3, 4, 9, 10), "N": range(1, 11)}
    assert ids == [f"{letter}{number}" for letter, told in numbers.items() for number in told]
    assert {claim.article for claim in CLAIMS} <= set(ARTICLES)


def test_claims_are_chosen_by_id() -> None:
    assert chosen([]) == CLAIMS
    assert [claim.id for claim in chosen(["p4", "P2"])] == ["P4", "P2"]
    with pytest.raises(ValueError, match="no claim P12, Q; known are P1, P2"):
        chosen(["P12", "q"])
