"""Does transformers' own model with our weights step as one process does, and is what it is not told before?"""

import dataclasses
from typing import Any

import pytest
import torch

from launch.bench import EXPERIMENT
from launch.case import Case, case_of
from launch.experiment import load
from launch.parity import Parity, case_batch, check_parity
from models.config import ModelConfig
from models.named import named_model
from models.published_fields import published_fields
from parallel.comm import Groups
from parallel.engines.choice import NATIVE, EngineChoice
from parallel.engines.engine import build, unsupported
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.plans import plan
from tests.one_rank import CPU, rank_of
from tests.small_models import small_config
from tests.tolerances import EXACT_RTOL

T5: dict[str, Any] = {
    "norm": "rmsnorm", "positions": "relative", "num_kv_heads": 4, "qkv_bias": False, "attention_output_bias": False,
    "ffn_bias": False, "attention_scale": False, "tying": "all",
}  # fmt: skip
THEIRS = EngineChoice("transformers")
MODELS: dict[str, ModelConfig] = {
    "llama": named_model("tiny-llama"),
    "llama tied and biased": named_model("tiny-llama").replace(
        tying="head", qkv_bias=True, attention_output_bias=True, ffn_bias=True, activation="geglu"
    ),
    "t5": named_model("tiny-t5"),
    "t5 gated without a scale": small_config("encoder_decoder", **T5, activation="geglu"),
}


def case(model: str, layout: Layout) -> Case:
    return case_of(MODELS[model], layout, engine=THEIRS)


def proved(one: Case) -> Parity:
    with rank_of(plan(one.config, one.layout), 0):
        return check_parity(one, groups=Groups(timeout_seconds=1.0), rank=0, device=CPU)


@pytest.mark.parametrize("layout", [Layout(microbatches=3), Layout(attention="materialised")], ids=["fused", "eager"])
@pytest.mark.parametrize("model", MODELS)
def test_a_step_equals_one_process(model: str, layout: Layout) -> None:
    parity = proved(case(model, layout))
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize("model", ["llama", "t5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_learns_what_the_native_engine_learns(model: str, dtype: torch.dtype) -> None:
    one = case(model, Layout(microbatches=2))
    told, held = {}, {}
    for choice in (NATIVE, THEIRS):
        with rank_of(plan(one.config, one.layout), 0) as comm:
            settings = EngineSettings(seed=0, dtype=dtype, device=CPU, optimizer="adamw", learning_rate=0.02)
            engine = build(choice, plan=plan(one.config, one.layout), comm=comm, settings=settings)
            told[choice] = [engine.step(case_batch(one, seed=0)).loss for _ in range(4)]
            held[choice] = (engine.num_parameters, engine.parameter_bytes, engine.gradient_bytes)
    assert told[THEIRS][3] < told[THEIRS][0]
    assert told[THEIRS] == pytest.approx(told[NATIVE], rel=1e-4 if dtype == torch.float32 else 0.05)
    assert held[THEIRS] == held[NATIVE]


@pytest.mark.parametrize("name", ["llama-2-7b", "llama-3-8b", "t5-small", "t5-11b", "tiny-llama", "tiny-t5"])
def test_a_model_comes_back_from_its_file(name: str) -> None:
    config = named_model(name)
    assert ModelConfig.from_hf(published_fields(config)).replace(name=name) == config


@pytest.mark.parametrize(
    ("model", "layout", "line"),
    [
        ("tiny-llama", Layout(tp=2, dp=2), "the transformers engine runs in one process: tp = 2, dp = 2; use 1"),
        (
            "tiny-t5",
            Layout(recompute="full"),
            "the transformers engine recomputes nothing: recompute = 'full'; use 'none'",
        ),
        (
            "tiny-t5-v1_1",
            Layout(),
            "the transformers engine runs Llama and T5: a model of type t5 has tying = 'all', not 'source_target'",
        ),
        (
            "tiny-decoder",
            Layout(),
            (
                "the transformers engine runs Llama and T5: a model of type llama has norm = 'rmsnorm', not "
                "'layernorm', activation = 'swiglu', not 'gelu', positions = 'rope', not 'learned'"
            ),
        ),
        (
            "tiny-bert",
            Layout(),
            "the transformers engine runs Llama and T5: an encoder_only model is neither a Llama nor a T5",
        ),
    ],
)
def test_what_it_cannot_run_is_told(model: str, layout: Layout, line: str) -> None:
    assert unsupported(THEIRS, named_model(model), layout) == line


def test_the_experiment_has_pairs_of_one_configuration_in_one_group_of_turns() -> None:
    experiment = load(EXPERIMENT.with_name("single_process.toml"))
    assert not any(cell.refusal for cell in experiment.cells)
    assert len(experiment.cells) <= experiment.settings.interleave
    natives, theirs = ([cell for cell in experiment.cells if cell.engine == choice] for choice in (NATIVE, THEIRS))
    pairs = [dataclasses.replace(cell, engine=THEIRS) for cell in natives if not cell.is_control]
    assert pairs == theirs
    for architecture in ("encoder_decoder", "decoder_only"):
        assert len({cell.model.width for cell in theirs if cell.model.architecture == architecture}) == 2
