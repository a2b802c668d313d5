"""Does every message meet its buffer, and is a table that would hang refused?"""

import pytest

from parallel.edges import Edge, chain
from parallel.schedule import parse
from parallel.schedules import BUILDERS
from parallel.transfers import Transfer, acknowledged, channels, check, fewest_buffers, with_transfers


def told(*rows: str, edges: tuple[Edge, ...] | None = None) -> list[str]:
    return [" ".join(map(str, steps)) for steps in with_transfers(parse(*rows), edges)]


def test_receives_are_posted_one_action_ahead_and_sends_follow_at_once() -> None:
    assert told("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1") == [
        "0F0 >0-1F0 <1-0B0 0F1 >0-1F1 <1-0B1 0B0 0B1",
        "<0-1F0 1F0 <0-1F1 1B0 >1-0B0 1F1 1B1 >1-0B1",
    ]


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    assert told("0F0 1F0 1B0 0B0") == ["0F0 1F0 1B0 0B0"]


def test_memory_that_travels_directly_is_sent_by_who_made_it() -> None:
    edges = (*chain(3), Edge(first=0, last=2, carries=("memory",)))
    assert told("0F0 0B0", "1F0 1B0", "2F0 2B0", edges=edges) == [
        "<2-0B0 <1-0B0 0F0 >0-1F0 >0-2F0 0B0",
        "<2-1B0 <0-1F0 1F0 >1-2F0 1B0 >1-0B0",
        "<1-2F0 <0-2F0 2F0 2B0 >2-1B0 >2-0B0",
    ]


def test_receives_keep_the_order_of_sends_where_use_differs() -> None:
    """Microbatch 1 is used first, but microbatch 0 is sent first: both are posted before."""
    (_, receiver) = told("0F0 0F1 0B1 0B0", "1F1 1B1 1F0 1B0")
    assert receiver.startswith("<0-1F0 <0-1F1 1F1")


def test_every_send_has_its_receive_on_the_other_side() -> None:
    for name, ranks in (("1f1b", range(4)), ("interleaved", (0, 1, 0, 1)), ("zb_v", (0, 1, 1, 0)), ("zb_h2", range(3))):
        table = BUILDERS[name](ranks, 5)
        ends = [step for steps in with_transfers(table) for step in steps if isinstance(step, Transfer)]
        sent = {step for step in ends if step.operation == "send"}
        assert {step.other_end for step in sent} == {step for step in ends if step.operation == "receive"}
        assert len(ends) == 2 * len(sent)


@pytest.mark.parametrize(
    ("rows", "microbatches"),
    [
        (("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"), 2),
        (("0B0 0F0",), 1),
        (("1F0 0F0 0B0 1B0",), 1),
    ],
)
def test_a_table_that_hangs_is_refused(rows: tuple[str, ...], microbatches: int) -> None:
    with pytest.raises(ValueError, match=r"^the schedule deadlocks: rank \d waits at |^stage 0 runs 0B0 0F0"):
        check(parse(*rows), microbatches)


def test_a_table_may_need_more_buffers_than_one() -> None:
    """Both ranks send two messages before they take any."""
    table = parse("0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2")
    check(table, 3)
    needed = fewest_buffers(table)
    for buffers in range(1, needed):
        with pytest.raises(ValueError, match="deadlocks"):
            check(table, 3, buffers=buffers)
    check(table, 3, buffers=needed)


def test_a_forward_tells_which_gradients_have_been_used() -> None:
    known = acknowledged(BUILDERS["1f1b"](range(2), 4))
    assert [known["forward", 0, microbatch] for microbatch in range(4)] == [(), (), (0,), (1,)]


def test_a_channel_is_told_once() -> None:
    edges = (*chain(4), Edge(first=0, last=2, carries=("memory",)))
    assert channels(edges, (0, 1, 0, 1)) == (
        (0, 1, "forward"),
        (1, 0, "forward"),
        (1, 0, "backward"),
        (0, 1, "backward"),
    )
