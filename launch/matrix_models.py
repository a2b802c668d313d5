"""Which small model does a choice of the covering array name?

Models have 16 units, 4 heads and four to six blocks; what an option does not change is the same in all of them. Left
out: which choices there are, and their layouts (`launch/matrix.py`).
"""

from collections.abc import Mapping

from launch.covering import Value
from models.config import ModelConfig

LENGTHS = {"even": (8, 6), "odd": (7, 5), "longer target": (5, 9)}
"""Padded source and target lengths."""
BLOCKS = {"2+2": (2, 2), "3+2": (3, 2), "1+5": (1, 5)}
"""Encoder and decoder blocks; an architecture of one stack has their sum."""
_HEADS = 4
_HEAD_WIDTH = 4


def config_of(choice: Mapping[str, Value]) -> ModelConfig:
    """The model of a complete choice. Raises ValueError when it contradicts itself."""
    architecture = choice["architecture"]
    num_encoder_blocks, num_decoder_blocks = BLOCKS[str(choice["blocks"])]
    num_blocks = num_encoder_blocks + num_decoder_blocks
    vocabulary = int(choice["vocabulary"])
    has_features = choice["front_end"] == "features"
    has_other_scales = choice["scales"] == "other"
    return ModelConfig(
        name="matrix",
        architecture=architecture,  # type: ignore[arg-type]
        width=_HEADS * _HEAD_WIDTH,
        num_heads=_HEADS,
        num_kv_heads=int(choice["kv_heads"]),
        head_width=_HEAD_WIDTH + 2 if choice["wide_heads"] else _HEAD_WIDTH,
        ffn_width=24,
        num_encoder_blocks={"encoder_decoder": num_encoder_blocks, "encoder_only": num_blocks}.get(
            str(architecture), 0
        ),
        num_decoder_blocks={"encoder_decoder": num_decoder_blocks, "decoder_only": num_blocks}.get(
            str(architecture), 0
        ),
        vocabulary=vocabulary,
        source_vocabulary=vocabulary + 2 if choice["vocabularies"] == "two" else 0,
        max_length=_longest(choice),
        norm=choice["norm"],  # type: ignore[arg-type]
        norm_position=choice["norm_position"],  # type: ignore[arg-type]
        final_norm=bool(choice["final_norm"]),
        embedding_norm=bool(choice["embedding_norm"]),
        activation=choice["activation"],  # type: ignore[arg-type]
        positions=choice["positions"],  # type: ignore[arg-type]
        position_offset=2 if choice["positions"] == "learned" else 0,
        relative_buckets=8,
        relative_max_distance=6,
        num_token_types=int(choice["token_types"]),
        qkv_bias=bool(choice["biases"]),
        attention_output_bias=bool(choice["biases"]),
        ffn_bias=bool(choice["biases"]),
        head_bias=choice["head"] == "bias",
        head_transform=choice["head"] == "transform",
        attention_scale=not has_other_scales,
        embedding_scale=has_other_scales,
        head_scale=has_other_scales,
        tying=choice["tying"],  # type: ignore[arg-type]
        feature_width=5 if has_features else 0,
    )


def _longest(choice: Mapping[str, Value]) -> int:
    """Positions of the longest stream. It fills the position table: what sequence parallelism adds lies beyond."""
    lengths = LENGTHS[str(choice["lengths"])]
    reads_pairs_in_one_stream = choice["data"] == "text" and choice["architecture"] != "encoder_decoder"
    return sum(lengths) if reads_pairs_in_one_stream else max(lengths)
