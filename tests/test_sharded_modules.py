"""Does each sharded module compute what the whole one does, forward and backward?

Every rank holds its shard, computes, and compares with the whole module in float64 on its own.
"""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.batch import IGNORED
from models.config import Architecture
from models.head import CrossEntropy, Head
from models.layers import FusedLinear
from parallel.collectives import enter, leave, slice_sequence
from parallel.comm import Comm, Groups, Site
from parallel.engines.native import NativeEngine, OptimizerName
from parallel.layouts import Layout
from parallel.parallelize import parallelize, take
from parallel.plan import Entering, Entry, Leaving, Part
from parallel.plans import plan
from parallel.tensor import ColumnLinear, MemoryEntry, RowLinear
from parallel.vocabulary import VocabularyCrossEntropy, VocabularyEmbedding, VocabularyHead
from tests.rank import Worker
from tests.small_models import ARCHITECTURES, small_batch, small_config, small_model
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

CPU = torch.device("cpu")
LENGTH, SEQUENCES, WIDTH = 8, 3, 6
SITE = Site(name="here")


def close(found: Tensor | None, expected: Tensor | None) -> None:
    """Equal but for the order of sums."""
    assert found is not None
    assert expected is not None
    torch.testing.assert_close(found, expected, rtol=EXACT_RTOL, atol=1e-12)


def random(*shape: int, seed: int = 0) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensor_parallel(worker: Worker) -> Comm:
    planned = plan(small_config("decoder_only"), Layout(tp=worker.world_size))
    return Comm.create(plan=planned, rank=worker.rank, groups=worker.groups, device=CPU)


def alone() -> Comm:
    planned = plan(small_config("decoder_only"), Layout())
    return Comm.create(plan=planned, rank=0, groups=Groups(timeout_seconds=1.0), device=CPU)


def shard(entry: Entry, name: str, whole: Tensor, comm: Comm) -> nn.Parameter:
    return nn.Parameter(take(whole, entry.shard(name, comm.size("tp"), comm.position("tp"))).clone())


def shard_of(whole: Tensor | None, entry: Entry, name: str, comm: Comm) -> Tensor:
    assert whole is not None
    return take(whole, entry.shard(name, comm.size("tp"), comm.position("tp")))


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
    enterings: tuple[Entering, ...] = ("copy", "gather")
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
    x = (slice_sequence(x_whole, comm) if entering == "gather" else x_whole).detach().clone().requires_grad_()
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
    close(x.grad, slice_sequence(x_whole.grad, comm) if entering == "gather" else x_whole.grad)
    for name in ("weight", "bias") if has_bias else ("weight",):
        expected = shard_of(getattr(whole, name).grad, entry, name, comm)
        found = getattr(module, name).grad.clone()
        if any(part.replicas(comm.size("tp")) > 1 for part in parts):
            start, stop = entry.shard(name, comm.size("tp"), comm.position("tp")).replicated_rows
            comm.all_reduce(found[start:stop], "kv_replica", site=SITE, phase="step").wait()
        close(found, expected)


@pytest.mark.parametrize("entering", ["copy", "gather"])
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


# ---- the vocabulary -----------------------------------------------------------------------------------------------


def vocabulary_embedding(worker: Worker, leaving: Leaving, rows: int) -> None:
    comm = tensor_parallel(worker)
    entry = Entry(module="token", style="vocabulary_embedding", leaving=leaving, parts=(Part(count=rows, width=1),))
    weight = random(rows, WIDTH, seed=1).requires_grad_()
    # Every row at least once, some twice.
    ids = (torch.arange(LENGTH * SEQUENCES) * 7 % rows).reshape(LENGTH, SEQUENCES)
    module = VocabularyEmbedding(weight=shard(entry, "weight", weight.detach(), comm), entry=entry, comm=comm)
    out, out_whole = module(ids), F.embedding(ids, weight)
    factor = random(*out_whole.shape, seed=2)
    close(out, out_whole if leaving == "reduce" else slice_sequence(out_whole, comm))
    (out * (factor if leaving == "reduce" else slice_sequence(factor, comm))).sum().backward()
    (out_whole * factor).sum().backward()
    close(module.weight.grad, shard_of(weight.grad, entry, "weight", comm))


