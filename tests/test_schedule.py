"""Are tables read, written, checked and drawn as what they are?"""

import pytest

from parallel.schedule import Action, check_rows, grid, is_split, max_in_flight, parse, ranks_of
from parallel.schedules import BUILDERS, gpipe, one_forward_one_backward


def test_an_action_survives_being_written_and_read() -> None:
    for name, build in BUILDERS.items():
        ranks = (0, 1, 1, 0) if name == "zb_v" else (0, 1, 0, 1) if name == "interleaved" else (0, 1, 2)
        for row in build(ranks, 12):
            assert tuple(Action.parse(str(action)) for action in row) == row


@pytest.mark.parametrize("text", ["", "F", "0", "F0", "0F-1", "0X3", "2F", ">0F0", "0F0 ", "0FB1"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no action; write stage, one of F B I W, and microbatch: 2F0$"):
        Action.parse(text)


def test_ranks_are_read_off_a_table() -> None:
    assert ranks_of(parse("0F0 2F0 2B0 0B0", "1F0 1B0")) == (0, 1, 0)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("0F0 0B0", "0F1 0B1"), r"^stage 0 stands on ranks 0 and 1$"),
        (("0F0 0B0", "2F0 2B0"), r"^stages \[0, 2\] are not 0 to 1$"),
        (("0F0 0B0", "1F0"), r"^stage 1 runs 1F0 of microbatch 0 of 1; it must run F B or F I W$"),
        (("0F0 0B0 0B0",), r"^stage 0 runs 0F0 0B0 0B0 of microbatch 0"),
        (("0B0 0F0",), r"^stage 0 runs 0B0 0F0 of microbatch 0"),
        (("0F0 0I0",), r"^stage 0 runs 0F0 0I0 of microbatch 0"),
        (("0F0 0W0 0I0",), r"^stage 0 runs 0F0 0W0 0I0 of microbatch 0"),
    ],
)
def test_a_table_that_is_not_complete_and_ordered_is_refused(rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rows(parse(*rows), 1)


def test_microbatches_are_in_flight_until_the_last_half_of_their_backward() -> None:
    (whole,), (split,) = parse("0F0 0F1 0B0 0F2 0B1 0B2"), parse("0F0 0I0 0F1 0I1 0F2 0W0 0I2 0W1 0W2")
    assert max_in_flight(whole) == 2
    assert max_in_flight(split) == 3
    assert max_in_flight(split, [5.0]) == 15
    assert is_split((split,))
    assert not is_split((whole,))


def test_a_table_is_drawn_in_the_earliest_slots_with_a_dot_where_a_rank_waits() -> None:
    assert grid(gpipe(range(2), 2)).splitlines() == ["0: 0F0 0F1 .   .   0B0 0B1", "1: .   1F0 1F1 1B0 1B1 ."]
    assert grid(one_forward_one_backward(range(2), 3)).splitlines() == [
        "0: 0F0 0F1 .   0B0 0F2 0B1 .   0B2",
        "1: .   1F0 1B0 1F1 1B1 1F2 1B2 .",
    ]


def test_a_table_that_cannot_go_on_is_not_drawn() -> None:
    with pytest.raises(ValueError, match=r"^the schedule deadlocks: rank 0 waits at 0B0; rank 1 waits at 1F1$"):
        grid(parse("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
