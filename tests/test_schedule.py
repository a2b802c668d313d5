"""Are actions and tables what they say: text, ranks, completeness, what is in flight, the drawn grid?"""

import itertools

import pytest

from parallel.schedule import Action, Table, check_rows, grid, is_split, max_in_flight, parse, ranks_of
from parallel.schedules import gpipe, interleaved, one_forward_one_backward, zb_h1

# ---- text ----------------------------------------------------------------------------------------------------------


def test_every_action_survives_being_written_and_read() -> None:
    for action in itertools.chain(*interleaved((0, 1, 2) * 2, 12), *zb_h1(range(3), 12)):
        assert Action.parse(str(action)) == action


@pytest.mark.parametrize("text", ["", "F", "0", "F0", "0F", "-1F0", "0F-1", "0X3", ">0-1F0", "0F0 ", "0FB1", "0f1"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no action; write stage, one of F B I W, and microbatch: 2F0$"):
        Action.parse(text)


def test_a_table_is_read_from_one_text_a_rank() -> None:
    assert parse("0F0 0B0", "1F0 1I0 1W0") == (
        (Action(kind="forward", stage=0, microbatch=0), Action(kind="backward", stage=0, microbatch=0)),
        (
            Action(kind="forward", stage=1, microbatch=0),
            Action(kind="backward_input", stage=1, microbatch=0),
            Action(kind="backward_weight", stage=1, microbatch=0),
        ),
    )


# ---- what gives what to whom ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "gives", "needs"),
    [
        ("0F3", ("forward", 0, 3), None),
        ("1F3", ("forward", 1, 3), ("forward", 0, 3)),
        ("1B3", ("backward", 1, 3), ("backward", 2, 3)),
        ("1I3", ("backward", 1, 3), ("backward", 2, 3)),
        ("2B3", ("backward", 2, 3), None),
        ("2I3", ("backward", 2, 3), None),
        ("1W3", None, None),
    ],
)
def test_neighbours_wait_for_forwards_and_input_gradients_but_for_no_weight_gradient(
    text: str, gives: object, needs: object
) -> None:
    action = Action.parse(text)
    assert action.gives == gives
    assert action.needs(3) == needs


def test_who_has_which_stage_is_read_off_the_table() -> None:
    assert ranks_of(parse("0F0 3F0", "2F0 1F0")) == (0, 1, 1, 0)
    with pytest.raises(ValueError, match=r"^stage 0 stands on ranks 0 and 1$"):
        ranks_of(parse("0F0", "0B0"))
    with pytest.raises(ValueError, match=r"^stages \[0, 2\] are not 0 to 1$"):
        ranks_of(parse("0F0", "2F0"))


def test_a_table_is_split_if_any_backward_is() -> None:
    assert not is_split(parse("0F0 0B0"))
    assert is_split(parse("0F0 0B0", "1F0 1I0 1W0"))


# ---- completeness --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "microbatches", "told"),
    [
        (parse("0F0 0B0", "1F0"), 1, "stage 1 runs 1F0 of microbatch 0"),
        (parse("0F0 0B0 0B0"), 1, "stage 0 runs 0F0 0B0 0B0 of microbatch 0"),
        (parse("0F0 0F0 0B0"), 1, "stage 0 runs 0F0 0F0 0B0 of microbatch 0"),
        (parse("0F0 0B0"), 2, "stage 0 runs nothing of microbatch 1"),
        (parse("0F0 0F1 0B0 0B1"), 1, "stage 0 runs 0F1 0B1 of microbatch 1"),
        (parse("0F0 0B0", "1B0 1F0"), 1, "stage 1 runs 1B0 1F0 of microbatch 0"),
        (parse("0F0 0I0"), 1, "stage 0 runs 0F0 0I0 of microbatch 0"),
        (parse("0F0 0W0 0I0"), 1, "stage 0 runs 0F0 0W0 0I0 of microbatch 0"),
        (parse("0F0 0B0 0W0"), 1, "stage 0 runs 0F0 0B0 0W0 of microbatch 0"),
    ],
    ids=[
        "missing",
        "twice",
        "forward twice",
        "too few",
        "too many",
        "backward first",
        "no weight",
        "weight first",
        "both",
    ],
)
def test_a_table_that_is_not_complete_and_ordered_is_refused(broken: Table, microbatches: int, told: str) -> None:
    with pytest.raises(ValueError, match=rf"^{told} of {microbatches}; it must run F B or F I W$"):
        check_rows(broken, microbatches)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 3), (3, 4), (4, 2)])
def test_a_table_that_lost_any_one_action_is_refused(pp: int, microbatches: int) -> None:
    for whole in (one_forward_one_backward(range(pp), microbatches), zb_h1(range(pp), microbatches)):
        check_rows(whole, microbatches)
        for rank, row in enumerate(whole):
            for index in range(len(row)):
                lost = (*whole[:rank], (*row[:index], *row[index + 1 :]), *whole[rank + 1 :])
                with pytest.raises(ValueError, match=r"; it must run F B or F I W$"):
                    check_rows(lost, microbatches)


# ---- in flight -----------------------------------------------------------------------------------------------------


def test_a_microbatch_is_in_flight_until_the_last_piece_of_its_backward() -> None:
    (whole,) = parse("0F0 0F1 0B0 0F2 0B1 0B2")
    (split,) = parse("0F0 0F1 0I0 0F2 0W0 0I1 0W1 0I2 0W2")
    assert max_in_flight(whole) == 2
    assert max_in_flight(split) == 3


def test_stages_of_a_rank_are_in_flight_together_and_may_weigh_differently() -> None:
    (row,) = parse("0F0 1F0 1B0 0F1 1F1 1B1 0B0 0B1")
    assert max_in_flight(row) == 3
    assert max_in_flight(row, weight=(1, 10)) == 12


# ---- the drawn grid ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "drawn"),
    [
        (gpipe(range(2), 3), ["0: 0F0 0F1 0F2 .   .   0B0 0B1 0B2", "1: .   1F0 1F1 1F2 1B0 1B1 1B2 ."]),
        (
            one_forward_one_backward(range(2), 3),
            ["0: 0F0 0F1 .   0B0 0F2 0B1 .   0B2", "1: .   1F0 1B0 1F1 1B1 1F2 1B2 ."],
        ),
        (
            zb_h1(range(2), 3),
            ["0: 0F0 0F1 .   0I0 0W0 0F2 0I1 0W1 0I2 0W2", "1: .   1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"],
        ),
        (
            interleaved((0, 1) * 2, 2),
            [
                "0: 0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1",
                "1: .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .",
            ],
        ),
    ],
    ids=["gpipe", "1f1b", "zb_h1", "interleaved"],
)
def test_a_table_is_drawn_in_the_earliest_slots_with_a_dot_where_a_rank_waits(table: Table, drawn: list[str]) -> None:
    assert grid(table).splitlines() == drawn


def test_cells_are_as_wide_as_the_widest_action() -> None:
    (line,) = grid(gpipe(range(1), 11)).splitlines()
    assert line.startswith("0: 0F0  0F1  0F2  ")
    assert line.endswith(" 0B10")


def test_a_table_that_cannot_go_on_is_not_drawn() -> None:
    with pytest.raises(ValueError, match=r"^the schedule deadlocks: rank 0 waits at 0B0; rank 1 waits at 1F0$"):
        grid(parse("0B0 0F0", "1F0 1B0"))
