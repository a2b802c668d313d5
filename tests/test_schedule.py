"""Are schedules complete, ordered, free of deadlock, and what the papers draw?"""

import itertools
from collections.abc import Callable

import pytest

from parallel.schedule import (
    BUILDERS,
    Action,
    Table,
    batches,
    check,
    gpipe,
    grid,
    max_in_flight,
    one_forward_one_backward,
    with_transfers,
)

SIZES = list(itertools.product(range(1, 9), range(1, 9)))
"""Stages and microbatches; looped over inside the tests, because a test costs more than a table."""


def row(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def table(*rows: str) -> Table:
    return tuple(map(row, rows))


# ---- the tables ---------------------------------------------------------------------------------------------------


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    assert gpipe(2, 3) == table("F0 F1 F2 B0 B1 B2", "F0 F1 F2 B0 B1 B2")


def test_1f1b_of_four_stages_and_four_microbatches_is_the_published_table() -> None:
    assert one_forward_one_backward(4, 4) == table(
        "F0 F1 F2 F3 B0 B1 B2 B3",
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    )


def test_1f1b_takes_fewer_microbatches_than_stages() -> None:
    assert one_forward_one_backward(4, 2) == table("F0 F1 B0 B1", "F0 F1 B0 B1", "F0 F1 B0 B1", "F0 B0 F1 B1")


def test_one_stage_alternates_under_1f1b() -> None:
    assert one_forward_one_backward(1, 3) == table("F0 B0 F1 B1 F2 B2")


@pytest.mark.parametrize("name", BUILDERS)
def test_every_built_table_passes_the_check(name: str) -> None:
    for stages, microbatches in SIZES:
        built = BUILDERS[name](stages, microbatches)
        assert len(built) == stages
        check(built, microbatches)


def test_gpipe_holds_every_microbatch_and_1f1b_no_more_than_the_stages_that_follow() -> None:
    for stages, microbatches in SIZES:
        assert [max_in_flight(actions) for actions in gpipe(stages, microbatches)] == [microbatches] * stages
        in_flight = [max_in_flight(actions) for actions in one_forward_one_backward(stages, microbatches)]
        assert in_flight == [min(microbatches, stages - stage) for stage in range(stages)]


# ---- transfers and batches ----------------------------------------------------------------------------------------


def test_transfers_stand_next_to_what_consumes_and_produces_them() -> None:
    assert with_transfers(table("F0 B0", "F0 B0", "F0 B0")) == table(
        "F0 >F0 <B0 B0", "<F0 F0 >F0 <B0 B0 >B0", "<F0 F0 B0 >B0"
    )


def test_what_two_stages_send_each_other_at_the_same_time_is_one_batch() -> None:
    full = with_transfers(one_forward_one_backward(2, 2))
    assert batches(full[0]) == tuple(map(row, ["F0", ">F0", "F1", ">F1 <B0", "B0", "<B1", "B1"]))
    assert batches(full[1]) == tuple(map(row, ["<F0", "F0", "B0", ">B0 <F1", "F1", "B1", ">B1"]))


@pytest.mark.parametrize("name", BUILDERS)
def test_every_send_has_its_receive_on_the_other_side(name: str) -> None:
    for stages, microbatches in SIZES:
        full = with_transfers(BUILDERS[name](stages, microbatches))
        for stage, actions in enumerate(full):
            sent = [action for action in actions if action.kind.startswith("send")]
            assert len(sent) == microbatches * ((stage > 0) + (stage + 1 < stages))
            for action in sent:
                mark = str(action).replace(">", "<")
                assert [str(other) for other in full[stage + action.peer]].count(mark) == 1


@pytest.mark.parametrize("name", BUILDERS)
def test_batches_finish_when_nothing_is_buffered(name: str) -> None:
    for stages, microbatches in SIZES:
        full = with_transfers(BUILDERS[name](stages, microbatches))
        assert not stuck([list(batches(actions)) for actions in full])


def test_the_player_of_this_file_sees_a_hang() -> None:
    assert stuck([[row(">F0"), row("<B0")], [row(">B0"), row("<F0")]])
    assert not stuck([[row(">F0 <B0")], [row(">B0 <F0")]])


def stuck(rows: list[list[tuple[Action, ...]]]) -> bool:
    """Plays batches of transfers that block until all their partners have arrived; written apart from the product.

    A transfer is done when both sides stand at a batch that holds it; a batch is left when all its transfers are done.
    """
    opposite = {"send_forward": "receive_forward", "send_backward": "receive_backward"}
    at, done = [0] * len(rows), [set[Action]() for _ in rows]
    while True:
        before = (list(at), [set(actions) for actions in done])
        for stage, actions in enumerate(rows):
            if at[stage] == len(actions):
                continue
            for action in actions[at[stage]]:
                if not action.is_transfer:
                    done[stage].add(action)
                other = stage + action.peer
                if action.kind not in opposite or at[other] == len(rows[other]):
                    continue
                for partner in rows[other][at[other]]:
                    if (partner.kind, partner.microbatch) == (opposite[action.kind], action.microbatch):
                        done[stage].add(action)
                        done[other].add(partner)
        for stage, actions in enumerate(rows):
            if at[stage] < len(actions) and done[stage] >= set(actions[at[stage]]):
                at[stage], done[stage] = at[stage] + 1, set()
        if before == (at, done):
            return any(index < len(actions) for index, actions in zip(at, rows, strict=True))


# ---- what the check refuses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "microbatches", "message"),
    [
        (table("F0 B0", "F0"), 1, r"^stage 1 runs backward of microbatches \[\], not each of 1 once$"),
        (table("F0 B0 B0"), 1, r"^stage 0 runs backward of microbatches \[0, 0\], not each of 1 once$"),
        (table("F0 B0"), 2, r"^stage 0 runs forward of microbatches \[0\], not each of 2 once$"),
        (table("F0 F1 B0 B1"), 1, r"^stage 0 runs forward of microbatches \[0, 1\], not each of 1 once$"),
        (table("F0 B0", "B0 F0"), 1, r"^stage 1 runs B0 before F0$"),
    ],
    ids=["missing", "twice", "too few", "too many", "backward first"],
)
def test_a_table_that_is_not_complete_and_ordered_is_refused(broken: Table, microbatches: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(broken, microbatches)


@pytest.mark.parametrize(
    "broken",
    [
        # Stage 1 wants microbatch 1 first, which stage 0 sends only after it has microbatch 0 back.
        table("F0 B0 F1 B1", "F1 B1 F0 B0"),
        # Stage 0 wants the gradient of microbatch 1 first, stage 1 sends that of microbatch 0 first.
        table("F0 F1 B1 B0", "F0 F1 B0 B1"),
        # Three stages wait in a ring for what the next one holds.
        table("F0 F1 B0 B1", "F1 F0 B0 B1", "F0 F1 B0 B1"),
    ],
    ids=["forward", "backward", "middle"],
)
def test_a_table_that_hangs_without_buffers_is_refused_and_told_where(broken: Table) -> None:
    with pytest.raises(ValueError, match=r"^the schedule deadlocks: stage \d waits at "):
        check(broken, max(a.microbatch for a in broken[0]) + 1)


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (3, 4), (4, 2)])
def test_a_table_that_lost_any_one_action_is_refused(name: str, stages: int, microbatches: int) -> None:
    whole = BUILDERS[name](stages, microbatches)
    for stage, actions in enumerate(whole):
        for index in range(len(actions)):
            lost = (*whole[:stage], (*actions[:index], *actions[index + 1 :]), *whole[stage + 1 :])
            with pytest.raises(ValueError, match=r"not each of"):
                check(lost, microbatches)


