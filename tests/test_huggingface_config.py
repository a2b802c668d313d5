"""Is a published config.json read as transformers reads it, and is nothing in it read past?"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models.config import ModelConfig
from models.costs import parameter_counts
from models.families import FAMILIES
from models.named import named_model
from tests.published_configs import BART_LARGE, BERT_LARGE, GPT2, LLAMA_2_7B, PUBLISHED, T5_SMALL, T5_V1_1_BASE

# Another library's own idea of each family, small enough to be built.
ROPE_SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
BART_SIZES = {
    "vocab_size": 40,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
T5_SIZES = {"vocab_size": 40, "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4}
BUILT: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaConfig", "LlamaForCausalLM", ROPE_SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}),
    ("LlamaConfig", "LlamaForCausalLM", ROPE_SIZES | {"num_attention_heads": 4, "head_dim": 16}),
    ("LlamaConfig", "LlamaForCausalLM", ROPE_SIZES | {"num_attention_heads": 4, "attention_bias": True}),
    ("LlamaConfig", "LlamaForCausalLM", ROPE_SIZES | {"num_attention_heads": 4, "mlp_bias": True}),
    ("MistralConfig", "MistralForCausalLM", ROPE_SIZES | {"num_attention_heads": 8, "sliding_window": None}),
    ("Qwen2Config", "Qwen2ForCausalLM", ROPE_SIZES | {"num_attention_heads": 4, "num_key_value_heads": 2}),
    (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        ROPE_SIZES | {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    ("GPT2Config", "GPT2LMHeadModel", {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16}),
    ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 40}),
    ("BertConfig", "BertForMaskedLM", ROPE_SIZES | {"num_attention_heads": 4, "type_vocab_size": 3}),
    ("T5Config", "T5ForConditionalGeneration", T5_SIZES | {"num_decoder_layers": 3}),
    ("T5Config", "T5ForConditionalGeneration", T5_SIZES | {"feed_forward_proj": "gated-gelu"}),
    ("BartConfig", "BartForConditionalGeneration", BART_SIZES),
    ("MBartConfig", "MBartForConditionalGeneration", BART_SIZES | {"scale_embedding": True}),
]


def content(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """Return what the library would write into config.json."""
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return written


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_a_published_file_is_the_named_model(name: str, published: Mapping[str, Any]) -> None:
    assert ModelConfig.from_hf(published).replace(name=name) == named_model(name)


@pytest.mark.parametrize(("config_class", "model_class", "sizes"), BUILT)
def test_parameters_are_those_of_the_model_that_transformers_builds(
    config_class: str, model_class: str, sizes: dict[str, Any]
) -> None:
    config = getattr(transformers, config_class)(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
        model.tie_weights()
    counts = parameter_counts(ModelConfig.from_hf(content(config)))
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_fields_have_the_defaults_of_transformers(model_type: str) -> None:
    max_length = 4096 if model_type == "mistral" else None  # its default window is 4096
    full = content(transformers.AutoConfig.for_model(model_type))
    short = ModelConfig.from_hf({"model_type": model_type}, max_length=max_length)
    assert short == ModelConfig.from_hf(full, max_length=max_length)


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_the_new_style_says_the_same_as_the_old_one(published: dict[str, Any]) -> None:
    model_type = published["model_type"]
    others = {key: value for key, value in published.items() if key != "model_type"}
    new = content(transformers.AutoConfig.for_model(model_type, **others))
    assert "torch_dtype" not in new
    assert "rope_theta" not in new
    old_config, new_config = ModelConfig.from_hf(published), ModelConfig.from_hf(new)
    if published is T5_V1_1_BASE:
        # The library ties this head whatever the file says, and writes so.
        assert (new_config.tying, new_config.head_scale) == ("all", False)
        new_config = new_config.replace(tying="source_target")
    assert new_config.replace(name="") == old_config.replace(name="")


def test_a_base_of_rope_is_found_in_every_place() -> None:
    places: list[dict[str, Any]] = [
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "default"}, "rope_theta": 5e5},
    ]
    for place in places:
        assert ModelConfig.from_hf({"model_type": "llama"} | place).rope_theta == 5e5


def test_a_file_its_folder_and_its_content_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT2), encoding="utf-8")
    expected = ModelConfig.from_hf(GPT2)
    assert expected.name == "gpt2"
    assert [ModelConfig.from_hf(source) for source in (file, str(file), tmp_path)] == [expected] * 3


def test_a_model_is_named_after_the_last_part_of_its_published_name() -> None:
    assert ModelConfig.from_hf(LLAMA_2_7B).name == "Llama-2-7b-hf"


def test_aliases_are_read_and_may_not_contradict() -> None:
    assert ModelConfig.from_hf({"model_type": "gpt2", "hidden_size": 1200}).width == 1200
    with pytest.raises(ValueError, match="num_hidden_layers = 11 contradicts encoder_layers = 12"):
        ModelConfig.from_hf(BART_LARGE | {"num_hidden_layers": 11})


def test_a_window_that_holds_every_sequence_is_read() -> None:
    mistral = {"model_type": "mistral", "max_position_embeddings": 32768, "sliding_window": 4096}
    assert ModelConfig.from_hf(mistral, max_length=4096).max_length == 4096
    assert ModelConfig.from_hf(mistral | {"sliding_window": None}).max_length == 32768
    qwen2 = {"model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28, "num_hidden_layers": 28}
    assert ModelConfig.from_hf(qwen2).num_blocks == 28
    assert ModelConfig.from_hf(qwen2 | {"use_sliding_window": True}).num_blocks == 28


@pytest.mark.parametrize(
    ("published", "changes", "message"),
    [
        (LLAMA_2_7B, {"model_type": "mixtral"}, "model_type = 'mixtral' is not modelled; llama, "),
        (LLAMA_2_7B, {"num_local_experts": 8}, "num_local_experts = 8 is a field that llama is not known to have"),
        (LLAMA_2_7B, {"quantization_config": {"bits": 4}}, r"quantization_config = \{'bits': 4\} is not modelled"),
        (
            LLAMA_2_7B,
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling = .*'linear'.* is not modelled",
        ),
        (LLAMA_2_7B, {"rope_parameters": {"rope_type": "llama3"}}, "rope_parameters = .*'llama3'.* is not modelled"),
        (LLAMA_2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not modelled; only 1.0 is"),
        (LLAMA_2_7B, {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not modelled; 'silu' or "),
        (LLAMA_2_7B, {"hidden_size": "4096"}, "hidden_size = '4096'; it must be an integer"),
        (LLAMA_2_7B, {"hidden_size": None}, "hidden_size = None; it must be an integer"),
        (LLAMA_2_7B, {"attention_bias": 1}, "attention_bias = 1; it must be true or false"),
        (LLAMA_2_7B, {"num_key_value_heads": 5}, "32 heads over 5 KV heads"),
        (
            {"model_type": "mistral"},
            {},
            "sliding_window = 4096 is shorter than the 131072 positions .* max_length = 4096",
        ),
        ({"model_type": "qwen2"}, {"use_sliding_window": True}, "sliding_window = 4096 is shorter than the 32768"),
        ({"model_type": "qwen2"}, {"layer_types": ["sliding_attention"]}, "layer_types = .* is not modelled"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not modelled"),
        (GPT2, {"embd_pdrop": 0.0}, "embd_pdrop = 0.0 differs from resid_pdrop = 0.1; the model has one"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention = True is not modelled"),
        (BERT_LARGE, {"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key' is not"),
        (BERT_LARGE, {"is_decoder": True}, "is_decoder = True is not modelled; only False is"),
        (T5_SMALL, {"feed_forward_proj": "gated-relu"}, "feed_forward_proj = 'gated-relu' is not modelled"),
        (T5_V1_1_BASE, {"dense_act_fn": "relu"}, "dense_act_fn = 'relu' is not modelled; only 'gelu_new' is"),
        (BART_LARGE, {"decoder_ffn_dim": 2048}, "decoder_ffn_dim = 2048 differs from encoder_ffn_dim = 4096"),
        (BART_LARGE, {"encoder_layerdrop": 0.1}, "encoder_layerdrop = 0.1 is not modelled; only 0.0 is"),
        (BART_LARGE, {"normalize_before": True}, "normalize_before = True is not modelled; only False is"),
        (BART_LARGE, {"tie_word_embeddings": False}, "tie_word_embeddings = False is not modelled; True is"),
    ],
)
def test_what_is_not_modelled_is_named_with_its_value(
    published: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf(published | changes)


def test_learned_positions_refuse_a_shorter_length() -> None:
    with pytest.raises(ValueError, match="max_length = 512, but n_positions = 1024 positions are learned"):
        ModelConfig.from_hf(GPT2, max_length=512)
    with pytest.raises(ValueError, match="max_length = 8192; it must lie between 1 and max_position_embeddings = 4096"):
        ModelConfig.from_hf(LLAMA_2_7B, max_length=8192)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(ValueError, match=r"config\.json: no such file; give a config\.json, the folder"):
        ModelConfig.from_hf(file)
    file.write_text('{"model_type": ', encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: not JSON, .*line 1"):
        ModelConfig.from_hf(tmp_path)
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.json: expected a JSON object, found list"):
        ModelConfig.from_hf(file)
    file.write_text('{"model_type": "llama", "vocab_size": -1}', encoding="utf-8")
    with pytest.raises(ValueError, match="vocabulary = -1"):
        ModelConfig.from_hf(file)
