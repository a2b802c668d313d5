"""Is a layout of degree 1 plain PyTorch, bit for bit?"""

import pytest
import torch

from models.config import Architecture
from parallel.engines.engine import OptimizerName
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.parallelize import parallelize
from parallel.plans import plan
from tests.shard_checks import CPU, alone
from tests.small_models import ARCHITECTURES, small_batch, small_config, small_model

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
    settings = EngineSettings(seed=3, dtype=dtype, device=CPU, optimizer=optimizer, learning_rate=0.05)
    engine = NativeEngine(plan=plan(config, Layout()), comm=alone(), settings=settings)
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