# ---- text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILDERS)
def test_every_action_survives_being_written_and_read(name: str) -> None:
    for action in itertools.chain(*with_transfers(BUILDERS[name](3, 12))):
        assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "0", "F-1", "X3", "2F", ">0", "F0 ", "<F", "FB1"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no action; write F0, B0, >F0, <F0, >B0 or <B0$"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("builder", "stages", "microbatches", "drawn"),
    [
        (gpipe, 2, 3, ["0: F0 F1 F2 .  .  B0 B1 B2", "1: .  F0 F1 F2 B0 B1 B2 ."]),
        (one_forward_one_backward, 2, 3, ["0: F0 F1 .  B0 F2 B1 .  B2", "1: .  F0 B0 F1 B1 F2 B2 ."]),
        (
            one_forward_one_backward,
            3,
            3,
            ["0: F0 F1 F2 .  .  B0 .  B1 .  B2", "1: .  F0 F1 .  B0 F2 B1 .  B2 .", "2: .  .  F0 B0 F1 B1 F2 B2 .  ."],
        ),
    ],
)
def test_a_table_is_drawn_in_the_earliest_slots_with_a_dot_where_a_stage_waits(
    builder: Callable[[int, int], Table], stages: int, microbatches: int, drawn: list[str]
) -> None:
    assert grid(builder(stages, microbatches)).splitlines() == drawn


def test_cells_are_as_wide_as_the_widest_action() -> None:
    lines = grid(gpipe(1, 11)).splitlines()
    assert lines[0].startswith("0: F0  F1  F2 ")
    assert lines[0].endswith(" B10")


def test_transfers_are_not_drawn() -> None:
    assert grid(with_transfers(gpipe(2, 2))) == grid(gpipe(2, 2))


def test_a_table_that_cannot_go_on_is_not_drawn() -> None:
    with pytest.raises(ValueError, match=r"^the schedule deadlocks"):
        grid(table("B0 F0", "F0 B0"))