@pytest.mark.parametrize("leaving", ["reduce", "scatter"])
@pytest.mark.parametrize("rows", [11, 12, 4])
def test_an_embedding_dealt_out_by_rows_is_the_whole_one(leaving: Leaving, rows: int, four_ranks: Ranks) -> None:
    four_ranks.run(vocabulary_embedding, leaving, rows)


def vocabulary_head(worker: Worker, entering: Entering) -> None:
    comm = tensor_parallel(worker)
    config = small_config("decoder_only", head_bias=True, head_scale=True, head_transform=True, vocabulary=11)
    entry = Entry(module="head", style="vocabulary_head", entering=entering, parts=(Part(count=11, width=1),))
    whole = Head(config).double()
    with torch.no_grad():
        for index, parameter in enumerate(whole.parameters()):
            parameter.copy_(random(*parameter.shape, seed=index))
    local = copy.deepcopy(whole)
    local.weight, local.bias = (shard(entry, name, getattr(whole, name).detach(), comm) for name in ("weight", "bias"))
    module = VocabularyHead(head=local, entry=entry, comm=comm)
    hidden_whole = random(LENGTH, SEQUENCES, config.width, seed=20).requires_grad_()
    hidden = hidden_whole if entering == "copy" else slice_sequence(hidden_whole, comm)
    hidden = hidden.detach().clone().requires_grad_()
    logits, logits_whole = module(hidden), whole(hidden_whole)
    start, stop = entry.parts[0].share(comm.size("tp"), comm.position("tp"))
    close(logits, logits_whole[..., start:stop])
    factor = random(*logits_whole.shape, seed=21)
    (logits * factor[..., start:stop]).sum().backward()
    (logits_whole * factor).sum().backward()
    assert hidden_whole.grad is not None
    close(hidden.grad, hidden_whole.grad if entering == "copy" else slice_sequence(hidden_whole.grad, comm))
    for name, parameter in module.named_parameters():
        expected = whole.get_parameter(name).grad
        assert parameter.grad is not None
        if name in ("weight", "bias"):
            expected = shard_of(expected, entry, name, comm)
        elif entering == "gather":
            comm.all_reduce(parameter.grad, "tp", site=SITE, phase="step").wait()
        close(parameter.grad, expected)


@pytest.mark.parametrize("entering", ["copy", "gather"])
def test_a_head_dealt_out_by_rows_is_the_whole_one(entering: Entering, two_ranks: Ranks) -> None:
    two_ranks.run(vocabulary_head, entering)


def cross_entropy(worker: Worker, rows: int, scale: float, ignored: str) -> None:
    comm = tensor_parallel(worker)
    entry = Entry(module="loss", style="vocabulary_loss", parts=(Part(count=rows, width=1),))
    labels = (torch.arange(LENGTH * SEQUENCES) * 5 % rows).reshape(SEQUENCES, LENGTH)
    if ignored == "some":
        labels[1, 2:] = IGNORED
        labels[0, 0] = IGNORED
    elif ignored == "all":
        labels[:] = IGNORED
    logits_whole = (random(LENGTH, SEQUENCES, rows, seed=1) * scale).requires_grad_()
    start, stop = entry.parts[0].share(comm.size("tp"), comm.position("tp"))
    logits = logits_whole[..., start:stop].detach().clone().requires_grad_()
    before = logits.detach().clone()
    loss = VocabularyCrossEntropy(entry=entry, comm=comm)(logits, labels)
    loss_whole = F.cross_entropy(
        logits_whole.flatten(0, 1), labels.t().flatten(), ignore_index=IGNORED, reduction="sum"
    )
    close(loss, loss_whole)
    assert torch.equal(logits, before)
    (loss * 0.37).backward()
    (loss_whole * 0.37).backward()
    assert logits_whole.grad is not None
    close(logits.grad, logits_whole.grad[..., start:stop])
    if ignored == "all":
        assert loss.item() == 0.0
        assert logits.grad is not None
        assert not logits.grad.any()


