"""What enters a model: token ids or features of each stream, their valid lengths, and the labels.

    encoder_only      source -> labels on the source
    decoder_only                target -> labels on the target
    encoder_decoder   source,   target -> labels on the target

Tensors are batch-first and padded on the right. Valid lengths are Python integers, so that a mask is made without
waiting for a device. Left out: tokenisation, and how a batch is cut over ranks.
"""

import dataclasses

import torch
from torch import Tensor

from models.config import ModelConfig, Stream

IGNORED = -100
"""The label of a position without loss."""

MASKED_SHARE = 0.15
"""Share of the valid positions that an encoder-only model predicts (BERT, arXiv 1810.04805, section 3.1)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One batch of sequences; B sequences, S and T the padded lengths of source and target.

    Attributes:
        labels: [B, L] integers of the predicted stream (the target if there is one), `IGNORED` where there is no loss.
        source: [B, S] token ids, or [B, S, F] float features.
        source_lengths: valid positions of each source sequence, from 1 to S.
        target: [B, T] token ids, already shifted: target[:, t] predicts labels[:, t].
        target_lengths: valid positions of each target sequence, from 1 to T.
        token_types: [B, S] (or [B, T] without a source) token-type ids; None means zeros.

    Raises ValueError if shapes disagree or a length is out of range.
    """

    labels: Tensor
    source: Tensor | None = None
    source_lengths: tuple[int, ...] = ()
    target: Tensor | None = None
    target_lengths: tuple[int, ...] = ()
    token_types: Tensor | None = None

    def __post_init__(self) -> None:
        if self.source is None and self.target is None:
            raise ValueError("a batch needs a source, a target or both")
        num_sequences = self.labels.shape[0]
        for stream, ids, lengths in (
            ("source", self.source, self.source_lengths),
            ("target", self.target, self.target_lengths),
        ):
            _check_stream(stream, ids, lengths, num_sequences)
        predicted = self.stream(self.predicted_stream)
        if self.labels.shape != predicted.shape[:2]:
            raise ValueError(
                f"labels {tuple(self.labels.shape)} must have the shape of the {self.predicted_stream}, "
                f"{tuple(predicted.shape[:2])}"
            )
        first = self.stream("source" if self.source is not None else "target")
        if self.token_types is not None and self.token_types.shape != first.shape[:2]:
            raise ValueError(
                f"token_types {tuple(self.token_types.shape)} must have the shape of their ids, "
                f"{tuple(first.shape[:2])}"
            )

    @property
    def num_sequences(self) -> int:
        return self.labels.shape[0]

    @property
    def predicted_stream(self) -> Stream:
        """The stream that the labels belong to."""
        return "source" if self.target is None else "target"

    def num_loss_tokens(self) -> int:
        """Positions with a label. Waits for the device of the labels: ask before the batch is moved to one."""
        return int((self.labels != IGNORED).sum())

    def stream(self, stream: Stream) -> Tensor:
        """Ids [B, L] or features [B, L, F] of one stream; ValueError if the batch lacks it."""
        ids = self.source if stream == "source" else self.target
        if ids is None:
            raise ValueError(f"this batch has no {stream}")
        return ids

    def lengths(self, stream: Stream) -> tuple[int, ...]:
        """Valid positions of each sequence of one stream."""
        return self.source_lengths if stream == "source" else self.target_lengths

    def stream_length(self, stream: Stream) -> int:
        """Padded length of one stream."""
        return self.stream(stream).shape[1]

    def narrow(self, start: int, count: int) -> "Batch":
        """Sequences [start, start + count) as views; one microbatch of this batch."""
        if count < 1 or start < 0 or start + count > self.num_sequences:
            raise ValueError(
                f"sequences {start} to {start + count} are not within the {self.num_sequences} of the batch"
            )
        end = start + count
        return Batch(
            labels=self.labels[start:end],
            source=None if self.source is None else self.source[start:end],
            source_lengths=self.source_lengths[start:end],
            target=None if self.target is None else self.target[start:end],
            target_lengths=self.target_lengths[start:end],
            token_types=None if self.token_types is None else self.token_types[start:end],
        )

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Batch":
        """The batch on a device. `dtype` is that of real-valued features; ids keep theirs."""

        def moved(ids: Tensor | None) -> Tensor | None:
            if ids is None:
                return None
            return ids.to(device, dtype if ids.is_floating_point() else None)

        return dataclasses.replace(
            self,
            labels=self.labels.to(device),
            source=moved(self.source),
            target=moved(self.target),
            token_types=moved(self.token_types),
        )


