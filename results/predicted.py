"""How well can a pipeline be balanced where no study can measure: any vocabulary, any ratio of lengths, any depth?

Closed forms (`models/costs.py`) on published models, one row a point, for three questions:

    vocabulary     decoder-only models, vocabulary 1k to 256k, 2 to 16 stages, cut evenly
    length_ratio   T5-large and its decoder-only twin of equal depth, 960 positions a pair, source/target 1/4 to 4,
                   2 to 16 stages, cut in every way below
    pair_vocabulary
                   the same two on 480 + 480 positions, vocabulary 1k to 256k

    even      block counts differ by one at most
    aligned   every stage encoder XOR decoder: each side cut evenly, the split of the stages that costs least
    mixed     any contiguous cut: the one whose most costly stage costs least
    folded    cut evenly into twice as many chunks; stage i holds chunks i and 2p - 1 - i

A stage costs the forward FLOPs of its blocks, and of the head on the last; its parameters are those of its blocks, and
of the embeddings, norms and head that live with them, a tied copy counted where it is held. The bubble is that of 1F1B
with four microbatches a stage and a backward twice as long as the forward; told for cuts of pairs, not for `folded`.
Left out: activations, transfers.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from models.config import ModelConfig
from models.costs import Side, block_costs, embedding_parameters, head_flops, norm_parameters
from models.matching import twins
from models.named import named_model
from parallel.layouts import Layout
from parallel.partition import first_blocks
from parallel.schedules import BUILDERS
from results.balance import imbalance, rank_bubbles

VOCABULARY_MODELS = ("gpt2-medium", "gpt2-xl", "llama-2-7b", "llama-2-70b")
VOCABULARIES = tuple(1024 * 2**step for step in range(9))
VOCABULARY_STAGES = (2, 4, 8, 16)

PAIR_MODEL = "t5-large"
PAIR_LENGTHS = ((192, 768), (320, 640), (480, 480), (640, 320), (768, 192))
EQUAL_LENGTHS = (480, 480)
PAIR_STAGES = (2, 3, 4, 6, 8, 12, 16)
CUTS = ("even", "aligned", "mixed", "folded")

MICROBATCHES_PER_STAGE = 4


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What each block of a model costs, ends included: the flat list that a cut divides."""

    config: ModelConfig
    flops: tuple[int, ...]
    head_flops: int
    parameters: tuple[int, ...]
    end_parameters: tuple[tuple[int, str, int], ...]
    """(block that it lives with, canonical name, parameters) of what stands outside the blocks."""

    @classmethod
    def of(cls, config: ModelConfig, source_length: int, target_length: int) -> "Work":
        """The work of a step on one pair of texts."""
        costs = block_costs(config, source_length, target_length)
        head = head_flops(config, target_length if config.has_decoder else source_length)
        flops = [cost.flops.total for cost in costs]
        flops[-1] += head
        return cls(
            config=config,
            flops=tuple(flops),
            head_flops=head,
            parameters=tuple(cost.parameters.total for cost in costs),
            end_parameters=tuple(_ends(config)),
        )

    def stage_flops(self, starts: Sequence[int]) -> list[int]:
        """Forward FLOPs of every stage; `starts` holds the first block of every stage but the first."""
        return [sum(self.flops[first:last]) for first, last in self._slices(starts)]

    def stage_parameters(self, starts: Sequence[int]) -> list[int]:
        """Parameters of every stage; a tensor with several users on a stage is counted once there."""
        held = []
        for first, last in self._slices(starts):
            ends = {name: size for block, name, size in self.end_parameters if first <= block < last}
            held.append(sum(self.parameters[first:last]) + sum(ends.values()))
        return held

    def _slices(self, starts: Sequence[int]) -> Iterator[tuple[int, int]]:
        return itertools.pairwise((0, *starts, len(self.flops)))


