"""How do pairs of texts become a batch?

s and t are the bytes of source and target (`models.vocabulary`), S and T the given lengths, `|` the separator:

    encoder_decoder   source  s1 s2 s3
                      target  begin t1 t2         labels  t1 t2 end
    decoder_only      target  s1 s2 s3 |  t1 t2   labels  s2 s3 |  t1 t2 end   with loss_on = "all"
                                                          .  .  .  t1 t2 end   with loss_on = "target"
    encoder_only      source  s1 s2 s3 |  M  t2   labels  .  .  .  .  t1 .

All three read the same bytes in S + T positions at most (the separator stands in the place of `begin`), and the first
two predict the same tokens. An encoder-only model guesses 15 % of the bytes, at least one, each replaced by MASK; it
reads both texts as translation language modelling does (arXiv 1901.07291), with token types 0 and 1 if it has them.

Sequences differ in valid positions as texts do; rows are padded to the given lengths. Texts that are longer lose their
end, and the batch says how many tokens were lost. Left out: packing several pairs into a row, sorting by length.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from models.batch import IGNORED, MASKED_SHARE, Batch
from models.catalogue import TextPair
from models.config import ModelConfig
from models.vocabulary import BEGIN, END, MASK, PAD, SEPARATOR, VOCABULARY, encode

LossOn = Literal["target", "all"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Truncation:
    """What the given lengths cut off a batch; tokens are bytes, and `end` where it was to be predicted."""

    num_sources: int
    num_targets: int
    num_source_tokens: int
    num_target_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TextBatch(Batch):
    """A batch made of texts, which knows what was cut off."""

    truncation: Truncation


def pair_batch(
    config: ModelConfig,
    pairs: Sequence[TextPair],
    *,
    num_sequences: int,
    source_length: int,
    target_length: int,
    seed: int,
    loss_on: LossOn = "target",
) -> TextBatch:
    """Return a batch of pairs for a model, the same for the same arguments.

    Pairs are drawn without repetition until all were drawn. Streams are [B, S] and [B, T] for an encoder-decoder, else
    [B, S + T]. `loss_on` says where an architecture that reads both texts in one sequence has labels: on the target
    alone, or on the source too; an encoder-decoder predicts nothing but its target.

    Raises:
        ValueError: no pairs, a length that holds no token, a model on features, a vocabulary without room for the
            bytes, or fewer learned positions than the batch has.
    """
    _check(config, pairs, num_sequences, source_length, target_length, loss_on)
    generator = random.Random(seed)
    order = generator.sample(range(len(pairs)), len(pairs))
    drawn = [pairs[order[index % len(order)]] for index in range(num_sequences)]
    sources = [encode(pair.source) for pair in drawn]
    targets = [[*encode(pair.target), END] for pair in drawn]
    truncation = _truncation(sources, targets, source_length, target_length)
    kept_sources = [ids[:source_length] for ids in sources]
    kept_targets = [ids[:target_length] for ids in targets]

    if not config.has_cross_attention:
        length = source_length + target_length
        return _one_stream(config, kept_sources, kept_targets, length, loss_on, generator, truncation)
    shifted = [[BEGIN, *ids[:-1]] for ids in kept_targets]
    return TextBatch(
        source=_padded(kept_sources, source_length, PAD),
        source_lengths=tuple(map(len, kept_sources)),
        target=_padded(shifted, target_length, PAD),
        target_lengths=tuple(map(len, shifted)),
        labels=_padded(kept_targets, target_length, IGNORED),
        truncation=truncation,
    )


def _one_stream(
    config: ModelConfig,
    sources: list[list[int]],
    targets: list[list[int]],
    length: int,
    loss_on: LossOn,
    generator: random.Random,
    truncation: Truncation,
) -> TextBatch:
    whole = [[*source, SEPARATOR, *target] for source, target in zip(sources, targets, strict=True)]
    # The last token is only ever a label: `end`, or the byte after the cut.
    streams = [ids[:-1] for ids in whole]
    lengths = tuple(map(len, streams))
    starts = [0 if loss_on == "all" else len(source) for source in sources]
    token_types = None
    if config.num_token_types > 1:
        rows = zip(sources, streams, strict=True)
        token_types = _padded([[int(at > len(source)) for at in range(len(ids))] for source, ids in rows], length, 0)
    if config.has_decoder:
        labels = [[IGNORED] * start + ids[start + 1 :] for start, ids in zip(starts, whole, strict=True)]
        return TextBatch(
            target=_padded(streams, length, PAD),
            target_lengths=lengths,
            labels=_padded(labels, length, IGNORED),
            token_types=token_types,
            truncation=truncation,
        )
    masked = [_masked(ids, start, generator) for ids, start in zip(streams, starts, strict=True)]
    return TextBatch(
        source=_padded([ids for ids, _ in masked], length, PAD),
        source_lengths=lengths,
        labels=_padded([labels for _, labels in masked], length, IGNORED),
        token_types=token_types,
        truncation=truncation,
    )


def _masked(ids: list[int], start: int, generator: random.Random) -> tuple[list[int], list[int]]:
    """Return the ids with some bytes from `start` on masked, and the labels that ask for them."""
    places = [at for at in range(start, len(ids)) if ids[at] != SEPARATOR]
    chosen = set(generator.sample(places, max(1, round(MASKED_SHARE * len(places)))))
    visible = [MASK if at in chosen else id_ for at, id_ in enumerate(ids)]
    return visible, [id_ if at in chosen else IGNORED for at, id_ in enumerate(ids)]


def _padded(rows: Sequence[Sequence[int]], length: int, fill: int) -> Tensor:
    return torch.tensor([[*row, *[fill] * (length - len(row))] for row in rows], dtype=torch.int64)


def _truncation(
    sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]], source_length: int, target_length: int
) -> Truncation:
    source_cuts = [len(ids) - source_length for ids in sources if len(ids) > source_length]
    target_cuts = [len(ids) - target_length for ids in targets if len(ids) > target_length]
    return Truncation(
        num_sources=len(source_cuts),
        num_targets=len(target_cuts),
        num_source_tokens=sum(source_cuts),
        num_target_tokens=sum(target_cuts),
    )


def _check(
    config: ModelConfig,
    pairs: Sequence[TextPair],
    num_sequences: int,
    source_length: int,
    target_length: int,
    loss_on: LossOn,
) -> None:
    if not pairs:
        raise ValueError("no pairs of texts; give at least one")
    if loss_on not in get_args(LossOn):
        raise ValueError(f"loss_on = {loss_on!r}; choose one of {', '.join(get_args(LossOn))}")
    if config.feature_width:
        raise ValueError(f"{config.name} reads features of width {config.feature_width}; text needs a token embedding")
    smallest = min(config.vocabulary, config.source_vocabulary or config.vocabulary)
    if smallest < VOCABULARY:
        raise ValueError(f"{config.name} has a vocabulary of {smallest}; bytes and specials need {VOCABULARY}")
    # With one target position, an encoder-only model would read the separator and no byte of the target to guess.
    least_target = 1 if config.has_decoder else 2
    for field, value, least in (
        ("num_sequences", num_sequences, 1),
        ("source_length", source_length, 1),
        ("target_length", target_length, least_target),
    ):
        if value < least:
            raise ValueError(f"{field} = {value}; it must be at least {least}")
    longest = max(source_length, target_length) if config.has_cross_attention else source_length + target_length
    if config.positions == "learned" and longest > config.max_length:
        raise ValueError(
            f"a pair of {source_length} + {target_length} positions needs {longest} learned positions; "
            f"{config.name} has {config.max_length}"
        )
