"""How do token ids or features become hidden states?

    hidden = dropout(norm(sqrt(D)? * token[ids] + position + token_type[types]))        each part if the config has it

This is where batch-first input becomes sequence-first. A target embedding of an encoder-decoder has no token types.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig, Stream
from models.dropout import Dropout
from models.layers import Norm, linear
from models.positions import LearnedPositions, SinusoidalPositions


class TokenEmbedding(nn.Module):
    """A row for each token id."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, width))

    def forward(self, ids_LB: Tensor) -> Tensor:
        """[L, B, D]."""
        return F.embedding(ids_LB, self.weight)


class TokenTypeEmbedding(nn.Module):
    """A row for each token type (BERT's sentence A and B)."""

    def __init__(self, num_types: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_types, width))

    def forward(self, types_LB: Tensor) -> Tensor:
        """[L, B, D]."""
        return F.embedding(types_LB, self.weight)


class Embedding(nn.Module):
    """Everything between the batch and the first block of a stack."""

    token: nn.Module | None
    features: nn.Module | None
    position: nn.Module | None
    token_type: nn.Module | None
    norm: nn.Module | None

    def __init__(self, config: ModelConfig, stream: Stream) -> None:
        super().__init__()
        reads_features = stream == "source" and config.feature_width > 0
        has_token_types = config.num_token_types > 0 and not (stream == "target" and config.has_cross_attention)
        vocabulary = config.source_vocabulary if stream == "source" else config.vocabulary
        self.scale = math.sqrt(config.width) if config.embedding_scale else 1.0
        self.token = None if reads_features else TokenEmbedding(vocabulary, config.width)
        self.features = linear(config.feature_width, config.width, bias=True) if reads_features else None
        self.position = _positions(config)
        self.token_type = TokenTypeEmbedding(config.num_token_types, config.width) if has_token_types else None
        self.norm = Norm(config) if config.embedding_norm else None
        self.dropout = Dropout(config.dropout)

    def forward(self, ids_BL: Tensor, token_types_BL: Tensor | None = None) -> Tensor:
        """ids_BL, or features_BLF, and token types (None: zeros) -> hidden_LBD."""
        length = ids_BL.shape[1]
        if self.token is not None:
            hidden_LBD = self.token(ids_BL.t())
            if self.scale != 1.0:
                hidden_LBD = hidden_LBD * self.scale
        else:
            assert self.features is not None
            hidden_LBD = self.features(ids_BL.transpose(0, 1))
        if self.token_type is not None:
            types_BL = torch.zeros_like(ids_BL[..., 0] if ids_BL.dim() == 3 else ids_BL, dtype=torch.int64)
            hidden_LBD = hidden_LBD + self.token_type((types_BL if token_types_BL is None else token_types_BL).t())
        if self.position is not None:
            hidden_LBD = hidden_LBD + self.position(length, hidden_LBD)
        if self.norm is not None:
            hidden_LBD = self.norm(hidden_LBD)
        embedded_LBD: Tensor = self.dropout(hidden_LBD)
        return embedded_LBD


def _positions(config: ModelConfig) -> nn.Module | None:
    if config.positions == "sinusoidal":
        return SinusoidalPositions(config.width)
    if config.positions == "learned":
        return LearnedPositions(config)
    return None
