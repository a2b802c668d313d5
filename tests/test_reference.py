"""Is the answer that layouts are compared with itself right? Against slopes and sums taken without autograd."""

from typing import Any

import pytest
import torch

from launch.reference import Reference, reference
from models.architectures import build
from models.batch import IGNORED, Batch, synthetic_batch
from models.config import ModelConfig
from models.initial import initialise
from models.named import named_model

CONFIG = named_model("tiny-encoder-decoder").replace(vocabulary=11, source_vocabulary=11, max_length=9)
SEED = 3


def batch_of(config: ModelConfig) -> Batch:
    return synthetic_batch(config, num_sequences=3, source_length=5, target_length=6, seed=1, ragged=True)


def step(config: ModelConfig = CONFIG, **changes: Any) -> Reference:
    return reference(config, batch_of(config), seed=SEED, **({"learning_rate": 0.5} | changes))


def loss_by_hand(nudged: str, place: int, amount: float) -> float:
    """The loss after one number of one parameter moved, from probabilities of single tokens."""
    model = build(CONFIG)
    initialise(model, CONFIG, seed=SEED, dtype=torch.float64, device="cpu")
    batch = batch_of(CONFIG)
    with torch.no_grad():
        dict(model.named_parameters())[nudged].view(-1)[place] += amount
        probability_LBV = model(batch, {})["logits"].softmax(-1)
    told: list[float] = [
        probability_LBV[at, row, label].log().item()
        for row, labels in enumerate(batch.labels.tolist())
        for at, label in enumerate(labels)
        if label != IGNORED
    ]
    return -sum(told) / len(told)


@pytest.mark.parametrize(
    "name",
    [
        "encoder.embedding.token.weight",
        "encoder.block.1.self_attention.qkv.weight",
        "decoder.block.0.cross_attention.kv.weight",
        "decoder.block.1.ffn.down.bias",
        "decoder.norm.weight",
    ],
)
def test_gradients_are_the_slopes_of_the_mean_loss_of_a_label(name: str) -> None:
    gradient = step().gradients[name].flatten()
    place, nudge = int(gradient.abs().argmax()), 1e-5
    slope = (loss_by_hand(name, place, nudge) - loss_by_hand(name, place, -nudge)) / (2 * nudge)
    assert gradient[place].item() == pytest.approx(slope, rel=1e-6)


def test_the_loss_is_the_mean_over_labels_of_the_whole_batch() -> None:
    told = step()
    assert told.loss == pytest.approx(loss_by_hand("decoder.norm.weight", 0, 0.0), rel=1e-12)
    assert batch_of(CONFIG).num_loss_tokens() < 3 * 6


def test_a_step_goes_against_the_gradient() -> None:
    before, after = step(learning_rate=0.0), step(learning_rate=0.5)
    for name, gradient in after.gradients.items():
        torch.testing.assert_close(after.weights[name], before.weights[name] - 0.5 * gradient, rtol=0.0, atol=0.0)
        assert gradient.abs().max() > 0.0, name


def test_a_tied_parameter_is_counted_once() -> None:
    tied, untied = step(), step(CONFIG.replace(tying="none"))
    alone = {"decoder.embedding.token.weight", "head.weight"}
    assert set(untied.gradients) - set(tied.gradients) == alone
    for told in (tied, untied):
        joined = torch.cat([gradient.flatten() for gradient in told.gradients.values()])
        assert told.gradient_norm == pytest.approx(joined.norm().item(), rel=1e-12)


def test_everything_is_computed_in_the_asked_precision() -> None:
    double, single = step(), step(dtype=torch.float32)
    assert {tensor.dtype for tensor in (*double.gradients.values(), *double.weights.values())} == {torch.float64}
    assert {tensor.dtype for tensor in single.gradients.values()} == {torch.float32}
    assert single.loss == pytest.approx(double.loss, rel=1e-5)
