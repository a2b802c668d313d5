"""What does DeepSpeed need to run the cells of an experiment without us? `twinshard ds-config`, a file a cell.

A cell is written once, whatever engines the experiment names. The file holds batch sizes, accumulation, optimizer, ZeRO
stage and what AutoTP shards; stages and cut are arguments of `PipelineModule` and stand in the table. A cell that
DeepSpeed cannot run, or that one file cannot tell, is a row with the reason.
"""

import dataclasses
from collections import Counter
from pathlib import Path

import click

from launch.cell import Cell
from launch.experiment import load
from launch.sheets import Cell as Told
from launch.sheets import Format, Sheet, format_option, show
from parallel.engines.choice import NATIVE
from parallel.engines.deepspeed_config import write_ds_config
from parallel.engines.deepspeed_limits import unsupported
from parallel.plans import plan

COLUMNS = ("cell", "ranks", "num_stages", "first_blocks", "file", "status", "reason")
Row = dict[str, Told]


@click.command("ds-config")
@click.argument("file", metavar="EXPERIMENT", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("ds_configs"),
    show_default=True,
    help="Folder of the files; it is made when it is not there.",
)
@format_option
def ds_config_command(*, file: Path, out: Path, form: Format) -> int:
    """Write a ds_config.json for every cell of EXPERIMENT that DeepSpeed can run.

    The file is what the deepspeed engine of this project runs with, batch sizes included; the dtype is the module's
    own. With it, and any script that calls deepspeed.initialize, a cell runs under DeepSpeed's own launcher:

    \b
      deepspeed --num_gpus RANKS train.py --deepspeed --deepspeed_config FILE

    A cell with stages needs a PipelineModule besides, with num_stages and the first block of each as they are told. One
    with cp needs DistributedAttention around every core attention, shards of the sequences, and
    mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp after its initialize_sequence_parallel(cp). One with tp
    names the modules of this project's models in its patterns.

    \b
    Examples:
      twinshard ds-config launch/experiments/engines.toml
      twinshard ds-config mine.toml --out configs --format csv
    """  # noqa: D301 - click reads the character
    cells = {dataclasses.replace(cell, engine=NATIVE).name: cell for cell in load(file).cells if not cell.is_control}
    out.mkdir(parents=True, exist_ok=True)
    rows = [_written(name, cell, out) for name, cell in cells.items()]
    show(form, sheets=_sheets(rows), columns=COLUMNS, rows=rows, document={"ds_configs": rows})
    return 0


def _written(name: str, cell: Cell, folder: Path) -> Row:
    """Writes the file of a cell, and returns its row."""
    path = folder / f"{name}.json"
    row: Row = {"cell": name, "ranks": cell.world_size, "status": "unsupported"}
    reason = unsupported(cell.model, cell.layout)
    if reason is not None:
        return row | {"reason": reason}
    try:
        partitioning = plan(cell.model, cell.layout, cell.profile)
        write_ds_config(
            path,
            cell.layout,
            num_sequences=cell.data.sequences,
            optimizer=cell.settings.optimizer,
            learning_rate=cell.settings.learning_rate,
            entries=partitioning.entries,
        )
    except ValueError as error:
        return row | {"reason": str(error)}
    first = " ".join(str(stage.first) for stage in partitioning.stages)
    return row | {"num_stages": len(partitioning.stages), "first_blocks": first, "file": str(path), "status": "ok"}


def _sheets(rows: list[Row]) -> list[Sheet]:
    """What was written, then every reason once."""
    written = [
        [row["cell"], row["ranks"], row["num_stages"], row["first_blocks"], row["file"]]
        for row in rows
        if row["status"] == "ok"
    ]
    headings = ("cell", "ranks", "stages", "first blocks", "file")
    sheets = [Sheet(title="what DeepSpeed reads of each cell", headings=headings, rows=written)]
    reasons = Counter(row["reason"] for row in rows if row["status"] != "ok")
    if reasons:
        told = [[count, reason] for reason, count in reasons.items()]
        sheets.append(Sheet(title="not written", headings=("cells", "reason"), rows=told))
    return sheets
