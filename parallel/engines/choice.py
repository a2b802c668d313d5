"""Who runs a model, and how: an engine, its own method to cut the model if any, and whether blocks are compiled.

    as it is written         behind a cell's name
    native                                          where blocks are compiled: .compiled
    deepspeed                .deepspeed
    deepspeed:uniform        .deepspeed-uniform

Where an engine has methods of its own to cut a model into stages, `deepspeed:uniform` is the engine with such a method
in place of the plan's cut. All else is as ever: what it computes equals one process, wherever it cuts. A record tells
whether blocks are compiled in a field of its own. Left out: what can be run (`parallel/engines/engine.py`).
"""

import dataclasses
import difflib
from typing import Any, Literal, get_args

EngineName = Literal["native", "torch", "deepspeed", "fairscale", "transformers"]
ENGINES: tuple[EngineName, ...] = get_args(EngineName)
PARTITIONING_ENGINES = tuple(name for name in ENGINES if name != "transformers")
"""Without the one that runs whole models only."""
PARTITIONS: dict[EngineName, tuple[str, ...]] = {
    "deepspeed": ("uniform", "parameters", "type:BlockLayer"),
    "fairscale": ("time", "size"),
}
"""Partition methods of an engine's own; what each balances is told where the engine is."""
ENGINE_TEXTS: tuple[str, ...] = (
    *ENGINES,
    *(f"{name}:{own}" for name, methods in PARTITIONS.items() for own in methods),
)
"""Every engine as it is written, alone and with each of its methods."""


@dataclasses.dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and how it runs."""

    name: EngineName = "native"
    partition: str = ""
    """The engine's own method to cut the model into stages; empty for the plan's stages."""
    compiled: bool = False
    """Whether blocks are compiled."""

    @classmethod
    def parse(cls, text: str, *, compiled: bool = False) -> "EngineChoice":
        """The choice of a text such as `torch` or `deepspeed:uniform`.

        Raises ValueError for an unknown engine, and for a method that it does not have.
        """
        told, _, partition = text.partition(":")
        name = next((known for known in ENGINES if known == told), None)
        if name is None:
            near = difflib.get_close_matches(told, ENGINES, n=1, cutoff=0.0)[0]
            raise ValueError(f"engine = {told!r}; choose one of {', '.join(ENGINES)}; the nearest is {near!r}")
        if text not in ENGINE_TEXTS:
            with_methods = ", ".join(known for known in ENGINE_TEXTS if ":" in known)
            raise ValueError(f"engine = {text!r}; engines that have partition methods of their own are {with_methods}")
        return cls(name, partition, compiled)

    @property
    def text(self) -> str:
        """Engine and method as they are written."""
        return f"{self.name}:{self.partition}" if self.partition else self.name

    @property
    def suffix(self) -> str:
        """Behind a cell's name; none for what runs where nothing is chosen."""
        engine = "" if self.name == "native" else f".{self.text.replace(':', '-')}"
        return engine + ".compiled" * self.compiled

    def to_dict(self) -> dict[str, Any]:
        """As a record and a row of a table tell it."""
        return {"engine": self.text, "compiled": self.compiled}


NATIVE = EngineChoice()
"""What runs where nothing is chosen."""
