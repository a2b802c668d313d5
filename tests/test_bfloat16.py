"""Is a step in bfloat16 as near the exact one as its eight bits allow, and is what must be wider wider?

A number is rounded by at most u = 2^-8 of itself, and so is every number on its way through the blocks, forward and
backward. Roundings do not know of each other: R of them add up to about sqrt(R) u of a tensor as a whole. A gradient
summed on the wrong scale is off in one direction, which roundings are not: along the exact gradient they cancel, but
for what few numbers share, and a few u are left. Sums over ranks and microbatches are in bfloat16 as well.
"""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from launch.case import Case
from launch.parity import case_batch
from launch.reference import Reference, reference
from models.attention import attention_mask, fused_attention, materialised_attention
from models.config import Architecture, NormKind
from models.dropout import Dropout
from models.head import CrossEntropy
from models.layers import Norm
from parallel.engines.choice import EngineName
from parallel.engines.engine import StepFacts
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.predict import predict
from parallel.sequence import deal
from tests.engine_steps import HeldBytes, engine_case, engine_of, trained
from tests.rank import Worker
from tests.small_models import small_config
from tests.spawn import Ranks

UNIT = torch.finfo(torch.bfloat16).eps / 2
ROUNDINGS = 5 * 2 * 20
"""Of a small model: five blocks, forward and backward, about twenty tensors each that are written on the way."""
TP, SP, PP, DP = (Layout(tp=2), Layout(tp=2, sp=True), Layout(pp=2, microbatches=2), Layout(dp=2))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """One step in bfloat16, and its whole gradients on rank 0."""

    facts: StepFacts
    gradients: dict[str, Tensor] | None


def stepped(worker: Worker, case: Case) -> Stepped:
    engine = engine_of(worker, case, dtype=torch.bfloat16)
    facts = engine.step(deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp))
    gathered = engine.gather("gradient")
    return Stepped(facts=facts, gradients=None if gathered is None else gathered.tensors)


def errors(found: dict[str, Tensor], expected: Reference) -> tuple[float, float]:
    """Worst relative error of a tensor as a whole, and how far the scale of all of them together is off."""
    worst = along = square = 0.0
    for name, gradient in expected.gradients.items():
        difference = found[name].double() - gradient
        worst = max(worst, (difference.norm() / gradient.norm()).item())
        along += (difference * gradient).sum().item()
        square += gradient.square().sum().item()
    return worst, abs(along / square)


@pytest.mark.parametrize(
    ("engine", "architecture", "layout"),
    [
        *(("native", "decoder_only", layout) for layout in (TP, SP, PP, DP)),
        *(("native", "encoder_decoder", layout) for layout in (TP, SP, PP, DP)),
        ("torch", "encoder_decoder", SP),
        ("fairscale", "decoder_only", TP),
    ],
    ids=lambda value: getattr(value, "label", value),
)
def test_gradients_are_near_the_exact_ones_and_of_their_scale(
    engine: EngineName, architecture: Architecture, layout: Layout, two_ranks: Ranks
) -> None:
    case = engine_case(engine, architecture, layout)
    told, _ = two_ranks.run(stepped, case)
    assert told.gradients is not None
    assert {gradient.dtype for gradient in told.gradients.values()} == {torch.bfloat16}
    expected = reference(case.config, case_batch(case, seed=0), seed=0, learning_rate=1.0)
    worst, scale = errors(told.gradients, expected)
    assert worst < 2 * math.sqrt(ROUNDINGS) * UNIT
    assert scale < 4 * UNIT
    # The loss is near log(vocabulary), of which the roundings of logits move little; it is told in float32.
    assert told.facts.loss == pytest.approx(expected.loss, rel=UNIT / 8)
    # The norm is of the gradients as they stand, summed in float32.
    norms = [gradient.double().norm() for gradient in told.gradients.values()]
    assert told.facts.gradient_norm == pytest.approx(torch.stack(norms).norm().item(), rel=1e-5)


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_sum_in_float32(kind: NormKind) -> None:
    """2^12 ones: a sum in eight bits stops growing at 2^8."""
    norm = Norm(small_config("decoder_only", norm=kind, width=4096)).bfloat16()
    torch.nn.init.ones_(norm.weight)
    if norm.bias is not None:
        torch.nn.init.zeros_(norm.bias)
    signs = torch.ones(1, 1, 4096, dtype=torch.bfloat16)
    signs[..., ::2] = -1.0
    torch.testing.assert_close(norm(signs), signs, rtol=2 * UNIT, atol=0.0)


@pytest.mark.parametrize("core", [fused_attention, materialised_attention])
def test_softmax_sums_in_float32(core: Callable[..., Tensor]) -> None:
    keys = torch.zeros(4096, 1, 1, 8, dtype=torch.bfloat16)
    mask = attention_mask(is_causal=False, key_lengths=(4096,), key_length=4096, like=keys)
    out = core(keys[:2], keys, torch.ones_like(keys), mask, scale=1.0, dropout=Dropout(0.0))
    torch.testing.assert_close(out, torch.ones_like(out), rtol=2 * UNIT, atol=0.0)


def test_the_loss_is_summed_in_float32() -> None:
    logits_LBV = torch.zeros(512, 1, 4096, dtype=torch.bfloat16)
    loss = CrossEntropy()(logits_LBV, torch.zeros(1, 512, dtype=torch.long))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(512 * math.log(4096), rel=1e-5)


# ---- what is held -------------------------------------------------------------------------------------------------


def held_and_predicted(
    engine: EngineName, layout: Layout, two_ranks: Ranks, *, master_weights: bool = False
) -> list[tuple[HeldBytes, HeldBytes]]:
    """Of both ranks, after a step of AdamW; master weights count as states of the optimizer."""
    case = engine_case(engine, "decoder_only", layout)
    held = two_ranks.run(trained, case, torch.bfloat16, 1)
    planned = plan(case.config, layout)
    shape = StepShape(num_sequences=10 // layout.dp, source_length=0, target_length=5, dtype_bytes=2)
    told = [one.states for one in predict(planned, shape, master_weights=master_weights)]
    by_rank = told if len(told) == len(held) else told * len(held)
    return [
        (
            one,
            HeldBytes(
                parameters=states.parameters,
                gradients=states.gradients,
                optimizer=states.optimizer + states.master_weights,
                losses=one.losses,
            ),
        )
        for one, states in zip(held, by_rank, strict=True)
    ]


@pytest.mark.parametrize("layout", [TP, PP, DP, DP.replace(zero=1)], ids=lambda layout: layout.label)
def test_states_are_what_accounting_says(layout: Layout, two_ranks: Ranks) -> None:
    for held, predicted in held_and_predicted("native", layout, two_ranks):
        assert held == predicted


def test_deepspeed_keeps_master_weights_under_zero_only(two_ranks: Ranks) -> None:
    layout = Layout(dp=2, microbatches=2)
    for held, predicted in held_and_predicted("deepspeed", layout, two_ranks):
        assert held == predicted
    sharded = layout.replace(zero=1)
    for held, predicted in held_and_predicted("deepspeed", sharded, two_ranks, master_weights=True):
        assert (held.parameters, held.optimizer) == (predicted.parameters, predicted.optimizer)
