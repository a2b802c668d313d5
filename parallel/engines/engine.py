"""What is an engine, which are there, and which can run a layout?

    unsupported(name, config, layout)     None, or in one line why not: not installed, or what it cannot partition
    build(name, plan=..., comm=..., ...)  one rank of the engine, ready to step

An engine partitions with its own means what the plan's layout asks for, and starts from the same weights as all others
(`models/initial.py`). Each is one module beside this one, loaded when it is asked for; loading this loads no torch.

Where an engine has methods of its own to cut a model into stages, `deepspeed:uniform` is the engine with such a method
in place of the plan's cut. All else is as ever: what it computes equals one process, wherever it cuts.
"""

import dataclasses
import difflib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

from models.config import ModelConfig
from parallel.layouts import Layout
from parallel.plan import Plan

if TYPE_CHECKING:
    import torch

    from models.batch import Batch
    from parallel.comm import Comm
    from parallel.engines.gathered import Gathered
    from parallel.pipeline import Observer

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
OptimizerName = Literal["sgd", "adamw"]
Quantity = Literal["gradient", "weight"]

_MAKERS: dict[EngineName, str] = {
    "native": "NativeEngine",
    "torch": "TorchEngine",
    "deepspeed": "DeepspeedEngine",
    "fairscale": "fairscale_engine",
    "transformers": "TransformersEngine",
}
_EXTRAS: tuple[EngineName, ...] = ("deepspeed", "fairscale", "transformers")
"""Engines that are a package of the same name, installed only by who wants them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepFacts:
    """What a step tells; the same on every rank."""

    loss: float
    """Sum of the cross-entropy over the valid target tokens of the whole step, divided by their number."""
    loss_tokens: int
    gradient_norm: float


class Engine(Protocol):
    """One rank of one layout of one model. Every method is collective."""

    plan: Plan
    comm: "Comm"
    has_own_threads: bool
    """Whether threads that it starts compute, so that the busy time of the one that calls it is not all."""

    def step(self, batch: "Batch", *, update: bool = True, observer: "Observer | None" = None) -> StepFacts:
        """Forward, backward, synchronisation and (unless `update` is false) one optimizer step.

        Args:
            batch: this data-parallel rank's share of the step, on the host; see `parallel.sequence.deal`.
            update: whether the weights change.
            observer: entered around every action by engines that have actions; others do not read it.
        """

    def gather(self, quantity: Quantity) -> "Gathered | None":
        """Whole gradients or weights by canonical name on rank 0, None elsewhere. For checks, not for speed."""

    @property
    def held_blocks(self) -> tuple[int, ...]:
        """Numbers in the flat block list of the blocks that this rank computes."""

    @property
    def num_parameters(self) -> int:
        """Elements of parameters that this rank holds."""

    @property
    def parameter_bytes(self) -> int:
        """Of this rank."""

    @property
    def gradient_bytes(self) -> int:
        """Of this rank."""

    @property
    def optimizer_bytes(self) -> int:
        """Of the optimizer's states on this rank; zero before its first step."""


def engine_name(text: str) -> EngineName:
    """The engine of this name. Raises ValueError for any other text."""
    for name in ENGINES:
        if name == text:
            return name
    near = difflib.get_close_matches(text, ENGINES, n=1, cutoff=0.0)[0]
    raise ValueError(f"engine = {text!r}; choose one of {', '.join(ENGINES)}; the nearest is {near!r}")


def engine_and_partition(text: str) -> tuple[EngineName, str]:
    """The engine of a text such as `torch` or `deepspeed:uniform`, and its method, empty for the plan's stages.

    Raises ValueError for an unknown engine, and for a method that it does not have.
    """
    told, _, partition = text.partition(":")
    name = engine_name(told)
    if text not in ENGINE_TEXTS:
        with_methods = ", ".join(known for known in ENGINE_TEXTS if ":" in known)
        raise ValueError(f"engine = {text!r}; engines that have partition methods of their own are {with_methods}")
    return name, partition


def engine_text(name: EngineName, partition: str) -> str:
    """The inverse of `engine_and_partition`."""
    return f"{name}:{partition}" if partition else name


def labelled(num_tokens: int) -> int:
    """The labels that a step's loss is divided by. Raises ValueError where there are none."""
    if num_tokens == 0:
        raise ValueError("none of the step's sequences has a label: there is no loss to divide")
    return num_tokens


def unsupported(
    name: EngineName, config: ModelConfig, layout: Layout, partition: str = "", *, compiled: bool = False
) -> str | None:
    """Why an engine cannot run a model on a layout, or not with compiled blocks, as one line; None when it can.

    What no engine could (heads that tp does not divide) is `Layout.check_model`'s to say.
    """
    if partition and layout.pp == 1:
        return f"{engine_text(name, partition)} cuts a model into stages, and pp = 1 leaves one; use pp >= 2"
    if name in _EXTRAS and importlib.util.find_spec(name) is None:
        return f"the {name} engine is not installed: pip install 'twinshard[engines]'"
    module = _module(name)
    reason: str | None = module.unsupported(config, layout)
    if reason is None and partition == "size":
        reason = module.unsupported_size()
    if reason is None and compiled:
        reason = (
            module.not_compiled(layout)
            if name == "native"
            else f"the {name} engine does not compile blocks: use engine = 'native'"
        )
    return reason


def build(
    name: EngineName,
    *,
    plan: Plan,
    comm: "Comm",
    seed: int,
    dtype: "torch.dtype",
    device: "torch.device",
    optimizer: OptimizerName = "sgd",
    learning_rate: float = 1e-2,
    partition: str = "",
    compiled: bool = False,
) -> Engine:
    """One rank of an engine. Collective; arguments are those of `parallel.engines.native.NativeEngine`.

    `partition` is a method of the engine's own, empty for the plan's stages. Raises ValueError for a layout that
    `unsupported` names.
    """
    reason = unsupported(name, plan.config, plan.layout, partition, compiled=compiled)
    if reason is not None:
        raise ValueError(reason)
    engine: Engine = getattr(_module(name), _MAKERS[name])(
        plan=plan,
        comm=comm,
        seed=seed,
        dtype=dtype,
        device=device,
        optimizer=optimizer,
        learning_rate=learning_rate,
        **({"partition": partition} if partition else {}),
        **({"compiled": True} if compiled else {}),
    )
    return engine


def _module(name: EngineName) -> Any:
    return importlib.import_module(f"parallel.engines.{name}")
