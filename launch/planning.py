"""Which layout should a model train with, or what would a given one do to it? `twinshard plan`, running nothing.

    twinshard plan MODEL --tp 8 ...                            what a layout does to a model (`launch/inspection.py`)
    twinshard plan MODEL --machine a100 --devices 64           the fastest layouts of a model and its twin

With a machine, layouts are searched (`parallel/search.py`), and options of a layout that are given hold for all that
are tried. The twin reads the same pair of texts: one stack reads source and target in a row, and the length of a model
with one stack is halved for a twin with two. Left out: how the answer is told (`launch/plan_sheets.py`).
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar, cast, get_args

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from launch.inspection import show_plan
from launch.layout_options import LAYOUT_OPTIONS, cut_of, layout_of, layout_options
from launch.machine_files import load_machine, machine_names
from launch.plan_sheets import COLUMNS, Planned, document, experiment, rows, sheets
from launch.sheets import Format, format_option, show
from launch.step_options import DTYPE_BYTES, Step, counted_model
from models.config import Architecture, ModelConfig
from models.matching import Match, twins
from models.named import named_model
from parallel.figures import Optimizer
from parallel.layouts import Layout
from parallel.search import Restriction, search
from parallel.search_space import Question

Command = TypeVar("Command", bound=Callable[..., Any])

PATIENCE_SECONDS = 2.0
"""A search that takes longer shows a bar."""
_OPTIONS = (
    click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage over dp."),
    click.option("--machine", help=f"Search: {', '.join(machine_names())}, or a .toml file of that form."),
    click.option("--devices", type=int, help="Search: devices, all of them used."),
    click.option("--sequences", type=int, help="Search: sequences of a step over all devices [default: one each]."),
    click.option("--microbatch", type=int, help="Search: sequences of a microbatch [default: any number]."),
    click.option("--source-length", type=int, help="Search: source positions [default: the model's maximum]."),
    click.option("--target-length", type=int, help="Search: target positions [default: the model's maximum]."),
    click.option("--dtype", type=click.Choice(list(DTYPE_BYTES)), default="bfloat16", show_default=True),
    click.option("--optimizer", type=click.Choice(get_args(Optimizer)), default="adamw", show_default=True),
    click.option("--master-weights", is_flag=True, help="Search: the optimizer updates a float32 copy."),
    click.option(
        "--twin",
        type=click.Choice(["none", *get_args(Match)]),
        default="depth",
        show_default=True,
        help="Search: in what the other architecture's model is matched.",
    ),
    click.option(
        "--out",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Search: write the layouts found as an experiment for simulate and run.",
    ),
)
SEARCH_OPTIONS = (
    *("machine", "devices", "sequences", "microbatch", "source_length", "target_length"),
    *("dtype", "optimizer", "master_weights", "twin", "out", "form"),
)
"""Names of the options that only a search reads."""


def _search_options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command("plan")
@click.argument("model")
@layout_options
@_search_options
@format_option
@click.pass_context
def plan_command(context: click.Context, /, *, model: str, **chosen: Any) -> int:
    """Show what a layout does to MODEL, or search the fastest layouts of MODEL and its twin on a machine.

    MODEL is a name that `twinshard models` lists, or a config.json of Hugging Face. Nothing is run.

    Without --machine, one layout is shown: its stages, each kind of module, and the schedule. With --machine and
    --devices, all layouts that fit are searched for the fastest step of --sequences sequences; options of a layout that
    are given hold for all of them, the others are free. Beside the fastest are told: what a step would take with even
    or aligned cuts, with 1f1b alone and with other restrictions, and the same of the twin. The exit code is 1 if
    the model or its twin fits nowhere.

    \b
    Examples:
      twinshard plan t5-small --tp 2 --sp
      twinshard plan llama-2-70b --tp 8 --pp 4 --microbatches 16 --schedule gpipe
      twinshard plan llama-2-70b --machine a100 --devices 64 --sequences 256
      twinshard plan t5-11b --machine h100 --devices 64 --pp 8 --sequences 512 --out plan.toml
    """  # noqa: D301 - click reads the character
    given = {name for name in chosen if context.get_parameter_source(name) is not ParameterSource.DEFAULT}
    asked = {name: chosen.pop(name) for name in SEARCH_OPTIONS}
    if asked["machine"] is None and asked["devices"] is None:
        for name in SEARCH_OPTIONS:
            if name in given:
                option = "--format" if name == "form" else f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} belongs to a search: give --machine and --devices too, or leave it out")
        config = ModelConfig.from_hf(Path(model)) if Path(model).exists() else named_model(model)
        show_plan(config, layout_of(chosen))
        return 0
    for name, other in (("machine", "a100"), ("devices", "64")):
        if asked[name] is None:
            raise ValueError(f"a search needs --machine and --devices: give --{name} too, such as --{name} {other}")
    fixed = {name: chosen[name] for name in (*LAYOUT_OPTIONS, "zero") if name in given}
    if "cut" in fixed:
        fixed["cut"] = cut_of(fixed["cut"])
    return _search(model, fixed, **asked)


def _search(
    model: str,
    fixed: Mapping[str, Any],
    *,
    machine: str,
    devices: int,
    twin: str,
    out: Path | None,
    form: Format,
    **chosen: Any,
) -> int:
    cluster = load_machine(machine)
    config, notes = counted_model(model)
    num_sequences = chosen.pop("sequences")
    size = chosen["microbatch"]
    if size is not None and size < 1:
        raise ValueError(f"microbatch = {size}; it must be at least 1")
    step = Step.of(chosen | {"microbatch": size or 1})
    shape = step.shape(config, 1)
    question = Question(
        config=config,
        machine=cluster,
        num_devices=devices,
        num_sequences=devices if num_sequences is None else num_sequences,
        source_length=shape.source_length,
        target_length=shape.target_length,
        dtype_bytes=shape.dtype_bytes,
        optimizer=step.optimizer,
        master_weights=step.master_weights,
        microbatch=size,
        fixed=fixed,
    )
    questions = [question]
    if twin != "none":
        questions.append(twin_of(question, cast("Match", twin)))
    planned = []
    for one in questions:
        with _Bar(one.config.name) as bar:
            answer = search(one, restrictions(one.config), observe=bar.observe)
        planned.append(Planned(question=one, answer=answer))
    told = [*notes, *step.unread(config)]
    text = experiment(planned, model=model, match=twin, dtype=step.dtype, pair=pair_of(question))
    if out is not None and text:
        out.write_text(text, encoding="utf-8", newline="\n")
        told.append(f"written to {out}")
    show(
        form,
        sheets=sheets(planned, told, text, dtype=step.dtype),
        columns=COLUMNS,
        rows=rows(planned, dtype=step.dtype),
        document=document(planned, told, text, dtype=step.dtype, step=dataclasses.asdict(step)),
    )
    return 0 if all(one.answer.found for one in planned) else 1


# ---- twins ----------------------------------------------------------------------------------------------------------


def pair_of(question: Question) -> tuple[int, int]:
    """Lengths of the pair of texts that a model and its twin read; a lone stream is halved."""
    if question.config.has_cross_attention:
        return question.source_length, question.target_length
    length = question.source_length + question.target_length
    return length - length // 2, length // 2


def twin_of(question: Question, match: Match) -> Question:
    """The same question about the model of the other architecture. Raises ValueError as `twins` does."""
    config = question.config
    other: Architecture = "encoder_decoder"
    if config.has_cross_attention:
        other = "encoder_only" if config.feature_width else "decoder_only"
    source, target = pair_of(question)
    made = twins(config, other, match, source_length=source, target_length=target).config
    length = source + target
    return dataclasses.replace(
        question,
        config=made,
        source_length=source if made.has_cross_attention else length * made.has_encoder,
        target_length=target if made.has_cross_attention else length * made.has_decoder,
        fixed=_carried(question.fixed, made),
    )


def _carried(fixed: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    """What is given, without what means nothing to a model with one stack."""
    if config.has_cross_attention:
        return dict(fixed)
    meaningless = {"memory_gather": None, "transport": None, "cut": "aligned", "placement": "folded"}
    return {
        name: value
        for name, value in fixed.items()
        if name not in meaningless or meaningless[name] not in (None, value)
    }


# ---- restrictions ---------------------------------------------------------------------------------------------------


def restrictions(config: ModelConfig) -> dict[str, Restriction]:
    """What others have, and what a step takes without what they lack; a lone stage has neither cut nor schedule."""
    told = {"even cut": _only(cut=("even",))}
    if config.has_cross_attention:
        told["aligned cut"] = _only(cut=("aligned",))
    told["1f1b only"] = _only(schedule=("1f1b",))
    told["one stage a rank"] = _only(chunks=(1,))
    others: dict[str, tuple[Any, ...]] = {
        "cut": ("even", "aligned"),
        "schedule": ("gpipe", "1f1b", "interleaved"),
        "placement": ("linear", "interleaved"),
    }
    if config.has_cross_attention:
        told["memory relayed"] = _only(transport=("relay",))
        told["memory sent directly"] = _sends_directly
        told["memory gathered per block"] = _gathers_per_block
        told["as others do"] = lambda layout: (
            _only(transport=("relay",), **others)(layout) and _gathers_per_block(layout)
        )
    else:
        told["as others do"] = _only(**others)
    return told


def _only(**values: tuple[Any, ...]) -> Restriction:
    return lambda layout: layout.pp == 1 or all(getattr(layout, name) in able for name, able in values.items())


def _sends_directly(layout: Layout) -> bool:
    return layout.transport == "direct" or (layout.num_stages < 3 and layout.transport == "relay")


def _gathers_per_block(layout: Layout) -> bool:
    return layout.tp == 1 or layout.memory_gather == "per_block"


class _Bar:
    """A bar on the error stream, once a search has taken a while."""

    def __init__(self, name: str) -> None:
        console = Console(stderr=True, markup=False)
        self._progress = Progress(
            TextColumn(f"layouts of {name}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f} decided, fastest {task.fields[fastest]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("layouts", visible=False, fastest="-")
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def observe(self, done: int, total: int, fastest: float) -> None:
        is_long = time.monotonic() - self._start > PATIENCE_SECONDS
        self._progress.update(self._task, completed=done, total=total, visible=is_long, fastest=f"{fastest:.4g} s")
