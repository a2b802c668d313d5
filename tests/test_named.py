"""Are the named models what the articles and the published checkpoints say they are?"""

import dataclasses

import pytest

from models.config import ModelConfig
from models.costs import parameter_counts
from models.named import MODEL_NAMES, named_model
from models.vocabulary import VOCABULARY

SIZES = {
    "name",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_width",
    "ffn_width",
    "num_encoder_blocks",
    "num_decoder_blocks",
    "vocabulary",
    "source_vocabulary",
    "max_length",
    "feature_width",
    "dropout",
    "attention_dropout",
    "ffn_dropout",
}
RELATIVES = {
    "tiny-transformer": "transformer-base",
    "tiny-speech": "speech",
    "tiny-annotated": "annotated",
    "tiny-gpt-classic": "gpt-classic",
    "tiny-gpt2": "gpt2-xl",
    "tiny-llama": "llama-2-70b",
    "tiny-bert": "bert-large",
    "tiny-t5": "t5-11b",
    "tiny-t5-v1_1": "t5-v1_1-small",
    "tiny-bart": "bart-large",
    "tiny-mbart": "mbart-large",
}
TWINS = ("tiny-encoder-decoder", "tiny-decoder", "tiny-encoder")
TINY = (*TWINS, *RELATIVES)


def style(config: ModelConfig) -> dict[str, object]:
    return {name: value for name, value in config.to_dict().items() if name not in SIZES}


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_every_name_is_a_valid_model_that_knows_its_name(name: str) -> None:
    assert named_model(name).name == name


def test_an_unknown_name_is_answered_with_the_closest() -> None:
    with pytest.raises(ValueError, match=r"unknown model 'lama-2-7b'; did you mean llama-2-7b"):
        named_model("lama-2-7b")
    with pytest.raises(ValueError, match=r"unknown model '####'; known are transformer-base, "):
        named_model("####")


def test_the_systems_of_the_articles_are_there() -> None:
    base = named_model("transformer-base")
    assert (base.num_encoder_blocks, base.num_decoder_blocks) == (6, 6)
    assert (base.width, base.num_heads, base.ffn_width) == (512, 8, 2048)
    assert (base.norm_position, base.positions, base.activation, base.tying) == ("post", "sinusoidal", "relu", "all")
    speech = named_model("speech")
    assert (speech.feature_width, speech.vocabulary, speech.num_blocks, speech.max_length) == (80, 26, 12, 2048)
    annotated = named_model("annotated")
    assert (annotated.embedding_scale, annotated.final_norm, annotated.head_bias) == (True, True, True)
    classic = named_model("gpt-classic")
    assert (classic.vocabulary, classic.width, classic.num_decoder_blocks) == (50257, 512, 6)
    assert (classic.ffn_width, classic.tying) == (2048, "none")
    largest = named_model("llama-2-70b")
    assert (largest.num_heads, largest.num_kv_heads, largest.head_width) == (64, 8, 128)


def test_every_tiny_model_is_listed_here() -> None:
    assert sorted(TINY) == sorted(name for name in MODEL_NAMES if name.startswith("tiny-"))


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_model_reads_bytes_splits_in_four_and_drops_nothing_out(name: str) -> None:
    config = named_model(name)
    assert parameter_counts(config).total < 100_000
    assert config.vocabulary == VOCABULARY
    assert VOCABULARY % 8 == config.num_heads % 4 == config.ffn_width % 4 == config.num_blocks % 4 == 0
    assert config.dropout == config.attention_dropout == config.ffn_dropout == 0


@pytest.mark.parametrize(("tiny", "relative"), RELATIVES.items())
def test_a_tiny_model_has_the_style_of_its_relative(tiny: str, relative: str) -> None:
    small, large = named_model(tiny), named_model(relative)
    assert style(small) == style(large)
    assert (small.num_kv_heads < small.num_heads) == (large.num_kv_heads < large.num_heads)
    assert (small.head_width * small.num_heads == small.width) == (large.head_width * large.num_heads == large.width)
    assert bool(small.feature_width) == bool(large.feature_width)


def test_sizes_are_fields_of_a_model() -> None:
    assert {field.name for field in dataclasses.fields(ModelConfig)} >= SIZES


def test_the_tiny_twins_share_their_blocks() -> None:
    configs = [named_model(name) for name in TWINS]
    assert {config.num_blocks for config in configs} == {4}
    assert len({(config.width, config.num_heads, config.ffn_width, config.activation) for config in configs}) == 1
