"""Do the verdicts on the balance of pipelines change when the rows do? Claims P3 and P4."""

import pytest

from results.runs import to_text
from results.tables import Tables
from tests.judging import is_own, outcome, verdict, with_cells, without
from tests.records import study_tables


@pytest.fixture(scope="module")
def told() -> Tables:
    return study_tables()


# ---- P3 -------------------------------------------------------------------------------------------------------------


def balanced(tables: Tables, value: float) -> Tables:
    """Every imbalance of every table set to one value, without spread."""
    names = [name for name in tables.predicted.columns if name.startswith("imbalance_")]
    predicted = tables.predicted.assign(**dict.fromkeys(names, value))
    names = [name for name in tables.runs.columns if name.startswith("imbalance_") and tables.runs[name].dtype == float]
    runs = tables.runs.assign(**dict.fromkeys(names, value))
    return tables.replace(
        predicted=predicted,
        runs=runs.assign(imbalance_busy_seconds=to_text([value] * 9)),
        penalty=tables.penalty.assign(imbalance=value),
    )


def test_an_even_cut_balances_up_to_a_size_of_the_head(told: Tables) -> None:
    found = verdict("P3", told)
    assert found.outcome == "conditional"
    assert "19% at 2 stages, 13% at 4 stages, 10% at 8 stages, 7% at 16 stages" in found.reason
    assert {row.basis for row in found.evidence} == {"predicted", "measured"}


def test_an_even_cut_balances_when_no_stage_is_above_a_tenth(told: Tables) -> None:
    assert outcome("P3", balanced(told, 1.1)) == "supported"
    assert outcome("P3", balanced(told, 1.101)) == "contradicted"


def test_predicted_balance_alone_decides_nothing(told: Tables) -> None:
    found = verdict("P3", without(balanced(told, 1.0), architecture="decoder_only"))
    assert found.outcome == "undecided"
    assert found.missing == ("a decoder-only run with pp >= 2 and an even cut",)


def test_without_a_control_busy_time_stays_open(told: Tables) -> None:
    found = verdict("P3", without(balanced(told, 1.0), is_control=True))
    assert found.outcome == "undecided"
    assert "imbalance of busy seconds" in found.reason


def test_a_noisy_control_keeps_busy_time_open(told: Tables) -> None:
    calm = balanced(told, 1.0)
    control = calm.runs["is_control"].astype(bool)
    runs = with_cells(calm.runs, control, imbalance_busy_seconds=to_text([1.3] * 9))
    found = verdict("P3", calm.replace(runs=runs))
    assert found.outcome == "undecided"
    assert any("noise of 1.3" in row.note for row in found.evidence)


# ---- P4 -------------------------------------------------------------------------------------------------------------


def unequal(tables: Tables, own: float, twin: float, *, mixed: float, moves: bool) -> Tables:
    """Imbalances and bubbles of encoder-decoders and of their twins set; the best aligned split moves or does not."""
    made = []
    for table in (tables.predicted, tables.runs):
        names = [name for name in table.columns if name.startswith("imbalance_") and table[name].dtype == float]
        names += ["bubble"] if table is tables.predicted else []
        values = [own if is_encoder_decoder else twin for is_encoder_decoder in is_own(table)]
        made.append(table.assign(**{name: table[name].where(table[name].isna(), values) for name in names}))
    predicted, runs = made
    predicted = with_cells(predicted, is_own(predicted) & (predicted["cut"] == "mixed"), imbalance_forward_flops=mixed)
    predicted["num_encoder_stages"] = [4 * ratio if moves else 1 for ratio in predicted["length_ratio"].fillna(0)]
    samples = [to_text([own if is_encoder_decoder else twin] * 9) for is_encoder_decoder in is_own(runs)]
    makespans = [own if is_encoder_decoder else twin for is_encoder_decoder in is_own(tables.penalty)]
    return tables.replace(
        predicted=predicted,
        runs=runs.assign(imbalance_busy_seconds=samples, bubble=samples),
        penalty=tables.penalty.assign(makespan_over_ideal=makespans),
    )


def test_whether_balance_is_harder_depends_on_the_cut(told: Tables) -> None:
    found = verdict("P4", told)
    assert found.outcome == "conditional"
    assert "even 26 of 35, aligned 13 of 35, mixed 1 of 35, folded 7 of 35, best 1 of 35 points" in found.reason


def test_balance_is_harder_when_every_imbalance_is_larger(told: Tables) -> None:
    assert outcome("P4", unequal(told, 1.5, 1.0, mixed=1.5, moves=True)) == "supported"


def test_balance_is_not_harder_when_none_is_and_no_choice_is_needed(told: Tables) -> None:
    assert outcome("P4", unequal(told, 1.2, 1.2, mixed=1.0, moves=False)) == "contradicted"


def test_balance_is_judged_only_with_twins_cut_both_ways(told: Tables) -> None:
    found = verdict("P4", without(told, cut="aligned"))
    assert found.missing == ("twins side by side with pp >= 2 and cut aligned",)
    assert found.outcome == "undecided"


def test_only_runs_with_several_stages_are_measured(told: Tables) -> None:
    evidence = [row for row in verdict("P4", told).evidence if row.basis == "measured"]
    assert evidence
    assert all("pp1" not in cell for row in evidence for cell in row.cells)


def test_harder_means_by_more_than_the_margin(told: Tables) -> None:
    def bubbles(own: float) -> set[str]:
        evidence = verdict("P4", unequal(told, own, 1.0, mixed=own, moves=True)).evidence
        return {
            row.says for row in evidence if row.quantity == "imbalance_forward_flops of the even cut against the twin's"
        }

    assert bubbles(1.04) == {"contradicts"}
    assert bubbles(1.06) == {"supports"}
