"""Are twins built from the same blocks, and is what cannot agree stated?"""

from typing import get_args

import pytest

from models.config import Architecture, ModelConfig, Tying
from models.costs import block_parameters, forward_flops, parameter_counts, sides
from models.matching import FFN_MULTIPLE, Match, pair_flops, twins
from models.named import MODEL_NAMES, named_model

ARCHITECTURES = get_args(Architecture)
MATCHES = get_args(Match)
ON_TOKENS = [name for name in MODEL_NAMES if not named_model(name).feature_width]
CARRIED = (
    "width",
    "num_heads",
    "num_kv_heads",
    "head_width",
    "norm",
    "norm_eps",
    "norm_position",
    "final_norm",
    "embedding_norm",
    "activation",
    "positions",
    "position_offset",
    "rope_theta",
    "num_token_types",
    "qkv_bias",
    "attention_output_bias",
    "ffn_bias",
    "head_bias",
    "attention_scale",
    "embedding_scale",
    "head_scale",
    "head_transform",
    "dropout",
    "attention_dropout",
    "ffn_dropout",
    "feature_width",
)


def parameters(config: ModelConfig) -> int:
    return parameter_counts(config).total


@pytest.mark.parametrize("name", ["t5-base", "bart-large", "annotated", "tiny-encoder-decoder"])
def test_an_encoder_decoder_of_l_and_l_blocks_matches_one_stack_of_2l(name: str) -> None:
    config = named_model(name)
    assert config.num_encoder_blocks == config.num_decoder_blocks
    twin = twins(config, "decoder_only", "depth", source_length=24, target_length=8)
    assert twin.config.num_decoder_blocks == 2 * config.num_decoder_blocks
    assert (twin.mismatch, twin.num_blocks_difference) == (0, 0)


@pytest.mark.parametrize("name", ["gpt2", "llama-2-7b", "bert-base"])
def test_depth_forth_and_back_is_the_same_model(name: str) -> None:
    config = named_model(name)
    there = twins(config, "encoder_decoder", "depth", source_length=24, target_length=8).config
    back = twins(there, config.architecture, "depth", source_length=24, target_length=8).config
    assert back.replace(name=name) == config


def test_an_odd_number_of_blocks_gives_the_encoder_one_more() -> None:
    config = named_model("tiny-decoder").replace(num_decoder_blocks=5)
    twin = twins(config, "encoder_decoder", "depth", source_length=8, target_length=8)
    assert (twin.config.num_encoder_blocks, twin.config.num_decoder_blocks, twin.mismatch) == (3, 2, 0)


def test_one_block_cannot_be_shared_by_two_sides() -> None:
    config = named_model("tiny-decoder").replace(num_decoder_blocks=1)
    twin = twins(config, "encoder_decoder", "depth", source_length=8, target_length=8)
    assert (twin.config.num_encoder_blocks, twin.config.num_decoder_blocks) == (1, 1)
    assert (twin.num_blocks_difference, twin.mismatch) == (1, 1.0)


def test_depth_per_side_doubles_the_blocks_of_one_stack() -> None:
    one_stack = named_model("gpt2")
    twin = twins(one_stack, "encoder_decoder", "depth_per_side", source_length=24, target_length=8)
    assert (twin.config.num_encoder_blocks, twin.config.num_decoder_blocks) == (12, 12)
    assert (twin.num_blocks_difference, twin.mismatch) == (12, 0)
    assert 0.9 < twin.parameter_mismatch < 1.0  # the article's "twice the parameters", less the shared embedding
    uneven = named_model("t5-small").replace(num_encoder_blocks=8, num_decoder_blocks=2)
    assert twins(uneven, "decoder_only", "depth_per_side", source_length=24, target_length=8).config.num_blocks == 2
    assert twins(uneven, "encoder_only", "depth_per_side", source_length=24, target_length=8).config.num_blocks == 8


