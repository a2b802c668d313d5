"""What is the fair partner of a model in another architecture?

Twins are built from the same blocks: width, heads, norms, activation and positions carry over, and only the number of
blocks (then, if asked, the width of the ffn) is chosen so that the two agree in one quantity:

    depth           as many blocks in all:   encoder L + decoder L   <->   2L of the one stack
    depth_per_side  as deep on each side:    encoder L + decoder L   <->    L of the one stack
    parameters      as many parameters
    flops           as many forward FLOPs on the same pair of texts

What cannot agree is stated, not hidden: a twin carries its relative differences in parameters and FLOPs.

The same pair of texts. An encoder-decoder reads S source positions and T target positions, the target's first being
`begin`. A model with one stack reads source, separator and target as one sequence of S + T positions, where the
separator stands in the place of `begin`: both see the same text and predict the same tokens.

The embedding. One stack reads both languages with one table, so its twin shares one table between its sides:

    encoder_decoder   none -> none    head -> head    source_target -> none            all -> head
    one stack         none -> source_target           head -> all
    features          none -> none                    head -> head     (a front end of features is never tied)

An odd number of blocks gives the encoder one more. Left out: twins with unequal widths, and layouts.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

from models.config import Architecture, ModelConfig, Tying
from models.costs import forward_flops, parameter_counts

Match = Literal["depth", "depth_per_side", "parameters", "flops"]

FFN_MULTIPLE = 16
"""Widths of a fitted ffn are multiples of this, so that tensor-parallel degrees up to it divide them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Twin:
    """A model matched to another one, and what is left between them."""

    config: ModelConfig
    match: Match
    source_length: int
    target_length: int
    """Positions of the pair of texts that the FLOPs were compared on."""
    num_blocks_difference: int
    """Blocks of the twin minus blocks of the original."""
    parameter_mismatch: float
    """(parameters of the twin - parameters of the original) / parameters of the original."""
    flop_mismatch: float
    """The same for FLOPs of a training pair; forward or whole step alike, as backward is twice the forward in both."""

    @property
    def mismatch(self) -> float:
        """What the match left over in its own quantity, relative to the original; a depth per side is always met."""
        num_blocks = self.config.num_blocks - self.num_blocks_difference
        left_over: dict[Match, float] = {
            "depth": self.num_blocks_difference / num_blocks,
            "depth_per_side": 0.0,
            "parameters": self.parameter_mismatch,
            "flops": self.flop_mismatch,
        }
        return left_over[self.match]


def pair_flops(config: ModelConfig, source_length: int, target_length: int) -> int:
    """Forward FLOPs on one pair of texts: two streams for an encoder-decoder, else one of S + T positions."""
    if config.has_cross_attention:
        return forward_flops(config, source_length, target_length)
    length = source_length + target_length
    return forward_flops(config, length * config.has_encoder, length * config.has_decoder)


def twins(
    config: ModelConfig,
    architecture: Architecture,
    match: Match = "depth",
    *,
    source_length: int,
    target_length: int,
) -> Twin:
    """Return the twin of a model in another architecture (or in its own, which is the model itself).

    `source_length` and `target_length` are positions of the two streams. The twin's `max_length` grows to S + T if it
    has to. With `parameters` and `flops`, the number of blocks comes closest first, then the ffn width in steps of 16.

    Raises:
        ValueError: an unknown architecture or match, a length below 1, a pair longer than the model's table of learned
            positions, or a decoder-only twin of a model on features.
    """
    for field, value, choices in (("architecture", architecture, Architecture), ("match", match, Match)):
        if value not in get_args(choices):
            raise ValueError(f"{field} = {value!r}; choose one of {', '.join(get_args(choices))}")
    _check_pair(config, source_length, target_length)

    def parameters(model: ModelConfig) -> int:
        return parameter_counts(model).total

    def flops(model: ModelConfig) -> int:
        return pair_flops(model, source_length, target_length)

    if architecture == config.architecture:
        twin = config
    elif match in ("depth", "depth_per_side"):
        frame = _frame(config, architecture, source_length + target_length)
        twin = _with_blocks(frame, config.num_blocks if match == "depth" else _depth_per_side(config, architecture))
    else:
        frame = _frame(config, architecture, source_length + target_length)
        cost = parameters if match == "parameters" else flops
        twin = _fitted(frame, cost, cost(config))
    return Twin(
        config=twin,
        match=match,
        source_length=source_length,
        target_length=target_length,
        num_blocks_difference=twin.num_blocks - config.num_blocks,
        parameter_mismatch=parameters(twin) / parameters(config) - 1,
        flop_mismatch=flops(twin) / flops(config) - 1,
    )


def long_enough(config: ModelConfig, longest: int) -> ModelConfig:
    """The same model for sequences of `longest` positions: its `max_length` grows to that where no table bounds it.

    Raises ValueError where positions are learned, and so bound.
    """
    if longest <= config.max_length:
        return config
    if config.positions == "learned":
        raise ValueError(
            f"{config.name} has learned {config.max_length} positions, and sequences have {longest}: shorten them"
        )
    return config.replace(max_length=longest)


