"""How long was a rank busy, rather than waiting, and when?

    device    a moment is          so that
    cpu       thread CPU time      busy time means something when ranks outnumber cores: who waits uses none
    cuda      an event on the      nothing has to wait for the GPU while the step runs; collectives inside an
              current stream       action count as busy, for they occupy the stream

When an action ran is told by a moment of the wall clock beside it; on a GPU one event tells both. `ActionClock` watches
the executor's actions, `BlockClock` the blocks of a model through hooks. Hooks cost time, so that the two are never
used in one step; four readings of a clock an action cost a microsecond or so.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self, TypeAlias

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from models.config import ModelConfig
from models.model import Model
from parallel.schedule import Action, Kind
from parallel.transfers import Step

Moment: TypeAlias = Any
"""Seconds of thread CPU time, or a CUDA event."""
Span: TypeAlias = tuple[Moment, Moment]


class Reading(NamedTuple):
    """A moment of both clocks."""

    busy: Moment
    wall: Moment


class Ran(NamedTuple):
    """An action as it was run."""

    action: Action
    start: Reading
    end: Reading


class BusyClock:
    """Tells moments, and the busy seconds between two of them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._device = device

    def now(self) -> Moment:
        if not self._on_gpu:
            return time.thread_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> Reading:
        """A moment of busy time, and one of wall time."""
        if not self._on_gpu:
            return Reading(time.thread_time(), time.perf_counter())
        event = self.now()
        return Reading(event, event)

    def seconds(self, span: Span) -> float:
        """Seconds of a span of one kind of moments; on a GPU its end must have passed, see `finish`."""
        start, end = span
        if not self._on_gpu:
            return max(0.0, float(end - start))
        return float(start.elapsed_time(end)) / 1000

    def finish(self) -> None:
        """Waits until the device has done all that it was given."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


class ActionClock:
    """Observer that takes the times of actions and of what follows them, from its making on.

    Attributes:
        begun: when it was made.
        ran: the actions of one step in the order in which they ran; a split backward's halves are two.
        synchronised: what follows the last action, in busy time.
    """

    def __init__(self, clock: BusyClock) -> None:
        self._clock = clock
        self.ran: list[Ran] = []
        self.synchronised: list[Span] = []
        self.begun = clock.read()

    @contextlib.contextmanager
    def _running(self, action: Action) -> Iterator[None]:
        start = self._clock.read()
        yield
        self.ran.append(Ran(action, start, self._clock.read()))

    @contextlib.contextmanager
    def synchronise(self) -> Iterator[None]:
        start = self._clock.now()
        yield
        self.synchronised.append((start, self._clock.now()))

    def action(self, action: Step) -> contextlib.AbstractContextManager[None]:
        return self._running(action) if isinstance(action, Action) else contextlib.nullcontext()

    @property
    def order(self) -> tuple[Action, ...]:
        return tuple(ran.action for ran in self.ran)

    def busy_seconds(self, ran: Ran) -> float:
        """Of one action."""
        return self._clock.seconds((ran.start.busy, ran.end.busy))

    def wall_seconds(self, moment: Reading) -> float:
        """Since the step began."""
        return self._clock.seconds((self.begun.wall, moment.wall))

    def synchronise_seconds(self) -> float:
        """Busy seconds of what follows the last action."""
        return sum(map(self._clock.seconds, self.synchronised))

    def by_stage(self, *kinds: Kind) -> dict[int, float]:
        """Busy seconds of some kinds of action, by stage."""
        sums = dict.fromkeys(sorted({ran.action.stage for ran in self.ran}), 0.0)
        for ran in self.ran:
            if ran.action.kind in kinds:
                sums[ran.action.stage] += self.busy_seconds(ran)
        return sums


def numbered_blocks(model: Model, config: ModelConfig) -> dict[int, nn.Module]:
    """Blocks of a model or a stage by their index in the flat block list, the encoder's first."""
    blocks: dict[int, nn.Module] = {}
    for stack, offset in ((model.encoder, 0), (model.decoder, config.num_encoder_blocks)):
        if stack is not None:
            blocks.update({offset + int(index): block for index, block in stack.blocks_here.items()})
    return blocks


class BlockClock:
    """Context in which every block's forward and backward is timed, through module hooks.

    A backward lasts from the moment when the gradient of a block's output is there until that of its inputs is.

    Attributes:
        forward, backward: spans by block, of all microbatches.
    """

    def __init__(self, blocks: dict[int, nn.Module], clock: BusyClock) -> None:
        self._blocks, self._clock = blocks, clock
        self.forward: dict[int, list[Span]] = defaultdict(list)
        self.backward: dict[int, list[Span]] = defaultdict(list)
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Self:
        for index, block in self._blocks.items():
            start, end = self._pair(self.forward[index])
            self._handles += [block.register_forward_pre_hook(start), block.register_forward_hook(end)]
            start, end = self._pair(self.backward[index])
            self._handles += [
                block.register_full_backward_pre_hook(start),
                block.register_full_backward_hook(end),
            ]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _pair(self, spans: list[Span]) -> tuple[Callable[..., None], Callable[..., None]]:
        started: list[Moment] = []

        def start(*_: Any) -> None:
            started.append(self._clock.now())

        def end(*_: Any) -> None:
            spans.append((started.pop(), self._clock.now()))

        return start, end

    def seconds(self, spans: dict[int, list[Span]]) -> dict[int, float]:
        """Busy seconds by block."""
        return {index: sum(map(self._clock.seconds, spans[index])) for index in self._blocks}
