"""Are the named tables what the papers draw, do they fit their memory, and do they meet the published rates?"""

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from parallel.greedy import greedy
from parallel.list_schedule import least_seconds, list_schedule
from parallel.placement import check_chunks, stage_ranks
from parallel.schedule import Table, max_in_flight, parse
from parallel.schedules import BUILDERS, one_forward_one_backward
from parallel.simulate import StageSeconds, TransferCost, TransferSeconds, simulate
from parallel.transfers import check, fewest_buffers

PUBLISHED = Path(__file__).parent.parent / "results" / "validation" / "zero_bubble.csv"
LINEAR = ("gpipe", "1f1b", "zb_h1", "zb_h2")


def tables(most_ranks: int = 4, most_microbatches: int = 9) -> Iterator[tuple[str, int, int, tuple[int, ...], Table]]:
    """Every named table of a few ranks, chunks and microbatches."""
    for pp, microbatches in itertools.product(range(1, most_ranks + 1), range(1, most_microbatches + 1)):
        for name in LINEAR:
            yield name, pp, microbatches, tuple(range(pp)), BUILDERS[name](range(pp), microbatches)
        for chunks in (2, 3, 4) if pp > 1 else ():
            ranks = stage_ranks("interleaved", pp, chunks)
            yield "interleaved", pp, microbatches, ranks, BUILDERS["interleaved"](ranks, microbatches)
        if pp > 1:
            ranks = stage_ranks("v", pp, 2)
            yield "zb_v", pp, microbatches, ranks, BUILDERS["zb_v"](ranks, microbatches)
            yield "gpipe", pp, microbatches, ranks, BUILDERS["gpipe"](ranks, microbatches)


def test_every_named_table_is_complete_and_ends_with_two_buffers_a_channel() -> None:
    for name, pp, microbatches, _, table in tables():
        check(table, microbatches)
        assert fewest_buffers(table) <= 2, (name, pp, microbatches)


def test_1f1b_of_four_ranks_and_four_microbatches_is_the_published_table() -> None:
    assert one_forward_one_backward(range(4), 4) == parse(
        "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3",
        "1F0 1F1 1F2 1B0 1F3 1B1 1B2 1B3",
        "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2B3",
        "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3",
    )


def test_interleaved_of_two_ranks_is_the_published_table() -> None:
    assert BUILDERS["interleaved"]((0, 1, 0, 1), 2) == parse(
        "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"
    )


