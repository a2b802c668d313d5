"""Is every layout equal to one process, and is "equal" measured as it is said?"""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from launch.case import Case, case_of
from launch.matrix import cases
from launch.parity import Parity, case_batch, check_parity, compare, relative_error
from launch.reference import Reference
from models.batch import IGNORED
from models.named import named_model
from parallel.comm import Groups
from parallel.engines.engine import StepFacts
from parallel.engines.gathered import Gathered, put_together
from parallel.layouts import Layout
from parallel.plan import WHOLE
from parallel.sequence import deal
from tests.rank import Worker
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

CPU = torch.device("cpu")

WHOLE_INPUTS = Layout(tp=2, sp=True, saved_input="whole", pp=2, schedule="zb_h1", microbatches=2)


def proved(worker: Worker, case: Case) -> Parity:
    return check_parity(case, groups=worker.groups, rank=worker.rank, device=CPU)


def parity_of(case: Case, request: pytest.FixtureRequest) -> Parity:
    if case.layout.world_size == 1:
        return check_parity(case, groups=Groups(timeout_seconds=1.0), rank=0, device=CPU)
    ranks: Ranks = request.getfixturevalue({2: "two_ranks", 4: "four_ranks"}[case.layout.world_size])
    return ranks.run(proved, case)[0]


def covering(every: Sequence[Case]) -> list[Case]:
    """Few cases in which every architecture meets every value of every option; `verify --matrix` proves all pairs."""
    left = {case: _values(case) for case in every}
    wanted, chosen = set().union(*left.values()), []
    while wanted:
        best = max(left, key=lambda case: (len(left[case] & wanted), -case.layout.world_size))
        chosen.append(best)
        wanted -= left.pop(best)
    return sorted(chosen, key=every.index)


def _values(case: Case) -> set[tuple[str, str, object]]:
    options = {**case.layout.to_dict(), "data": case.data}
    return {(case.config.architecture, name, str(value)) for name, value in options.items()}


@pytest.mark.parametrize("case", covering(cases()), ids=lambda case: case.name.replace(" ", "-"))
def test_a_layout_equals_one_process(case: Case, request: pytest.FixtureRequest) -> None:
    parity = parity_of(case, request)
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("transformer-big", Layout(tp=2, sp=True, pp=2, cut="aligned", microbatches=2)),
        ("speech", Layout(pp=4, microbatches=3, memory_gather="per_block")),
        ("t5-11b", Layout(tp=4, memory_gather="per_block")),
        ("t5-base", WHOLE_INPUTS),
        ("t5-small", WHOLE_INPUTS.replace(memory_gather="per_block", recompute="full")),
        ("llama-2-70b", Layout(tp=2, sp=True, dp=2, recompute="full")),
        ("bert-large", Layout(tp=2, pp=2, schedule="gpipe", microbatches=4)),
        ("mbart-large", Layout(pp=4, cut=(5, 11, 19), recompute="selective")),
    ],
    ids=lambda given: given if isinstance(given, str) else given.label,
)
def test_a_small_relative_of_a_published_model_equals_one_process(
    model: str, layout: Layout, request: pytest.FixtureRequest
) -> None:
    assert parity_of(case_of(named_model(model), layout), request).failures == ()


def test_ranks_of_one_step_have_different_numbers_of_labels_in_a_case_of_every_architecture() -> None:
    """Else a mean of means would pass for the mean."""
    differing = set()
    for case in cases():
        if case.layout.dp > 1 and case.data != "full":
            batch = case_batch(case, seed=0)
            counts = {deal(batch, case.layout, rank).num_loss_tokens() for rank in range(case.layout.dp)}
            if len(counts) > 1:
                differing.add(case.config.architecture)
    assert differing == {"encoder_decoder", "decoder_only", "encoder_only"}


def test_text_is_cut_and_padded() -> None:
    """Of two sentences both may be long; of more, none of these batches has such."""
    for case in cases():
        if case.data == "text" and case.num_sequences > 2:
            batch = case_batch(case, seed=0)
            assert (batch.labels == IGNORED).any()
            lengths = batch.lengths(batch.predicted_stream)
            assert len(set(lengths)) > 1


