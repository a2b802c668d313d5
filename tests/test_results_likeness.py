"""Are blocks alike, are there more choices, and are simulated steps as long as the twin's, as the tables have it?"""

import dataclasses

import pandas as pd
import pytest

from launch import space as made
from results import penalty_sections
from results.claims import schemes
from results.tables import Tables, build
from tests.judging import outcome, verdict
from tests.records import DECODER_ONLY, ENCODER_DECODER, record


def one_rank_tables(**noise: float) -> Tables:
    """Two runs of each architecture on one rank, the second a control."""
    runs = [
        dataclasses.replace(
            record(config, lengths=(6, 24), noise=noise.get(config.architecture, 0.0), sample_seed=seed),
            is_control=seed > 0,
        )
        for config in (ENCODER_DECODER, DECODER_ONLY)
        for seed in (0, 1)
    ]
    return build(runs)


@pytest.fixture(scope="module")
def told() -> Tables:
    return one_rank_tables()


# ---- P9 -------------------------------------------------------------------------------------------------------------


def test_blocks_of_one_stack_are_alike_and_those_of_two_sides_are_not(told: Tables) -> None:
    found = verdict("P9", told)
    assert found.outcome == "supported"
    quantities = {row.quantity for row in found.evidence}
    assert len(quantities) == 6
    assert {row.basis for row in found.evidence} == {"predicted", "measured"}


def test_one_block_that_differs_in_a_decoder_only_model_is_a_condition(told: Tables) -> None:
    table = told.variation.copy()
    first = table.index[table["architecture"] == "decoder_only"][0]
    table.loc[first, "variation_forward_flops"] = 0.5
    found = verdict("P9", told.replace(variation=table))
    assert found.outcome == "conditional"
    assert "decoder-only 9 of 10" in found.reason


def test_times_of_blocks_that_vary_contradict(told: Tables) -> None:
    own = told.blocks["architecture"] == "decoder_only"
    blocks = told.blocks.copy()
    second = own & (blocks["index"] == 0)
    for name in ("forward_busy_seconds", "backward_busy_seconds"):
        blocks.loc[second, name] = "[9.0, 9.0, 9.0]"
        samples = blocks.loc[own & ~second, name]
        blocks.loc[own & ~second, name] = ["[1.0, 1.0, 1.0]"] * len(samples)
    rows = [row for row in verdict("P9", told.replace(blocks=blocks)).evidence if row.table == "blocks"]
    says = {row.says for row in rows if "decoder-only" in row.quantity}
    assert says == {"contradicts"}


def test_blocks_without_runs_decide_nothing(told: Tables) -> None:
    found = verdict("P9", told.replace(runs=told.runs.head(0)))
    assert found.outcome == "undecided"
    assert "a run of decoder_only on one rank, with times of blocks" in found.missing


# ---- P11 ------------------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_has_more_layouts_and_steps_further_apart(told: Tables) -> None:
    assert outcome("P11", told) == "supported"


def test_as_few_and_as_close_layouts_as_the_twin_contradict(told: Tables) -> None:
    twin = told.space[told.space["architecture"] == "decoder_only"]
    own = twin.assign(architecture="encoder_decoder", num_encoder_blocks=24, num_decoder_blocks=24)
    assert outcome("P11", told.replace(space=pd.concat([twin, own]))) == "contradicted"


def test_rows_of_the_stored_space_are_what_the_code_predicts(told: Tables) -> None:
    """After a wanted change: `python -m launch.space`."""
    table = told.space.set_index("point")
    assert table.index.is_unique
    num_layouts = 0
    for config in made.models():
        layouts = list(made.layouts(config))
        num_layouts += len(layouts)
        row = made.row(config, layouts[-1])
        assert table.loc[row["point"], "step_seconds"] == pytest.approx(row["step_seconds"], rel=1e-6)
    assert num_layouts == len(table)


# ---- P4, simulated --------------------------------------------------------------------------------------------------


def test_others_are_held_against_the_best_named_schedule_and_we_against_the_best_list(told: Tables) -> None:
    for who in ("others", "ours"):
        rows = schemes.against(told.penalty, who)
        assert not rows.duplicated(schemes.POINT).any()
        point = rows.iloc[0]
        same = told.penalty[(told.penalty[schemes.POINT] == point[schemes.POINT]).all(axis=1)]
        mine = same[
            (same["who"] == who) & (same["grain"] == "block") & ((same["family"] == "list") | (who == "others"))
        ]
        assert point["makespan_over_ideal"] == mine["makespan_over_ideal"].min()
        twins = same[(same["who"] == "twin") & (same["grain"] == "block")]
        named = ["1f1b", "interleaved x2"] if who == "others" else ["list"]
        least = twins.loc[twins["family"].isin(named), "makespan_over_ideal"].min()
        assert point["against_best"] == pytest.approx(point["makespan_over_ideal"] / least)


def test_simulated_steps_no_longer_than_the_twins_contradict(told: Tables) -> None:
    table = told.penalty.assign(makespan_over_ideal=1.2)
    assert {row.says for row in schemes.evidence(table)} == {"contradicts"}
    assert {row.says for row in schemes.evidence(told.penalty)} == {"supports", "contradicts"}


def test_where_blocks_are_too_coarse_the_bound_says_why(told: Tables) -> None:
    coarse = [row for row in schemes.evidence(told.penalty) if row.says == "supports" and "list" in row.quantity]
    assert coarse
    for row in coarse:
        assert "no dealing of blocks is below" in row.note
        assert row.value.startswith("16 ranks")


def test_the_picture_has_a_panel_for_every_number_of_ranks(told: Tables) -> None:
    figure = penalty_sections.picture(told.penalty, "flops")
    assert figure is not None
    assert [axis.get_title() for axis in figure.axes] == ["2 ranks", "4 ranks", "8 ranks", "16 ranks"]
    assert all(len(axis.lines) >= 7 for axis in figure.axes)
    assert penalty_sections.picture(told.penalty, "unknown") is None


def test_the_section_tells_every_kind_of_costs_and_number_of_ranks(told: Tables) -> None:
    *_, table = penalty_sections.section(told.penalty, [])
    kinds = told.penalty[["costs", "pp"]].drop_duplicates()
    assert len(table.splitlines()) == 2 + len(kinds)
