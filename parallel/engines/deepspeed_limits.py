"""What can DeepSpeed not run of these models? Each limit in one line, told before anything starts. Torch-free."""

import itertools
from collections.abc import Iterator

from models.config import ModelConfig
from parallel.layouts import Layout


def unsupported(_config: ModelConfig, layout: Layout) -> str | None:
    """Why DeepSpeed cannot run a layout, as one line; None when it can."""
    return next(itertools.chain(_axis_limits(layout), _pipeline_limits(layout)), None)


def _axis_limits(layout: Layout) -> Iterator[str]:
    if layout.world_size == 1:
        yield "deepspeed needs a process group: a layout of one rank is plain PyTorch; use 2 ranks or more"
    if layout.tp > 1:
        yield (
            "deepspeed's AutoTP replaces nn.Linear and nn.Embedding, and projections, embeddings and head of these "
            f"models are neither: tp = {layout.tp}; use tp = 1"
        )
    if layout.cp > 1:
        yield f"deepspeed's Ulysses attention is not joined with these models: cp = {layout.cp}; use cp = 1"


def _pipeline_limits(layout: Layout) -> Iterator[str]:
    if layout.pp == 1:
        return
    if layout.zero > 1:
        yield f"deepspeed's PipelineModule refuses ZeRO 2 and 3: zero = {layout.zero}, pp = {layout.pp}; use zero <= 1"
    if layout.schedule != "1f1b":
        yield f"deepspeed's pipeline runs 1F1B only: schedule = {layout.schedule!r}; use schedule = '1f1b'"
    if layout.transport != "relay":
        yield (
            f"deepspeed's stages send to their neighbours only: transport = {layout.transport!r}; "
            "use transport = 'relay'"
        )
