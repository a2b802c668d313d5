"""Which config.json describes a model of ours? The inverse of `models/huggingface.py`, for Llama and T5.

    decoder_only  ->  llama        encoder_decoder  ->  t5        fields of ModelConfig -> content of the file

A file has no place for what its family takes for granted (Llama's norm, T5's one vocabulary). So what was written is
read again: a model that it does not come back as is refused, with what the family has and the model has not. Nothing
is fetched, and transformers is not needed. Left out: the other families that are read, encoder-only models (BERT), and
T5 with a head of its own, which transformers 5 ties whatever the file says.
"""

import dataclasses

from models.config import Activation, ModelConfig
from models.huggingface import model_fields
from models.meanings import Fields

_LLAMA_ACTIVATIONS: dict[Activation, str] = {"swiglu": "silu", "geglu": "gelu_pytorch_tanh"}
_T5_ACTIVATIONS: dict[Activation, str] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "swiglu": "gated-silu",
    "geglu": "gated-gelu",
}


def published_fields(config: ModelConfig) -> Fields:
    """Return the content of the config.json that describes a model; `model_type` is `llama` or `t5`.

    Raises ValueError, in one line, for a model that is neither.
    """
    if config.architecture == "encoder_only":
        raise ValueError("an encoder_only model is neither a Llama nor a T5")
    content = _t5(config) if config.has_cross_attention else _llama(config)
    read = ModelConfig(**model_fields(content)).to_dict()
    unread = {"name", *(_RELATIVE if config.positions != "relative" else ()), *_rope_field(config)}
    pairs = [(field.name, read[field.name], getattr(config, field.name)) for field in dataclasses.fields(config)]
    told = [
        f"{name} = {theirs!r}, not {ours!r}" for name, theirs, ours in pairs if theirs != ours and name not in unread
    ]
    if told:
        raise ValueError(f"a model of type {content['model_type']} has {', '.join(told)}")
    return content


_RELATIVE = ("relative_buckets", "relative_max_distance")


def _rope_field(config: ModelConfig) -> tuple[str, ...]:
    return () if config.positions == "rope" else ("rope_theta",)


def _llama(config: ModelConfig) -> Fields:
    return {
        "model_type": "llama",
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "intermediate_size": config.ffn_width,
        "num_hidden_layers": config.num_decoder_blocks,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_width,
        "hidden_act": _LLAMA_ACTIVATIONS.get(config.activation, "silu"),
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        "tie_word_embeddings": config.tying == "head",
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.ffn_bias,
    }


def _t5(config: ModelConfig) -> Fields:
    return {
        "model_type": "t5",
        "vocab_size": config.vocabulary,
        "d_model": config.width,
        "d_kv": config.head_width,
        "d_ff": config.ffn_width,
        "num_layers": config.num_encoder_blocks,
        "num_decoder_layers": config.num_decoder_blocks,
        "num_heads": config.num_heads,
        "relative_attention_num_buckets": config.relative_buckets,
        "relative_attention_max_distance": config.relative_max_distance,
        "dropout_rate": config.dropout,
        "layer_norm_epsilon": config.norm_eps,
        "feed_forward_proj": _T5_ACTIVATIONS[config.activation],
        "tie_word_embeddings": True,
        "scale_decoder_outputs": config.head_scale,
        "n_positions": config.max_length,
    }
