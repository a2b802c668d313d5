"""Does a dropout mask depend on its key, site and salt, and on nothing else?"""

import copy
import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from models.blocks import EncoderBlock
from models.config import Architecture
from models.dropout import Dropout
from models.sublayers import Attention
from tests.small_models import ARCHITECTURES, small_batch, small_config, small_model

ONES = torch.ones(50, 3, 8, dtype=torch.float64)


def dropout() -> Dropout:
    module = Dropout(0.3)
    module.site = "decoder.block.0.ffn.dropout"
    return module


def test_an_idle_dropout_returns_its_input_itself() -> None:
    assert dropout().eval()(ONES) is ONES
    assert Dropout(0.0)(ONES) is ONES


def test_a_mask_repeats_and_scales_what_it_keeps() -> None:
    first = dropout()(ONES)
    assert torch.equal(first, dropout()(ONES))
    assert set(first.unique().tolist()) == {0.0, 1 / 0.7}
    assert 0.2 < (first == 0).double().mean() < 0.4


@pytest.mark.parametrize("change", ["seed", "step", "microbatch", "site", "salt"])
def test_a_mask_differs_with_each_part_of_its_name(change: str) -> None:
    changed = dropout()
    if change == "site":
        changed.site = "decoder.block.1.ffn.dropout"
    elif change == "salt":
        changed.salt = 1
    else:
        setattr(changed.key, change, 1)
    assert not torch.equal(changed(ONES), dropout()(ONES))


def test_the_global_generator_is_neither_read_nor_changed() -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = dropout()(ONES)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert torch.equal(first, dropout()(ONES))


def test_gradients_pass_where_the_mask_kept() -> None:
    hidden = torch.randn(ONES.shape, dtype=torch.float64, requires_grad=True)
    out = dropout()(hidden)
    out.sum().backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, dropout()(ONES))
    assert torch.equal(out, hidden * hidden.grad)


def test_one_byte_an_element_is_kept_for_the_backward_pass() -> None:
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        dropout()(ONES.clone().requires_grad_())
    assert [(tensor.dtype, tensor.shape) for tensor in kept] == [(torch.bool, ONES.shape)]


def test_a_meta_tensor_has_a_mask_too() -> None:
    assert dropout()(torch.empty(3, 4, device="meta")).is_meta


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_model_has_one_key_and_each_dropout_its_qualified_name(architecture: Architecture) -> None:
    config = small_config(architecture, dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
    model = copy.deepcopy(small_model(config))
    sites = {name: module for name, module in model.named_modules() if isinstance(module, Dropout)}
    assert all(module.site == name for name, module in sites.items())
    assert all(module.key is model.mask_key for module in sites.values())
    for attention in model.modules():
        if isinstance(attention, Attention):
            assert isinstance(attention.core, functools.partial)
            assert attention.core.keywords["dropout"] is attention.core_dropout


def test_recomputing_a_block_draws_the_same_masks() -> None:
    config = small_config("encoder_only", dropout=0.2, attention_dropout=0.2, ffn_dropout=0.2)
    model, batch = small_model(config).train(), small_batch(config)
    model(batch, {})["logits"].sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert model.encoder is not None
    for block in model.encoder.block.values():
        inner = block.forward
        block.forward = functools.partial(checkpoint, inner, use_reentrant=False, preserve_rng_state=False)
    model(batch, {})["logits"].sum().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=0, atol=0)


def test_dropout_acts_on_the_branch_and_inside_the_ffn() -> None:
    config = small_config("encoder_only", dropout=0.3, ffn_dropout=0.4)
    model = small_model(config).train()
    assert model.encoder is not None
    block = model.encoder.block["1"]
    assert isinstance(block, EncoderBlock)
    ffn, hidden_LBD = block.ffn, torch.randn(7, 3, 16, dtype=torch.float64)
    kept: dict[str, torch.Tensor] = {}
    for name in ("inner_dropout", "dropout"):
        module = ffn.get_submodule(name)
        module.register_forward_hook(lambda _module, _inputs, out, name=name: kept.update({name: out}))
    out_LBD = ffn(hidden_LBD)
    assert torch.equal(out_LBD - hidden_LBD, (hidden_LBD + kept["dropout"]) - hidden_LBD)
    for name, probability in (("inner_dropout", 0.4), ("dropout", 0.3)):
        share = float((kept[name] == 0).double().mean())
        assert abs(share - probability) < 0.12, name
