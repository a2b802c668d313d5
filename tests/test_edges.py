"""Is what crosses an edge checked before it moves, let go after it moved, and does a failing rank end the others?"""

import time
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from models.batch import Batch
from models.model import Hidden
from parallel.comm import Comm, Message, Pending
from parallel.engines.engine import StepFacts
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout, Schedule
from parallel.plans import plan
from parallel.schedule import Direction
from tests.one_rank import CPU, rank_of
from tests.rank import Worker
from tests.small_models import small_batch, small_config
from tests.spawn import RankError, Ranks

CONFIG = small_config("encoder_decoder")
LAYOUT = Layout(pp=3, cut=(2, 4), microbatches=3)
"""Edge 0-1 carries the source, edge 1-2 target and memory."""
BATCH = small_batch(CONFIG)

Change = Callable[[Hidden], Hidden]


def widened(left: Hidden) -> Hidden:
    return {name: torch.cat((tensor, tensor[..., :1]), -1) for name, tensor in left.items()}


def shortened(left: Hidden) -> Hidden:
    return {name: tensor[:-1] for name, tensor in left.items()}


def narrowed(left: Hidden) -> Hidden:
    return {name: tensor.float() for name, tensor in left.items()}


def detached(left: Hidden) -> Hidden:
    return {name: tensor.detach() for name, tensor in left.items()}


def detached_memory(left: Hidden) -> Hidden:
    return {name: tensor.detach() if name == "memory" else tensor for name, tensor in left.items()}


def engine_of(comm: Comm, layout: Layout) -> NativeEngine:
    settings = EngineSettings(seed=0, dtype=torch.float64, device=CPU)
    return NativeEngine(plan=plan(CONFIG, layout), comm=comm, settings=settings)


def change_what_leaves(engine: NativeEngine, change: Change) -> None:
    (part,) = engine.parts.values()
    forward = part.forward

    def changed(batch: Batch, hidden: Hidden) -> Hidden:
        return change(forward(batch, hidden))

    part.forward = changed  # type: ignore[method-assign]


# ---- checks before data moves -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "change", "message"),
    [
        (
            0,
            widened,
            r"^edge\.0-1 >0-1F0: source is \(7, 1, 17\) torch.float64, the edge carries \(7, 1, 16\) torch.float64$",
        ),
        (0, shortened, r"^edge\.0-1 >0-1F0: source is \(6, 1, 16\) torch.float64, the edge carries \(7, 1, 16\) torch"),
        (0, narrowed, r"^edge\.0-1 >0-1F0: source is \(7, 1, 16\) torch.float32, the edge carries .* torch.float64$"),
        (0, detached, r"^edge\.0-1 >0-1F0: source has no gradient to send back$"),
        (1, shortened, r"^edge\.1-2 >1-2F0: target is \(4, 1, 16\) torch.float64, the edge carries \(5, 1, 16\) torch"),
        (1, detached_memory, r"^edge\.1-2 >1-2F0: memory has no gradient to send back$"),
    ],
)
def test_a_tensor_that_is_not_what_the_edge_carries_is_refused_before_it_moves(
    rank: int, change: Change, message: str
) -> None:
    with rank_of(plan(CONFIG, LAYOUT), rank) as comm:
        engine = engine_of(comm, LAYOUT)
        change_what_leaves(engine, change)
        with pytest.raises(RuntimeError, match=message):
            engine.step(BATCH)
        assert [event for event in comm.ledger if event.operation == "send"] == []


def test_under_sequence_parallelism_an_edge_carries_the_shard_of_a_padded_stream() -> None:
    layout = LAYOUT.replace(tp=2, sp=True)
    with rank_of(plan(CONFIG, layout), 0) as comm:
        engine = engine_of(comm, layout)
        change_what_leaves(engine, shortened)
        with pytest.raises(RuntimeError, match=r"source is \(3, 1, 16\) torch.float64, the edge carries \(4, 1, 16\)"):
            engine.step(BATCH)


def test_an_input_that_the_stage_does_not_read_is_told() -> None:
    """Its sender waits for a gradient."""
    with rank_of(plan(CONFIG, LAYOUT), 2) as comm:
        engine = engine_of(comm, LAYOUT)
        (part,) = engine.parts.values()
        forward = part.forward

        def forgetful(batch: Batch, hidden: Hidden) -> Hidden:
            return forward(batch, {**hidden, "memory": hidden["memory"].detach()})

        part.forward = forgetful  # type: ignore[method-assign]
        with pytest.raises(AssertionError, match=r"^no gradient for \['memory'\]$"):
            engine.step(BATCH)


