"""Do the three architectures read what they should, and only that, out of parameters with the agreed names?"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from models.attention import AttentionMask, materialised_attention
from models.batch import Batch
from models.blocks import DecoderBlock
from models.config import Architecture, Positions
from models.layers import Linear
from models.model import Model
from models.sublayers import Attention
from tests.small_models import ARCHITECTURES, POSITIONS, SOURCE_LENGTH, small_batch, small_config, small_model
from tests.tolerances import EXACT_RTOL


def logits(model: Model, batch: Batch) -> Tensor:
    """[B, L, V], whole model."""
    logits_LBV: Tensor = model(batch, {})["logits"]
    return logits_LBV.transpose(0, 1)


def valid(batch: Batch) -> Tensor:
    """[B, L], where the predicted stream is not padding."""
    lengths = torch.tensor(batch.lengths(batch.predicted_stream))
    return torch.arange(batch.stream_length(batch.predicted_stream)) < lengths[:, None]


def with_other_padding(batch: Batch) -> Batch:
    """The same sequences with every padded id changed."""

    def changed(ids: Tensor | None, lengths: tuple[int, ...]) -> Tensor | None:
        if ids is None:
            return None
        ids = ids.clone()
        for row, length in enumerate(lengths):
            ids[row, length:] = (ids[row, length:] + 1) % 29
        return ids

    return dataclasses.replace(
        batch,
        source=changed(batch.source, batch.source_lengths),
        target=changed(batch.target, batch.target_lengths),
    )


def ids_of(batch: Batch, other: Batch) -> list[tuple[Tensor | None, Tensor]]:
    """The ids of both streams of two batches, side by side."""
    pairs = ((batch.source, other.source), (batch.target, other.target))
    return [(ids, changed) for ids, changed in pairs if changed is not None]


@pytest.mark.parametrize("core", ["fused", "materialised"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_padding_changes_no_valid_logit(architecture: Architecture, positions: Positions, core: str) -> None:
    config = small_config(architecture, positions=positions)
    model, batch = small_model(config), small_batch(config)
    if core == "materialised":
        for module in model.modules():
            if isinstance(module, Attention):
                module.use(materialised_attention)
    other = with_other_padding(batch)
    assert any(ids is not None and not torch.equal(ids, changed) for ids, changed in ids_of(batch, other))
    assert torch.equal(logits(model, batch)[valid(batch)], logits(model, other)[valid(batch)])


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("architecture", ["decoder_only", "encoder_decoder"])
def test_a_decoder_reads_the_past_only(architecture: Architecture, positions: Positions) -> None:
    config = small_config(architecture, positions=positions)
    model, batch = small_model(config), small_batch(config, ragged=False)
    assert batch.target is not None
    target = batch.target.clone()
    target[:, 3] = (target[:, 3] + 1) % config.vocabulary
    before, after = logits(model, batch), logits(model, dataclasses.replace(batch, target=target))
    changes = (before != after).any(-1)
    assert not changes[:, :3].any()
    assert changes[:, 3:].all()


@pytest.mark.parametrize("positions", POSITIONS)
def test_an_encoder_reads_all_of_its_sequence_and_no_other(positions: Positions) -> None:
    config = small_config("encoder_only", positions=positions)
    model, batch = small_model(config), small_batch(config, ragged=False)
    assert batch.source is not None
    source = batch.source.clone()
    source[1, -1] = (source[1, -1] + 1) % config.vocabulary
    before, after = logits(model, batch), logits(model, dataclasses.replace(batch, source=source))
    changes = (before != after).any(-1)
    assert changes[1].all()
    assert not changes[[0, 2]].any()


@pytest.mark.parametrize("positions", POSITIONS)
def test_every_target_position_reads_the_whole_source(positions: Positions) -> None:
    config = small_config("encoder_decoder", positions=positions)
    model, batch = small_model(config), small_batch(config, ragged=False)
    assert batch.source is not None
    for position in range(SOURCE_LENGTH):
        source = batch.source.clone()
        source[1, position] = (source[1, position] + 1) % config.source_vocabulary
        after = logits(model, dataclasses.replace(batch, source=source))
        changes = (logits(model, batch) != after).any(-1)
        assert changes[1].all()
        assert not changes[[0, 2]].any()


def test_real_valued_features_enter_an_encoder() -> None:
    config = small_config("encoder_decoder", feature_width=6, num_token_types=2)
    model, batch = small_model(config), small_batch(config).to("cpu", torch.float64)
    assert logits(model, batch).shape == (3, 5, 29)
    names = dict(model.named_parameters())
    assert names["encoder.embedding.features.weight"].shape == (16, 6)
    assert "encoder.embedding.token.weight" not in names


BLOCK_NAMES = {
    "self_attention": ("norm.weight", "norm.bias", "qkv.weight", "qkv.bias", "output.weight", "output.bias"),
    "cross_attention": (
        *("norm.weight", "norm.bias", "query.weight", "query.bias", "kv.weight", "kv.bias"),
        *("output.weight", "output.bias"),
    ),
    "ffn": ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias"),
}


def test_names_of_parameters_are_the_agreed_ones() -> None:
    config = small_config(
        "encoder_decoder", num_encoder_blocks=1, num_decoder_blocks=1, num_token_types=2, embedding_norm=True,
        head_transform=True, head_bias=True,
    )  # fmt: skip
    stack = ["embedding.token.weight", "embedding.position.weight", "embedding.norm.weight", "embedding.norm.bias"]
    stack += ["norm.weight", "norm.bias"]
    expected = [f"{side}.{name}" for side in ("encoder", "decoder") for name in stack]
    expected += ["encoder.embedding.token_type.weight", "head.weight", "head.bias"]
    expected += [f"head.transform.{name}" for name in ("dense.weight", "dense.bias", "norm.weight", "norm.bias")]
    for side, sublayers in (
        ("encoder", ("self_attention", "ffn")),
        ("decoder", ("self_attention", "cross_attention", "ffn")),
    ):
        expected += [f"{side}.block.0.{sub}.{name}" for sub in sublayers for name in BLOCK_NAMES[sub]]
    assert sorted(name for name, _ in small_model(config).named_parameters()) == sorted(expected)
    relative = small_model(config.replace(positions="relative", norm="rmsnorm"))
    names = {name for name, _ in relative.named_parameters()}
    assert names - set(expected) == {"encoder.relative_bias.weight", "decoder.relative_bias.weight"}
    assert not any(name.endswith(("norm.bias", "position.weight")) for name in names)


def test_output_and_down_are_plain_linear_layers() -> None:
    model = small_model(small_config("encoder_decoder"))
    kinds = {type(module) for name, module in model.named_modules() if name.endswith((".output", ".down"))}
    assert kinds == {Linear}
    assert issubclass(Linear, nn.Linear)


class ProductCounter(TorchDispatchMode):
    """Counts matrix products by operator."""

    num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and count it if it is a product."""
        if func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.num_products += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_each_projection_is_one_matrix_product(activation: str, bias: bool) -> None:
    config = small_config(
        "encoder_decoder", activation=activation, qkv_bias=bias, attention_output_bias=bias, ffn_bias=bias
    )
    model, batch = small_model(config), small_batch(config)
    with ProductCounter() as counter, torch.no_grad():  # type: ignore[no-untyped-call]
        model(batch, {})
    num_encoder_products, num_decoder_products, num_head_products = 4, 7, 1
    assert counter.num_products == 3 * num_encoder_products + 2 * num_decoder_products + num_head_products


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bias_and_mask_are_made_once_for_all_blocks(architecture: Architecture) -> None:
    config = small_config(architecture, positions="relative")
    model, batch = small_model(config), small_batch(config)
    seen: dict[str, list[object]] = {"encoder": [], "decoder": [], "memory": []}
    num_biases = 0

    def count(*_: object) -> None:
        nonlocal num_biases
        num_biases += 1

    for side in ("encoder", "decoder"):
        stack = getattr(model, side)
        if stack is None:
            continue
        stack.relative_bias.register_forward_hook(count)
        for block in stack.block.values():
            block.self_attention.register_forward_hook(lambda _m, inputs, _o, side=side: seen[side].append(inputs[1]))
            if getattr(block, "cross_attention", None) is not None:
                block.cross_attention.register_forward_hook(lambda _m, inputs, _o: seen["memory"].append(inputs[2]))
    model(batch, {})
    assert num_biases == config.has_encoder + config.has_decoder
    assert [len(masks) for masks in seen.values()] == [
        config.num_encoder_blocks,
        config.num_decoder_blocks,
        config.num_decoder_blocks * config.has_cross_attention,
    ]
    assert all(mask is masks[0] for masks in seen.values() for mask in masks)


