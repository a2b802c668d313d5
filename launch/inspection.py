"""What can be seen without running anything? The named models, and what a layout does to one of them."""

import re
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from launch.layout_options import layout_of, layout_options
from models.config import ModelConfig
from models.costs import parameter_counts
from models.named import MODEL_NAMES, named_model
from parallel.partition import Stage
from parallel.plan import Plan
from parallel.plans import plan
from parallel.schedule import grid


@click.command("models")
@click.argument("word", default="")
def models_command(word: str) -> int:
    """List the models that can be called by name, those that contain WORD.

    \b
    Examples:
      twinshard models
      twinshard models t5
    """  # noqa: D301 - click reads the character
    names = [name for name in MODEL_NAMES if word in name]
    if not names:
        raise ValueError(f"no model has {word!r} in its name; known are {', '.join(MODEL_NAMES)}")
    table = Table(box=None, pad_edge=False)
    for heading in ("model", "architecture"):
        table.add_column(heading, no_wrap=True)
    for heading in ("blocks", "width", "heads", "KV heads", "ffn", "vocabulary", "parameters"):
        table.add_column(heading, justify="right", no_wrap=True)
    for config in map(named_model, names):
        sides = [config.num_encoder_blocks, config.num_decoder_blocks]
        table.add_row(
            config.name,
            config.architecture,
            " + ".join(str(count) for count in sides if count),
            *map(str, (config.width, config.num_heads, config.num_kv_heads, config.ffn_width, config.vocabulary)),
            f"{parameter_counts(config).total:,}",
        )
    Console(width=max(130, Console().width)).print(table)
    return 0


@click.command("plan")
@click.argument("model")
@layout_options
def plan_command(model: str, **chosen: Any) -> int:
    """Show what a layout does to MODEL: its stages, each kind of module, and the schedule.

    MODEL is a name that `twinshard models` lists, or a config.json of Hugging Face. Nothing is run.

    \b
    Examples:
      twinshard plan t5-small --tp 2 --sp
      twinshard plan t5-small --pp 4 --cut aligned --microbatches 8
      twinshard plan llama-2-70b --tp 8 --pp 4 --microbatches 16 --schedule gpipe
    """  # noqa: D301 - click reads the character
    config = ModelConfig.from_hf(Path(model)) if Path(model).exists() else named_model(model)
    layout = layout_of(chosen)
    made = plan(config, layout)
    console = Console(width=max(130, Console().width))
    console.print(
        f"{config.name} ({config.architecture}) on {layout.world_size} ranks: {layout.label}", highlight=False
    )
    console.print(_stages(made))
    console.print(_entries(made) if made.entries else "tp = 1: no module is changed")
    for shared in made.shared:
        holders = ", ".join(f"stage {stage} as {name}" for stage, name in shared.holders)
        console.print(f"{shared.name} is held by {holders}; its gradients are summed", highlight=False)
    console.print(
        f"\nschedule, a line a stage (backward drawn as long as forward)\n{grid(made.table)}", highlight=False
    )
    return 0


def _stages(made: Plan) -> Table:
    table = Table("stage", "blocks", "sends forward", box=None, pad_edge=False)
    for stage in made.stages:
        table.add_row(str(stage.index), _blocks(stage, made.config.num_encoder_blocks), ", ".join(stage.outputs) or "-")
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
