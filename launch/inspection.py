"""What can be seen without running anything? The named models, and what a layout does to one of them."""

import dataclasses
import re
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from launch.sheets import Cell, Format, Sheet, format_option, show
from launch.step_options import counted_model
from models.config import ModelConfig
from models.costs import ParameterCounts, parameter_counts
from models.named import MODEL_NAMES, named_model
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.partition import Stage
from parallel.plan import Plan
from parallel.plans import plan
from parallel.profile import Profile
from parallel.schedule import grid


@click.command("models")
@click.argument("model", default="")
@format_option
def models_command(model: str, form: Format) -> int:
    """List the models that can be called by name, those that contain MODEL, with exact counts by component.

    MODEL may also be a config.json of Hugging Face; a tied tensor is counted once.

    \b
    Examples:
      twinshard models
      twinshard models t5 --format csv
    """  # noqa: D301 - click reads the character
    configs, notes = _models(model)
    sizes = [_sizes(config) for config in configs]
    counts = [parameter_counts(config) for config in configs]
    parts = [field.name for field in dataclasses.fields(ParameterCounts)]
    rows: list[dict[str, Cell]] = [
        size | {part: getattr(count, part) for part in parts} | {"parameters": count.total}
        for size, count in zip(sizes, counts, strict=True)
    ]
    sheets = [
        _sheet("models", [*sizes[0], "parameters"], rows),
        _sheet("parameters by component", ["model", *parts], rows),
        *(Sheet(title="notes", headings=("",), rows=[[note]]) for note in notes),
    ]
    documents = [
        size | {"parameters": {"total": count.total, "by_component": dataclasses.asdict(count)}, "notes": list(notes)}
        for size, count in zip(sizes, counts, strict=True)
    ]
    show(form, sheets=sheets, columns=list(rows[0]), rows=rows, document={"models": documents})
    return 0


def _models(word: str) -> tuple[list[ModelConfig], tuple[str, ...]]:
    """Named models with a word in their names, or the one of a file, with notes."""
    names = [name for name in MODEL_NAMES if word in name]
    if names:
        return [named_model(name) for name in names], ()
    if Path(word).exists() or "/" in word or word.endswith(".json"):
        config, notes = counted_model(word)
        return [config], notes
    raise ValueError(f"no model has {word!r} in its name; known are {', '.join(MODEL_NAMES)}")


def _sizes(config: ModelConfig) -> dict[str, Cell]:
    return {
        "model": config.name,
        "architecture": config.architecture,
        "encoder_blocks": config.num_encoder_blocks,
        "decoder_blocks": config.num_decoder_blocks,
        "width": config.width,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_width": config.head_width,
        "ffn_width": config.ffn_width,
        "vocabulary": config.vocabulary,
    }


def _sheet(title: str, names: list[str], rows: list[dict[str, Cell]]) -> Sheet:
    headings = tuple(name.replace("_", " ") for name in names)
    return Sheet(title=title, headings=headings, rows=[[row[name] for name in names] for row in rows])


def show_plan(config: ModelConfig, layout: Layout) -> None:
    """Write what a layout does to a model: its stages, each kind of module, and the schedule."""
    longest = StepShape(
        num_sequences=layout.microbatches,
        source_length=config.max_length * config.has_encoder,
        target_length=config.max_length * config.has_decoder,
    )
    # Without a step to ask for, cuts and schedules that depend on costs count them at the longest one.
    made = plan(config, layout, Profile.counted_for(config, layout, longest))
    console = Console(width=max(130, Console().width), markup=False)
    console.print(
        f"{config.name} ({config.architecture}) on {layout.world_size} ranks: {layout.label}", highlight=False
    )
    console.print(_stages(made))
    console.print(_entries(made) if made.entries else "tp = 1: no module is changed")
    for shared in made.shared:
        holders = ", ".join(f"pipeline rank {rank} as {name}" for rank, name in shared.holders)
        console.print(f"{shared.name} is held by {holders}; its gradients are summed", highlight=False)
    console.print(f"\nschedule, a line a rank (all actions drawn equally long)\n{grid(made.table)}", highlight=False)


def _stages(made: Plan) -> Table:
    table = Table("stage", "rank", "blocks", "sends forward", box=None, pad_edge=False)
    for stage, rank in zip(made.stages, made.ranks, strict=True):
        leaving = [edge for edge in made.edges if edge.first == stage.index]
        sent = "; ".join(f"{', '.join(edge.carries)} to {edge.last}" for edge in leaving) or "-"
        table.add_row(str(stage.index), str(rank), _blocks(stage, made.config.num_encoder_blocks), sent)
    return table


def _blocks(stage: Stage, num_encoder_blocks: int) -> str:
    """Blocks of a stage as `E0-E3 D0`, numbered within their stacks."""
    told = []
    for letter, first, end in (
        ("E", stage.first, min(stage.last, num_encoder_blocks)),
        ("D", max(stage.first - num_encoder_blocks, 0), stage.last - num_encoder_blocks),
    ):
        if first < end:
            told.append(f"{letter}{first}" if first == end - 1 else f"{letter}{first}-{letter}{end - 1}")
    return " ".join(told)


def _entries(made: Plan) -> Table:
    """The plan's entries, blocks of a stack that are treated alike in one row."""
    rows: dict[tuple[str, str, str], int] = {}
    for entry in made.entries:
        key = (re.sub(r"block\.\d+", "block.*", entry.module), entry.style, entry.detail)
        rows[key] = rows.get(key, 0) + 1
    table = Table("module", "times", "style", "detail", box=None, pad_edge=False)
    for (module, style, detail), count in rows.items():
        table.add_row(module, str(count), style, detail)
    return table