@pytest.mark.parametrize("rows", [11, 12, 4])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_cross_entropy_over_ranks_is_that_of_all_logits(rows: int, ignored: str, four_ranks: Ranks) -> None:
    four_ranks.run(cross_entropy, rows, 3.0, ignored)


def test_cross_entropy_over_ranks_is_stable_for_large_logits(two_ranks: Ranks) -> None:
    two_ranks.run(cross_entropy, 11, 1e4, "some")


def half_cross_entropy(worker: Worker) -> tuple[float, float]:
    """Worst error of the gradient of bfloat16 logits, and the error of its sum, both relative to float64."""
    comm = tensor_parallel(worker)
    rows, tokens = 64, 1019.0
    entry = Entry(module="loss", style="vocabulary_loss", parts=(Part(count=rows, width=1),))
    whole = random(LENGTH, SEQUENCES, rows, seed=1).bfloat16()
    labels = (torch.arange(LENGTH * SEQUENCES) * 5 % rows).reshape(SEQUENCES, LENGTH)
    start, stop = entry.parts[0].share(comm.size("tp"), comm.position("tp"))
    logits = whole[..., start:stop].clone().requires_grad_()
    loss = VocabularyCrossEntropy(entry=entry, comm=comm)(logits, labels)
    assert loss.dtype == torch.float32
    (loss / tokens).backward()
    exact = whole.double().requires_grad_()
    (CrossEntropy()(exact, labels) / tokens).backward()
    assert exact.grad is not None
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    expected, found = exact.grad[..., start:stop], logits.grad.double()
    bias = (found * expected).sum() / expected.square().sum() - 1
    return ((found - expected).abs().max() / expected.abs().max()).item(), bias.abs().item()


def test_cross_entropy_of_bfloat16_logits_is_computed_in_float32(two_ranks: Ranks) -> None:
    for worst, bias in two_ranks.run(half_cross_entropy):
        assert worst < 2**-8
        assert bias < 2**-10


# ---- degree 1 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_degree_one_swaps_no_module(architecture: Architecture) -> None:
    config = small_config(architecture, dropout=0.1)
    with torch.device("meta"):
        plain = small_model(config)
    kinds = [type(module) for module in plain.modules()]
    parallelized = parallelize(plain, plan(config, Layout()), alone())
    assert [type(module) for module in parallelized.modules()] == kinds


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_degree_one_equals_plain_pytorch_bit_for_bit(
    architecture: Architecture, dtype: torch.dtype, optimizer: OptimizerName
) -> None:
    config = small_config(architecture, tying="head", dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
    batch = small_batch(config)
    engine = NativeEngine(
        plan=plan(config, Layout()),
        comm=alone(),
        seed=3,
        dtype=dtype,
        device=CPU,
        optimizer=optimizer,
        learning_rate=0.05,
    )
    plain = small_model(config, seed=3, dtype=dtype).train()
    plain.mask_key.seed = 3
    parameters = list(plain.parameters())
    updates: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.05)
    if optimizer == "adamw":
        updates = torch.optim.AdamW(parameters, lr=0.05, fused=True)
    for _ in range(2):
        facts = engine.step(batch)
        updates.zero_grad()
        assert plain.loss is not None
        loss = plain.loss(plain(batch, {})["logits"], batch.labels) / batch.num_loss_tokens()
        loss.backward()
        assert facts.loss == loss.item()
        assert set(engine.gradients.views) == {name for name, _ in plain.named_parameters()}
        for name, parameter in plain.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(engine.gradients.views[name], parameter.grad), name
        updates.step()
        plain.mask_key.step += 1
        for name, parameter in engine.model.named_parameters():
            assert torch.equal(parameter, plain.get_parameter(name)), name
