"""Do the closed forms count what is published and what is built?"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from models.architectures import build
from models.attention import materialised_attention
from models.batch import synthetic_batch
from models.config import ModelConfig
from models.costs import (
    Side,
    block_costs,
    block_flops,
    block_parameters,
    embedding_flops,
    embedding_parameters,
    forward_flops,
    head_flops,
    head_parameters,
    norm_parameters,
    num_blocks,
    parameter_counts,
    sides,
    stack_parameters,
)
from models.matching import twins
from models.named import MODEL_NAMES, named_model
from models.sublayers import Attention

# Parameters of the published checkpoints, tied tensors counted once.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-large": 783_150_080,
    "bart-base": 139_420_416,
    "bart-large": 406_291_456,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800,
}
# BERT without its masked-LM head, with the pooler (one dense map of its width) that is not modelled.
PUBLISHED_WITH_POOLER = {"bert-base": 109_482_240, "bert-large": 335_141_888}
# Encoder stack, decoder stack, cross-attention in it, embedding: the checkpoints of T5.
PUBLISHED_STACKS = {
    "t5-small": (18_881_280, 25_175_808, 6_291_456, 16_449_536),
    "t5-base": (84_954_240, 113_275_008, 28_311_552, 24_674_304),
    "t5-3b": (1_208_010_752, 1_610_688_512, 402_653_184, 32_899_072),
}
# Narayanan et al. 2021 (arXiv 2104.04473), Table 1: billions of parameters, heads, width, blocks.
MEGATRON_2021 = [(1.7, 24, 2304, 24), (18.4, 48, 6144, 40), (39.1, 64, 8192, 48), (145.6, 96, 12288, 80)]
# Korthikanti et al. 2022 (arXiv 2205.05198), Table 3: heads, width, blocks, sequences, FLOPs of an iteration.
MEGATRON_2022 = [(96, 12288, 96, 64, 1.410915e17), (160, 25600, 128, 512, 6.425876e18)]

# What no named model has: token types, grouped queries or features in an architecture that usually lacks them.
UNUSUAL = [
    twins(named_model("tiny-bert"), "encoder_decoder", source_length=8, target_length=8).config,
    twins(named_model("tiny-llama"), "encoder_decoder", source_length=8, target_length=8).config,
    twins(named_model("tiny-speech"), "encoder_only", source_length=8, target_length=8).config,
    named_model("tiny-annotated").replace(name="two-vocabularies", source_vocabulary=40, tying="head"),
]

COMPONENTS = {
    ".self_attention.norm.": "norms",
    ".cross_attention.norm.": "norms",
    ".ffn.norm.": "norms",
    ".embedding.norm.": "norms",
    ".relative_bias.": "relative_bias",
    ".self_attention.": "self_attention",
    ".cross_attention.": "cross_attention",
    ".ffn.": "ffn",
    ".embedding.": "embedding",
    "head.": "head",
    ".norm.": "norms",
}


def component_of(name: str) -> str:
    return next(component for part, component in COMPONENTS.items() if part in name)


def shortened(name: str) -> ModelConfig:
    """Return a named model with two blocks a side at most: all blocks of a side are alike."""
    config = named_model(name)
    return config.replace(
        num_encoder_blocks=min(2, config.num_encoder_blocks), num_decoder_blocks=min(2, config.num_decoder_blocks)
    )


def megatron(num_heads: int, width: int, num_decoder_blocks: int) -> ModelConfig:
    return ModelConfig(
        architecture="decoder_only",
        width=width,
        num_heads=num_heads,
        ffn_width=4 * width,
        num_decoder_blocks=num_decoder_blocks,
        vocabulary=51200,
        max_length=2048,
        tying="head",
    )


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_totals_are_those_of_the_published_checkpoints(name: str, parameters: int) -> None:
    assert parameter_counts(named_model(name)).total == parameters


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_WITH_POOLER.items())
def test_bert_without_its_head_and_with_a_pooler_is_the_published_one(name: str, parameters: int) -> None:
    config = named_model(name)
    pooler = config.width * config.width + config.width
    assert parameter_counts(config).total - head_parameters(config) + pooler == parameters


@pytest.mark.parametrize(("name", "stacks"), PUBLISHED_STACKS.items())
def test_the_stacks_of_t5_are_the_published_ones(name: str, stacks: tuple[int, int, int, int]) -> None:
    config = named_model(name)
    counts = parameter_counts(config)
    encoder, decoder = stack_parameters(config, "encoder"), stack_parameters(config, "decoder")
    assert (encoder, decoder, counts.cross_attention, counts.embedding) == stacks
    assert encoder + decoder + counts.embedding == counts.total


@pytest.mark.parametrize(("billions", "num_heads", "width", "num_decoder_blocks"), MEGATRON_2021)
def test_the_models_of_megatron_have_their_published_size(
    billions: float, num_heads: int, width: int, num_decoder_blocks: int
) -> None:
    assert round(parameter_counts(megatron(num_heads, width, num_decoder_blocks)).total / 1e9, 1) == billions


@pytest.mark.parametrize(("num_heads", "width", "num_decoder_blocks", "num_sequences", "flops"), MEGATRON_2022)
def test_an_iteration_of_megatron_takes_its_published_flops(
    num_heads: int, width: int, num_decoder_blocks: int, num_sequences: int, flops: float
) -> None:
    config = megatron(num_heads, width, num_decoder_blocks)
    counted = 3 * forward_flops(config, target_length=2048, microbatch=num_sequences)
    assert counted == pytest.approx(flops, rel=1e-6)


@pytest.mark.parametrize("config", [*map(shortened, MODEL_NAMES), *UNUSUAL], ids=lambda config: config.name)
def test_every_component_is_what_the_built_model_holds(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = build(config)
    counted = dict.fromkeys(COMPONENTS.values(), 0)
    blocks: dict[tuple[str, str], int] = {}
    # named_parameters yields a tied tensor once, under its first name.
    for parameter_name, parameter in model.named_parameters():
        counted[component_of(parameter_name)] += parameter.numel()
        if ".block." in parameter_name:
            side, _, index = parameter_name.split(".")[:3]
            blocks[side, index] = blocks.get((side, index), 0) + parameter.numel()

    counts = parameter_counts(config)
    assert {component: getattr(counts, component) for component in counted} == counted
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert blocks == {(cost.side, str(cost.index)): cost.parameters.total for cost in block_costs(config, 1, 1)}


@pytest.mark.parametrize("name", [name for name in MODEL_NAMES if name.startswith("tiny-")])
def test_forward_flops_are_those_of_the_products_that_run(name: str) -> None:
    config = named_model(name)
    with torch.device("meta"):
        model = build(config)
    for module in model.modules():
        if isinstance(module, Attention):
            module.use(materialised_attention)
    batch = synthetic_batch(config, num_sequences=3, source_length=12, target_length=7, seed=0)
    with FlopCounterMode(display=False) as counter:
        model(batch.to("meta", torch.float32), {})
    assert counter.get_total_flops() == forward_flops(config, 12, 7, 3)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_parts_add_up_to_the_whole(name: str) -> None:
    config = named_model(name)
    blocks = block_costs(config, 48, 16, 2)
    counts = parameter_counts(config)

    assert [(cost.side, cost.index) for cost in blocks] == [
        (side, index) for side in sides(config) for index in range(num_blocks(config, side))
    ]
    predicted_length = 16 if config.has_decoder else 48
    ends = embedding_flops(config, 48, 2) + head_flops(config, predicted_length, 2)
    assert ends + sum(cost.flops.total for cost in blocks) == forward_flops(config, 48, 16, 2)
    for sublayer in ("self_attention", "cross_attention", "ffn"):
        assert sum(getattr(cost.parameters, sublayer) for cost in blocks) == getattr(counts, sublayer)

    untied = sum(stack_parameters(config, side) + embedding_parameters(config, side) for side in sides(config))
    shared = config.vocabulary * config.width if config.tying in ("source_target", "all") else 0
    embedding_norms = len(sides(config)) * norm_parameters(config) * config.embedding_norm
    assert untied - shared + embedding_norms + head_parameters(config) == counts.total


def test_a_plain_encoder_decoder_follows_the_textbook() -> None:
    # With an ffn of 4h and as many key-value heads as heads: encoder 24bsh^2 + 4bs^2h,
    # decoder 28b(s_d)h^2 + 4b(s_e)h^2 + 4b(s_d)^2h + 4b(s_d)(s_e)h, head 2b(s_d)hV.
    config = named_model("transformer-base")
    b, h, s_e, s_d = 2, config.width, 512, 128
    encoder = block_flops(config, "encoder", s_e, s_d, b)
    decoder = block_flops(config, "decoder", s_e, s_d, b)
    assert encoder.total == 24 * b * s_e * h**2 + 4 * b * s_e**2 * h
    assert decoder.total == 28 * b * s_d * h**2 + 4 * b * s_e * h**2 + 4 * b * s_d**2 * h + 4 * b * s_d * s_e * h
    assert head_flops(config, s_d, b) == 2 * b * s_d * h * config.vocabulary


def test_half_of_the_causal_scores_is_half_of_one_term_of_the_decoder() -> None:
    config = named_model("tiny-encoder-decoder")
    for side in sides(config):
        full = block_flops(config, side, 12, 7, 3)
        half = block_flops(config, side, 12, 7, 3, causal_half=True)
        halved = full.self_core // 2 if side == "decoder" else 0
        assert full.total - half.total == halved
        assert full.cross_core == half.cross_core


def test_grouped_queries_shrink_key_and_value_but_not_the_scores() -> None:
    config = named_model("tiny-llama")
    full = config.replace(num_kv_heads=config.num_heads)
    fewer, more = block_flops(config, "decoder", 0, 8), block_flops(full, "decoder", 0, 8)
    assert fewer.self_core == more.self_core
    removed = config.width * 2 * (full.num_kv_heads - config.num_kv_heads) * config.head_width
    assert more.self_projections - fewer.self_projections == 2 * 8 * removed
    saved = block_parameters(full, "decoder").self_attention - block_parameters(config, "decoder").self_attention
    assert saved == removed


@pytest.mark.parametrize(("name", "side"), [("gpt2", "encoder"), ("bert-base", "decoder")])
def test_a_side_that_is_not_there_is_refused(name: str, side: Side) -> None:
    with pytest.raises(ValueError, match=f"has no {side}"):
        block_flops(named_model(name), side, 8, 8)


def test_a_length_that_is_read_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="reads source_length = 0; it must be at least 1"):
        forward_flops(named_model("t5-small"), target_length=8)
    with pytest.raises(ValueError, match="reads target_length = 0"):
        forward_flops(named_model("gpt2"), source_length=8)
