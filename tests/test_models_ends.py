"""Do embedding, positions, head and loss compute their formulas?"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.batch import IGNORED
from models.embedding import Embedding
from models.head import CrossEntropy, Head
from models.positions import LearnedPositions, SinusoidalPositions
from tests.small_models import small_batch, small_config, small_model
from tests.tolerances import EXACT_RTOL

IDS = torch.tensor([[3, 1, 4], [1, 5, 9]])
LIKE = torch.zeros(1, dtype=torch.float64)


def embedding(**changes: object) -> tuple[Embedding, dict[str, Tensor]]:
    model = small_model(small_config("encoder_only", **changes))
    assert model.encoder is not None
    assert isinstance(model.encoder.embedding, Embedding)
    return model.encoder.embedding, dict(model.encoder.embedding.named_parameters())


def test_an_embedding_is_sequence_first_and_adds_positions() -> None:
    module, weights = embedding()
    expected = weights["token.weight"][IDS.T] + weights["position.weight"][:3, None]
    assert torch.equal(module(IDS), expected)


def test_a_scaled_embedding_scales_tokens_only() -> None:
    module, weights = embedding(embedding_scale=True)
    expected = 4.0 * weights["token.weight"][IDS.T] + weights["position.weight"][:3, None]
    assert torch.equal(module(IDS), expected)


def test_missing_token_types_are_zeros() -> None:
    module, _ = embedding(num_token_types=2)
    assert torch.equal(module(IDS), module(IDS, torch.zeros_like(IDS)))
    assert not torch.equal(module(IDS), module(IDS, torch.ones_like(IDS)))


def test_an_embedding_norm_comes_last() -> None:
    module, weights = embedding(embedding_norm=True)
    normed_LBD = (module(IDS) - weights["norm.bias"]) / weights["norm.weight"]
    torch.testing.assert_close(normed_LBD.mean(-1), torch.zeros(3, 2, dtype=torch.float64), rtol=0, atol=1e-12)


def test_learned_positions_start_after_the_offset_and_end_at_the_last_row() -> None:
    module = LearnedPositions(small_config("encoder_only", position_offset=2, max_length=4))
    assert module.weight.shape == (6, 16)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0)[:, None].expand(6, 16))
    for length, rows in ((1, [2]), (4, [2, 3, 4, 5]), (7, [2, 3, 4, 5, 5, 5, 5])):
        positions_L1D = module(length, LIKE)
        assert positions_L1D.shape == (length, 1, 16)
        assert positions_L1D[:, 0, 0].tolist() == rows


def test_sinusoidal_positions_are_their_formula() -> None:
    positions_L1D = SinusoidalPositions(6)(5, LIKE)
    for position in range(5):
        for column in range(6):
            angle = position / 10000 ** ((column - column % 2) / 6)
            expected = math.cos(angle) if column % 2 else math.sin(angle)
            assert float(positions_L1D[position, 0, column]) == pytest.approx(expected, rel=EXACT_RTOL, abs=1e-15)


def head(**changes: object) -> tuple[Head, dict[str, Tensor]]:
    model = small_model(small_config("encoder_only", **changes))
    assert isinstance(model.head, Head)
    return model.head, dict(model.head.named_parameters())


def test_a_head_is_its_formula() -> None:
    hidden_LBD = torch.randn(3, 2, 16, dtype=torch.float64)
    plain, weights = head()
    assert torch.equal(plain(hidden_LBD), F.linear(hidden_LBD, weights["weight"]))
    scaled, weights = head(head_scale=True, head_bias=True)
    assert torch.equal(scaled(hidden_LBD), F.linear(hidden_LBD / 4.0, weights["weight"], weights["bias"]))
    transformed, weights = head(head_transform=True)
    inner = F.gelu(F.linear(hidden_LBD, weights["transform.dense.weight"], weights["transform.dense.bias"]))
    inner = F.layer_norm(inner, (16,), weights["transform.norm.weight"], weights["transform.norm.bias"], 1e-5)
    assert torch.equal(transformed(hidden_LBD), F.linear(inner, weights["weight"]))


def reference_loss(logits_LBV: Tensor, labels_BL: Tensor) -> float:
    total = 0.0
    for row, labels in enumerate(labels_BL.tolist()):
        for position, label in enumerate(labels):
            if label != IGNORED:
                total -= float(logits_LBV[position, row].double().log_softmax(0)[label])
    return total


def test_the_loss_is_a_sum_over_labelled_positions() -> None:
    logits_LBV = torch.randn(3, 2, 7, dtype=torch.float64)
    labels_BL = torch.tensor([[2, IGNORED, 6], [0, IGNORED, IGNORED]])
    assert float(CrossEntropy()(logits_LBV, labels_BL)) == pytest.approx(
        reference_loss(logits_LBV, labels_BL), rel=1e-12
    )
    nothing = torch.full_like(labels_BL, IGNORED)
    assert float(CrossEntropy()(logits_LBV, nothing)) == 0.0


def test_the_loss_of_half_precision_logits_is_summed_in_float32() -> None:
    logits_LBV = torch.randn(64, 8, 7).bfloat16()
    labels_BL = torch.randint(7, (8, 64))
    loss = CrossEntropy()(logits_LBV, labels_BL)
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(reference_loss(logits_LBV, labels_BL), rel=1e-5)


def test_losses_of_microbatches_add_up() -> None:
    config = small_config("encoder_decoder")
    model, batch = small_model(config), small_batch(config)
    parts = [batch.narrow(0, 2), batch.narrow(2, 1)]
    assert model.loss is not None
    losses = [float(model.loss(model(part, {})["logits"], part.labels).detach()) for part in (batch, *parts)]
    assert losses[0] == pytest.approx(losses[1] + losses[2], rel=EXACT_RTOL)