# ---- how far is off -----------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("found", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.5], [1.0, 2.0], 0.25),
        ([0.5, -4.0], [0.0, -4.0], 0.125),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 1e-300], [0.0, 0.0], INF),
        ([NAN, 2.0], [1.0, 2.0], INF),
        ([1.0, 2.0], [NAN, 2.0], INF),
        ([INF, 2.0], [1.0, 2.0], INF),
        ([INF, 2.0], [INF, 2.0], INF),
        ([1.0, 2.0, 3.0], [1.0, 2.0], INF),
        ([], [], 0.0),
    ],
)
def test_an_error_is_the_largest_difference_over_the_largest_number(
    found: list[float], expected: list[float], error: float
) -> None:
    dtype = torch.float64
    assert relative_error(torch.tensor(found, dtype=dtype), torch.tensor(expected, dtype=dtype)) == error


def gathered(tensors: dict[str, Tensor], replica_error: float = 0.0) -> Gathered:
    return Gathered(tensors=tensors, replica_error=replica_error, replica_name="head.bias" if replica_error else "")


def compared(
    *,
    steps: tuple[StepFacts, ...] = (StepFacts(loss=2.0, loss_tokens=5, gradient_norm=5.0),) * 2,
    gradients: Gathered | None = None,
    weights: Gathered | None = None,
    ledger: str | None = None,
) -> Parity:
    """A comparison in which everything is equal, but for what is given."""
    tensors = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    expected = Reference(loss=2.0, gradient_norm=5.0, gradients=tensors, weights=tensors)
    return compare(steps, gradients or gathered(tensors), weights or gathered(tensors), expected, ledger=ledger)


def test_what_is_equal_passes() -> None:
    parity = compared()
    assert parity.has_passed
    assert parity.worst_error == 0.0


@pytest.mark.parametrize("kind", ["gradients", "weights"])
def test_the_worst_tensor_is_named(kind: str) -> None:
    wrong = gathered({"a": torch.tensor([3.0, 4.4]), "b": torch.tensor([0.0])})
    parity = compared(**{kind: wrong})  # type: ignore[arg-type]
    assert parity.failures == (f"{kind.removesuffix('s')} a is off by 1.0e-01",)


def test_a_missing_parameter_fails() -> None:
    parity = compared(gradients=gathered({"a": torch.tensor([3.0, 4.0])}))
    assert parity.missing == ("b",)
    assert parity.failures == ("no gradient of b",)


def test_an_additional_parameter_fails() -> None:
    tensors = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0]), "c": torch.tensor([0.0])}
    assert compared(gradients=gathered(tensors)).failures == ("a gradient of c, which one process does not have",)


def test_a_rank_that_tells_another_loss_fails() -> None:
    right = StepFacts(loss=2.0, loss_tokens=5, gradient_norm=5.0)
    for wrong, line in (
        (dataclasses.replace(right, loss=NAN), "loss rank 1 is off by inf"),
        (dataclasses.replace(right, loss=2.2), "loss rank 1 is off by 1.0e-01"),
        (dataclasses.replace(right, gradient_norm=4.0), "gradient_norm rank 1 is off by 2.0e-01"),
    ):
        assert compared(steps=(right, wrong)).failures == (line,)


@pytest.mark.parametrize("error", [1e-3, NAN, INF])
def test_copies_that_differ_fail(error: float) -> None:
    tensors = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    parity = compared(weights=gathered(tensors, replica_error=error))
    assert len(parity.failures) == 1
    assert parity.replica.name == "head.bias"


def test_a_copy_that_is_no_number_agrees_with_none() -> None:
    """Whichever rank has it, and whatever comes after it."""
    numbers = {"right": torch.tensor([1.0, 2.0]), "wrong": torch.tensor([1.0, NAN])}
    for order in (("right", "wrong", "right"), ("wrong", "right", "right")):
        told = put_together([{"a": (WHOLE, numbers[which])} for which in order])
        assert (told.replica_error, told.replica_name) == (INF, "a")


def test_a_ledger_that_differs_fails() -> None:
    assert compared(ledger="rank 1: the ledger has 3 events").failures == ("rank 1: the ledger has 3 events",)


def test_a_parity_is_read_back_as_it_was_written() -> None:
    parity = compared(gradients=gathered({"a": torch.tensor([3.0, INF])}), ledger="rank 0: differs")
    assert Parity.from_dict(parity.to_dict()) == parity


def test_a_record_keeps_the_errors() -> None:
    wrong = gathered({"a": torch.tensor([3.0, 4.4]), "b": torch.tensor([0.0])})
    facts = compared(gradients=wrong).facts("small t5")
    assert facts.model == "small t5"
    assert facts.gradient_error == pytest.approx(0.1)
    assert facts.weight_error == facts.loss_error == facts.replica_error == 0.0
