"""Do the named schedules draw what the papers draw, hold what they promise, and reach the published figures?"""

import csv
import itertools
import pathlib
from collections.abc import Sequence

import pytest

from parallel.layouts import PLACEMENTS
from parallel.placement import Placement, stage_ranks
from parallel.schedule import Table, check_rows, is_split, max_in_flight, parse, ranks_of
from parallel.schedules import (
    BUILDERS,
    gpipe,
    interleaved,
    named,
    one_forward_one_backward,
    zb_h1,
    zb_h2,
    zb_v,
)
from parallel.simulate import StageSeconds, TransferSeconds, simulate

PUBLISHED = pathlib.Path(__file__).parent.parent / "results" / "validation" / "zero_bubble.csv"
SIZES = list(itertools.product(range(1, 6), range(1, 10)))
"""Ranks and microbatches; looped over inside the tests, because a test costs more than a table."""
CHUNKS = (2, 3, 4)


def v(pp: int) -> tuple[int, ...]:
    return (*range(pp), *reversed(range(pp)))


def bubble(table: Table) -> float:
    """Time that is not work, over the work of a rank; all stages are equal."""
    timeline = simulate(table, StageSeconds.equal(len(ranks_of(table))))
    return timeline.makespan_seconds * len(table) / sum(timeline.busy_seconds) - 1


# ---- the tables ----------------------------------------------------------------------------------------------------


