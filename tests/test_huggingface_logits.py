"""Is a loaded checkpoint the published model? The proof is the logits of an independent implementation.

Small random models of transformers, every parameter perturbed so that no norm is 1 and no bias 0, are loaded here. Both
compute the same logits at every valid position of right-padded batches, in float32.

T5 v1.1 was published with a head of its own and without a scale in front of it. Version 5 of transformers ties every
head of T5 and keeps only the missing scale. So T5 v1.1 is compared twice: as published, the constructed object being
given a head of its own again, and as transformers now builds it, tied without a scale.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MBartConfig,
    MBartForConditionalGeneration,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from models.architectures import build
from models.batch import Batch, synthetic_batch
from models.config import ModelConfig
from models.huggingface_weights import load_weights, store_weights, translate
from models.slicing import slice_model
from tests.tolerances import LOGITS_ATOL

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = SPECIAL | {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attn_implementation": "eager",
}
T5: dict[str, Any] = {
    "vocab_size": 31, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 10,
    "initializer_factor": 0.5,
}  # fmt: skip
T5_V1_1 = T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
BART: dict[str, Any] = SPECIAL | {
    "vocab_size": 31, "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 24,
    "attn_implementation": "eager",
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24,
    "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip
BERT = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "bos_token_id")}
CASES: dict[str, tuple[type[Any], type[Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, LLAMA),
    "llama_biased": (LlamaConfig, LlamaForCausalLM, LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama_wide_heads": (LlamaConfig, LlamaForCausalLM, LLAMA | {"head_dim": 6, "tie_word_embeddings": True}),
    "mistral": (MistralConfig, MistralForCausalLM, LLAMA | {"sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, LLAMA),
    "gpt2": (GPT2Config, GPT2LMHeadModel, GPT2),
    "bert": (BertConfig, BertForMaskedLM, BERT),
    "t5": (T5Config, T5ForConditionalGeneration, T5),
    "t5_gated_tied": (T5Config, T5ForConditionalGeneration, T5 | {"feed_forward_proj": "gated-gelu"}),
    "t5_v1_1_tied": (T5Config, T5ForConditionalGeneration, T5_V1_1),
    "bart": (BartConfig, BartForConditionalGeneration, BART),
    "bart_scaled": (BartConfig, BartForConditionalGeneration, BART | {"scale_embedding": True}),
    "mbart": (MBartConfig, MBartForConditionalGeneration, BART | {"scale_embedding": True}),
}


ZERO = ("final_logits_bias",)
"""An entry that is no parameter of ours."""


def perturb(model: nn.Module) -> None:
    """Move every parameter off its initial value."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)


@functools.cache
def published(case: str) -> tuple[PreTrainedModel, ModelConfig, str]:
    """A model of transformers, our config of it, and its family."""
    make_config, make_model, fields = CASES[case]
    config = make_config(**fields)
    model: PreTrainedModel = make_model(config).eval()
    perturb(model)
    return model, ModelConfig.from_hf(config.to_dict()), config.model_type


def published_t5_v1_1() -> tuple[PreTrainedModel, ModelConfig, str]:
    """T5 v1.1 as published: gated, and its head its own."""
    model, _, family = published.__wrapped__("t5_v1_1_tied")
    model.lm_head.weight = nn.Parameter(torch.randn(31, 16, generator=torch.Generator().manual_seed(2)) * 0.2)
    return model, ModelConfig.from_hf(T5_V1_1 | {"model_type": family}), family


def mask(lengths: tuple[int, ...], length: int) -> Tensor:
    return (torch.arange(length) < torch.tensor(lengths)[:, None]).long()


def their_logits(model: PreTrainedModel, config: ModelConfig, batch: Batch) -> Tensor:
    """[B, L, V]."""
    inputs: dict[str, Any] = {}
    if config.has_encoder:
        inputs["input_ids"] = batch.source
        inputs["attention_mask"] = mask(batch.source_lengths, batch.stream_length("source"))
    if config.has_decoder:
        prefix = "decoder_" if config.has_encoder else ""
        inputs[f"{prefix}input_ids"] = batch.target
        inputs[f"{prefix}attention_mask"] = mask(batch.target_lengths, batch.stream_length("target"))
    if config.num_token_types:
        inputs["token_type_ids"] = batch.token_types
    with torch.no_grad():
        logits_BLV: Tensor = model(**inputs, use_cache=False).logits if config.has_decoder else model(**inputs).logits
    return logits_BLV


def our_logits(weights: dict[str, Tensor], config: ModelConfig, family: str, batch: Batch) -> Tensor:
    """[B, L, V], of a model that is loaded with the weights."""
    model = build(config).eval()
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))
    load_weights(model, config, weights, family)
    with torch.no_grad():
        logits_LBV: Tensor = model(batch, {})["logits"]
    return logits_LBV.transpose(0, 1)


def assert_same_logits(model: PreTrainedModel, config: ModelConfig, family: str) -> None:
    batch = synthetic_batch(config, num_sequences=4, source_length=17, target_length=13, seed=3, ragged=True)
    lengths = batch.lengths(batch.predicted_stream)
    assert min(lengths) < max(lengths)
    valid = mask(lengths, max(lengths)).bool()
    theirs = their_logits(model, config, batch)[valid]
    ours = our_logits(model.state_dict(), config, family, batch)[valid]
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, rtol=0.0, atol=LOGITS_ATOL)


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str) -> None:
    assert_same_logits(*published(case))


