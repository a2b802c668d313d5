"""What a model is: one frozen description for the three architectures.

A decoder-only, an encoder-only and an encoder-decoder model are built from the same blocks, so they share one
description. An architecture is told by the stacks it has:

    encoder_only      num_encoder_blocks > 0, num_decoder_blocks = 0
    decoder_only      num_encoder_blocks = 0, num_decoder_blocks > 0
    encoder_decoder   both > 0; decoder blocks have cross-attention

Every contradiction is an error here, so that nothing downstream has to ask twice. Left out on purpose: degrees, ranks,
lengths of a batch, kernels; a model knows nothing of how it is partitioned or run.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from models.huggingface import Source, counted_fields, model_fields

Architecture = Literal["decoder_only", "encoder_decoder", "encoder_only"]
NormKind = Literal["layernorm", "rmsnorm"]
NormPosition = Literal["pre", "post"]
Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu", "geglu"]
Positions = Literal["sinusoidal", "learned", "rope", "relative"]
Tying = Literal["none", "head", "source_target", "all"]
Stream = Literal["source", "target"]

GATED: frozenset[Activation] = frozenset({"swiglu", "geglu"})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that fixes the mathematics and the parameters of one model.

    `num_kv_heads = 0` and `head_width = 0` mean the usual choice (as many as query heads; width / num_heads) and are
    replaced by it, so that a built config always holds the numbers themselves.

    Raises ValueError with one line for every contradiction.
    """

    name: str = "unnamed"
    architecture: Architecture
    width: int
    num_heads: int
    num_kv_heads: int = 0
    head_width: int = 0
    ffn_width: int
    num_encoder_blocks: int = 0
    num_decoder_blocks: int = 0
    vocabulary: int
    """Rows of the embedding of the stream that the head predicts (source for encoder-only, else target)."""
    source_vocabulary: int = 0
    """Rows of an encoder-decoder's source embedding; 0 means `vocabulary`."""
    max_length: int

    norm: NormKind = "layernorm"
    norm_eps: float = 1e-5
    norm_position: NormPosition = "pre"
    final_norm: bool = True
    """A norm after the last block of every stack."""
    embedding_norm: bool = False
    """A norm after the embedding of every stack (BERT, BART)."""
    activation: Activation = "gelu"
    positions: Positions = "learned"
    position_offset: int = 0
    """Unused rows at the start of a learned position table (BART has 2)."""
    rope_theta: float = 10000.0
    relative_buckets: int = 32
    relative_max_distance: int = 128
    num_token_types: int = 0
    """Rows of a token-type embedding (BERT has 2), 0 for none."""

    qkv_bias: bool = True
    attention_output_bias: bool = True
    ffn_bias: bool = True
    head_bias: bool = False
    attention_scale: bool = True
    """Divide the scores by sqrt(head_width); T5 does not."""
    embedding_scale: bool = False
    """Multiply token embeddings by sqrt(width)."""
    head_scale: bool = False
    """Multiply the input of the head by 1/sqrt(width) (T5 with a tied head)."""
    head_transform: bool = False
    """Dense, activation and norm before the head (BERT's masked-LM head)."""
    tying: Tying = "none"
    """head: head = embedding of the predicted stream; source_target: both embeddings are one; all: the three are."""

    dropout: float = 0.0
    attention_dropout: float = 0.0
    ffn_dropout: float = 0.0
    feature_width: int = 0
    """Width of real-valued source features projected by a linear front end, 0 for token ids."""

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_sizes()
        for field, value in (
            ("num_kv_heads", self.num_kv_heads or self.num_heads),
            ("head_width", self.head_width or self._default_head_width()),
            ("source_vocabulary", self.source_vocabulary or (self.vocabulary if self.has_source_tokens else 0)),
        ):
            object.__setattr__(self, field, value)
        self._check_stacks()
        self._check_rules()

    # ---- what follows from the fields -------------------------------------------------------------------------

    @property
    def has_encoder(self) -> bool:
        return self.architecture != "decoder_only"

    @property
    def has_decoder(self) -> bool:
        return self.architecture != "encoder_only"

    @property
    def has_cross_attention(self) -> bool:
        return self.architecture == "encoder_decoder"

    @property
    def has_source_tokens(self) -> bool:
        """Whether an encoder exists and reads token ids rather than features."""
        return self.has_encoder and self.feature_width == 0

    @property
    def is_gated(self) -> bool:
        return self.activation in GATED

    @property
    def num_blocks(self) -> int:
        return self.num_encoder_blocks + self.num_decoder_blocks

    @property
    def predicted_stream(self) -> Stream:
        """The stream whose hidden states enter the head."""
        return "target" if self.has_decoder else "source"

    @property
    def tie_groups(self) -> tuple[tuple[str, ...], ...]:
        """Qualified names of parameters that are one tensor; the first of each group is its canonical name."""
        predicted = "decoder.embedding.token.weight" if self.has_decoder else "encoder.embedding.token.weight"
        groups: dict[Tying, tuple[tuple[str, ...], ...]] = {
            "none": (),
            "head": ((predicted, "head.weight"),),
            "source_target": (("encoder.embedding.token.weight", "decoder.embedding.token.weight"),),
            "all": (("encoder.embedding.token.weight", "decoder.embedding.token.weight", "head.weight"),),
        }
        return groups[self.tying]

    def replace(self, **changes: Any) -> "ModelConfig":
        """The same config with some fields changed; validated again."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of `to_dict`. Unknown and missing keys are errors."""
        known = {field.name: field for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(f"unknown model keys {', '.join(unknown)}; known are {', '.join(known)}")
        missing = [name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields]
        if missing:
            raise ValueError(f"the model lacks {', '.join(missing)}")
        return cls(**fields)

    @classmethod
    def from_hf(cls, source: Source, *, max_length: int | None = None) -> "ModelConfig":
        """The model that a published config.json describes: a file, the folder that holds it, or its content.

        See `models.huggingface.model_fields`. Raises ValueError for what is not modelled.
        """
        return cls(**model_fields(source, max_length=max_length))

    @classmethod
    def counted_from_hf(cls, source: Source) -> tuple["ModelConfig", tuple[str, ...]]:
        """A model that holds and computes as much as the one of a config.json, and notes on what it passes over.

        For counting only: where there are notes, its outputs would differ. Raises ValueError for what changes counts.
        """
        fields, notes = counted_fields(source)
        return cls(**fields), notes

    # ---- rules ------------------------------------------------------------------------------------------------

    def _check_choices(self) -> None:
        for field, choices in (
            ("architecture", Architecture),
            ("norm", NormKind),
            ("norm_position", NormPosition),
            ("activation", Activation),
            ("positions", Positions),
            ("tying", Tying),
        ):
            value = getattr(self, field)
            if value not in get_args(choices):
                raise ValueError(f"{field} = {value!r}; choose one of {', '.join(get_args(choices))}")

    def _check_sizes(self) -> None:
        for field in ("width", "num_heads", "ffn_width", "vocabulary", "max_length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}; it must be at least 1")
        for field in (
            "num_kv_heads",
            "head_width",
            "num_encoder_blocks",
            "num_decoder_blocks",
            "source_vocabulary",
            "position_offset",
            "num_token_types",
            "feature_width",
        ):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} = {getattr(self, field)}; it must not be negative")
        for field in ("dropout", "attention_dropout", "ffn_dropout"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field} = {getattr(self, field)}; it must lie in [0, 1)")
        if self.norm_eps <= 0:
            raise ValueError(f"norm_eps = {self.norm_eps}; it must be positive")

    def _default_head_width(self) -> int:
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} over {self.num_heads} heads: num_heads must divide width, or give head_width"
            )
        return self.width // self.num_heads

    def _check_stacks(self) -> None:
        for side, has_side in (("encoder", self.has_encoder), ("decoder", self.has_decoder)):
            num_blocks = getattr(self, f"num_{side}_blocks")
            if has_side and num_blocks < 1:
                raise ValueError(f"{self.architecture} needs num_{side}_blocks >= 1, got {num_blocks}")
            if not has_side and num_blocks:
                raise ValueError(f"{self.architecture} has no {side}, but num_{side}_blocks = {num_blocks}")

    def _check_rules(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads over {self.num_kv_heads} KV heads: num_kv_heads must divide")
        if self.positions == "rope" and self.head_width % 2:
            raise ValueError(f"positions = 'rope' needs an even head width, got {self.head_width}")
        if self.positions == "sinusoidal" and self.width % 2:
            raise ValueError(f"positions = 'sinusoidal' needs an even width, got {self.width}")
        if self.positions == "relative" and (self.relative_buckets < 4 or self.relative_buckets % 4):
            raise ValueError(f"relative_buckets = {self.relative_buckets}; it must be a multiple of 4")
        if self.positions == "relative" and self.relative_max_distance <= self.relative_buckets // 2:
            raise ValueError(
                f"relative_max_distance = {self.relative_max_distance} must exceed half of "
                f"{self.relative_buckets} relative_buckets"
            )
        if self.position_offset and self.positions != "learned":
            raise ValueError(f"position_offset = {self.position_offset} needs positions = 'learned'")
        if self.feature_width and not self.has_encoder:
            raise ValueError("feature_width needs an encoder; decoder_only reads token ids")
        if self.source_vocabulary and not self.has_source_tokens:
            raise ValueError(f"source_vocabulary = {self.source_vocabulary}, but no encoder reads token ids")
        if self.architecture == "encoder_only" and self.source_vocabulary not in (0, self.vocabulary):
            raise ValueError(f"encoder_only has one vocabulary: {self.vocabulary} and {self.source_vocabulary} differ")
        self._check_tying()

    def _check_tying(self) -> None:
        if self.tying in ("source_target", "all"):
            if not self.has_cross_attention:
                raise ValueError(f"tying = {self.tying!r} needs an encoder_decoder; {self.architecture} has one stack")
            if self.feature_width:
                raise ValueError(f"tying = {self.tying!r} needs source token ids, but feature_width is set")
            if self.source_vocabulary != self.vocabulary:
                raise ValueError(
                    f"tying = {self.tying!r} needs one vocabulary, got {self.source_vocabulary} and {self.vocabulary}"
                )
        if self.tying == "head" and self.architecture == "encoder_only" and self.feature_width:
            raise ValueError("tying = 'head' needs a token embedding, but feature_width is set")
        if self.head_transform and self.is_gated:
            raise ValueError("head_transform needs an activation without a gate")


def keys_values_name(index: int | str) -> str:
    """What the keys and values of a decoder block are called where they leave a slice and enter another: `kv.3`."""
    return f"kv.{index}"
