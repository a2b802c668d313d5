"""How is a layout written on the command line? One option a field of `Layout`, the same for every command."""

from collections.abc import Callable
from typing import Any, TypeVar, get_args

import click

from parallel.layouts import (
    AttentionKernel,
    Cut,
    Layout,
    MemoryGather,
    NamedCut,
    Recompute,
    SavedInput,
    Schedule,
    Transport,
    Vocabulary,
)
from parallel.placement import Placement

Command = TypeVar("Command", bound=Callable[..., Any])

_DEFAULT = Layout()
_OPTIONS = (
    click.option("--tp", default=_DEFAULT.tp, show_default=True, help="Tensor-parallel degree."),
    click.option("--pp", default=_DEFAULT.pp, show_default=True, help="Pipeline ranks."),
    click.option("--dp", default=_DEFAULT.dp, show_default=True, help="Data-parallel degree."),
    click.option(
        "--gradient-bucket-bytes",
        default=_DEFAULT.gradient_bucket_bytes,
        show_default=True,
        help="Least of gradients, in whole blocks, that leave for their sum over dp while the backward runs; "
        "0 sums all of them after it. Native engine; the size of DDP's buckets.",
    ),
    click.option("--sp", is_flag=True, help="Shard the sequence over the tp ranks between products."),
    click.option("--microbatches", default=_DEFAULT.microbatches, show_default=True, help="Microbatches of a step."),
    click.option("--schedule", type=click.Choice(get_args(Schedule)), default=_DEFAULT.schedule, show_default=True),
    click.option(
        "--cut",
        default="even",
        show_default=True,
        help="even, aligned, balanced by parameters, flops, times or memory, or first blocks such as 2,5.",
    ),
    click.option("--chunks", default=_DEFAULT.chunks, show_default=True, help="Stages of each pipeline rank."),
    click.option("--placement", type=click.Choice(get_args(Placement)), default=_DEFAULT.placement, show_default=True),
    click.option(
        "--transport",
        type=click.Choice(get_args(Transport)),
        default=_DEFAULT.transport,
        show_default=True,
        help="Of the memory: from stage to stage, from its maker to all, or as keys and values (one stage a rank).",
    ),
    click.option(
        "--memory-gather", type=click.Choice(get_args(MemoryGather)), default=_DEFAULT.memory_gather, show_default=True
    ),
    click.option(
        "--saved-input",
        type=click.Choice(get_args(SavedInput)),
        default=_DEFAULT.saved_input,
        show_default=True,
        help="Under --sp: what products keep of the inputs that they gather.",
    ),
    click.option(
        "--vocabulary",
        type=click.Choice(get_args(Vocabulary)),
        default=_DEFAULT.vocabulary,
        show_default=True,
        help="Under --tp: a rank holds its rows of embeddings and head, or all of them and computes the whole loss.",
    ),
    click.option("--recompute", type=click.Choice(get_args(Recompute)), default=_DEFAULT.recompute, show_default=True),
    click.option(
        "--attention", type=click.Choice(get_args(AttentionKernel)), default=_DEFAULT.attention, show_default=True
    ),
)
LAYOUT_OPTIONS = (
    "tp",
    "pp",
    "dp",
    "gradient_bucket_bytes",
    "sp",
    "microbatches",
    "schedule",
    "cut",
    "chunks",
    "placement",
    "transport",
    "memory_gather",
    "saved_input",
    "vocabulary",
    "recompute",
    "attention",
)
"""Names of the options, as a command gets them."""


def layout_options(command: Command) -> Command:
    """Decorator that gives a command the options; it reads them with `layout_of`."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def layout_of(chosen: dict[str, Any]) -> Layout:
    """The layout of the options as click gives them. Raises ValueError when they contradict each other."""
    return Layout(**{**chosen, "cut": cut_of(chosen["cut"])})


def cut_of(text: str) -> Cut:
    """A cut as it is typed. Raises ValueError for anything else."""
    for name in get_args(NamedCut):
        if text == name:
            named: NamedCut = name
            return named
    try:
        return tuple(int(first) for first in text.split(","))
    except ValueError as error:
        names = ", ".join(get_args(NamedCut))
        raise ValueError(f"cut = {text!r}; choose one of {names} or first blocks such as 2,5") from error
