"""Do embedding, head and loss over a dealt-out vocabulary compute what the whole ones do, forward and backward?

Every rank holds its shard, computes, and compares with the whole module in float64 on its own.
"""

import copy

import pytest
import torch
import torch.nn.functional as F

from models.batch import IGNORED
from models.head import CrossEntropy, Head
from parallel.collectives import slice_sequence
from parallel.plan import Entering, Entry, Leaving, Part
from parallel.vocabulary import VocabularyCrossEntropy, VocabularyEmbedding, VocabularyHead
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
from tests.small_models import small_config
from tests.spawn import Ranks

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
        elif entering != "copy":
            comm.all_reduce(parameter.grad, "tp", site=SITE, phase="step").wait()
        close(parameter.grad, expected)


@pytest.mark.parametrize("entering", ["copy", "gather", "gather_once"])
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
