"""What is an engine, and which can run a layout?

    unsupported(choice, config, layout)     None, or in one line why not: not installed, or what it cannot partition
    build(choice, plan=..., comm=..., ...)  one rank of the engine, ready to step

An engine partitions with its own means what the plan's layout asks for, and starts from the same weights as all others
(`models/initial.py`). Each is one module beside this one, loaded when it is asked for; loading this loads no torch.
Left out: which engines there are, and how one is written (`choice.py`).
"""

import dataclasses
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any, Literal, Protocol

from models.config import ModelConfig
from parallel.engines.choice import EngineChoice, EngineName
from parallel.layouts import Layout
from parallel.plan import Plan

if TYPE_CHECKING:
    from models.batch import Batch
    from parallel.comm import Comm
    from parallel.engines.gathered import Gathered
    from parallel.engines.settings import EngineSettings
    from parallel.pipeline import Observer

OptimizerName = Literal["sgd", "adamw"]
Quantity = Literal["gradient", "weight"]

_MAKERS: dict[EngineName, str] = {
    "native": "NativeEngine",
    "torch": "TorchEngine",
    "deepspeed": "DeepspeedEngine",
    "fairscale": "fairscale_engine",
    "transformers": "TransformersEngine",
}
_COMPILING: tuple[EngineName, ...] = ("native", "torch")
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


def labelled(num_tokens: int) -> int:
    """The labels that a step's loss is divided by. Raises ValueError where there are none."""
    if num_tokens == 0:
        raise ValueError("none of the step's sequences has a label: there is no loss to divide")
    return num_tokens


def unsupported(choice: EngineChoice, config: ModelConfig, layout: Layout) -> str | None:
    """Why an engine cannot run a model on a layout, or not with compiled blocks, as one line; None when it can.

    What no engine could (heads that tp does not divide) is `Layout.check_model`'s to say.
    """
    name = choice.name
    if choice.partition and layout.pp == 1:
        return f"{choice.text} cuts a model into stages, and pp = 1 leaves one; use pp >= 2"
    if name in _EXTRAS and importlib.util.find_spec(name) is None:
        return f"the {name} engine is not installed: pip install 'twinshard[engines]'"
    module = _module(name)
    reason: str | None = module.unsupported(config, layout)
    if reason is None and choice.partition == "size":
        reason = module.unsupported_size()
    if reason is None and choice.compiled:
        reason = (
            module.not_compiled(layout)
            if name in _COMPILING
            else f"the {name} engine does not compile blocks: use engine = 'native' or 'torch'"
        )
    return reason


def build(choice: EngineChoice, *, plan: Plan, comm: "Comm", settings: "EngineSettings") -> Engine:
    """One rank of an engine. Collective. Raises ValueError for a layout that `unsupported` names."""
    reason = unsupported(choice, plan.config, plan.layout)
    if reason is not None:
        raise ValueError(reason)
    engine: Engine = getattr(_module(choice.name), _MAKERS[choice.name])(
        plan=plan,
        comm=comm,
        settings=settings,
        **({"partition": choice.partition} if choice.partition else {}),
        **({"compiled": True} if choice.compiled else {}),
    )
    return engine


def _module(name: EngineName) -> Any:
    return importlib.import_module(f"parallel.engines.{name}")