@pytest.mark.parametrize("position", ["pre", "post"])
def test_a_sublayer_is_its_residual_formula(position: str) -> None:
    config = small_config("encoder_decoder", norm_position=position, activation="swiglu")
    model = small_model(config)
    assert model.decoder is not None
    block = model.decoder.block["1"]
    assert isinstance(block, DecoderBlock)
    assert block.cross_attention is not None
    weights = dict(block.named_parameters())
    hidden_LBD = torch.randn(5, 3, 16, dtype=torch.float64)
    memory_SBD = torch.randn(7, 3, 16, dtype=torch.float64)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + config.norm_eps).sqrt()
        return x * weights[f"{name}.norm.weight"] + weights[f"{name}.norm.bias"]

    def residual(name: str, branch: Callable[[Tensor], Tensor]) -> Tensor:
        if position == "pre":
            return hidden_LBD + branch(norm(name, hidden_LBD))
        return norm(name, hidden_LBD + branch(hidden_LBD))

    def ffn(x: Tensor) -> Tensor:
        gate, up = linear("ffn.up", x).chunk(2, -1)
        return linear("ffn.down", gate * gate.sigmoid() * up)

    def read_memory(x: Tensor) -> Tensor:
        q = linear("cross_attention.query", x).reshape(5, 3, 4, 4)
        k, v = linear("cross_attention.kv", memory_SBD).reshape(7, 3, 2, 2, 4).repeat_interleave(2, 3).unbind(2)
        probabilities = torch.einsum("lbnh,sbnh->bnls", q, k).div(2.0).softmax(-1)
        return linear("cross_attention.output", torch.einsum("bnls,sbnh->lbnh", probabilities, v).flatten(2))

    everything = AttentionMask(is_causal=False)
    torch.testing.assert_close(block.ffn(hidden_LBD), residual("ffn", ffn), rtol=EXACT_RTOL, atol=1e-12)
    read_LBD = block.cross_attention(hidden_LBD, memory_SBD, everything)
    torch.testing.assert_close(read_LBD, residual("cross_attention", read_memory), rtol=EXACT_RTOL, atol=1e-12)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_parameter_takes_part(architecture: Architecture) -> None:
    for positions in POSITIONS:
        config = small_config(
            architecture,
            positions=positions,
            num_token_types=2,
            embedding_norm=True,
            head_transform=True,
            head_bias=True,
        )
        model, batch = small_model(config), small_batch(config)
        assert model.loss is not None
        model.loss(model(batch, {})["logits"], batch.labels).backward()
        idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
        assert idle == []