def _check_pair(config: ModelConfig, source_length: int, target_length: int) -> None:
    if source_length < 1 or target_length < 1:
        raise ValueError(f"a pair of {source_length} source and {target_length} target positions: each is at least 1")
    longest = max(source_length, target_length) if config.has_cross_attention else source_length + target_length
    if config.positions == "learned" and longest > config.max_length:
        raise ValueError(
            f"{config.name} reads {longest} positions of a pair of {source_length} + {target_length}, but has learned "
            f"{config.max_length}: shorten the pair or raise max_length"
        )


def _frame(config: ModelConfig, architecture: Architecture, pair_length: int) -> ModelConfig:
    """Return the fewest blocks of the other architecture, with everything else carried over."""
    if architecture == "decoder_only" and config.feature_width:
        raise ValueError(
            f"{config.name} reads features of width {config.feature_width}; decoder_only reads token ids: "
            "take encoder_only, or a model on token ids"
        )
    has_cross_attention = architecture == "encoder_decoder"
    vocabulary = max(config.vocabulary, config.source_vocabulary)
    reads_tokens = architecture != "decoder_only" and not config.feature_width
    return config.replace(
        name=f"{config.name}-{architecture.replace('_', '-')}-twin",
        architecture=architecture,
        num_encoder_blocks=int(architecture != "decoder_only"),
        num_decoder_blocks=int(architecture != "encoder_only"),
        vocabulary=vocabulary,
        source_vocabulary=vocabulary if reads_tokens else 0,
        max_length=config.max_length if has_cross_attention else max(config.max_length, pair_length),
        tying=_tying(config, architecture),
    )


def _tying(config: ModelConfig, architecture: Architecture) -> Tying:
    if config.feature_width:
        # An encoder-only model on features has no table that its head could be tied to.
        return "none" if architecture == "encoder_only" else config.tying
    if architecture == "encoder_decoder":
        to_both: dict[Tying, Tying] = {"none": "source_target", "head": "all"}
        return to_both[config.tying]
    to_one: dict[Tying, Tying] = {"none": "none", "head": "head", "source_target": "none", "all": "head"}
    return to_one[config.tying]


def _with_blocks(frame: ModelConfig, num_blocks: int) -> ModelConfig:
    """Return the frame with that many blocks in all; the two sides of an encoder-decoder have at least one each."""
    if not frame.has_decoder:
        return frame.replace(num_encoder_blocks=num_blocks)
    if not frame.has_encoder:
        return frame.replace(num_decoder_blocks=num_blocks)
    num_decoder_blocks = max(1, num_blocks // 2)
    return frame.replace(
        num_encoder_blocks=max(1, num_blocks - num_decoder_blocks), num_decoder_blocks=num_decoder_blocks
    )


def _depth_per_side(config: ModelConfig, architecture: Architecture) -> int:
    """Return the blocks in all of a twin whose sides are each as deep as those of the model that it has."""
    if architecture == "encoder_decoder":
        return 2 * config.num_blocks
    if not config.has_cross_attention:
        return config.num_blocks
    return config.num_decoder_blocks if architecture == "decoder_only" else config.num_encoder_blocks


def _fitted(frame: ModelConfig, cost: Callable[[ModelConfig], int], wanted: int) -> ModelConfig:
    """Return the frame with the number of blocks, then the ffn width, whose cost comes closest to `wanted`."""

    def distance(candidate: ModelConfig) -> int:
        return abs(cost(candidate) - wanted)

    # The cost grows with the number of blocks: the first count above the wanted cost and the one before it enclose it.
    num_blocks = frame.num_blocks
    while cost(_with_blocks(frame, num_blocks)) < wanted:
        num_blocks += 1
    counts = {max(frame.num_blocks, num_blocks - 1), num_blocks}
    first, *second = sorted((_with_blocks(frame, count) for count in counts), key=distance)
    twin = min(_with_ffn_widths(first, cost, wanted), key=distance)
    # The ffn of a few blocks may not shrink enough to meet the cost; then the other count is the better start.
    if twin.ffn_width == FFN_MULTIPLE < frame.ffn_width:
        twin = min([twin, *(fit for other in second for fit in _with_ffn_widths(other, cost, wanted))], key=distance)
    return twin


def _with_ffn_widths(model: ModelConfig, cost: Callable[[ModelConfig], int], wanted: int) -> list[ModelConfig]:
    """Return the model, and the two multiples of 16 between which its ffn width would meet the wanted cost."""
    # The cost is linear in the ffn width, so two points tell where it meets the wanted one.
    slope = cost(model.replace(ffn_width=model.ffn_width + 1)) - cost(model)
    steps = max(1, (model.ffn_width + (wanted - cost(model)) // slope) // FFN_MULTIPLE)
    return [model, *(model.replace(ffn_width=FFN_MULTIPLE * count) for count in (steps, steps + 1))]
