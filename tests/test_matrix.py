"""Does the matrix prove every legal pair of options, the same ones each time, and nothing illegal?"""

import functools
import hashlib
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.covering import Choice, Rule, covering_array, legal_pairs, pairs
from launch.matrix import OPTIONS, RULES, case, cases, choices

ROOT = Path(__file__).resolve().parent.parent
REDUNDANT = (
    "a mixed stage needs more blocks than chunks",
    "without stages nothing is cut",
    "a mixed stage needs more blocks than stages",
    "only what sp makes products gather is kept whole",
    "without tp every vocabulary is whole",
    "keys and values are shipped to other stages, one a rank",
)
"""Rules about choices that contradict nothing, but say nothing new."""


def random_choices(seed: int, count: int) -> Iterator[Choice]:
    generator = random.Random(seed)
    for _ in range(count):
        yield {option: generator.choice(values) for option, values in OPTIONS.items()}


@functools.cache
def breaking_one() -> dict[str, list[Choice]]:
    """Choices that a single rule forbids, by its reason."""
    found: dict[str, list[Choice]] = {rule.reason: [] for rule in RULES}
    for choice in random_choices(seed=2, count=48000):
        broken = [rule for rule in RULES if not rule.holds(choice)]
        if len(broken) == 1:
            found[broken[0].reason].append(choice)
    return found


def digest() -> str:
    told = json.dumps([one.to_dict() for one in cases()], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()


def test_every_legal_pair_of_options_meets() -> None:
    met = pairs(choices())
    assert sorted(map(sorted, legal_pairs(OPTIONS, RULES) - met)) == []


def test_no_case_breaks_a_rule() -> None:
    assert [rule.reason for rule in RULES for choice in choices() if not rule.holds(choice)] == []
    assert pairs(choices()) == legal_pairs(OPTIONS, RULES)


def test_whatever_model_and_layout_accept_shows_no_pair_that_the_matrix_lacks() -> None:
    """Legality as ModelConfig, Layout and Case see it, which know nothing of the matrix's rules."""
    met, num_accepted = pairs(choices()), 0
    redundant = [rule for rule in RULES if rule.reason in REDUNDANT]
    for choice in random_choices(seed=1, count=36000):
        if not all(rule.holds(choice) for rule in redundant):
            continue
        try:
            case(choice)
        except ValueError:
            continue
        num_accepted += 1
        assert pairs([choice]) <= met
    assert num_accepted > 500


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.reason)
def test_each_rule_forbids_what_is_wrong_or_says_nothing(rule: Rule) -> None:
    broken = breaking_one()[rule.reason]
    assert broken
    if rule.reason not in REDUNDANT:
        for choice in broken:
            with pytest.raises(ValueError, match=r"\w"):
                case(choice)


def test_every_product_of_degrees_up_to_four_ranks_is_proved_for_each_architecture() -> None:
    degrees = [
        product for product in itertools.product((1, 2, 4), repeat=3) if product[0] * product[1] * product[2] <= 4
    ]
    wanted = {(tp, pp, dp, sp) for tp, pp, dp in degrees for sp in (False, True) if tp > 1 or not sp}
    for architecture in OPTIONS["architecture"]:
        layouts = [one.layout for one in cases() if one.config.architecture == architecture]
        assert {(layout.tp, layout.pp, layout.dp, layout.sp) for layout in layouts} == wanted


def test_some_stage_mixes_encoder_and_decoder_blocks() -> None:
    def is_mixed(cut: tuple[int, ...], boundary: int) -> bool:
        return bool(cut) and boundary not in cut

    found = [one for one in cases() if isinstance(one.layout.cut, tuple) and one.config.has_cross_attention]
    assert {one.layout.pp for one in found} == {2, 4}
    assert all(is_mixed(one.layout.cut, one.config.num_encoder_blocks) for one in found)  # type: ignore[arg-type]


def test_another_process_finds_the_same_cases() -> None:
    program = "import tests.test_matrix as here; print(here.digest())"
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert told.stdout.strip() == digest()


def test_names_are_unique_and_worlds_follow_each_other() -> None:
    sizes = [one.layout.world_size for one in cases()]
    assert sizes == sorted(sizes)
    assert set(sizes) == {1, 2, 4}
    assert len({one.name for one in cases()}) == len(sizes)


def test_a_quick_matrix_shows_every_value_in_fewer_cases() -> None:
    assert len(cases(quick=True)) < len(cases()) / 4
    numberless = {one.name.partition(" ")[2] for one in cases()}
    assert {one.name.partition(" ")[2] for one in cases(quick=True)} <= numberless


def test_pairs_that_the_greed_leaves_are_packed_into_further_rows() -> None:
    options = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1)}
    rules = (
        Rule("a and b differ", ("a", "b"), lambda a, b: a != b),
        Rule("c needs a", ("a", "c"), lambda a, c: a or not c),
    )
    rows = covering_array(options, rules)
    assert pairs(rows) == legal_pairs(options, rules)
    assert frozenset({("a", 1), ("b", 1)}) not in pairs(rows)
    assert frozenset({("a", 0), ("c", 1)}) not in pairs(rows)
    assert all(rule.holds(row) for rule in rules for row in rows)