def test_gpipe_runs_all_forwards_then_all_backwards_chunk_by_chunk() -> None:
    assert gpipe(range(2), 3) == parse("0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    assert gpipe(v(2), 2) == parse("0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1", "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1")


def test_1f1b_of_four_stages_and_four_microbatches_is_the_published_table() -> None:
    assert one_forward_one_backward(range(4), 4) == parse(
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    )


def test_1f1b_takes_fewer_microbatches_than_stages() -> None:
    assert one_forward_one_backward(range(4), 2) == parse(
        "0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1", "3F0 3B0 3F1 3B1"
    )


def test_one_stage_alternates_under_1f1b() -> None:
    assert one_forward_one_backward((0,), 3) == parse("0F0 0B0 0F1 0B1 0F2 0B2")


def test_interleaved_of_two_ranks_and_four_microbatches_is_the_published_table() -> None:
    """Two chunks: a round of two through the first, then through the second."""
    assert interleaved((0, 1, 0, 1), 4) == parse(
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    )


def test_zb_h1_of_four_stages_puts_weights_off_by_the_rank() -> None:
    assert zb_h1(range(3), 4) == parse(
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1F1 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3",
        "2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3",
    )


def test_zb_h2_fills_the_beginning_with_forwards() -> None:
    assert zb_h2(range(2), 4) == parse(
        "0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3",
        "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3",
    )


def test_zb_v_goes_down_and_up_again() -> None:
    first, last = zb_v(v(2), 4)
    assert " ".join(map(str, first[:9])) == "0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1"
    assert " ".join(map(str, last[:9])) == "1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0"


# ---- validity ------------------------------------------------------------------------------------------------------


def test_every_named_table_of_every_size_is_complete_and_stands_on_its_ranks() -> None:
    for pp, microbatches in SIZES:
        for ranks in ((*range(pp),), v(pp), *((*range(pp),) * chunks for chunks in CHUNKS)):
            tables = named(ranks, microbatches)
            assert "gpipe" in tables
            for table in tables.values():
                check_rows(table, microbatches)
                assert [{ranks[action.stage] for action in row} for row in table] == [{rank} for rank in range(pp)]


@pytest.mark.parametrize("schedule", BUILDERS)
def test_a_schedule_runs_on_its_placements_and_on_no_other(schedule: str) -> None:
    placements: tuple[tuple[Placement, int], ...] = (("linear", 1), ("interleaved", 3), ("v", 2), ("folded", 2))
    able = {
        placement
        for placement, chunks in placements
        if schedule in named(stage_ranks(placement, 3, chunks), microbatches=2)
    }
    assert able == {placement for name, able_on in PLACEMENTS.items() if name == schedule for placement in able_on}


@pytest.mark.parametrize(
    ("schedule", "ranks", "told"),
    [
        ("1f1b", (0, 1, 0, 1), r"schedule '1f1b' has one stage a rank, in order: stages on ranks 0 1 0 1; try inter"),
        ("zb_h2", (1, 0), r"schedule 'zb_h2' has one stage a rank, in order: stages on ranks 1 0; try "),
        (
            "interleaved",
            (0, 1),
            r"stages to ranks in turn, two or more each: stages on ranks 0 1; try stages on ranks 0 1 0 1",
        ),
        ("interleaved", (0, 1, 1, 0), r"two or more each: stages on ranks 0 1 1 0; try stages on ranks 0 1 0 1$"),
        (
            "zb_v",
            (0, 1, 0, 1),
            r"goes down the ranks and up again: stages on ranks 0 1 0 1; try stages on ranks 0 1 1 0$",
        ),
        (
            "zb_v",
            (0, 1, 2),
            r"goes down the ranks and up again: stages on ranks 0 1 2; try stages on ranks 0 1 2 2 1 0$",
        ),
    ],
)
def test_ranks_that_a_schedule_cannot_run_are_refused_with_those_that_it_can(
    schedule: str, ranks: Sequence[int], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        BUILDERS[schedule](ranks, 3)


@pytest.mark.parametrize("schedule", BUILDERS)
def test_a_step_without_microbatches_is_refused(schedule: str) -> None:
    with pytest.raises(ValueError, match=r"^microbatches = 0; a step has at least 1$"):
        BUILDERS[schedule]((0,), 0)


# ---- what is held --------------------------------------------------------------------------------------------------


def test_gpipe_holds_every_microbatch_and_1f1b_no_more_than_the_stages_that_follow() -> None:
    for pp, microbatches in SIZES:
        assert [max_in_flight(row) for row in gpipe(range(pp), microbatches)] == [microbatches] * pp
        in_flight = [max_in_flight(row) for row in one_forward_one_backward(range(pp), microbatches)]
        assert in_flight == [min(microbatches, pp - rank) for rank in range(pp)]


def test_zero_bubble_schedules_hold_p_and_2_p_minus_1() -> None:
    for pp, microbatches in SIZES:
        assert {max_in_flight(row) for row in zb_h1(range(pp), microbatches)} == {min(microbatches, pp)}
        assert {max_in_flight(row) for row in zb_h2(range(pp), microbatches)} == {min(microbatches, 2 * pp - 1)}
        in_flight = [max_in_flight(row) for row in zb_v(v(pp), microbatches)]
        assert max(in_flight) == min(2 * microbatches, 2 * pp)
        if microbatches >= 2 * pp - 1:
            assert set(in_flight) == {2 * pp}


def test_interleaved_starts_as_many_forwards_as_published() -> None:
    """(chunks - 1) p + 2 (p - 1 - rank), then one more before the first backward."""
    for pp, chunks, rounds in itertools.product(range(1, 6), CHUNKS, (1, 2, 3)):
        for rank, row in enumerate(interleaved((*range(pp),) * chunks, rounds * pp)):
            ahead = next(index for index, action in enumerate(row) if action.kind == "backward")
            total = rounds * pp * chunks
            assert ahead == min(total, (chunks - 1) * pp + 2 * (pp - 1 - rank) + 1)
            assert max_in_flight(row) == ahead


def test_interleaved_rounds_hold_less_than_twice_p_microbatches_each() -> None:
    for pp, microbatches in SIZES:
        for chunks in CHUNKS:
            largest = -(-microbatches // max(1, microbatches // pp))
            assert largest < 2 * pp
            most = max(max_in_flight(row) for row in interleaved((*range(pp),) * chunks, microbatches))
            assert most <= min(chunks * microbatches, (chunks - 1) * largest + 2 * pp - 1)


# ---- time ----------------------------------------------------------------------------------------------------------


def test_the_bubble_is_p_minus_1_over_m_and_chunks_divide_it() -> None:
    """Also of microbatches that do not fill whole rounds of p."""
    for pp, microbatches in SIZES:
        for table in (
            gpipe(range(pp), microbatches),
            one_forward_one_backward(range(pp), microbatches),
            gpipe(v(pp), microbatches),
        ):
            assert bubble(table) == pytest.approx((pp - 1) / microbatches)
        for chunks in CHUNKS if microbatches >= pp else ():
            for table in (
                interleaved((*range(pp),) * chunks, microbatches),
                gpipe((*range(pp),) * chunks, microbatches),
            ):
                assert bubble(table) == pytest.approx((pp - 1) / (microbatches * chunks))


def test_fewer_microbatches_than_ranks_go_round_without_a_wait_of_their_own() -> None:
    """The last of them follows the first through all stages, there and back; 2 seconds a backward."""
    for pp, microbatches in SIZES:
        for chunks in CHUNKS if microbatches < pp else ():
            timeline = simulate(interleaved((*range(pp),) * chunks, microbatches), StageSeconds.equal(pp * chunks))
            assert timeline.makespan_seconds == pytest.approx(3 * (pp * chunks + microbatches - 1))


def test_no_rank_of_zb_h2_and_zb_v_waits_between_equal_pieces() -> None:
    for pp, microbatches in SIZES:
        if microbatches >= 2 * pp - 1:
            for table in (zb_h2(range(pp), microbatches), zb_v(v(pp), microbatches)):
                assert simulate(table, StageSeconds.equal(len(ranks_of(table)))).bubble_rate == 0.0


def test_zb_h1_fills_two_thirds_of_the_bubble_of_1f1b() -> None:
    for pp, microbatches in SIZES:
        if microbatches >= pp:
            assert bubble(zb_h1(range(pp), microbatches)) == pytest.approx((pp - 1) / (3 * microbatches))


def published() -> list[dict[str, str]]:
    with PUBLISHED.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", published(), ids=lambda row: f"{row['model']} m{row['microbatches']}")
def test_bubble_rates_are_those_published_to_four_decimals(row: dict[str, str]) -> None:
    """Qi et al. 2023 (arXiv 2401.10241), tables 5 and 9."""
    num_stages, microbatches = int(row["stages"]), int(row["microbatches"])
    forward, backward_input, backward_weight, latency = (float(row[f"T{name}_ms"]) for name in ("F", "B", "W", "comm"))
    seconds = StageSeconds.equal(
        num_stages, forward=forward, backward_input=backward_input, backward_weight=backward_weight
    )
    for schedule, column in (("1f1b", "1F1B"), ("zb_h1", "ZB_H1"), ("zb_h2", "ZB_H2")):
        table = BUILDERS[schedule](range(num_stages), microbatches)
        timeline = simulate(table, seconds, transfer_seconds=lambda *_: TransferSeconds(latency=latency))
        assert f"{timeline.bubble_rate:.4f}" == row[f"bubble_{column}"]
        assert is_split(table) == (schedule != "1f1b")
