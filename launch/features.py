"""What may an engine be able to do, and which case shows whether it can?

    feature            the case that shows it, on two ranks                        on
    tp, sp, pp, dp     nothing but the axis                                        the axis
    zero1..3, cp       likewise                                                    dp, cp
    tied               one table for embeddings and head                           tp, pp, dp
    unequal_lengths    streams and sequences of lengths of their own, padded       tp, pp, dp
    uneven_blocks      a cut beside the middle: a stage of both sides              pp
    ragged_microbatch  a last microbatch with fewer sequences                      tp, pp, dp

Each is one change of a plain case: untied, as many blocks on both stages, full sequences of one length, full
microbatches, 1F1B where the engine has it. So a case that is wrong names what is wrong. Torch-free. Left out: features
together (`launch/matrix.py`), and the engine that partitions nothing: each of its rows would be a refusal.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from launch.case import Case
from models.config import Architecture, ModelConfig
from models.named import named_model
from parallel.engines.choice import PARTITIONING_ENGINES, EngineChoice, EngineName
from parallel.layouts import Layout, Schedule

ARCHITECTURES: dict[Architecture, str] = {
    "decoder_only": "tiny-decoder",
    "encoder_decoder": "tiny-encoder-decoder",
    "encoder_only": "tiny-encoder",
}
"""Each with the tiny model that stands for it."""
_MICROBATCH = 2
"""Sequences of a microbatch that is full."""
_LENGTH = 8
_TENSOR, _PIPELINE, _DATA = Layout(tp=2, microbatches=2), Layout(pp=2, microbatches=4), Layout(dp=2, microbatches=2)
_AXES = (_TENSOR, _PIPELINE, _DATA)
_SCHEDULES: dict[EngineName, Schedule] = {"fairscale": "gpipe"}
"""Of engines whose pipelines do not run the default."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One thing that an engine can or cannot do; what it does not name is as in the plain case."""

    layouts: tuple[Layout, ...]
    is_tied: bool = False
    has_unequal_lengths: bool = False
    has_odd_blocks: bool = False
    has_ragged_microbatch: bool = False

    def case(self, name: str, engine: EngineName, architecture: Architecture, layout: Layout) -> Case:
        """The case that shows it on a layout."""
        num_sequences = (_MICROBATCH * layout.microbatches - self.has_ragged_microbatch) * layout.dp
        return Case(
            name=name,
            config=self._config(architecture),
            layout=layout,
            engine=EngineChoice(engine),
            data="ragged" if self.has_unequal_lengths else "full",
            num_sequences=num_sequences,
            source_length=_LENGTH - self.has_unequal_lengths,
            target_length=_LENGTH + 2 * self.has_unequal_lengths,
        )

    def _config(self, architecture: Architecture) -> ModelConfig:
        config = named_model(ARCHITECTURES[architecture])
        changes: dict[str, Any] = {"tying": "none"}
        if self.is_tied:
            changes["tying"] = "all" if config.has_cross_attention else "head"
        if self.has_odd_blocks:
            side = "num_encoder_blocks" if config.has_encoder else "num_decoder_blocks"
            changes[side] = getattr(config, side) + 1
        return config.replace(**changes)


FEATURES: dict[str, Feature] = {
    "tp": Feature(layouts=(_TENSOR,)),
    "sp": Feature(layouts=(_TENSOR.replace(sp=True),)),
    "pp": Feature(layouts=(_PIPELINE,)),
    "dp": Feature(layouts=(_DATA,)),
    "zero1": Feature(layouts=(_DATA.replace(zero=1),)),
    "zero2": Feature(layouts=(_DATA.replace(zero=2),)),
    "zero3": Feature(layouts=(_DATA.replace(zero=3),)),
    "cp": Feature(layouts=(Layout(cp=2, microbatches=2),)),
    "tied": Feature(layouts=_AXES, is_tied=True),
    "unequal_lengths": Feature(layouts=_AXES, has_unequal_lengths=True),
    "uneven_blocks": Feature(layouts=(_PIPELINE.replace(cut=(2,)),), has_odd_blocks=True),
    "ragged_microbatch": Feature(layouts=_AXES, has_ragged_microbatch=True),
}


def _layouts(engine: EngineName, feature: Feature) -> Iterator[Layout]:
    """The layouts of a feature, with a schedule that the engine has."""
    for layout in feature.layouts:
        yield layout.replace(schedule=_SCHEDULES.get(engine, layout.schedule)) if layout.pp > 1 else layout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Capability:
    """One place of the matrix: a feature of an engine, for an architecture, on an axis."""

    engine: EngineName
    architecture: Architecture
    feature: str
    axis: str
    case: Case


def capabilities(
    engines: Sequence[EngineName] = PARTITIONING_ENGINES,
    architectures: Sequence[Architecture] = tuple(ARCHITECTURES),
    features: Sequence[str] = tuple(FEATURES),
) -> Iterator[Capability]:
    """Every place of the matrix, or those of some engines, architectures and features."""
    for engine in engines:
        for architecture in architectures:
            for feature in features:
                for layout in _layouts(engine, FEATURES[feature]):
                    axis = next(name for name in ("tp", "pp", "dp", "cp") if getattr(layout, name) > 1)
                    name = f"{engine} {architecture} {feature} on {axis}"
                    case = FEATURES[feature].case(name, engine, architecture, layout)
                    yield Capability(engine=engine, architecture=architecture, feature=feature, axis=axis, case=case)