def test_logits_of_t5_v1_1_with_its_own_head_are_those_of_transformers() -> None:
    model, config, family = published_t5_v1_1()
    assert (config.tying, config.head_scale) == ("source_target", False)
    assert_same_logits(model, config, family)


def test_grouped_queries_and_every_published_form_are_covered() -> None:
    configs = {case: published(case)[1] for case in CASES}
    assert all(configs[case].num_kv_heads < configs[case].num_heads for case in ("llama", "mistral", "qwen2"))
    assert (configs["t5"].tying, configs["t5"].head_scale) == ("all", True)
    assert (configs["t5_v1_1_tied"].tying, configs["t5_v1_1_tied"].head_scale) == ("all", False)
    assert configs["t5"].num_encoder_blocks != configs["t5"].num_decoder_blocks
    assert configs["mbart"].norm_position == "pre"
    assert configs["bart"].norm_position == "post"


@pytest.mark.parametrize("case", ["gpt2", "bert", "bart"])
def test_the_prefix_of_the_base_class_may_be_absent(case: str) -> None:
    model, config, family = published(case)
    weights = model.state_dict()
    prefix = f"{model.base_model_prefix}."
    bare = {name.removeprefix(prefix): value for name, value in weights.items()}
    assert bare.keys() != weights.keys()
    expected = translate(config, weights, family)
    assert all(torch.equal(value, expected[name]) for name, value in translate(config, bare, family).items())
    with pytest.raises(ValueError, match="with and without"):
        translate(config, weights | bare, family)


def test_old_names_of_norms_are_read() -> None:
    model, config, family = published("bert")
    weights = model.state_dict()
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in weights.items()
    }
    old["bert.pooler.dense.weight"] = old["cls.seq_relationship.bias"] = torch.ones(2)
    expected = translate(config, weights, family)
    assert all(torch.equal(value, expected[name]) for name, value in translate(config, old, family).items())


@pytest.mark.parametrize("case", ["llama_wide_heads", "gpt2", "bert", "t5", "bart"])
def test_a_tied_parameter_may_be_stored_once_but_not_differently(case: str) -> None:
    model, config, family = published(case)
    weights = model.state_dict()
    tied = [*(model._tied_weights_keys or {})]
    once = {name: value for name, value in weights.items() if name not in tied}
    expected = translate(config, weights, family)
    assert all(torch.equal(value, expected[name]) for name, value in translate(config, once, family).items())
    for name in tied:
        with pytest.raises(ValueError, match="differ, but are one parameter here"):
            translate(config, weights | {name: weights[name] + 1.0}, family)


@pytest.mark.parametrize("case", ["llama_biased", "gpt2", "bert", "t5", "bart"])
def test_every_entry_matters(case: str) -> None:
    model, config, family = published(case)
    weights = model.state_dict()
    for name in weights.keys() - {"final_logits_bias"}:
        rest = {other: value for other, value in weights.items() if value.data_ptr() != weights[name].data_ptr()}
        with pytest.raises(ValueError, match="the checkpoint lacks"):
            translate(config, rest, family)


def test_a_checkpoint_that_does_not_fit_is_refused() -> None:
    model, config, family = published("qwen2")
    weights = model.state_dict()
    with pytest.raises(ValueError, match=r"1 entries .* no parameters here: extra\.weight"):
        translate(config, weights | {"extra.weight": torch.ones(1)}, family)
    with pytest.raises(ValueError, match=r"12 entries .*layers\.1"):
        translate(config.replace(num_decoder_blocks=1), weights, family)
    with pytest.raises(ValueError, match=r"k_proj.weight has 8 rows, but the config has 4"):
        translate(config.replace(num_kv_heads=1), weights, family)
    with pytest.raises(ValueError, match=r"has shape \(37, 16\), but embed_tokens.weight gives \(31, 16\)"):
        translate(config.replace(vocabulary=37), weights, family)
    with pytest.raises(ValueError, match="family 'opt' are not known"):
        translate(config, weights, "opt")
    with pytest.raises(ValueError, match="meta device"), torch.device("meta"):
        load_weights(build(config), config, weights, family)


def test_a_bias_of_the_logits_that_is_not_zero_is_refused() -> None:
    model, config, family = published("bart")
    weights = model.state_dict()
    with pytest.raises(ValueError, match="final_logits_bias is not zero"):
        translate(config, weights | {"final_logits_bias": torch.ones(1, 31)}, family)


@pytest.mark.parametrize("case", CASES)
def test_weights_of_ours_become_theirs_again(case: str) -> None:
    model, config, family = published(case)
    weights = model.state_dict()
    values = translate(config, weights, family)
    emptied = {name: value if name in ZERO else torch.full_like(value, float("nan")) for name, value in weights.items()}
    store_weights(values, emptied, config, family)
    assert all(torch.equal(emptied[name], value) for name, value in weights.items())
    with pytest.raises(ValueError, match="the checkpoint lacks"):
        store_weights(values, {}, config, family)


def test_a_slice_is_loaded_from_the_whole_checkpoint() -> None:
    model, config, family = published("bart")
    whole, part = build(config), slice_model(build(config), config, (1, 4))
    for loaded in (whole, part):
        load_weights(loaded, config, model.state_dict(), family)
    expected = dict(whole.named_parameters(remove_duplicate=False))
    names = [name for name, _ in part.named_parameters()]
    assert "encoder.block.1.ffn.up.weight" in names
    assert "encoder.block.0.ffn.up.weight" not in names
    assert all(torch.equal(parameter, expected[name]) for name, parameter in part.named_parameters())