def test_a_step_without_any_label_is_refused() -> None:
    empty = Batch(
        labels=torch.full_like(BATCH.labels, -100),
        source=BATCH.source,
        source_lengths=BATCH.source_lengths,
        target=BATCH.target,
        target_lengths=BATCH.target_lengths,
    )
    layout = Layout()
    with rank_of(plan(CONFIG, layout), 0) as comm:
        engine = engine_of(comm, layout)
        with pytest.raises(ValueError, match=r"^none of the step's sequences has a label: there is no loss to divide$"):
            engine.step(empty)


# ---- what is kept -------------------------------------------------------------------------------------------------


def most_sent_alive(worker: Worker, schedule: Schedule) -> tuple[int, int]:
    """Most tensors that were sent and still exist when the next are sent: (anywhere in the step, after it)."""
    layout = Layout(pp=2, microbatches=8, schedule=schedule)
    comm = Comm.create(plan=plan(CONFIG, layout), rank=worker.rank, groups=worker.groups, device=CPU)
    engine = engine_of(comm, layout)
    send, sent, alive = comm.send, list[weakref.ref[Tensor]](), [0]

    def counted(messages: Sequence[Message], peer: int, *, direction: Direction) -> list[Pending]:
        alive.append(sum(reference() is not None for reference in sent))
        sent.extend(weakref.ref(message.tensor) for message in messages)
        return send(messages, peer, direction=direction)

    comm.send = counted  # type: ignore[method-assign]
    engine.step(small_batch(CONFIG, num_sequences=8))
    del comm.send
    assert len(sent) == 8
    return max(alive), sum(reference() is not None for reference in sent)


def test_what_was_sent_is_let_go_when_the_next_stage_has_it(two_ranks: Ranks) -> None:
    """One microbatch under way and one that is just being sent."""
    for during, after in two_ranks.run(most_sent_alive, "1f1b"):
        assert during <= 2
        assert after == 0


def test_nothing_of_a_step_is_kept_after_it() -> None:
    for schedule in ("gpipe", "1f1b"):
        layout = Layout.from_dict({"pp": 3, "cut": [2, 4], "microbatches": 3, "schedule": schedule})
        for rank in range(3):
            kept: list[weakref.ref[Tensor]] = []
            with rank_of(plan(CONFIG, layout), rank) as comm:
                engine = engine_of(comm, layout)

                def remember(left: Hidden, kept: list[weakref.ref[Tensor]] = kept) -> Hidden:
                    kept.extend(map(weakref.ref, left.values()))
                    return left

                change_what_leaves(engine, remember)
                engine.step(BATCH)
                assert len(kept) >= 3
                assert [reference for reference in kept if reference() is not None] == []


# ---- a rank that fails --------------------------------------------------------------------------------------------


def fails_in_the_middle(worker: Worker) -> None:
    comm = Comm.create(plan=plan(CONFIG, LAYOUT_OF_TWO), rank=worker.rank, groups=worker.groups, device=CPU)
    engine = engine_of(comm, LAYOUT_OF_TWO)
    calls: list[None] = []

    def fail(left: Hidden) -> Hidden:
        calls.append(None)
        if worker.rank == 1 and len(calls) == 2:
            raise RuntimeError("the second microbatch is broken on purpose")
        return left

    change_what_leaves(engine, fail)
    engine.step(BATCH)


LAYOUT_OF_TWO = Layout(pp=2, microbatches=3)


def one_step(worker: Worker) -> StepFacts:
    comm = Comm.create(plan=plan(CONFIG, LAYOUT_OF_TWO), rank=worker.rank, groups=worker.groups, device=CPU)
    return engine_of(comm, LAYOUT_OF_TWO).step(BATCH)


def test_a_rank_that_fails_in_the_middle_of_a_step_is_named_and_ends_the_others(two_ranks: Ranks) -> None:
    two_ranks.run(one_step)
    begun = time.monotonic()
    with pytest.raises(
        RankError, match=r"^rank 1 raised\n(?s:.*)RuntimeError: the second microbatch is broken on purpose"
    ):
        two_ranks.run(fails_in_the_middle)
    assert time.monotonic() - begun < 40.0
    first, second = two_ranks.run(one_step)
    assert first == second
