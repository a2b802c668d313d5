"""What do published checkpoints call the parameters of each family?

    our module  <-  their modules, one below the other            qkv  <-  q_proj k_proj v_proj

Names are those of transformers' model classes, without what the base class puts before them; `{}` is the index of a
block. A module with several rules is stored in several places, or in one of several forms. Left out: heads for tasks
other than predicting tokens.
"""

import dataclasses
from collections.abc import Mapping

Rule = tuple[str, str]
"""Our module, and theirs separated by spaces."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointNames:
    """How the checkpoints of one family are read.

    Attributes:
        rules: which modules are which.
        prefix: what the base class puts before its names; some published files lack it.
        ignored: patterns of names that are no parameters of the model.
        zero: names of tensors that the model does without as long as they are zero.
        transposed: last parts of the modules whose weights are stored as [in, out].
    """

    rules: tuple[Rule, ...]
    prefix: str
    ignored: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()


def _under(ours: str, theirs: str, *rules: Rule) -> tuple[Rule, ...]:
    """The same rules below two modules."""
    return tuple(
        (f"{ours}.{our_name}", " ".join(f"{theirs}.{row}" for row in rows.split())) for our_name, rows in rules
    )


_ROPE_DECODER = CheckpointNames(
    rules=(
        ("decoder.embedding.token", "embed_tokens"),
        *_under(
            "decoder.block.{}",
            "layers.{}",
            ("self_attention.norm", "input_layernorm"),
            ("self_attention.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj"),
            ("self_attention.output", "self_attn.o_proj"),
            ("ffn.norm", "post_attention_layernorm"),
            ("ffn.up", "mlp.gate_proj mlp.up_proj"),
            ("ffn.down", "mlp.down_proj"),
        ),
        ("decoder.norm", "norm"),
        ("head", "lm_head"),
    ),
    prefix="model.",
    ignored=(r"rotary_emb\.inv_freq$",),
)

_GPT2 = CheckpointNames(
    rules=(
        ("decoder.embedding.token", "wte"),
        ("decoder.embedding.position", "wpe"),
        *_under(
            "decoder.block.{}",
            "h.{}",
            ("self_attention.norm", "ln_1"),
            ("self_attention.qkv", "attn.c_attn"),
            ("self_attention.output", "attn.c_proj"),
            ("ffn.norm", "ln_2"),
            ("ffn.up", "mlp.c_fc"),
            ("ffn.down", "mlp.c_proj"),
        ),
        ("decoder.norm", "ln_f"),
        ("head", "lm_head"),
    ),
    prefix="transformer.",
    ignored=(r"\.attn\.(masked_)?bias$",),
    transposed=("c_attn", "c_proj", "c_fc"),
)

_BERT = CheckpointNames(
    rules=(
        *_under(
            "encoder.embedding",
            "embeddings",
            ("token", "word_embeddings"),
            ("position", "position_embeddings"),
            ("token_type", "token_type_embeddings"),
            ("norm", "LayerNorm"),
        ),
        *_under(
            "encoder.block.{}",
            "encoder.layer.{}",
            ("self_attention.qkv", "attention.self.query attention.self.key attention.self.value"),
            ("self_attention.output", "attention.output.dense"),
            ("self_attention.norm", "attention.output.LayerNorm"),
            ("ffn.up", "intermediate.dense"),
            ("ffn.down", "output.dense"),
            ("ffn.norm", "output.LayerNorm"),
        ),
        *_under(
            "head",
            "cls.predictions",
            ("transform.dense", "transform.dense"),
            ("transform.norm", "transform.LayerNorm"),
        ),
        ("head", "cls.predictions.decoder"),
        ("head", "cls.predictions"),  # the bias once more, and in old files only here
    ),
    prefix="bert.",
    ignored=(r"^cls\.seq_relationship\.", r"^pooler\.", r"^embeddings\.(position|token_type)_ids$"),
)


def _t5_stack(side: str, ffn_index: int) -> tuple[Rule, ...]:
    ffn = f"layer.{ffn_index}.DenseReluDense"
    return (
        (f"{side}.embedding.token", "shared"),
        *_under(
            side,
            side,
            ("embedding.token", "embed_tokens"),
            ("relative_bias", "block.0.layer.0.SelfAttention.relative_attention_bias"),
            ("norm", "final_layer_norm"),
        ),
        *_under(
            f"{side}.block.{{}}",
            f"{side}.block.{{}}",
            ("self_attention.norm", "layer.0.layer_norm"),
            ("self_attention.qkv", "layer.0.SelfAttention.q layer.0.SelfAttention.k layer.0.SelfAttention.v"),
            ("self_attention.output", "layer.0.SelfAttention.o"),
            ("ffn.norm", f"layer.{ffn_index}.layer_norm"),
            ("ffn.up", f"{ffn}.wi"),
            ("ffn.up", f"{ffn}.wi_0 {ffn}.wi_1"),
            ("ffn.down", f"{ffn}.wo"),
        ),
    )


_T5 = CheckpointNames(
    rules=(
        *_t5_stack("encoder", 1),
        *_t5_stack("decoder", 2),
        *_under(
            "decoder.block.{}.cross_attention",
            "decoder.block.{}.layer.1",
            ("norm", "layer_norm"),
            ("query", "EncDecAttention.q"),
            ("kv", "EncDecAttention.k EncDecAttention.v"),
            ("output", "EncDecAttention.o"),
        ),
        ("head", "lm_head"),
    ),
    prefix="",
    ignored=(r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",),
)


def _bart_stack(side: str) -> tuple[Rule, ...]:
    return (
        (f"{side}.embedding.token", "shared"),
        *_under(
            side,
            side,
            ("embedding.token", "embed_tokens"),
            ("embedding.position", "embed_positions"),
            ("embedding.norm", "layernorm_embedding"),
            ("norm", "layer_norm"),
        ),
        *_under(
            f"{side}.block.{{}}",
            f"{side}.layers.{{}}",
            ("self_attention.norm", "self_attn_layer_norm"),
            ("self_attention.qkv", "self_attn.q_proj self_attn.k_proj self_attn.v_proj"),
            ("self_attention.output", "self_attn.out_proj"),
            ("ffn.norm", "final_layer_norm"),
            ("ffn.up", "fc1"),
            ("ffn.down", "fc2"),
        ),
    )


_BART = CheckpointNames(
    rules=(
        *_bart_stack("encoder"),
        *_bart_stack("decoder"),
        *_under(
            "decoder.block.{}",
            "decoder.layers.{}",
            ("cross_attention.norm", "encoder_attn_layer_norm"),
            ("cross_attention.query", "encoder_attn.q_proj"),
            ("cross_attention.kv", "encoder_attn.k_proj encoder_attn.v_proj"),
            ("cross_attention.output", "encoder_attn.out_proj"),
        ),
        ("head", "lm_head"),
    ),
    prefix="model.",
    ignored=(r"^(encoder|decoder)\.version$",),
    zero=("final_logits_bias",),
)

CHECKPOINT_NAMES: Mapping[str, CheckpointNames] = {
    "llama": _ROPE_DECODER,
    "mistral": _ROPE_DECODER,
    "qwen2": _ROPE_DECODER,
    "gpt2": _GPT2,
    "bert": _BERT,
    "t5": _T5,
    "bart": _BART,
    "mbart": _BART,
}
"""By `model_type`; T5 v1.1 is of type t5."""
