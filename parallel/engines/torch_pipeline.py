"""How do torch's pipeline schedules run stages of an encoder-decoder?

    stage 0 (source) -> stage 1 (memory) -> stage 2 (target, memory) -> stage 3: loss

A stage is called with what the one before it returned, a tuple: the memory is relayed by returning it. Ids, masks and
labels never travel: a stage is told the microbatch's number and reads its own batch. The last one returns its share of
the loss, so that logits stay where they are.

    schedule       stages a rank      torch's class
    gpipe          one                ScheduleGPipe
    gpipe          several, in turn   ScheduleLoopedBFS: microbatches go back in the other order, as fast
    1f1b           one                Schedule1F1B
    interleaved    several, in turn   ScheduleInterleaved1F1B
    zb_h1          one                ScheduleInterleavedZeroBubble
    zb_v           two                ScheduleZBVZeroBubble

ScheduleInterleavedZeroBubble with several stages a rank and ScheduleDualPipeV are none of `parallel/schedules.py`.

What had to be made right:
    ragged last microbatch    buffers have the shape of the first one: it is filled up with sequences without labels
    averages                  torch divides gradients by the microbatches (`scale_grads`): off, the loss is divided by
                              the labels of the whole step
    first step                shapes are given, so that torch does not run the first microbatch once more to find them
    backward in two pieces    `torch_anchor.py`
What is right and dear: with two pieces, a checkpointed block is computed again for its input and for each weight.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from models.batch import IGNORED, Batch
from models.model import Model
from parallel.engines.torch_anchor import Anchor
from parallel.layouts import SPLIT_SCHEDULES, Schedule
from parallel.plan import Plan
from parallel.sequence import microbatches

ONE_STAGE: dict[Schedule, type[PipelineScheduleSingle | PipelineScheduleMulti]] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "zb_h1": ScheduleInterleavedZeroBubble,
}
SEVERAL_STAGES: dict[Schedule, type[PipelineScheduleMulti]] = {
    "gpipe": ScheduleLoopedBFS,
    "interleaved": ScheduleInterleaved1F1B,
    "zb_v": ScheduleZBVZeroBubble,
}
"""Classes by the number of stages a rank."""


class StageModule(nn.Module):
    """One stage as torch calls it: tensors in, tensors or the loss out.

    Attributes:
        microbatches: of the step under way.
        scale: of the sum of the losses.
    """

    def __init__(self, model: Model, plan: Plan, index: int) -> None:
        super().__init__()
        self.model = model
        self.stage = plan.stages[index]
        self.is_last = index == len(plan.stages) - 1
        self.microbatches: Sequence[Batch] = ()
        self.scale = 1.0
        is_split = index > 0 and plan.layout.schedule in SPLIT_SCHEDULES
        self._anchor = Anchor(model) if is_split else None

    def forward(self, *entered: Tensor, number: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Hidden states in the order of the edge -> those of the next edge, or a scalar."""
        index = int(number.item())
        batch = self.microbatches[index]
        self.model.mask_key.microbatch = index
        # What the first stage gets from torch is the number again.
        hidden = dict(zip(self.stage.inputs, entered, strict=False))
        left = self.model(batch, hidden) if self._anchor is None else self._anchor.run(batch, hidden)
        if not self.is_last:
            return tuple(left[name] for name in self.stage.outputs)
        assert self.model.loss is not None
        loss: Tensor = self.model.loss(left["logits"], batch.labels)
        return _local(loss) * self.scale


def _local(loss: Tensor) -> Tensor:
    local: Callable[[], Tensor] | None = getattr(loss, "to_local", None)
    return loss if local is None else local()


def equal_microbatches(batch: Batch, plan: Plan) -> list[Batch]:
    """The step cut into microbatches of one size; a ragged last one is filled up with sequences without labels."""
    cut = microbatches(batch, plan.layout)
    size, last = cut[0].num_sequences, cut[-1]
    return [*cut[:-1], _filled(last, size)] if last.num_sequences < size else cut


def _filled(batch: Batch, size: int) -> Batch:
    missing = size - batch.num_sequences

    def filled(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.cat((tensor, tensor[:1].expand(missing, *tensor.shape[1:])))

    unlabelled = batch.labels.new_full((missing, batch.labels.shape[1]), IGNORED)
    return dataclasses.replace(
        batch,
        labels=torch.cat((batch.labels, unlabelled)),
        source=filled(batch.source),
        target=filled(batch.target),
        token_types=filled(batch.token_types),
        source_lengths=batch.source_lengths + batch.source_lengths[:1] * missing,
        target_lengths=batch.target_lengths + batch.target_lengths[:1] * missing,
    )


class StagePipeline:
    """Runs the stages of this rank under torch's schedule.

    Args:
        stages: what torch runs, wrapped for dp or not, by stage number.
        plan: its schedule and edges.
        group: of the pp ranks.
        device, dtype: of hidden states.
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        plan: Plan,
        group: "dist.ProcessGroup",
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._stages, self._plan, self._group, self._device, self._dtype = stages, plan, group, device, dtype
        self._schedules: dict[tuple[int, ...], PipelineScheduleSingle | PipelineScheduleMulti] = {}

    def run(self, cut: Sequence[Batch]) -> Tensor | None:
        """All microbatches forward and backward; the sum of their losses where the last stage is."""
        schedule = self._schedule_for(cut[0])
        numbers = torch.arange(len(cut))
        losses: list[Tensor] = []
        arguments = (numbers,) if 0 in self._stages else ()
        holds_loss = len(self._plan.stages) - 1 in self._stages
        schedule.step(
            *arguments, number=numbers, target=numbers if holds_loss else None, losses=losses, return_outputs=False
        )
        return torch.stack([loss.detach() for loss in losses]).sum() if holds_loss else None

    def _schedule_for(self, batch: Batch) -> PipelineScheduleSingle | PipelineScheduleMulti:
        """The schedule for microbatches of this shape: torch's buffers have the shape of one."""
        layout = self._plan.layout
        lengths = [0 if ids is None else ids.shape[1] for ids in (batch.source, batch.target)]
        key = (batch.num_sequences, *lengths)
        if key not in self._schedules:
            made: list[Any] = [self._stage(index, batch) for index in sorted(self._stages)]
            kind: Any = (ONE_STAGE if layout.chunks == 1 else SEVERAL_STAGES)[layout.schedule]
            stages = made[0] if issubclass(kind, PipelineScheduleSingle) else made
            self._schedules[key] = kind(stages, layout.microbatches, _first, scale_grads=False)
        return self._schedules[key]

    def _stage(self, index: int, batch: Batch) -> PipelineStage:
        stage = self._plan.stages[index]
        entering = tuple(self._hidden(name, batch) for name in stage.inputs)
        leaving = tuple(self._hidden(name, batch) for name in stage.outputs)
        return PipelineStage(
            self._stages[index],
            index,
            len(self._plan.stages),
            self._device,
            input_args=entering or torch.empty(1, dtype=torch.int64, device="meta"),
            output_args=leaving or torch.empty((), dtype=self._dtype, device="meta", requires_grad=True),
            group=self._group,
        )

    def _hidden(self, name: str, batch: Batch) -> Tensor:
        layout = self._plan.layout
        length = batch.stream_length("target" if name == "target" else "source")
        shape = (length // layout.tp if layout.sp else length, batch.num_sequences, self._plan.config.width)
        return torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)


def _first(loss: Tensor, _number: Tensor) -> Tensor:
    """The last stage has made the loss already."""
    return loss
