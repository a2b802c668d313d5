"""Do initial values depend on seed and name only, and does none of them hide a mistake?"""

import pytest
import torch

from models.architectures import build
from models.config import Architecture, Tying
from models.initial import canonical_name, draw, initialise
from models.slicing import slice_model
from tests.small_models import ARCHITECTURES, POSITIONS, small_batch, small_config, small_model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_slice_starts_as_the_whole_does(architecture: Architecture) -> None:
    config = small_config(architecture, positions="relative", tying="head")
    whole = dict(small_model(config).named_parameters(remove_duplicate=False))
    for first in range(config.num_blocks):
        with torch.device("meta"):
            part = slice_model(build(config), config, (first, first + 1))
        initialise(part, config, seed=1, dtype=torch.float64, device="cpu")
        for name, parameter in part.named_parameters(remove_duplicate=False):
            assert torch.equal(parameter, whole[name]), name


def test_other_parameters_change_no_value() -> None:
    few, many = small_config("decoder_only"), small_config("decoder_only", num_decoder_blocks=5, head_bias=True)
    many_values = dict(small_model(many).named_parameters())
    for name, parameter in small_model(few).named_parameters():
        assert torch.equal(parameter, many_values[name])


def test_values_differ_by_seed_and_by_name() -> None:
    config = small_config("decoder_only")
    values = [
        draw(config, name, (16, 16), seed=seed)
        for name in ("decoder.block.0.ffn.down.weight", "decoder.block.1.ffn.down.weight")
        for seed in (1, 2)
    ]
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])


@pytest.mark.parametrize("tying", ["head", "source_target", "all"])
def test_a_tied_name_draws_what_its_canonical_name_draws(tying: Tying) -> None:
    config = small_config("encoder_decoder", tying=tying)
    (group,) = config.tie_groups
    for name in group:
        assert canonical_name(config, name) == group[0]
        assert torch.equal(draw(config, name, (29, 16), seed=4), draw(config, group[0], (29, 16), seed=4))
    assert canonical_name(config, "decoder.norm.weight") == "decoder.norm.weight"


def test_values_are_drawn_in_float32_and_then_cast() -> None:
    config = small_config("encoder_only")
    exact = dict(small_model(config, dtype=torch.float64).named_parameters())
    for dtype in (torch.float32, torch.bfloat16):
        for name, parameter in small_model(config, dtype=dtype).named_parameters():
            assert torch.equal(parameter, exact[name].float().to(dtype))


def test_the_global_generator_is_neither_read_nor_changed() -> None:
    state = torch.get_rng_state()
    small_model(small_config("encoder_decoder"))
    with torch.device("cpu"):
        build(small_config("encoder_decoder"))
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_parameter_starts_at_zero_or_one(architecture: Architecture, positions: str) -> None:
    config = small_config(architecture, positions=positions, num_token_types=2, head_bias=True, head_transform=True)
    for name, parameter in small_model(config).named_parameters():
        assert parameter.requires_grad
        assert not ((parameter == 0) | (parameter == 1)).any(), name
        assert parameter.std() > 0.005, name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_activations_stay_of_order_one_in_depth(architecture: Architecture) -> None:
    config = small_config(
        architecture, width=64, ffn_width=256, attention_scale=False, positions="relative",
        num_encoder_blocks=0 if architecture == "decoder_only" else 12,
        num_decoder_blocks=0 if architecture == "encoder_only" else 12,
    )  # fmt: skip
    model, batch = small_model(config), small_batch(config)
    deepest: list[float] = []
    for stack in (model.encoder, model.decoder):
        if stack is not None:
            stack.block["11"].register_forward_hook(lambda _m, _i, out: deepest.append(float(out.detach().std())))
    model(batch, {})
    assert all(0.3 < deviation < 10.0 for deviation in deepest), deepest


@pytest.mark.parametrize(
    "name", ["decoder.block.0.self_attention.qkv.weight", "decoder.block.0.cross_attention.query.weight"]
)
def test_queries_start_smaller_where_scores_are_not_scaled(name: str) -> None:
    scaled = small_config("encoder_decoder")
    unscaled = scaled.replace(attention_scale=False)
    rows = 32 if "qkv" in name else 16
    values, smaller = (draw(config, name, (rows, 16), seed=1) for config in (scaled, unscaled))
    torch.testing.assert_close(smaller[:16], values[:16] / 2.0)
    assert torch.equal(smaller[16:], values[16:])
