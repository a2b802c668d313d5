"""The model as DeepSpeed's PipelineModule, and its schedule one instruction after the other.

    type:^Start        the plan's stages: the first layer of each is of a class whose name starts so
    type:BlockLayer    as many blocks a stage
    parameters         as many parameters a stage; embedding and head count
    uniform            as many layers a stage; embedding and head are layers

DeepSpeed cuts by balancing what a method counts. With one start a stage there is nothing to balance, and of equally
good cuts it takes the last: right before the start.

DeepSpeed runs 1F1B. It sizes its receive buffers by the first microbatch and keeps them: they are made anew for a batch
of another shape, and for every microbatch where the last is ragged. A stage that hands on several tensors runs a
backward from each of them: a graph that two of them share is walked twice.
Source: deepspeed 0.19, runtime/pipe. Left out: data parallelism without stages (`parallel/engines/deepspeed.py`).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule as instructions
from deepspeed.runtime.pipe.topology import ProcessTopology
from torch import Tensor

from models.batch import Batch
from parallel.engines.layer_list import Listed, first_layers, layer_list
from parallel.engines.listed_layers import Current, Parts
from parallel.pipeline import Observer
from parallel.schedule import Action, Kind

OF_PLAN = "type:^Start"
"""The method that gives the plan's stages."""


def layer_specs(parts: Parts, current: Current) -> list[Any]:
    """The model as a list of layers, none of which is built."""
    layers = layer_list(parts.plan.config)
    specs = [_spec(layer, parts, current) for layer in layers]
    for place in first_layers(layers, parts.plan.stages):
        start = specs[place]
        start.typename = type(f"Start{start.typename.__name__}", (start.typename,), {})
    return specs


def _spec(layer: Listed, parts: Parts, current: Current) -> Any:
    if layer.use is None:
        return LayerSpec(layer.kind, parts, current, *layer.arguments)
    use = functools.partial(layer.use, parts, current)
    return TiedLayerSpec("token", layer.kind, parts, *layer.arguments, forward_fn=use)


def pipeline_module(parts: Parts, current: Current, *, method: str, score: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """DeepSpeed's module of this rank's stage; its ranks are numbered as this project's are: dp, then pp."""
    layout = parts.plan.layout
    return PipelineModule(
        layers=layer_specs(parts, current),
        topology=ProcessTopology(axes=["data", "pipe"], dims=[layout.dp, layout.pp]),
        loss_fn=score,
        partition_method=method,
    )


class Instructions:
    """Runs the schedule of DeepSpeed's pipeline engine, watched, and without its own reports.

    Args:
        engine: DeepSpeed's.
        current: the microbatch of this stage, which each forward moves on.
        before_update: called when all gradients are reduced; False means not to update.
    """

    def __init__(self, engine: Any, current: Current, before_update: Callable[[], bool]) -> None:
        self._engine, self._current, self._before_update = engine, current, before_update
        self._shapes: tuple[Any, ...] = ()
        self._stage: int = engine.stage_id
        self._originals = dict(engine._INSTRUCTION_MAP)  # noqa: SLF001, the table is how DeepSpeed is extended
        self._backward = 0

    def run(self, parts: Sequence[Batch], watch: Observer, enter: Callable[[int], None]) -> None:
        """One step.

        Args:
            parts: the microbatches.
            watch: entered around every action.
            enter: called with the number of a microbatch before its forward.
        """
        engine = self._engine
        self._current.batches, self._current.index, self._backward = parts, -1, 0
        shapes = tuple(None if ids is None else ids.shape for ids in (parts[0].source, parts[0].target))
        if shapes != self._shapes:
            engine.reset_activation_shape()
            self._shapes = shapes
        engine.dynamic_shape = parts[-1].num_sequences != parts[0].num_sequences
        engine._INSTRUCTION_MAP = {  # noqa: SLF001
            **self._originals,
            instructions.ForwardPass: self._forward(watch, enter),
            instructions.BackwardPass: self._backward_pass(watch),
            instructions.OptimizerStep: self._update(),
        }
        # The first and the last stage ask for data: the number of the microbatch, which both read themselves.
        numbers = (torch.tensor([number]) for number in itertools.count())
        engine.train_batch((number, number) for number in numbers)

    def _forward(self, watch: Observer, enter: Callable[[int], None]) -> Callable[..., None]:
        original = self._originals[instructions.ForwardPass]

        def forward(engine: Any, **arguments: Any) -> None:
            self._current.index += 1
            enter(self._current.index)
            with watch.action(self._action("forward", self._current.index)):
                original(engine, **arguments)

        return forward

    def _backward_pass(self, watch: Observer) -> Callable[..., None]:
        original = self._originals[instructions.BackwardPass]

        def backward(engine: Any, **arguments: Any) -> None:
            with watch.action(self._action("backward", self._backward)):
                original(engine, **arguments)
            self._backward += 1

        return backward

    def _update(self) -> Callable[..., None]:
        original = self._originals[instructions.OptimizerStep]

        def update(engine: Any, **arguments: Any) -> None:
            if self._before_update():
                original(engine, **arguments)
            else:
                engine.zero_grad()

        return update

    def _action(self, kind: Kind, microbatch: int) -> Action:
        return Action(kind=kind, stage=self._stage, microbatch=microbatch)
