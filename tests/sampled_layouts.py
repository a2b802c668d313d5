"""Random layouts of random small models, the same for the same seed: what equalities of closed forms are tried on."""

import dataclasses
import random
from typing import Any

from models.config import ModelConfig
from parallel.figures import StepShape
from parallel.layouts import Cut, Layout
from parallel.plan import Plan
from parallel.plans import plan
from tests.small_models import ARCHITECTURES, POSITIONS, small_config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One model, partitioned, and one step of it."""

    plan: Plan
    shape: StepShape

    def __str__(self) -> str:
        config = {
            key: value for key, value in self.plan.config.to_dict().items() if value not in (0, 0.0, False, "none")
        }
        return f"{self.plan.layout.label} of {config} on {self.shape}"


def samples(count: int, *, seed: int) -> list[Sample]:
    """So many samples; draws that no layout can take are drawn again."""
    generator = random.Random(seed)
    drawn: list[Sample] = []
    while len(drawn) < count:
        try:
            drawn.append(_sample(generator))
        except ValueError:
            continue
    return drawn


def _sample(generator: random.Random) -> Sample:
    config = _config(generator)
    layout = _layout(generator, config)
    sequences = layout.microbatches * generator.choice((1, 2, 3))
    if sequences > layout.microbatches > 1:
        # The last microbatch is smaller.
        sequences -= generator.choice((0, 0, 1))
    source_length, target_length = generator.choice((2, 7, 12)), generator.choice((1, 5, 12))
    shape = StepShape(
        num_sequences=sequences,
        source_length=source_length if config.has_encoder else 0,
        target_length=target_length if config.has_decoder else 0,
        dtype_bytes=generator.choice((2, 4, 8)),
        is_ragged=config.has_encoder and generator.random() < 0.4,
    )
    layout.check_sequences(sequences * layout.dp)
    return Sample(plan=plan(config, layout), shape=shape)


def _config(generator: random.Random) -> ModelConfig:
    architecture = generator.choice((*ARCHITECTURES, "encoder_decoder"))
    changes: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": generator.choice((1, 2, 4, 8)),
        "head_width": generator.choice((4, 6)),
        "ffn_width": 24,
        "vocabulary": generator.choice((29, 32)),
        "num_encoder_blocks": 0 if architecture == "decoder_only" else generator.choice((1, 2, 3, 5)),
        "num_decoder_blocks": 0 if architecture == "encoder_only" else generator.choice((1, 2, 3, 5)),
        "norm": generator.choice(("layernorm", "rmsnorm")),
        "norm_position": generator.choice(("pre", "post")),
        "activation": generator.choice(("relu", "gelu", "gelu_tanh", "swiglu", "geglu")),
        "positions": generator.choice(POSITIONS),
        "relative_buckets": 8,
        "relative_max_distance": 20,
        "num_token_types": generator.choice((0, 2)),
        "dropout": generator.choice((0.0, 0.1)),
        "attention_dropout": generator.choice((0.0, 0.0, 0.1)),
        "ffn_dropout": generator.choice((0.0, 0.1)),
        "feature_width": generator.choice((0, 0, 0, 6)) if architecture != "decoder_only" else 0,
        "source_vocabulary": generator.choice((0, 0, 31)) if architecture == "encoder_decoder" else 0,
        "tying": generator.choice(("none", "head", "source_target", "all")),
    }
    for flag in ("embedding_norm", "head_scale", "head_bias", "head_transform"):
        changes[flag] = generator.random() < 0.3
    for flag in ("final_norm", "qkv_bias", "attention_output_bias", "ffn_bias"):
        changes[flag] = generator.random() < 0.6
    return small_config(architecture, **changes)


def _layout(generator: random.Random, config: ModelConfig) -> Layout:
    pp = generator.choice((1, 2, 3, 4))
    if pp > config.num_blocks:
        raise ValueError("more stages than blocks")
    anywhere = tuple(sorted(generator.sample(range(1, config.num_blocks), pp - 1)))
    cuts: tuple[Cut, ...] = ("even", "aligned", anywhere)
    tp = generator.choice((1, 2, 4, 8))
    dp = generator.choice((1, 2, 3))
    zero = int(dp > 1 and generator.random() < 0.4)
    sp = tp > 1 and generator.random() < 0.6
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        zero=zero,
        gradient_bucket_bytes=generator.choice((0, 1, 3000)) if dp > 1 and not zero else 0,
        sp=sp,
        microbatches=generator.choice((1, 2, 3, 5)),
        schedule=generator.choice(("gpipe", "1f1b")),
        cut=generator.choice(cuts),
        memory_gather=generator.choice(("per_block", "per_stage")),
        saved_input=generator.choice(("shard", "whole")),
        vocabulary="sharded" if sp else generator.choice(("sharded", "whole")),
        recompute=generator.choice(("none", "selective", "full")),
        attention=generator.choice(("fused", "materialised")),
    )
