"""How is every cell of an experiment run, and what does a step of it read?

    Settings    seed, repeats, warm-up, turns, dtype, optimizer          top keys of the file
    DataSpec    text or synthetic tokens, sequences, lengths             a [data.<name>] table

Left out: the tokens themselves (`launch/data.py`).
"""

import dataclasses
from typing import Literal

from models.config import ModelConfig

LossOn = Literal["target", "all"]

NUM_PART_STEPS = 3
"""Steps of a cell that are taken apart, where the experiment asks for it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How every cell of an experiment is run."""

    seed: int = 0
    """Of weights, dropout masks and synthetic tokens."""
    repeats: int = 5
    """Timed steps."""
    warmup: int = 1
    """Steps before the timed ones."""
    interleave: int = 8
    """Cells that are kept in memory together and timed in turns; 1 for models that fill a device."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    optimizer: Literal["sgd", "adamw"] = "adamw"
    learning_rate: float = 1e-3
    parts: bool = False
    """Whether a few more steps tell what a step is made of: products, copies, other operators, dispatch, waiting."""

    def __post_init__(self) -> None:
        for field, least in (("seed", 0), ("repeats", 1), ("warmup", 0), ("interleave", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"{field} = {getattr(self, field)}; it must be at least {least}")
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate = {self.learning_rate}; it must be positive")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """The batch of one step, over all data-parallel ranks.

    Lengths are those of a pair of texts; a model with one stack reads both in a row.
    """

    text: str
    """`synthetic`, or pairs of sentences: `django:de,fr,ja`, or a .tsv, .jsonl, .po or .mo file."""
    sequences: int
    source_length: int
    target_length: int
    loss_on: LossOn = "target"
    """Which tokens of a pair a decoder-only model is trained on; other architectures have one choice."""
    ragged: bool = False
    """Whether synthetic sequences have lengths of their own."""

    def __post_init__(self) -> None:
        for field in ("sequences", "source_length", "target_length"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}; it must be at least 1")
        if self.ragged and self.text != "synthetic":
            raise ValueError("ragged is read with text = 'synthetic' only: real sentences have lengths of their own")

    def stream_lengths(self, config: ModelConfig) -> tuple[int, int]:
        """Padded positions of the source and the target stream of a model, 0 for one that it lacks."""
        if config.has_cross_attention:
            return self.source_length, self.target_length
        length = self.source_length + self.target_length
        return length * config.has_encoder, length * config.has_decoder

    def check_model(self, config: ModelConfig) -> None:
        """Raises ValueError when a model has no position for what it would read."""
        longest = max(self.stream_lengths(config))
        if config.positions == "learned" and longest > config.max_length:
            raise ValueError(
                f"{config.name} has {config.max_length} learned positions, the data has {longest}: raise max_length or "
                f"shorten the sequences"
            )
