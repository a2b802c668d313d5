"""What is proved: one partitioning of one small model on one batch, and how a large model gets a small relative.

A proof needs the structure of a model, not its size. Torch-free, so that a mistake is answered before any process
starts. Left out: the batch's tensors (`launch/parity.py`) and which cases to prove (`launch/matrix.py`).
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from models.config import ModelConfig
from models.vocabulary import VOCABULARY
from parallel.engines.choice import NATIVE, EngineChoice
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.partition import Stage, stages
from parallel.profile import Profile

Data = Literal["full", "ragged", "text"]

SMALL_HEAD_WIDTH = 4
SMALL_VOCABULARY = 48
"""About as many rows has a small relative; 2, 3, 4, 6 and 8 divide it, so that a remainder is the large model's."""
SMALL_LENGTH = 16
SMALL_FEATURE_WIDTH = 5
MOST_GROUPED_HEADS = 4
"""Query heads of a KV head from which a small relative keeps one KV head a rank, not two."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One partitioning of one small model on one batch, to be compared with one process.

    Raises ValueError when the layout cannot partition the model or the batch, or when the model drops out: masks depend
    on microbatch and shard, so one process draws others.
    """

    name: str
    config: ModelConfig
    layout: Layout
    engine: EngineChoice = NATIVE
    data: Data = "ragged"
    """`full`: every position valid; `ragged`: random valid lengths; `text`: sentences, cut and padded."""
    num_sequences: int
    source_length: int
    target_length: int

    def __post_init__(self) -> None:
        if self.data not in get_args(Data):
            raise ValueError(f"data = {self.data!r}; choose one of {', '.join(get_args(Data))}")
        if self.config.dropout or self.config.attention_dropout or self.config.ffn_dropout:
            raise ValueError(f"{self.config.name} drops out, and masks differ by layout: compare it with dropout 0")
        if self.data == "text" and self.config.feature_width:
            raise ValueError(f"{self.config.name} reads features: text needs a token embedding")
        if self.data == "text" and self.config.vocabulary < VOCABULARY:
            raise ValueError(f"text needs {VOCABULARY} rows, one a byte and the specials, got {self.config.vocabulary}")
        self.layout.check_model(self.config)
        self.layout.check_sequences(self.num_sequences)
        stages(self.config, self.layout, self.profile)

    @property
    def profile(self) -> Profile | None:
        """What blocks cost, counted in FLOPs, where the layout asks; None where it does not."""
        shape = StepShape(
            num_sequences=self.num_sequences // self.layout.dp,
            source_length=self.source_length * self.config.has_encoder,
            target_length=self.target_length * self.config.has_decoder,
        )
        return Profile.counted_for(self.config, self.layout, shape)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "layout": self.layout.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Case":
        """The inverse of `to_dict`."""
        config, layout = ModelConfig.from_dict(fields["config"]), Layout.from_dict(fields["layout"])
        return cls(**{**fields, "config": config, "layout": layout, "engine": EngineChoice(**fields["engine"])})


def case_of(
    config: ModelConfig, layout: Layout, profile: Profile | None = None, *, engine: EngineChoice = NATIVE
) -> Case:
    """The case that stands for a model of any size on a layout: its small relative on ragged sequences.

    Args:
        config: the model.
        layout: its layout.
        profile: what the model's blocks cost, for a layout that is cut by cost.
        engine: who runs it, and how.

    Raises:
        ValueError: the layout cannot partition the model itself.
    """
    # Two sequences a microbatch, but only one in the last: a ragged end.
    num_sequences = 2 * layout.microbatches - (layout.microbatches > 1)
    small, cut = small_relative(config, layout, profile)
    return Case(
        name=f"{config.name} {layout.label}{' compiled' * engine.compiled}",
        config=small,
        layout=cut,
        engine=engine,
        num_sequences=num_sequences * layout.dp,
        source_length=7,
        target_length=9,
    )


def small_relative(config: ModelConfig, layout: Layout, profile: Profile | None = None) -> tuple[ModelConfig, Layout]:
    """A tiny model with the same options and the same structure under a layout, without dropout, and how it is cut.

    Kept: architecture, norms, positions, activation, biases, scales, tying; query heads of a KV head and whether ranks
    share a KV head; whether heads are as wide together as the model; the kind of every pipeline stage (encoder, decoder
    or both); the remainder of each vocabulary over the ranks. Raises ValueError when the layout cannot partition
    `config`.
    """
    layout.check_model(config)
    grouped = config.num_heads // config.num_kv_heads
    num_kv_heads = min(config.num_kv_heads, layout.tp * layout.cp * (2 if grouped <= MOST_GROUPED_HEADS else 1))
    num_heads = grouped * num_kv_heads
    blocks = _fewest_blocks(config, stages(config, layout, profile))
    heads_width = num_heads * SMALL_HEAD_WIDTH
    small = config.replace(
        name=f"small {config.name}",
        width=heads_width if config.num_heads * config.head_width == config.width else heads_width + 4,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_width=SMALL_HEAD_WIDTH,
        ffn_width=6 * layout.tp,
        num_encoder_blocks=sum(num_encoder for num_encoder, _ in blocks),
        num_decoder_blocks=sum(num_decoder for _, num_decoder in blocks),
        vocabulary=_small_vocabulary(config.vocabulary, layout.tp),
        source_vocabulary=_small_vocabulary(config.source_vocabulary, layout.tp),
        max_length=SMALL_LENGTH,
        relative_buckets=8,
        relative_max_distance=6,
        feature_width=min(config.feature_width, SMALL_FEATURE_WIDTH),
        dropout=0.0,
        attention_dropout=0.0,
        ffn_dropout=0.0,
    )
    return small, layout.replace(cut=tuple(itertools.accumulate(map(sum, blocks[:-1]))))


def _small_vocabulary(rows: int, tp: int) -> int:
    """Few rows with the same remainder over the ranks; 0 stays 0."""
    return rows if rows <= SMALL_VOCABULARY else -(-SMALL_VOCABULARY // tp) * tp + rows % tp


def _fewest_blocks(config: ModelConfig, cut: Sequence[Stage]) -> list[tuple[int, int]]:
    """Encoder and decoder blocks of each stage: one of each kind that it has, and two of a side that has two."""
    middle = config.num_encoder_blocks
    blocks = [[int(stage.first < middle), int(stage.last > middle)] for stage in cut]
    for side, num_blocks in enumerate((config.num_encoder_blocks, config.num_decoder_blocks)):
        holders = [held for held in blocks if held[side]]
        # All blocks of the side are on this one stage.
        if len(holders) == 1 and num_blocks > 1:
            holders[0][side] = 2
    return [(num_encoder, num_decoder) for num_encoder, num_decoder in blocks]
