"""Does recomputation change what is kept and nothing else?"""

from collections import Counter

import pytest
import torch
from torch import Tensor

from models.attention import AttentionMask
from models.blocks import DecoderBlock, EncoderBlock
from models.config import Architecture
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.layouts import AttentionKernel, Layout, Recompute
from parallel.plans import plan
from parallel.recompute import apply_recompute, recompute_block
from tests.one_rank import CPU, rank_of
from tests.small_models import ARCHITECTURES, small_batch, small_config, small_model

LAYOUT = Layout(microbatches=2)


def gradients_of(architecture: Architecture, layout: Layout, **changes: object) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a second step, dropout on."""
    drops: dict[str, object] = {"dropout": 0.2, "attention_dropout": 0.3, "ffn_dropout": 0.1}
    config = small_config(architecture, **(drops | changes))
    planned = plan(config, layout)
    with rank_of(planned, 0) as comm:
        engine = NativeEngine(plan=planned, comm=comm, settings=EngineSettings(seed=4, dtype=torch.float64, device=CPU))
        engine.step(small_batch(config))
        facts = engine.step(small_batch(config))
        return facts.loss, engine.gradients.views


@pytest.mark.parametrize("positions", ["relative", "rope"])
@pytest.mark.parametrize("attention", ["fused", "materialised"])
@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradients_are_the_same_bit_for_bit(
    architecture: Architecture, recompute: Recompute, attention: AttentionKernel, positions: str
) -> None:
    """Padding, dropout, and a relative bias whose gradient leaves through the mask."""
    layout = LAYOUT.replace(attention=attention)
    loss, gradients = gradients_of(architecture, layout, positions=positions)
    again, regained = gradients_of(architecture, layout.replace(recompute=recompute), positions=positions)
    assert again == loss
    assert set(regained) == set(gradients)
    for name, gradient in gradients.items():
        assert torch.equal(regained[name], gradient), name
    assert all(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize(
    ("recompute", "core", "ffn"),
    [("none", 1, 1), ("selective", 2, 1), ("full", 2, 2)],
    ids=["none", "selective", "full"],
)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_selective_runs_every_core_twice_and_full_every_block(
    architecture: Architecture, recompute: Recompute, core: int, ffn: int
) -> None:
    planned = plan(small_config(architecture, attention_dropout=0.1), Layout(recompute=recompute))
    calls: Counter[str] = Counter()
    with rank_of(planned, 0) as comm:
        engine = NativeEngine(plan=planned, comm=comm, settings=EngineSettings(seed=4, dtype=torch.float64, device=CPU))
        for name, module in engine.model.named_modules():

            def count(*_: object, name: str = name) -> None:
                calls[name] += 1

            module.register_forward_pre_hook(count)
        engine.step(small_batch(planned.config))
    # The dropout of the probabilities is called by the core itself.
    assert {count for name, count in calls.items() if name.endswith("core_dropout")} == {core}
    assert {count for name, count in calls.items() if name.endswith("ffn.up")} == {ffn}
    outside = (
        "encoder.norm",
        "decoder.norm",
        "head",
        "loss",
        "encoder.embedding",
        "decoder.embedding",
        "decoder.memory",
    )
    assert {count for name, count in calls.items() if name in outside} == {1}


def test_none_leaves_every_module_as_it_is() -> None:
    model = small_model(small_config("encoder_decoder"))
    before = {name: (module.forward, getattr(module, "core", None)) for name, module in model.named_modules()}
    apply_recompute(model, "none")
    assert {n: (m.forward, getattr(m, "core", None)) for n, m in model.named_modules()} == before


def test_a_recomputed_block_gives_the_gradient_of_everything_it_reads() -> None:
    """Hidden states, memory, and both tensors that masks add to scores."""
    config = small_config("encoder_decoder")
    tensors = [torch.randn(5, 2, 16), torch.randn(7, 2, 16), torch.randn(1, 4, 5, 5), torch.randn(1, 4, 5, 7)]
    gradients = []
    for is_recomputed in (False, True):
        block = small_model(config).get_submodule("decoder.block.0")
        assert isinstance(block, DecoderBlock)
        if is_recomputed:
            recompute_block(block)
        hidden, memory, added, memory_added = (tensor.double().requires_grad_() for tensor in tensors)
        self_mask = AttentionMask(is_causal=False, added_BNQK=added)
        memory_mask = AttentionMask(is_causal=False, added_BNQK=memory_added)
        block(hidden, self_mask, memory, memory_mask).square().sum().backward()
        gradients.append([tensor.grad for tensor in (hidden, memory, added, memory_added, *block.parameters())])
    for once, twice in zip(*gradients, strict=True):
        assert once is not None
        assert twice is not None
        assert torch.equal(once, twice)


def test_what_needs_no_gradient_gets_none() -> None:
    block = small_model(small_config("encoder_decoder")).get_submodule("encoder.block.0")
    assert isinstance(block, EncoderBlock)
    recompute_block(block)
    hidden = torch.randn(5, 2, 16, dtype=torch.float64, requires_grad=True)
    added = torch.zeros(1, 1, 1, 5, dtype=torch.float64)
    block(hidden, AttentionMask(is_causal=False, added_BNQK=added)).sum().backward()
    assert hidden.grad is not None
    assert added.grad is None


def test_a_recomputation_is_part_of_the_backward() -> None:
    """Its collectives are written as such."""
    planned = plan(small_config("decoder_only"), Layout(tp=2, recompute="full"))
    with rank_of(planned, 0) as comm:
        settings = EngineSettings(seed=4, dtype=torch.float64, device=CPU)
        NativeEngine(plan=planned, comm=comm, settings=settings).step(small_batch(planned.config))
        phases = Counter(event.phase for event in comm.ledger if ".block." in event.site)
    assert phases == {"forward": 4, "recompute": 4, "backward": 4}