def test_tables_hold_no_more_microbatches_than_they_promise() -> None:
    for name, pp, microbatches, ranks, table in tables():
        held = [max_in_flight(row) for row in table]
        promised = {
            "gpipe": [microbatches * len(ranks) // pp] * pp,
            "1f1b": [min(microbatches, pp - rank) for rank in range(pp)],
            "zb_h1": [pp] * pp,
            "zb_h2": [2 * pp - 1] * pp,
            "zb_v": [2 * pp] * pp,
        }
        if name in promised:
            assert all(now <= most for now, most in zip(held, promised[name], strict=True)), (name, pp, microbatches)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_bubble_of_equal_stages_is_what_the_formula_says(chunks: int) -> None:
    """(p - 1) / (m chunks) of the work, Narayanan et al. 2021, section 2.2."""
    for pp, rounds in ((2, 2), (4, 1), (4, 3)):
        ranks = tuple(range(pp)) * chunks
        table = BUILDERS["interleaved" if chunks > 1 else "1f1b"](ranks, pp * rounds)
        seconds = StageSeconds.equal(pp * chunks, forward=1.0, backward_input=1.0, backward_weight=1.0)
        work = 3 * pp * rounds * chunks
        bubble = (simulate(table, seconds).makespan_seconds - work) / work
        assert bubble == pytest.approx((pp - 1) / (pp * rounds * chunks))


def _latency(seconds: float) -> TransferCost:
    return lambda _edge, _direction: TransferSeconds(latency=seconds)


def test_zero_bubble_schedules_meet_the_published_rates() -> None:
    """To 4 decimals, arXiv 2401.10241, tables 5 and 9."""
    with PUBLISHED.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    for row in rows:
        pp, microbatches = int(row["stages"]), int(row["microbatches"])
        forward, half, weight, latency = (float(row[f"T{name}_ms"]) for name in ("F", "B", "W", "comm"))
        seconds = StageSeconds.equal(pp, forward=forward, backward_input=half, backward_weight=weight)
        for name, column in (("1f1b", "1F1B"), ("zb_h1", "ZB_H1"), ("zb_h2", "ZB_H2")):
            table = BUILDERS[name](range(pp), microbatches)
            timeline = simulate(table, seconds, transfer_seconds=_latency(latency))
            assert f"{timeline.bubble_rate:.4f}" == row[f"bubble_{column}"], (row["model"], name)


def test_zb_v_leaves_equal_ranks_nothing_to_wait_for_but_the_first_forward() -> None:
    for pp in (2, 4):
        ranks, seconds = stage_ranks("v", pp, 2), StageSeconds.equal(2 * pp)
        timeline = simulate(BUILDERS["zb_v"](ranks, 3 * pp), seconds)
        assert timeline.makespan_seconds == least_seconds(ranks, 3 * pp, seconds)


# ---- unequal stages -------------------------------------------------------------------------------------------------


COSTS = [(1.0, 2.0, 1.0, 3.0, 1.0, 2.0, 4.0, 1.0), (5.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 9.0), (1.0,) * 8]


@pytest.mark.parametrize("placement", ["linear", "interleaved", "v"])
@pytest.mark.parametrize("costs", COSTS)
def test_a_list_schedule_is_at_least_as_good_as_every_named_one_in_its_memory(
    placement: str, costs: tuple[float, ...]
) -> None:
    ranks = stage_ranks(placement, 4, 1 if placement == "linear" else 2)  # type: ignore[arg-type]
    costs = costs[: len(ranks)]
    seconds = StageSeconds(forward=costs, backward_input=costs, backward_weight=costs)
    table = list_schedule(ranks, 8, seconds)
    check(table, 8)
    limit = 4 * len(ranks) // 4
    assert max(max_in_flight(row) for row in table) <= limit
    reached = simulate(table, seconds).makespan_seconds
    assert reached >= least_seconds(ranks, 8, seconds)
    for build in BUILDERS.values():
        try:
            named = build(ranks, 8)
        except ValueError:
            continue
        if max(max_in_flight(row) for row in named) <= limit:
            assert reached <= simulate(named, seconds).makespan_seconds


def test_a_list_schedule_beats_the_named_ones_where_stages_differ() -> None:
    """Both sides on every rank, the encoder's chunks four times as costly."""
    ranks, costs = stage_ranks("folded", 4, 2), (4.0,) * 4 + (1.0,) * 4
    seconds = StageSeconds(forward=costs, backward_input=costs, backward_weight=costs)
    listed = simulate(list_schedule(ranks, 16, seconds), seconds).makespan_seconds
    assert listed < 0.9 * simulate(BUILDERS["interleaved"](ranks, 16), seconds).makespan_seconds


def test_memory_that_one_microbatch_does_not_fit_is_refused() -> None:
    seconds = StageSeconds.equal(4)
    with pytest.raises(ValueError, match=r"keeps 6, over the limit of 5; try a limit of 6 or more$"):
        list_schedule((0, 1, 1, 0), 4, seconds, kept=[3.0, 1.0, 1.0, 3.0], limit=5.0)
    with pytest.raises(ValueError, match=r"^rank 0 keeps 2 of one microbatch of its stages, over the limit of 1;"):
        greedy((0, 1, 1, 0), 4, seconds, limit=1.0, split=True)


# ---- placements -----------------------------------------------------------------------------------------------------


def test_placements_written_out() -> None:
    assert stage_ranks("linear", 3, 1) == (0, 1, 2)
    assert stage_ranks("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert stage_ranks("v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert stage_ranks("folded", 2, 2) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("placement", "pp", "chunks", "message"),
    [
        ("linear", 2, 2, r"placement 'linear' with chunks = 2: it has one chunk a rank; try chunks = 1"),
        ("interleaved", 2, 1, r"two chunks a rank or more; try chunks = 2"),
        ("v", 2, 3, r"two chunks a rank; try chunks = 2"),
        ("folded", 2, 3, r"as many encoder as decoder chunks; try chunks = 4"),
        ("v", 1, 2, r"chunks = 2 on one pipeline rank: chunks are dealt to pp >= 2 ranks; try chunks = 1"),
        ("w", 2, 2, r"placement = 'w'; choose one of linear, interleaved, v, folded"),
        ("linear", 2, 0, r"chunks = 0; it must be at least 1"),
    ],
)
def test_chunks_that_a_placement_cannot_have_are_refused(placement: str, pp: int, chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_chunks(placement, pp, chunks)  # type: ignore[arg-type]
