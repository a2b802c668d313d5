"""Does a proof fail when something is wrong? A check that cannot fail proves nothing."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from launch.case import Case, case_of
from launch.parity import LARGEST_ERROR, Parity, check_parity
from models.named import named_model
from parallel.layouts import Layout
from tests.mutations import (
    broken_all_reduce,
    broken_loss,
    drifting_tied_copy,
    embedding_summed_over_tp,
    gradient_kept,
    gradient_scaled_twice,
    norm_not_summed,
    sent_after_the_first_microbatch,
    untold_event,
    whole_counted_by_every_rank,
)
from tests.rank import Worker
from tests.spawn import Ranks

Mutation = Callable[..., contextlib.AbstractContextManager[None]]

TENSOR_PARALLEL = case_of(named_model("tiny-transformer"), Layout(tp=2))
WHOLE_VOCABULARY = case_of(named_model("tiny-transformer"), Layout(tp=2, vocabulary="whole"))
SEQUENCE_PARALLEL = case_of(named_model("tiny-t5"), Layout(tp=2, sp=True))
PIPELINE = case_of(named_model("tiny-encoder-decoder"), Layout(pp=2, microbatches=3))
BUCKETS = case_of(named_model("tiny-t5"), Layout(dp=2, microbatches=3, gradient_bucket_bytes=1))


def proved(worker: Worker, case: Case, mutation: Mutation, arguments: tuple[Any, ...]) -> Parity:
    with mutation(*arguments):
        return check_parity(case, groups=worker.groups, rank=worker.rank, device=torch.device("cpu"))


def wrong_kinds(parity: Parity) -> set[str]:
    return {kind for kind in ("loss", "gradient", "weight") if parity.worst(kind).error > LARGEST_ERROR}


@pytest.mark.parametrize(
    "case", [TENSOR_PARALLEL, WHOLE_VOCABULARY, SEQUENCE_PARALLEL, PIPELINE, BUCKETS], ids=lambda case: case.name
)
def test_each_case_passes_when_nothing_is_broken(case: Case, two_ranks: Ranks) -> None:
    assert two_ranks.run(proved, case, contextlib.nullcontext, ())[0].failures == ()


@pytest.mark.parametrize(
    "site", ["encoder.block.0.ffn.down", "decoder.block.1.cross_attention.query", "decoder.memory"]
)
def test_a_broken_all_reduce_is_noticed(site: str, two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, TENSOR_PARALLEL, broken_all_reduce, (site,))[0]
    assert not parity.has_passed
    assert {"gradient", "weight"} <= wrong_kinds(parity)


def test_a_loss_over_some_rows_of_the_vocabulary_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, TENSOR_PARALLEL, broken_loss, ())[0]
    assert not parity.has_passed
    assert wrong_kinds(parity) == {"loss", "gradient", "weight"}


def test_a_whole_embedding_whose_gradient_is_summed_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, WHOLE_VOCABULARY, embedding_summed_over_tp, ())[0]
    assert wrong_kinds(parity) == {"gradient", "weight"}
    assert "embedding.token" in parity.gradient.name
    assert parity.gradient.error == pytest.approx(1.0)


def test_a_norm_that_counts_what_is_whole_on_every_rank_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, WHOLE_VOCABULARY, whole_counted_by_every_rank, ())[0]
    assert wrong_kinds(parity) == set()
    assert parity.gradient_norm.error > 1e-3
    assert not parity.has_passed


def test_a_gradient_that_is_scaled_twice_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, PIPELINE, gradient_scaled_twice, (PIPELINE.layout.microbatches,))[0]
    assert not parity.has_passed
    assert wrong_kinds(parity) == {"gradient", "weight"}
    assert parity.gradient_norm.error == pytest.approx(2 / 3)


def test_a_norm_that_is_not_summed_under_sp_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, SEQUENCE_PARALLEL, norm_not_summed, ())[0]
    assert not parity.has_passed
    assert wrong_kinds(parity) == {"gradient", "weight"}
    assert "norm" in parity.gradient.name
    assert parity.replica.error > LARGEST_ERROR


def test_a_tied_copy_that_drifts_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, PIPELINE, drifting_tied_copy, ())[0]
    assert not parity.has_passed
    assert wrong_kinds(parity) == {"gradient", "weight"}
    assert parity.gradient.name == "encoder.embedding.token.weight"
    assert parity.replica.error > LARGEST_ERROR


def test_a_gradient_that_a_step_leaves_behind_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, PIPELINE, gradient_kept, ())[0]
    assert {"gradient", "weight"} <= wrong_kinds(parity)
    assert parity.gradient_norm.error > 0.1


def test_a_bucket_that_leaves_too_early_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, BUCKETS, sent_after_the_first_microbatch, (BUCKETS.layout.microbatches,))[0]
    assert wrong_kinds(parity) == {"gradient", "weight"}
    assert parity.replica.error > LARGEST_ERROR


def test_buckets_that_are_not_summed_are_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, BUCKETS, broken_all_reduce, ("gradient.dp",))[0]
    assert {"gradient", "weight"} <= wrong_kinds(parity)


def test_a_communication_that_the_ledger_lacks_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved, TENSOR_PARALLEL, untold_event, ("decoder.memory",))[0]
    assert wrong_kinds(parity) == set()
    (failure,) = parity.failures
    assert failure.startswith("rank 0 (dp=0 pp=0 cp=0 tp=0): ")


def test_every_rank_hears_the_same(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(proved, PIPELINE, drifting_tied_copy, ())
    assert first == second