def _ends(config: ModelConfig) -> Iterator[tuple[int, str, int]]:
    """Embeddings with the first block of a stack, relative biases with every block, norms and head with the last."""
    canonical = {name: group[0] for group in config.tie_groups for name in group}
    sides: tuple[tuple[Side, int, int], ...] = (
        ("encoder", 0, config.num_encoder_blocks),
        ("decoder", config.num_encoder_blocks, config.num_blocks),
    )
    for side, first, last in sides:
        if first == last:
            continue
        token = f"{side}.embedding.token.weight"
        rows = 0 if side == "encoder" and config.feature_width else _vocabulary(config, side)
        yield first, canonical.get(token, token), rows * config.width
        yield first, f"{side}.embedding", embedding_parameters(config, side) - rows * config.width
        yield first, f"{side}.embedding.norm", norm_parameters(config) * config.embedding_norm
        yield last - 1, f"{side}.norm", norm_parameters(config) * config.final_norm
        if config.positions == "relative":
            for block in range(first, last):
                yield block, f"{side}.relative_bias.weight", config.relative_buckets * config.num_heads
    last = config.num_blocks - 1
    matrix = config.vocabulary * config.width
    yield last, canonical.get("head.weight", "head.weight"), matrix
    transform = (config.width * (config.width + 1) + norm_parameters(config)) * config.head_transform
    yield last, "head", config.vocabulary * config.head_bias + transform


def _vocabulary(config: ModelConfig, side: Side) -> int:
    return config.source_vocabulary if side == "encoder" else config.vocabulary


# ---- cuts -----------------------------------------------------------------------------------------------------------


def even(work: Work, pp: int) -> tuple[int, ...]:
    """First blocks of the even cut."""
    return first_blocks(work.config, Layout(pp=pp))


def aligned(work: Work, pp: int) -> tuple[tuple[int, ...], int]:
    """First blocks of the aligned cut that costs least, and the number of its encoder stages (0 for one stack)."""
    config = work.config
    if not config.has_cross_attention:
        return even(work, pp), 0
    best: tuple[int, tuple[int, ...], int] | None = None
    for num_encoder_stages in range(1, pp):
        num_decoder_stages = pp - num_encoder_stages
        if num_encoder_stages > config.num_encoder_blocks or num_decoder_stages > config.num_decoder_blocks:
            continue
        encoder = _evenly(config.num_encoder_blocks, num_encoder_stages)
        decoder = _evenly(config.num_decoder_blocks, num_decoder_stages)
        starts = (*encoder, config.num_encoder_blocks, *(config.num_encoder_blocks + start for start in decoder))
        cost = max(work.stage_flops(starts))
        if best is None or cost < best[0]:
            best = (cost, starts, num_encoder_stages)
    assert best is not None, f"{pp} stages over {config.num_encoder_blocks} + {config.num_decoder_blocks} blocks"
    return best[1], best[2]


def mixed(work: Work, pp: int) -> tuple[int, ...]:
    """First blocks of the contiguous cut whose most costly stage costs least."""
    sums = (0, *itertools.accumulate(work.flops))
    limits = sorted({sums[last] - sums[first] for first, last in itertools.combinations(range(len(sums)), 2)})
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _filled(work.flops, pp, limits[middle]) is None:
            low = middle + 1
        else:
            high = middle
    starts = _filled(work.flops, pp, limits[low])
    assert starts is not None, "the whole model fits one stage"
    return starts


def folded_flops(work: Work, pp: int) -> list[int]:
    """Forward FLOPs of every stage when the model is cut evenly into 2p chunks and folded."""
    chunks = work.stage_flops(even(work, 2 * pp))
    return [chunks[stage] + chunks[-1 - stage] for stage in range(pp)]


def folded_parameters(work: Work, pp: int) -> list[int]:
    """Parameters of every stage of the folded placement; a copy tied within a stage is counted twice."""
    chunks = work.stage_parameters(even(work, 2 * pp))
    return [chunks[stage] + chunks[-1 - stage] for stage in range(pp)]


