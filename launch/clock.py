"""How long was a rank busy, rather than waiting?

    device    a moment is          so that
    cpu       thread CPU time      busy time means something when ranks outnumber cores: who waits uses none
    cuda      an event on the      nothing has to wait for the GPU while the step runs; collectives inside an
              current stream       action count as busy, for they occupy the stream

`ActionClock` watches the executor's actions, `BlockClock` the blocks of a model through hooks. Hooks cost time, so that
the two are never used in one step. Left out: wall time, which needs no clock of its own.
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, TypeAlias

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

    def seconds(self, span: Span) -> float:
        """Busy seconds of a span; on a GPU its end must have passed, see `finish`."""
        start, end = span
        if not self._on_gpu:
            return max(0.0, float(end - start))
        return float(start.elapsed_time(end)) / 1000

    def finish(self) -> None:
        """Waits until the device has done all that it was given."""
        if self._on_gpu:
            torch.cuda.synchronize(self._device)


class ActionClock:
    """Observer that takes the time of forwards, backwards and of what follows them.

    Attributes:
        spans: of one step by stage and kind, in the order in which they ran; a split backward's halves are its two.
        synchronised: of what follows the last action.
        order: the actions of the step as they were run.
    """

    def __init__(self, clock: BusyClock) -> None:
        self._clock = clock
        self.spans: dict[tuple[int, Kind], list[Span]] = defaultdict(list)
        self.order: list[Action] = []
        self.synchronised: list[Span] = []

    @contextlib.contextmanager
    def _timed(self, spans: list[Span]) -> Iterator[None]:
        start = self._clock.now()
        yield
        spans.append((start, self._clock.now()))

    def action(self, action: Step) -> contextlib.AbstractContextManager[None]:
        if not isinstance(action, Action):
            return contextlib.nullcontext()
        self.order.append(action)
        return self._timed(self.spans[action.stage, action.kind])

    def synchronise(self) -> contextlib.AbstractContextManager[None]:
        return self._timed(self.synchronised)

    def seconds(self, spans: Iterable[Span]) -> float:
        return sum(map(self._clock.seconds, spans))

    def by_stage(self, *kinds: Kind) -> dict[int, float]:
        """Busy seconds of some kinds of action, by stage."""
        stages = sorted({stage for stage, _ in self.spans})
        return {
            stage: sum(self.seconds(self.spans[stage, kind]) for kind in kinds if (stage, kind) in self.spans)
            for stage in stages
        }


def numbered_blocks(model: Model, config: ModelConfig) -> dict[int, nn.Module]:
    """Blocks of a model or a stage by their index in the flat block list, the encoder's first."""
    blocks: dict[int, nn.Module] = {}
    for stack, offset in ((model.encoder, 0), (model.decoder, config.num_encoder_blocks)):
        if stack is not None:
            blocks.update({offset + int(index): block for index, block in stack.block.items()})
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
