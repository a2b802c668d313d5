"""Small models that tests of models share: one config for each architecture, and a way to fill a model."""

import torch

from models.architectures import build
from models.batch import Batch, synthetic_batch
from models.config import Architecture, ModelConfig, Positions
from models.initial import initialise
from models.model import Model

ARCHITECTURES: tuple[Architecture, ...] = ("encoder_only", "decoder_only", "encoder_decoder")
POSITIONS: tuple[Positions, ...] = ("sinusoidal", "learned", "rope", "relative")
SOURCE_LENGTH = 7
TARGET_LENGTH = 5


def small_config(architecture: Architecture, **changes: object) -> ModelConfig:
    """Three encoder blocks, two decoder blocks, grouped queries; whatever else is changed."""
    fields: dict[str, object] = {
        "architecture": architecture,
        "width": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_width": 24,
        "num_encoder_blocks": 0 if architecture == "decoder_only" else 3,
        "num_decoder_blocks": 0 if architecture == "encoder_only" else 2,
        "vocabulary": 29,
        "max_length": 12,
    }
    return ModelConfig.from_dict(fields | changes)


def small_model(config: ModelConfig, *, seed: int = 1, dtype: torch.dtype = torch.float64) -> Model:
    """A built and initialised model in evaluation mode."""
    with torch.device("meta"):
        model = build(config)
    initialise(model, config, seed=seed, dtype=dtype, device="cpu")
    return model.eval()


def small_batch(config: ModelConfig, *, seed: int = 2, ragged: bool = True, num_sequences: int = 3) -> Batch:
    """Three sequences of unequal source and target lengths."""
    return synthetic_batch(
        config,
        num_sequences=num_sequences,
        source_length=SOURCE_LENGTH,
        target_length=TARGET_LENGTH,
        seed=seed,
        ragged=ragged,
    )