def _evenly(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    size, larger = divmod(num_blocks, num_stages)
    return tuple(itertools.accumulate(size + (index < larger) for index in range(num_stages - 1)))


def _filled(flops: Sequence[int], pp: int, limit: int) -> tuple[int, ...] | None:
    """Stages filled from the front up to a limit, leaving a block for each stage to come; None if they do not do."""
    starts: list[int] = []
    cost = 0
    for block, flop in enumerate(flops):
        num_left = len(flops) - block
        is_forced = block > 0 and num_left == pp - 1 - len(starts)
        if block and (cost + flop > limit or is_forced):
            starts.append(block)
            cost = 0
        cost += flop
        if cost > limit or len(starts) >= pp:
            return None
    return tuple(starts)


# ---- the table ------------------------------------------------------------------------------------------------------


@functools.cache
def build() -> pd.DataFrame:
    """Make the table of all questions, once: it is the same for every study."""
    return pd.DataFrame([*_vocabulary_rows(), *_pair_rows(), *_pair_vocabulary_rows()])


def _vocabulary_rows() -> Iterator[dict[str, Any]]:
    for name, vocabulary, pp in itertools.product(VOCABULARY_MODELS, VOCABULARIES, VOCABULARY_STAGES):
        config = named_model(name).replace(vocabulary=vocabulary)
        if pp <= config.num_blocks:
            work = Work.of(config, 0, config.max_length)
            yield _row("vocabulary", name, work, (0, config.max_length), "even", pp)


def _pair_rows() -> Iterator[dict[str, Any]]:
    original = named_model(PAIR_MODEL)
    for lengths in PAIR_LENGTHS:
        yield from _twin_rows("length_ratio", original, lengths, PAIR_STAGES)


def _pair_vocabulary_rows() -> Iterator[dict[str, Any]]:
    original = named_model(PAIR_MODEL)
    for vocabulary in VOCABULARIES:
        config = original.replace(vocabulary=vocabulary, source_vocabulary=vocabulary)
        yield from _twin_rows("pair_vocabulary", config, EQUAL_LENGTHS, VOCABULARY_STAGES)


def _twin_rows(
    question: str, original: ModelConfig, lengths: tuple[int, int], stages: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """An encoder-decoder and its decoder-only twin, cut in every way."""
    source_length, target_length = lengths
    twin = twins(original, "decoder_only", source_length=source_length, target_length=target_length).config
    for config, read in ((original, lengths), (twin, (0, sum(lengths)))):
        work = Work.of(config, *read)
        for pp, cut in itertools.product(stages, CUTS):
            if cut != "folded" or 2 * pp <= config.num_blocks:
                row = _row(question, PAIR_MODEL, work, read, cut, pp)
                row["length_ratio"] = source_length / target_length
                row["point"] += f" of {source_length}/{target_length}"
                if cut != "folded":
                    row["bubble"] = _bubble(work.stage_flops(_starts(work, cut, pp)[0]))
                yield row


def _bubble(flops: Sequence[int]) -> float:
    microbatches = MICROBATCHES_PER_STAGE * len(flops)
    table = BUILDERS["1f1b"](range(len(flops)), microbatches)
    return float(rank_bubbles(table, flops, [2 * flop for flop in flops]).mean())


def _row(question: str, model: str, work: Work, lengths: tuple[int, int], cut: str, pp: int) -> dict[str, Any]:
    config = work.config
    starts, num_encoder_stages = _starts(work, cut, pp)
    flops = folded_flops(work, pp) if cut == "folded" else work.stage_flops(starts)
    parameters = folded_parameters(work, pp) if cut == "folded" else work.stage_parameters(starts)
    head_parameters = config.vocabulary * config.width
    return {
        "question": question,
        "point": f"{model} {config.architecture} v{config.vocabulary} pp{pp}({cut})",
        "architecture": config.architecture,
        "model": model,
        "width": config.width,
        "num_blocks": config.num_blocks,
        "vocabulary": config.vocabulary,
        "source_length": lengths[0],
        "target_length": lengths[1],
        "length_ratio": None,
        "pp": pp,
        "cut": cut,
        "first_blocks": ",".join(map(str, starts)),
        "num_encoder_stages": num_encoder_stages,
        "head_to_stage_flops": work.head_flops / ((sum(work.flops) - work.head_flops) / pp),
        "head_to_stage_parameters": head_parameters / (sum(work.parameters) / pp),
        "imbalance_forward_flops": float(imbalance(flops)),
        "imbalance_parameters": float(imbalance(parameters)),
        "bubble": None,
    }


def _starts(work: Work, cut: str, pp: int) -> tuple[tuple[int, ...], int]:
    """First blocks of a cut (of the chunks, for the folded placement), and the encoder stages of an aligned one."""
    if cut == "aligned":
        return aligned(work, pp)
    if cut == "mixed":
        return mixed(work, pp), 0
    return even(work, 2 * pp if cut == "folded" else pp), 0
