"""What did one rank hold, send, compute and keep in one step? Read off a run of the native engine, dry or for real.

    with Meter(engine) as meter:
        engine.step(batch, observer=meter)
    meter.figures()

Three witnesses watch the step: the ledger what is sent, `SavedBytes` what autograd keeps, `Operators` what is computed.
Their readings are cut at the borders of actions and of blocks, so that it is known which block they belong to. A
measured step must not be timed: watching it costs more than the step.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from models.costs import ParameterCounts
from parallel.engines.native import NativeEngine
from parallel.figures import PhaseFlops, RankFigures
from parallel.ledger import Event, totals
from parallel.operators import Operators
from parallel.saved import SavedBytes
from parallel.schedule import Action
from parallel.transfers import Step


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A stretch of one action: a block, or what lies before, between or after blocks.

    Attributes:
        block: qualified name of the block; empty outside of blocks.
        flops: executed in this stretch.
        kept: bytes kept at its end minus bytes kept at its start.
        on_top: most that was kept at any moment of it minus bytes kept at its start.
    """

    block: str
    flops: PhaseFlops
    kept: int
    on_top: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ActionFigures:
    """One forward or backward, in stretches."""

    action: Action
    segments: tuple[Segment, ...]
    events: tuple[Event, ...]
    """Communication of this action."""


class Meter:
    """Context and observer of one step of a native engine.

    Attributes:
        actions: what each forward and backward took, in the order of their execution.
        operators: the operators of the step.
        events: all communication of the step.
    """

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self._holding = _Holding.of(engine)
        self._first_event = len(engine.comm.ledger)
        self._saved = SavedBytes(engine.model, engine.deferral)
        self._handles: list[RemovableHandle] = []
        self._segments: list[Segment] = []
        self._block = ""
        self._start = _Reading()
        self._peak_bytes = 0
        self.operators = Operators()
        self.actions: list[ActionFigures] = []

    def __enter__(self) -> Self:
        for name, module in blocks(self._engine.model).items():
            self._handles.append(module.register_forward_pre_hook(self._entering(name)))
            self._handles.append(module.register_forward_hook(self._leaving(name)))
        self._saved.__enter__()
        self.operators.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.operators.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._saved.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()

    # ---- the observer -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def action(self, action: Step) -> Iterator[None]:
        """Around one action of the executor; transfers compute nothing and keep nothing."""
        if not isinstance(action, Action):
            yield
            return
        first_event = len(self._engine.comm.ledger)
        self.operators.phase = "forward" if action.kind == "forward" else "backward"
        self._segments = []
        self._cut("")
        self._segments.clear()
        yield
        self._cut("")
        self.operators.phase = "step"
        events = tuple(self._engine.comm.ledger.events[first_event:])
        self.actions.append(ActionFigures(action=action, segments=tuple(self._segments), events=events))

    def synchronise(self) -> contextlib.AbstractContextManager[None]:
        """Around gradient synchronisation and update."""
        return contextlib.nullcontext()

    # ---- the figures --------------------------------------------------------------------------------------------

    @property
    def events(self) -> tuple[Event, ...]:
        return tuple(self._engine.comm.ledger.events[self._first_event :])

    def figures(self) -> RankFigures:
        """The figures of the step that was watched."""
        return RankFigures(
            coordinate=self._engine.comm.coordinate,
            parameters=self._holding.parameters,
            parameter_bytes=self._holding.parameter_bytes,
            gradient_bytes=self._holding.gradient_bytes,
            events=totals(self.events),
            flops=self.operators.phase_flops,
            saved_bytes=sum(segment.kept for segment in self.actions[0].segments),
            peak_saved_bytes=self._peak_bytes,
        )

    # ---- cutting ------------------------------------------------------------------------------------------------

    def _cut(self, block: str) -> None:
        """Ends a stretch; what follows belongs to `block`."""
        saved, before = self._saved, self._start
        flops = self.operators.phase_flops
        self._segments.append(
            Segment(
                block=self._block,
                flops=PhaseFlops(
                    forward=flops.forward - before.flops.forward,
                    recompute=flops.recompute - before.flops.recompute,
                    backward=flops.backward - before.flops.backward,
                ),
                kept=saved.now_bytes - before.now_bytes,
                on_top=saved.peak_bytes - before.now_bytes,
            )
        )
        self._peak_bytes = max(self._peak_bytes, saved.peak_bytes)
        saved.peak_bytes = saved.now_bytes
        self._block = block
        self._start = _Reading(now_bytes=saved.now_bytes, flops=flops)

    def _entering(self, name: str) -> Any:
        return lambda *_: self._cut(name)

    def _leaving(self, name: str) -> Any:
        def leave(_module: nn.Module, _inputs: Any, out: Tensor) -> None:
            self._cut("")
            # The gradient of what a block gives is complete when all that follows has run backward.
            out.register_hook(lambda _gradient: self._cut(name))

        return leave


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Reading:
    now_bytes: int = 0
    flops: PhaseFlops = dataclasses.field(default_factory=PhaseFlops)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Holding:
    """What an engine holds from step to step."""

    parameters: ParameterCounts
    parameter_bytes: int
    gradient_bytes: int

    @classmethod
    def of(cls, engine: NativeEngine) -> "_Holding":
        counts = dict.fromkeys((field.name for field in dataclasses.fields(ParameterCounts)), 0)
        for name, parameter in engine.model.named_parameters():
            counts[component(name)] += parameter.numel()
        return cls(
            parameters=ParameterCounts(**counts),
            parameter_bytes=engine.parameter_bytes,
            gradient_bytes=engine.gradient_bytes,
        )


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Blocks of a rank by qualified name, `decoder.block.3`, in the order of the computation."""
    return {
        f"{side}.block.{index}": block
        for side in ("encoder", "decoder")
        if (stack := getattr(model, side)) is not None
        for index, block in stack.block.items()
    }


def component(name: str) -> str:
    """The component that a parameter is counted under, by its qualified name."""
    path = name.split(".")
    if path[0] == "head":
        return "head"
    if "norm" in path:
        return "norms"
    return next(part for part in path if part in ("embedding", "relative_bias", *_SUBLAYERS))


_SUBLAYERS = ("self_attention", "cross_attention", "ffn")