def synthetic_batch(
    config: ModelConfig,
    *,
    num_sequences: int,
    source_length: int,
    target_length: int,
    seed: int,
    ragged: bool = False,
) -> Batch:
    """Random ids (or normal features) for a model; the same for the same arguments.

    A causal model predicts the next token of each position. An encoder-only model predicts 15 % of its valid positions,
    at least one a sequence. With `ragged`, valid lengths are random, at least 1, and at least one sequence is full. The
    length of a stream that the architecture lacks is not read.
    """
    if num_sequences < 1:
        raise ValueError(f"num_sequences = {num_sequences}; a batch has at least 1 sequence")
    generator = torch.Generator().manual_seed(seed)
    source = target = None
    source_lengths: tuple[int, ...] = ()
    target_lengths: tuple[int, ...] = ()
    token_types = None
    if config.has_encoder:
        source, source_lengths = _source(config, num_sequences, source_length, generator, ragged)
    if config.has_decoder:
        target_lengths = _valid_lengths("target", num_sequences, target_length, generator, ragged)
        tokens = torch.randint(config.vocabulary, (num_sequences, target_length + 1), generator=generator)
        target = tokens[:, :-1].contiguous()
        labels = tokens[:, 1:].masked_fill(_padding(target_lengths, target_length), IGNORED)
    else:
        labels = torch.randint(config.vocabulary, (num_sequences, source_length), generator=generator)
        labels = labels.masked_fill(~_masked_positions(source_lengths, source_length, generator), IGNORED)
    if config.num_token_types:
        length = source_length if config.has_encoder else target_length
        token_types = torch.randint(config.num_token_types, (num_sequences, length), generator=generator)
    return Batch(
        labels=labels,
        source=source,
        source_lengths=source_lengths,
        target=target,
        target_lengths=target_lengths,
        token_types=token_types,
    )


def _check_stream(stream: str, ids: Tensor | None, lengths: tuple[int, ...], num_sequences: int) -> None:
    if ids is None:
        if lengths:
            raise ValueError(f"{stream}_lengths are given without a {stream}")
        return
    if ids.dim() not in ((2, 3) if stream == "source" else (2,)):
        raise ValueError(f"{stream} has shape {tuple(ids.shape)}; it must be [sequences, length] token ids")
    if ids.shape[0] != num_sequences or len(lengths) != num_sequences:
        raise ValueError(
            f"{ids.shape[0]} {stream} sequences and {len(lengths)} {stream}_lengths for {num_sequences} rows of labels"
        )
    for length in lengths:
        if not 1 <= length <= ids.shape[1]:
            raise ValueError(f"{stream} length {length} must lie between 1 and the padded length {ids.shape[1]}")


def _source(
    config: ModelConfig, num_sequences: int, length: int, generator: torch.Generator, ragged: bool
) -> tuple[Tensor, tuple[int, ...]]:
    lengths = _valid_lengths("source", num_sequences, length, generator, ragged)
    if config.feature_width:
        return torch.randn(num_sequences, length, config.feature_width, generator=generator), lengths
    return torch.randint(config.source_vocabulary, (num_sequences, length), generator=generator), lengths


def _valid_lengths(
    stream: str, num_sequences: int, length: int, generator: torch.Generator, ragged: bool
) -> tuple[int, ...]:
    if length < 1:
        raise ValueError(f"{stream}_length = {length}; it must be at least 1")
    if not ragged:
        return (length,) * num_sequences
    lengths = torch.randint(1, length + 1, (num_sequences,), generator=generator)
    lengths[torch.randint(num_sequences, (1,), generator=generator)] = length
    return tuple(lengths.tolist())


def _padding(lengths: tuple[int, ...], length: int) -> Tensor:
    return torch.arange(length) >= torch.tensor(lengths)[:, None]


def _masked_positions(lengths: tuple[int, ...], length: int, generator: torch.Generator) -> Tensor:
    score = torch.rand(len(lengths), length, generator=generator).masked_fill(_padding(lengths, length), 2.0)
    lowest = torch.zeros_like(score, dtype=torch.bool).scatter_(1, score.argmin(1, keepdim=True), True)
    return lowest | (score < MASKED_SHARE)
