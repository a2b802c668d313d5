"""Which published models can be called by name?

Every system of the articles and the checkpoints whose parameter counts are published, as data: a style (what a family
has in common) and a row (its sizes). `tiny-` models are relatives of each style, small enough for a test.

Sources: Vaswani et al. 2017 (arXiv 1706.03762) Table 3; Radford et al. 2019 (GPT-2); Touvron et al. 2023
(arXiv 2307.09288); Grattafiori et al. 2024 (arXiv 2407.21783); Devlin et al. 2018 (arXiv 1810.04805); Raffel et al.
2019 (arXiv 1910.10683) and the v1.1 release; Lewis et al. 2019 (arXiv 1910.13461); Liu et al. 2020 (arXiv 2001.08210);
for the styles `speech`, `annotated` and `gpt-classic` the articles that the study judges. Left out: weights,
tokenizers, and BERT's pooler, which no token is predicted from.
"""

import difflib
from typing import Any

from models.config import ModelConfig
from models.vocabulary import VOCABULARY

Fields = dict[str, Any]

# ---- sizes ----------------------------------------------------------------------------------------------------------


def _decoder(num_blocks: int, width: int, num_heads: int, ffn_width: int) -> Fields:
    return {"num_decoder_blocks": num_blocks, "width": width, "num_heads": num_heads, "ffn_width": ffn_width}


def _encoder(num_blocks: int, width: int, num_heads: int, ffn_width: int) -> Fields:
    return {"num_encoder_blocks": num_blocks, "width": width, "num_heads": num_heads, "ffn_width": ffn_width}


def _both(num_blocks: int, width: int, num_heads: int, ffn_width: int) -> Fields:
    return _encoder(num_blocks, width, num_heads, ffn_width) | {"num_decoder_blocks": num_blocks}


# ---- styles ---------------------------------------------------------------------------------------------------------

_WITHOUT_BIAS: Fields = {"qkv_bias": False, "attention_output_bias": False, "ffn_bias": False}

