"""How does a position enter the model?

    sinusoidal  added to the embedding: sin(p / 10000^(2i/D)) in column 2i, cosine in column 2i + 1 (arXiv 1706.03762)
    learned     added to the embedding: a row of a table
    rope        queries and keys rotated by p * theta^(-2i/H), the two halves of a head being the coordinates
                (arXiv 2104.09864, in the half-split order of the published LLaMA checkpoints)
    relative    a number per head added to each score, by bucket of key position minus query position (arXiv 1910.10683)

Left out: scaled or interpolated rotations, and positions that do not start at 0.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.elementwise import rotated


class PositionTables:
    """Tables of one length, kept from the call before if length, device and dtype are the same."""

    def __init__(self, make: Callable[[int, torch.device, torch.dtype], tuple[Tensor, ...]]) -> None:
        self._make = make
        self._key: tuple[object, ...] = ()
        self._tables: tuple[Tensor, ...] = ()

    def get(self, length: int, like: Tensor) -> tuple[Tensor, ...]:
        """The tables for positions 0 to length - 1, on the device and in the dtype of `like`."""
        if torch.compiler.is_compiling():
            # What was kept would belong to the compiled code: it is used once, then the code is compiled again.
            return self._made(length, like)
        # Fake tensors belong to the mode that made them, and inference tensors cannot take part in training.
        key = (length, like.device, like.dtype, getattr(like, "fake_mode", None), torch.is_inference_mode_enabled())
        if key != self._key:
            with torch.no_grad():
                self._tables = self._made(length, like)
            self._key = key
        return self._tables

    def _made(self, length: int, like: Tensor) -> tuple[Tensor, ...]:
        exact = torch.float64 if like.dtype == torch.float64 else torch.float32
        return tuple(table.to(like.dtype) for table in self._make(length, like.device, exact))


class SinusoidalPositions(nn.Module):
    """Sines and cosines of geometrically spaced wavelengths; no parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self._tables = PositionTables(self._make)

    def forward(self, length: int, like: Tensor) -> Tensor:
        """[length, 1, D] on the device and in the dtype of `like`."""
        (table_L1D,) = self._tables.get(length, like)
        return table_L1D

    def _make(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        angles_LF = _angles(length, self.width, 10000.0, device, dtype)
        return (torch.stack((angles_LF.sin(), angles_LF.cos()), dim=-1).reshape(length, 1, self.width),)


class LearnedPositions(nn.Module):
    """A table with a row for each position, after `offset` rows that no position uses.

    Positions beyond `max_length - 1` read the last row: they are padding that makes a length divisible.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.offset = config.position_offset
        self.max_length = config.max_length
        self.weight = nn.Parameter(torch.empty(config.max_length + config.position_offset, config.width))

    def forward(self, length: int, like: Tensor) -> Tensor:
        """[length, 1, D] in the dtype of the table; `like` is not read."""
        if length <= self.max_length:
            return self.weight[self.offset : self.offset + length, None]
        rows = torch.arange(length, device=self.weight.device).clamp_(max=self.max_length - 1) + self.offset
        return F.embedding(rows, self.weight)[:, None]


class Rope:
    """Rotation of queries and keys; one object serves all self-attentions of a stack."""

    def __init__(self, config: ModelConfig) -> None:
        self.head_width = config.head_width
        self.theta = config.rope_theta
        self._tables = PositionTables(self._make)

    def rotate(self, q_LBNH: Tensor, k_LBKH: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys of positions 0 to L - 1, rotated."""
        cos_L11F, sin_L11F = self._tables.get(q_LBNH.shape[0], q_LBNH)
        turned_LBNH = rotated(q_LBNH, cos_L11F, sin_L11F, by_head=False)
        return turned_LBNH, rotated(k_LBKH, cos_L11F, sin_L11F, by_head=True)

    def _make(self, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        angles_L11F = _angles(length, self.head_width, self.theta, device, dtype)[:, None, None]
        return angles_L11F.cos(), angles_L11F.sin()


class RelativeBias(nn.Module):
    """A learned bias per head and bucket of distance; one object serves all self-attentions of a stack.

    Near distances have a bucket each, far ones share buckets of logarithmically growing width up to `max_distance`, and
    all beyond share the last. A bidirectional stack spends half of its buckets on keys after the query.
    """

    def __init__(self, config: ModelConfig, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.num_buckets = config.relative_buckets
        self.max_distance = config.relative_max_distance
        self.weight = nn.Parameter(torch.empty(config.relative_buckets, config.num_heads))

    def forward(self, query_length: int, key_length: int) -> Tensor:
        """bias_NQK, for as many heads as the weight has columns."""
        device = self.weight.device
        distance_QK = torch.arange(key_length, device=device) - torch.arange(query_length, device=device)[:, None]
        bias_QKN = F.embedding(self._buckets(distance_QK), self.weight)
        # Contiguous, because it is read once for each block.
        return bias_QKN.permute(2, 0, 1).contiguous()

    def _buckets(self, distance: Tensor) -> Tensor:
        """Bucket of each key position minus query position."""
        if self.is_causal:
            num_buckets = self.num_buckets
            first = torch.zeros_like(distance)
            distance = (-distance).clamp(min=0)
        else:
            num_buckets = self.num_buckets // 2
            first = (distance > 0).to(distance.dtype) * num_buckets
            distance = distance.abs()
        num_near = num_buckets // 2
        growth = (num_buckets - num_near) / math.log(self.max_distance / num_near)
        far = num_near + ((distance.clamp(min=1).float() / num_near).log() * growth).to(distance.dtype)
        return first + torch.where(distance < num_near, distance, far.clamp(max=num_buckets - 1))


def _angles(length: int, width: int, theta: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2, device=device, dtype=dtype) / width)
    return torch.arange(length, device=device, dtype=dtype)[:, None] * frequencies
