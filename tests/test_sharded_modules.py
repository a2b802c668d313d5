"""Does each sharded linear map compute what the whole one does, forward and backward?

Every rank holds its shard, computes, and compares with the whole module in float64 on its own.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.layers import FusedLinear
from parallel.collectives import enter, leave, slice_sequence
from parallel.plan import Entering, Entry, Leaving, Part
from parallel.tensor import ColumnLinear, MemoryEntry, RowLinear
from tests.rank import Worker
from tests.shard_checks import (
    LENGTH,
    SEQUENCES,
    SITE,
    WIDTH,
    close,
    random,
    shard,
    shard_of,
    tensor_parallel,
)
from tests.spawn import Ranks

# ---- collectives with a gradient ----------------------------------------------------------------------------------


def conjugate_pairs(worker: Worker) -> None:
    comm = tensor_parallel(worker)
    size, mine = worker.world_size, worker.rank
    own = random(LENGTH, 2, seed=mine).requires_grad_()
    weight = random(LENGTH, 2, seed=10 + mine)
    everyone = [random(LENGTH, 2, seed=rank) for rank in range(size)]
    weights = [random(LENGTH, 2, seed=10 + rank) for rank in range(size)]
    rows = slice(mine * LENGTH // size, (mine + 1) * LENGTH // size)

    out = enter(own, "copy", comm, SITE)
    (out * weight).sum().backward()
    assert torch.equal(out, own)
    close(own.grad, sum(weights, torch.zeros(())))

    own.grad = None
    out = leave(own * 1.0, "reduce", comm, SITE)
    (out * weight).sum().backward()
    close(out, sum(everyone, torch.zeros(())))
    close(own.grad, weight)

    own.grad = None
    out = leave(own, "scatter", comm, SITE)
    (out * weight[rows]).sum().backward()
    close(out, sum(everyone, torch.zeros(()))[rows])
    close(own.grad, torch.cat([weights[r][r * LENGTH // size : (r + 1) * LENGTH // size] for r in range(size)]))

    part = random(LENGTH // size, 2, seed=mine).requires_grad_()
    out = enter(part, "gather", comm, SITE)
    (out * weight).sum().backward()
    close(out, torch.cat([random(LENGTH // size, 2, seed=rank) for rank in range(size)]))
    close(part.grad, sum(weights, torch.zeros(()))[rows])

    own.grad = None
    out = slice_sequence(own, comm)
    (out * weight[rows]).sum().backward()
    assert torch.equal(out, own[rows])
    expected = torch.zeros_like(own)
    expected[rows] = weight[rows]
    close(own.grad, expected)


def inputs_survive(worker: Worker) -> None:
    """No collective writes into what others may hold: only a partial sum is given away."""
    comm = tensor_parallel(worker)
    enterings: tuple[Entering, ...] = ("copy", "gather", "gather_once")
    leavings: tuple[Leaving, ...] = ("reduce", "scatter")
    for move in (*(partial(enter, entering=e) for e in enterings), *(partial(leave, leaving=e) for e in leavings)):
        given = random(LENGTH, 2, seed=worker.rank).requires_grad_()
        out = move(given * 1.0, comm=comm, site=SITE)
        gradient = random(*out.shape, seed=7)
        before = gradient.clone()
        out.backward(gradient)
        assert torch.equal(gradient, before), move
        held = random(LENGTH, 2, seed=worker.rank)
        out = move(held, comm=comm, site=SITE)
        assert out is held or torch.equal(held, given), move
        assert (out is held) == (move.keywords == {"leaving": "reduce"}), move


def test_conjugate_pairs_move_and_sum_what_they_say(two_ranks: Ranks, four_ranks: Ranks) -> None:
    two_ranks.run(conjugate_pairs)
    four_ranks.run(conjugate_pairs)


def test_no_collective_changes_what_it_was_given(two_ranks: Ranks) -> None:
    two_ranks.run(inputs_survive)


def test_a_length_that_does_not_divide_is_never_sliced(two_ranks: Ranks) -> None:
    two_ranks.run(refuses_an_odd_length)


def refuses_an_odd_length(worker: Worker) -> None:
    comm = tensor_parallel(worker)
    with pytest.raises(AssertionError, match=r"^length 7 over 2 tp ranks$"):
        slice_sequence(random(7, 2), comm)
    with pytest.raises(AssertionError, match=r"^here: length 7 over 2 ranks$"):
        comm.reduce_scatter(random(7, 2), "tp", site=SITE, phase="forward")


# ---- linear maps --------------------------------------------------------------------------------------------------


def column(worker: Worker, entering: Entering, counts: tuple[int, ...], width: int, has_bias: bool) -> None:
    comm = tensor_parallel(worker)
    parts = tuple(Part(count=count, width=width) for count in counts)
    entry = Entry(module="up", style="colwise", entering=entering, parts=parts)
    whole = FusedLinear(WIDTH, tuple(count * width for count in counts), has_bias)
    rows = sum(count * width for count in counts)
    whole.weight = nn.Parameter(random(rows, WIDTH, seed=1))
    whole.bias = nn.Parameter(random(rows, seed=2)) if has_bias else None
    x_whole = random(LENGTH, SEQUENCES, WIDTH, seed=3).requires_grad_()
    x = (x_whole if entering == "copy" else slice_sequence(x_whole, comm)).detach().clone().requires_grad_()
    module = ColumnLinear(
        weight=shard(entry, "weight", whole.weight.detach(), comm),
        bias=shard(entry, "bias", whole.bias.detach(), comm) if whole.bias is not None else None,
        entry=entry,
        comm=comm,
    )
    outs = module(x)
    assert len(outs) == len(counts)
    loss, loss_whole = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for index, (part, out, out_whole) in enumerate(zip(parts, outs, whole(x_whole), strict=True)):
        start, stop = part.share(comm.size("tp"), comm.position("tp"))
        close(out, out_whole[..., start:stop])
        weight = random(*out_whole.shape, seed=10 + index)
        # Copies of a unit share its gradient between them, as query heads do.
        loss = loss + (out * weight[..., start:stop]).sum() / part.replicas(comm.size("tp"))
        loss_whole = loss_whole + (out_whole * weight).sum()
    loss.backward()
    loss_whole.backward()
    assert x_whole.grad is not None
    close(x.grad, x_whole.grad if entering == "copy" else slice_sequence(x_whole.grad, comm))
    for name in ("weight", "bias") if has_bias else ("weight",):
        expected = shard_of(getattr(whole, name).grad, entry, name, comm)
        found = getattr(module, name).grad.clone()
        if any(part.replicas(comm.size("tp")) > 1 for part in parts):
            start, stop = entry.shard(name, comm.size("tp"), comm.position("tp")).replicated_rows
            comm.all_reduce(found[start:stop], "kv_replica", site=SITE, phase="step").wait()
        close(found, expected)


@pytest.mark.parametrize("entering", ["copy", "gather", "gather_once"])
def test_a_column_parallel_product_is_its_rows_of_the_whole(entering: Entering, two_ranks: Ranks) -> None:
    two_ranks.run(column, entering, (4, 2, 2), 3, True)
    two_ranks.run(column, entering, (5,), 1, False)


@pytest.mark.parametrize("entering", ["copy", "gather"])
def test_units_fewer_than_ranks_are_held_twice_and_their_gradients_add_up(
    entering: Entering, four_ranks: Ranks
) -> None:
    four_ranks.run(column, entering, (4, 2, 2), 3, True)


def row(worker: Worker, leaving: Leaving, has_bias: bool) -> None:
    comm = tensor_parallel(worker)
    part = Part(count=5, width=2)
    entry = Entry(module="down", style="rowwise", leaving=leaving, parts=(part,))
    weight = random(WIDTH, 10, seed=1).requires_grad_()
    bias = random(WIDTH, seed=2).requires_grad_() if has_bias else None
    x_whole = random(LENGTH, SEQUENCES, 10, seed=3).requires_grad_()
    start, stop = part.share(comm.size("tp"), comm.position("tp"))
    x = x_whole[..., start:stop].detach().clone().requires_grad_()
    local_bias = nn.Parameter(bias.detach().clone()) if bias is not None else None
    module = RowLinear(weight=shard(entry, "weight", weight.detach(), comm), bias=local_bias, entry=entry, comm=comm)
    out, out_whole = module(x), F.linear(x_whole, weight, bias)
    factor = random(*out_whole.shape, seed=4)
    here = factor if leaving == "reduce" else slice_sequence(factor, comm)
    close(out, out_whole if leaving == "reduce" else slice_sequence(out_whole, comm))
    (out * here).sum().backward()
    (out_whole * factor).sum().backward()
    assert x_whole.grad is not None
    close(x.grad, x_whole.grad[..., start:stop])
    close(module.weight.grad, shard_of(weight.grad, entry, "weight", comm))
    if local_bias is not None and bias is not None:
        gradient = local_bias.grad
        assert gradient is not None
        if leaving == "scatter":
            comm.all_reduce(gradient, "tp", site=SITE, phase="step").wait()
        close(gradient, bias.grad)


@pytest.mark.parametrize("leaving", ["reduce", "scatter"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_row_parallel_product_adds_its_bias_once(leaving: Leaving, has_bias: bool, two_ranks: Ranks) -> None:
    two_ranks.run(row, leaving, has_bias)


def memory_entry(worker: Worker, entering: Entering) -> None:
    comm = tensor_parallel(worker)
    entry = Entry(module="decoder.memory", style="memory_entry", stream="memory", entering=entering)
    whole = random(LENGTH, SEQUENCES, WIDTH, seed=1)
    memory = (slice_sequence(whole, comm) if entering == "gather" else whole).clone().requires_grad_()
    comm.ledger.clear()
    entered = MemoryEntry(entry=entry, comm=comm)(memory)
    assert torch.equal(entered, whole)
    weights = [random(LENGTH, SEQUENCES, WIDTH, seed=10 + rank) for rank in range(worker.world_size)]
    # Two readers, as two blocks: their gradients are added before anything is sent.
    ((entered * weights[worker.rank]).sum() + (entered * weights[worker.rank]).sum()).backward()
    expected = 2 * sum(weights, torch.zeros(()))
    close(memory.grad, slice_sequence(expected, comm) if entering == "gather" else expected)
    assert [event.phase for event in comm.ledger].count("backward") == 1


@pytest.mark.parametrize("entering", ["copy", "gather"])
def test_the_memory_gradient_of_all_readers_is_reduced_once(entering: Entering, two_ranks: Ranks) -> None:
    two_ranks.run(memory_entry, entering)