# The paper's projections are plain matrices; only the ffn has biases. Its vocabulary is "about 37000".
_TRANSFORMER: Fields = {
    "architecture": "encoder_decoder",
    "vocabulary": 37000,
    "max_length": 1024,
    "norm_position": "post",
    "final_norm": False,
    "activation": "relu",
    "positions": "sinusoidal",
    "embedding_scale": True,
    "qkv_bias": False,
    "attention_output_bias": False,
    "tying": "all",
    "dropout": 0.1,
}
# The article drops out the embedding and the output of the ffn; here the output of attention shares that probability.
_SPEECH: Fields = {
    "architecture": "encoder_decoder",
    "vocabulary": 26,
    "max_length": 2048,
    "norm_position": "post",
    "final_norm": False,
    "activation": "relu",
    "positions": "sinusoidal",
    "head_bias": True,
    "dropout": 0.1,
    "feature_width": 80,
}
# Pre-norm, as the final norm of both stacks asks for. The article leaves the vocabularies open: the paper's is taken.
_ANNOTATED: Fields = {
    "architecture": "encoder_decoder",
    "vocabulary": 37000,
    "max_length": 5000,
    "norm_eps": 1e-6,
    "activation": "relu",
    "positions": "sinusoidal",
    "embedding_scale": True,
    "head_bias": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "ffn_dropout": 0.1,
}
_GPT_CLASSIC: Fields = {
    "architecture": "decoder_only",
    "vocabulary": 50257,
    "max_length": 1024,
    "positions": "sinusoidal",
    "dropout": 0.1,
    "ffn_dropout": 0.1,
}
_GPT2: Fields = {
    "architecture": "decoder_only",
    "vocabulary": 50257,
    "max_length": 1024,
    "activation": "gelu_tanh",
    "tying": "head",
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
_LLAMA: Fields = _WITHOUT_BIAS | {
    "architecture": "decoder_only",
    "vocabulary": 32000,
    "max_length": 4096,
    "norm": "rmsnorm",
    "activation": "swiglu",
    "positions": "rope",
}
_LLAMA3: Fields = _LLAMA | {"vocabulary": 128256, "max_length": 8192, "num_kv_heads": 8, "rope_theta": 500000.0}
_BERT: Fields = {
    "architecture": "encoder_only",
    "vocabulary": 30522,
    "max_length": 512,
    "norm_eps": 1e-12,
    "norm_position": "post",
    "final_norm": False,
    "embedding_norm": True,
    "num_token_types": 2,
    "head_bias": True,
    "head_transform": True,
    "tying": "head",
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
_T5: Fields = _WITHOUT_BIAS | {
    "architecture": "encoder_decoder",
    "vocabulary": 32128,
    "max_length": 512,
    "norm": "rmsnorm",
    "norm_eps": 1e-6,
    "activation": "relu",
    "positions": "relative",
    "attention_scale": False,
    "head_scale": True,
    "tying": "all",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "ffn_dropout": 0.1,
    "head_width": 64,
}
_T5_V1_1: Fields = _T5 | {"activation": "geglu", "head_scale": False, "tying": "source_target"}
_BART: Fields = {
    "architecture": "encoder_decoder",
    "vocabulary": 50265,
    "max_length": 1024,
    "norm_position": "post",
    "final_norm": False,
    "embedding_norm": True,
    "position_offset": 2,
    "tying": "all",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "ffn_dropout": 0.1,
}
_MBART: Fields = _BART | {
    "vocabulary": 250027,
    "norm_position": "pre",
    "final_norm": True,
    "embedding_scale": True,
    "attention_dropout": 0.0,
    "ffn_dropout": 0.0,
}
# Tiny models read bytes, so that they can be given text, and drop nothing out, so that runs compare exactly.
_TINY: Fields = {
    "vocabulary": VOCABULARY,
    "max_length": 128,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "ffn_dropout": 0.0,
}

# ---- the models -----------------------------------------------------------------------------------------------------

_MODELS: dict[str, Fields] = {
    "transformer-base": _TRANSFORMER | _both(6, 512, 8, 2048),
    "transformer-big": _TRANSFORMER | _both(6, 1024, 16, 4096) | {"dropout": 0.3},
    "speech": _SPEECH | _both(6, 512, 8, 2048),
    "annotated": _ANNOTATED | _both(6, 512, 8, 2048),
    "gpt-classic": _GPT_CLASSIC | _decoder(6, 512, 8, 2048),
    "gpt2": _GPT2 | _decoder(12, 768, 12, 3072),
    "gpt2-medium": _GPT2 | _decoder(24, 1024, 16, 4096),
    "gpt2-large": _GPT2 | _decoder(36, 1280, 20, 5120),
    "gpt2-xl": _GPT2 | _decoder(48, 1600, 25, 6400),
    "llama-2-7b": _LLAMA | _decoder(32, 4096, 32, 11008),
    "llama-2-13b": _LLAMA | _decoder(40, 5120, 40, 13824),
    "llama-2-70b": _LLAMA | _decoder(80, 8192, 64, 28672) | {"num_kv_heads": 8},
    "llama-3-8b": _LLAMA3 | _decoder(32, 4096, 32, 14336),
    # Exact in parameters, bytes and FLOPs; its outputs differ, because the stretched rope of 3.1 is not modelled.
    "llama-3.1-405b": _LLAMA3 | _decoder(126, 16384, 128, 53248) | {"max_length": 131072},
    "bert-base": _BERT | _encoder(12, 768, 12, 3072),
    "bert-large": _BERT | _encoder(24, 1024, 16, 4096),
    "t5-small": _T5 | _both(6, 512, 8, 2048),
    "t5-base": _T5 | _both(12, 768, 12, 3072),
    "t5-large": _T5 | _both(24, 1024, 16, 4096),
    "t5-3b": _T5 | _both(24, 1024, 32, 16384) | {"head_width": 128},
    "t5-11b": _T5 | _both(24, 1024, 128, 65536) | {"head_width": 128},
    "t5-v1_1-small": _T5_V1_1 | _both(8, 512, 6, 1024),
    "t5-v1_1-base": _T5_V1_1 | _both(12, 768, 12, 2048),
    "t5-v1_1-large": _T5_V1_1 | _both(24, 1024, 16, 2816),
    "t5-v1_1-xl": _T5_V1_1 | _both(24, 2048, 32, 5120),
    "t5-v1_1-xxl": _T5_V1_1 | _both(24, 4096, 64, 10240),
    "bart-base": _BART | _both(6, 768, 12, 3072),
    "bart-large": _BART | _both(12, 1024, 16, 4096),
    "mbart-large": _MBART | _both(12, 1024, 16, 4096),
    # The first three are twins: equal blocks, four of them, default style.
    "tiny-encoder-decoder": _TINY | {"architecture": "encoder_decoder", "tying": "all"} | _both(2, 32, 4, 64),
    "tiny-decoder": _TINY | {"architecture": "decoder_only", "tying": "head"} | _decoder(4, 32, 4, 64),
    "tiny-encoder": _TINY | {"architecture": "encoder_only", "tying": "head"} | _encoder(4, 32, 4, 64),
    "tiny-transformer": _TRANSFORMER | _TINY | _both(2, 32, 4, 64),
    "tiny-speech": _SPEECH | _TINY | {"feature_width": 8} | _both(2, 32, 4, 64),
    "tiny-annotated": _ANNOTATED | _TINY | _both(2, 32, 4, 64),
    "tiny-gpt-classic": _GPT_CLASSIC | _TINY | _decoder(4, 32, 4, 64),
    "tiny-gpt2": _GPT2 | _TINY | _decoder(4, 32, 4, 128),
    "tiny-llama": _LLAMA | _TINY | {"num_kv_heads": 2} | _decoder(4, 32, 4, 96),
    "tiny-bert": _BERT | _TINY | _encoder(4, 32, 4, 128),
    "tiny-t5": _T5 | _TINY | {"head_width": 16} | _both(2, 32, 4, 64),
    "tiny-t5-v1_1": _T5_V1_1 | _TINY | {"head_width": 16} | _both(2, 32, 4, 48),
    "tiny-bart": _BART | _TINY | _both(2, 32, 4, 128),
    "tiny-mbart": _MBART | _TINY | _both(2, 32, 4, 128),
}

MODEL_NAMES: tuple[str, ...] = tuple(_MODELS)


def named_model(name: str) -> ModelConfig:
    """Return the config of a named model; its field `name` is that name.

    Raises:
        ValueError: the name is unknown; the message holds the closest known names.
    """
    if name not in _MODELS:
        close = difflib.get_close_matches(name, MODEL_NAMES, n=3, cutoff=0.4)
        nearest = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(MODEL_NAMES)}"
        raise ValueError(f"unknown model {name!r}; {nearest}")
    return ModelConfig(name=name, **_MODELS[name])
