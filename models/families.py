"""What does each field of a published family's config.json mean?

One table per family: field -> the value that transformers assumes when the field is absent, and the reader that turns
the value into fields of `ModelConfig`. A field that is neither in its family's table nor among those without meaning is
unknown, and an error, because it may change the mathematics.

Source: the configuration classes and models of transformers 4 and 5. Left out: heads for tasks other than predicting
tokens (BERT's pooler), and T5's dropout behind the final norms.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.meanings import (
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    Fields,
    Reader,
    activation,
    beside,
    chosen,
    count,
    flag,
    null_or,
    number,
    only,
    optional_window,
    passed_over,
    rope,
    same_as,
    same_rate_as,
    t5_ffn,
    t5_head,
    window,
)

Meanings = dict[str, tuple[Any, Reader]]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How one `model_type` is read.

    Attributes:
        constant: fields of `ModelConfig` that the whole family shares.
        meanings: for every field of the file its default and its reader.
        aliases: other names of a field, as in `hidden_size` for `n_embd`.
        length_field: the field that holds the longest sequence.
        has_fixed_length: whether that length counts rows of the checkpoint (learned positions).
    """

    constant: Fields
    meanings: Meanings
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    length_field: str = "max_position_embeddings"
    has_fixed_length: bool = False


_COMMON: Meanings = {
    "add_cross_attention": (False, only(False)),
    "cross_attention_hidden_size": (None, only(None)),
    "is_decoder": (False, only(False)),
    "pruned_heads": ({}, only({})),
    "quantization_config": (None, only(None)),
    "tie_encoder_decoder": (False, only(False)),
}
_ONE_STACK: Meanings = {"is_encoder_decoder": (False, only(False))}
_TWO_STACKS: Meanings = {"is_encoder_decoder": (True, only(True))}
_TIED_HEAD = chosen("tying", {True: "head", False: "none"})

# ---- rope decoders --------------------------------------------------------------------------------------------------

_ROPE_DECODER: Fields = {
    "architecture": "decoder_only",
    "norm": "rmsnorm",
    "positions": "rope",
    "qkv_bias": False,
    "attention_output_bias": False,
    "ffn_bias": False,
}


def _rope_meanings(*, vocabulary: int, ffn_width: int, num_kv_heads: int | None, max_length: int) -> Meanings:
    """Return what Llama, Mistral and Qwen2 share, with the defaults that differ."""
    return (
        _COMMON
        | _ONE_STACK
        | {
            "vocab_size": (vocabulary, count("vocabulary")),
            "hidden_size": (4096, count("width")),
            "intermediate_size": (ffn_width, count("ffn_width")),
            "num_hidden_layers": (32, count("num_decoder_blocks")),
            "num_attention_heads": (32, count("num_heads")),
            "num_key_value_heads": (num_kv_heads, null_or(count("num_kv_heads"), lambda _: {})),
            "head_dim": (None, null_or(count("head_width"), lambda _: {})),
            "hidden_act": ("silu", activation(GATED_ACTIVATIONS, "swiglu")),
            "max_position_embeddings": (max_length, count("max_length")),
            "rms_norm_eps": (1e-6, number("norm_eps")),
            "attention_dropout": (0.0, number("attention_dropout")),
            "tie_word_embeddings": (False, _TIED_HEAD),
            "rope_parameters": (None, rope),
            "rope_scaling": (None, beside),
            "rope_theta": (10000.0, beside),
            "partial_rotary_factor": (None, beside),
            "is_decoder": (False, beside),
        }
    )


_LLAMA = Family(
    constant=_ROPE_DECODER,
    meanings=_rope_meanings(vocabulary=32000, ffn_width=11008, num_kv_heads=None, max_length=2048)
    | {
        "attention_bias": (False, flag("qkv_bias", "attention_output_bias")),
        "mlp_bias": (False, flag("ffn_bias")),
    },
)
_MISTRAL = Family(
    constant=_ROPE_DECODER,
    meanings=_rope_meanings(vocabulary=32000, ffn_width=14336, num_kv_heads=8, max_length=131072)
    | {"sliding_window": (4096, window)},
)
_QWEN2 = Family(
    constant=_ROPE_DECODER | {"qkv_bias": True},
    meanings=_rope_meanings(vocabulary=151936, ffn_width=22016, num_kv_heads=32, max_length=32768)
    | {
        "sliding_window": (4096, optional_window),
        "use_sliding_window": (False, flag()),
        "max_window_layers": (28, count()),
        "layer_types": (None, beside),
        "use_mrope": (False, only(False)),
    },
)

# ---- GPT-2 and BERT -------------------------------------------------------------------------------------------------

