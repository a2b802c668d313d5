"""Which model, and which step of it? The argument and the options that all accounting commands share.

A length that is not given is the longest that the model reads. Left out: layouts (`launch/layout_options.py`).
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

import click

from models.config import ModelConfig
from models.named import MODEL_NAMES, named_model
from parallel.figures import Optimizer, StepShape

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
STEP_OPTIONS = ("microbatch", "source_length", "target_length", "dtype", "optimizer", "master_weights")
"""Names of the options, as a command gets them."""

_OPTIONS = (
    click.option("--microbatch", default=1, show_default=True, help="Sequences of a microbatch."),
    click.option("--source-length", type=int, help="Source positions [default: the model's maximum]."),
    click.option("--target-length", type=int, help="Target positions [default: the model's maximum]."),
    click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), default="float32", show_default=True),
    click.option("--optimizer", type=click.Choice(get_args(Optimizer)), default="adamw", show_default=True),
    click.option("--master-weights", is_flag=True, help="The optimizer updates a float32 copy of the parameters."),
)


def step_options(command: Command) -> Command:
    """Decorator that gives a command the options; it reads them with `Step.of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def counted_model(model: str) -> tuple[ModelConfig, tuple[str, ...]]:
    """A named model, or what a config.json counts as with notes on what it passes over.

    Raises ValueError for an unknown name, a missing or broken file, or a model whose counts are not known.
    """
    if model in MODEL_NAMES:
        return named_model(model), ()
    if Path(model).exists() or "/" in model or model.endswith(".json"):
        return ModelConfig.counted_from_hf(model)
    return named_model(model), ()


def device_bytes_of(_context: click.Context, _option: click.Parameter, value: float | None) -> int | None:
    """Callback of an option such as `--device-bytes 80e9`."""
    if value is not None and not 1 <= value < float("inf"):
        raise ValueError(f"device-bytes = {value:g}; a device has at least 1 byte, as in 80e9")
    return None if value is None else int(value)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What a training step of any model computes on.

    Attributes:
        microbatch: sequences of a microbatch.
        source_length, target_length: positions; None for the longest.
        dtype: of parameters, activations and gradients.
        optimizer: whose states are held.
        master_weights: whether it updates a float32 copy.
    """

    microbatch: int
    source_length: int | None
    target_length: int | None
    dtype: str
    optimizer: Optimizer
    master_weights: bool

    def __post_init__(self) -> None:
        if self.microbatch < 1:
            raise ValueError(f"microbatch = {self.microbatch}; a microbatch has at least 1 sequence")

    @classmethod
    def of(cls, chosen: dict[str, Any]) -> Self:
        """The step of the options, taken out of all that a command was given."""
        return cls(**{name: chosen.pop(name) for name in STEP_OPTIONS})

    def shape(self, config: ModelConfig, microbatches: int) -> StepShape:
        """The step of a model. Raises ValueError for lengths that it cannot read."""
        shape = StepShape(
            num_sequences=self.microbatch * microbatches,
            source_length=self._length(config, self.source_length) * config.has_encoder,
            target_length=self._length(config, self.target_length) * config.has_decoder,
            dtype_bytes=DTYPE_BYTES[self.dtype],
        )
        shape.check(config)
        return shape

    def unread(self, config: ModelConfig) -> tuple[str, ...]:
        """Notes on lengths of streams that a model lacks."""
        given = (("source", self.source_length, config.has_encoder), ("target", self.target_length, config.has_decoder))
        return tuple(
            f"{config.architecture} has no {stream} stream: {stream}-length = {length} is not read"
            for stream, length, is_read in given
            if length is not None and not is_read
        )

    @staticmethod
    def _length(config: ModelConfig, length: int | None) -> int:
        return config.max_length if length is None else length