@pytest.mark.parametrize("name", ON_TOKENS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_match_states_its_mismatch_and_keeps_the_blocks(name: str, architecture: Architecture) -> None:
    config = named_model(name)
    for match in MATCHES:
        twin = twins(config, architecture, match, source_length=64, target_length=32)
        assert twin.config.architecture == architecture
        assert {field: getattr(twin.config, field) for field in CARRIED} == {
            field: getattr(config, field) for field in CARRIED
        }
        assert twin.parameter_mismatch == pytest.approx(parameters(twin.config) / parameters(config) - 1, abs=1e-12)
        flops, wanted = pair_flops(twin.config, 64, 32), pair_flops(config, 64, 32)
        assert twin.flop_mismatch == pytest.approx(flops / wanted - 1, abs=1e-12)
        assert twin.num_blocks_difference == twin.config.num_blocks - config.num_blocks
        if match.startswith("depth"):
            assert twin.config.ffn_width == config.ffn_width
        else:
            assert twin.config.ffn_width == config.ffn_width or twin.config.ffn_width % FFN_MULTIPLE == 0


@pytest.mark.parametrize("name", ON_TOKENS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_agree_within_half_a_step_of_the_ffn(name: str, architecture: Architecture) -> None:
    config = named_model(name)
    twin = twins(config, architecture, "parameters", source_length=64, target_length=32)
    wider = twin.config.replace(ffn_width=twin.config.ffn_width + FFN_MULTIPLE)
    step = parameters(wider) - parameters(twin.config)
    assert abs(parameters(twin.config) - parameters(config)) <= step / 2
    assert twin.mismatch == twin.parameter_mismatch


@pytest.mark.parametrize("name", ON_TOKENS)
def test_no_other_number_of_blocks_with_the_same_ffn_comes_closer_in_flops(name: str) -> None:
    config = named_model(name)
    architecture: Architecture = "encoder_decoder" if config.architecture != "encoder_decoder" else "decoder_only"
    twin = twins(config, architecture, "flops", source_length=64, target_length=32)
    wanted = pair_flops(config, 64, 32)
    left_over = abs(pair_flops(twin.config, 64, 32) - wanted)
    assert twin.mismatch == twin.flop_mismatch
    for step in (-1, 1):
        encoder = twin.config.num_encoder_blocks + step * twin.config.has_encoder
        decoder = twin.config.num_decoder_blocks + step * twin.config.has_decoder
        if max(encoder, decoder) > 0 and min(encoder, decoder) >= int(twin.config.has_cross_attention):
            other = twin.config.replace(
                ffn_width=config.ffn_width, num_encoder_blocks=encoder, num_decoder_blocks=decoder
            )
            assert left_over <= abs(pair_flops(other, 64, 32) - wanted)


def test_one_stack_reads_source_separator_and_target_as_one_sequence() -> None:
    config = named_model("t5-small")
    one_stack = twins(config, "decoder_only", source_length=24, target_length=8).config
    # Of the 8 target positions the first is begin: 24 bytes of source, the separator in its place, 7 bytes of target.
    assert pair_flops(one_stack, 24, 8) == forward_flops(one_stack, target_length=24 + 1 + 7)
    assert pair_flops(config, 24, 8) == forward_flops(config, 24, 8)
    bert = named_model("bert-base")
    assert pair_flops(bert, 24, 8) == forward_flops(bert, source_length=32)


def test_matched_in_parameters_one_stack_computes_far_more() -> None:
    twin = twins(named_model("t5-base"), "decoder_only", "parameters", source_length=512, target_length=128)
    assert abs(twin.parameter_mismatch) < 1e-4
    assert twin.flop_mismatch > 1


@pytest.mark.parametrize(
    ("tying", "expected"), [("none", "none"), ("head", "head"), ("source_target", "none"), ("all", "head")]
)
def test_tying_maps_to_the_nearest_legal_one(tying: Tying, expected: Tying) -> None:
    config = named_model("tiny-encoder-decoder").replace(tying=tying)
    for architecture in ("decoder_only", "encoder_only"):
        assert twins(config, architecture, source_length=8, target_length=8).config.tying == expected


def test_one_stack_keeps_its_number_of_matrices_in_an_encoder_decoder() -> None:
    tied, untied = named_model("tiny-gpt2"), named_model("tiny-llama")
    assert twins(tied, "encoder_decoder", source_length=8, target_length=8).config.tying == "all"
    assert twins(untied, "encoder_decoder", source_length=8, target_length=8).config.tying == "source_target"


def test_one_stack_has_rows_for_both_vocabularies() -> None:
    config = named_model("annotated").replace(source_vocabulary=40000)
    twin = twins(config, "decoder_only", source_length=8, target_length=8).config
    assert (twin.vocabulary, twin.source_vocabulary) == (40000, 0)


def test_learned_positions_grow_to_hold_the_pair() -> None:
    config = named_model("tiny-encoder-decoder")
    assert twins(config, "decoder_only", source_length=64, target_length=64).config.max_length == config.max_length
    assert twins(config, "decoder_only", source_length=100, target_length=60).config.max_length == 160
    with pytest.raises(ValueError, match="reads 160 positions of a pair of 100 \\+ 60, but has learned 128"):
        twins(named_model("tiny-decoder"), "encoder_decoder", source_length=100, target_length=60)


def test_features_have_no_decoder_only_twin_but_an_encoder_only_one() -> None:
    speech = named_model("speech")
    with pytest.raises(ValueError, match="reads features of width 80; decoder_only reads token ids"):
        twins(speech, "decoder_only", source_length=100, target_length=50)
    twin = twins(speech, "encoder_only", source_length=100, target_length=50).config
    assert (twin.num_encoder_blocks, twin.feature_width, twin.source_vocabulary) == (12, 80, 0)


def test_a_model_is_its_own_twin() -> None:
    config = named_model("gpt2")
    for match in MATCHES:
        twin = twins(config, "decoder_only", match, source_length=24, target_length=8)
        assert twin.config == config
        assert twin.mismatch == twin.parameter_mismatch == twin.flop_mismatch == 0


def test_the_encoder_blocks_of_a_twin_are_those_of_the_original() -> None:
    config = named_model("t5-base")
    twin = twins(config, "encoder_only", source_length=24, target_length=8).config
    assert block_parameters(twin, "encoder") == block_parameters(config, "encoder")
    assert sides(twin) == ("encoder",)


def test_mistakes_are_answered_with_the_choices() -> None:
    config = named_model("gpt2")
    with pytest.raises(ValueError, match="match = 'width'; choose one of depth, depth_per_side, parameters, flops"):
        twins(config, "encoder_decoder", "width", source_length=8, target_length=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="architecture = 'rnn'; choose one of"):
        twins(config, "rnn", source_length=8, target_length=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 source and 8 target positions"):
        twins(config, "encoder_decoder", source_length=0, target_length=8)