_GPT2 = Family(
    constant={"architecture": "decoder_only", "positions": "learned"},
    meanings=_COMMON
    | _ONE_STACK
    | {
        "vocab_size": (50257, count("vocabulary")),
        "n_positions": (1024, count("max_length")),
        "n_embd": (768, count("width")),
        "n_layer": (12, count("num_decoder_blocks")),
        "n_head": (12, count("num_heads")),
        "n_inner": (None, null_or(count("ffn_width"), lambda values: {"ffn_width": 4 * values["n_embd"]})),
        "activation_function": ("gelu_new", activation(PLAIN_ACTIVATIONS, "gelu")),
        "resid_pdrop": (0.1, number("dropout")),
        "embd_pdrop": (0.1, same_rate_as("resid_pdrop")),
        "attn_pdrop": (0.1, number("attention_dropout")),
        "layer_norm_epsilon": (1e-5, number("norm_eps")),
        "scale_attn_weights": (True, flag("attention_scale")),
        "scale_attn_by_inverse_layer_idx": (False, passed_over(False, "scales scores only")),
        "tie_word_embeddings": (True, _TIED_HEAD),
        "is_decoder": (False, beside),
    },
    aliases={
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
    length_field="n_positions",
    has_fixed_length=True,
)
_BERT = Family(
    constant={
        "architecture": "encoder_only",
        "positions": "learned",
        "norm_position": "post",
        "final_norm": False,
        "embedding_norm": True,
        "head_bias": True,
        "head_transform": True,
    },
    meanings=_COMMON
    | _ONE_STACK
    | {
        "vocab_size": (30522, count("vocabulary")),
        "hidden_size": (768, count("width")),
        "num_hidden_layers": (12, count("num_encoder_blocks")),
        "num_attention_heads": (12, count("num_heads")),
        "intermediate_size": (3072, count("ffn_width")),
        "hidden_act": ("gelu", activation(PLAIN_ACTIVATIONS, "gelu")),
        "hidden_dropout_prob": (0.1, number("dropout")),
        "attention_probs_dropout_prob": (0.1, number("attention_dropout")),
        "max_position_embeddings": (512, count("max_length")),
        "type_vocab_size": (2, count("num_token_types")),
        "layer_norm_eps": (1e-12, number("norm_eps")),
        "position_embedding_type": ("absolute", only("absolute")),
        "tie_word_embeddings": (True, _TIED_HEAD),
    },
    has_fixed_length=True,
)

# ---- T5, BART and mBART ---------------------------------------------------------------------------------------------

_T5 = Family(
    constant={
        "architecture": "encoder_decoder",
        "norm": "rmsnorm",
        "positions": "relative",
        "attention_scale": False,
        "qkv_bias": False,
        "attention_output_bias": False,
        "ffn_bias": False,
    },
    meanings=_COMMON
    | _TWO_STACKS
    | {
        "vocab_size": (32128, count("vocabulary")),
        "d_model": (512, count("width")),
        "d_kv": (64, count("head_width")),
        "d_ff": (2048, count("ffn_width")),
        "num_layers": (6, count("num_encoder_blocks")),
        "num_decoder_layers": (
            None,
            null_or(count("num_decoder_blocks"), lambda values: {"num_decoder_blocks": values["num_layers"]}),
        ),
        "num_heads": (8, count("num_heads")),
        "relative_attention_num_buckets": (32, count("relative_buckets")),
        "relative_attention_max_distance": (128, count("relative_max_distance")),
        "dropout_rate": (0.1, number("dropout", "attention_dropout", "ffn_dropout")),
        "layer_norm_epsilon": (1e-6, number("norm_eps")),
        "feed_forward_proj": ("relu", t5_ffn),
        "dense_act_fn": (None, beside),
        "is_gated_act": (None, beside),
        "tie_word_embeddings": (True, t5_head),
        "scale_decoder_outputs": (None, beside),
        "n_positions": (512, count("max_length")),
    },
    aliases={
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    length_field="n_positions",
)


def _bart_meanings(*, is_pre_norm: bool) -> Meanings:
    """Return what BART and mBART share; old files say where the norms are, and have to agree."""
    return (
        _COMMON
        | _TWO_STACKS
        | {
            "vocab_size": (50265, count("vocabulary")),
            "max_position_embeddings": (1024, count("max_length")),
            "d_model": (1024, count("width")),
            "encoder_layers": (12, count("num_encoder_blocks")),
            "decoder_layers": (12, count("num_decoder_blocks")),
            "encoder_attention_heads": (16, count("num_heads")),
            "decoder_attention_heads": (16, same_as("encoder_attention_heads")),
            "encoder_ffn_dim": (4096, count("ffn_width")),
            "decoder_ffn_dim": (4096, same_as("encoder_ffn_dim")),
            "encoder_layerdrop": (0.0, passed_over(0.0, "drops blocks at random: all are counted")),
            "decoder_layerdrop": (0.0, passed_over(0.0, "drops blocks at random: all are counted")),
            "activation_function": ("gelu", activation(PLAIN_ACTIVATIONS, "gelu")),
            "dropout": (0.1, number("dropout")),
            "attention_dropout": (0.0, number("attention_dropout")),
            "activation_dropout": (0.0, number("ffn_dropout")),
            "scale_embedding": (False, flag("embedding_scale")),
            "tie_word_embeddings": (True, chosen("tying", {True: "all"})),
            "normalize_before": (is_pre_norm, only(is_pre_norm)),
            "add_final_layer_norm": (is_pre_norm, only(is_pre_norm)),
            "normalize_embedding": (True, only(True)),
            "static_position_embeddings": (False, only(False)),
            "extra_pos_embeddings": (2, only(2)),
            "add_bias_logits": (False, only(False)),
        }
    )


_BART_ALIASES = {
    "hidden_size": "d_model",
    "num_attention_heads": "encoder_attention_heads",
    "num_hidden_layers": "encoder_layers",
}
_BART_CONSTANT: Fields = {
    "architecture": "encoder_decoder",
    "positions": "learned",
    "position_offset": 2,
    "embedding_norm": True,
}

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "gpt2": _GPT2,
    "bert": _BERT,
    "t5": _T5,
    "bart": Family(
        constant=_BART_CONSTANT | {"norm_position": "post", "final_norm": False},
        meanings=_bart_meanings(is_pre_norm=False),
        aliases=_BART_ALIASES,
        has_fixed_length=True,
    ),
    "mbart": Family(
        constant=_BART_CONSTANT | {"norm_position": "pre", "final_norm": True},
        meanings=_bart_meanings(is_pre_norm=True),
        aliases=_BART_ALIASES,
        has_fixed_length=True,
    ),
}
