"""How long would the steps of an experiment take on a machine nobody here has? `twinshard simulate`, running nothing.

Every cell of the experiment is predicted (`parallel/step_time.py`) with the bytes of its fullest rank
(`parallel/predict.py`). A cell that this machine's engines cannot run is simulated all the same; one that its model or
batch forbids is a row with the reason.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, get_args, get_type_hints

import click

import launch.cell
from launch.bars import counting_bar
from launch.experiment import load
from launch.machine_files import load_machine, machine_names
from launch.settings import Settings
from launch.sheets import Cell, Format, Sheet, csv_text, format_option, show
from launch.step_options import DTYPE_BYTES
from parallel.figures import StepShape
from parallel.machine import Machine
from parallel.predict import predict
from parallel.step_time import StepTime, held_bytes, step_time
from parallel.timeline import Steps, Timeline

FILE_NAME = "simulated.csv"
DTYPES = get_args(get_type_hints(Settings)["dtype"])


class Drawing(Protocol):
    """Who writes pictures of timelines (`results/timeline.py`)."""

    def __call__(
        self,
        timelines: Mapping[str, Timeline],
        held: Mapping[str, Sequence[Steps]],
        *,
        title: str,
        folder: Path,
        name: str,
        capacity_bytes: float | None = None,
    ) -> list[Path]: ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulated:
    """One cell on a machine.

    Attributes:
        shape: of a data-parallel rank's step; None where there is no step.
        time: of it; None where there is no step.
        peak_bytes: of the fullest rank.
        refusal: why there is no step.
    """

    cell: launch.cell.Cell
    machine: Machine
    shape: StepShape | None = None
    time: StepTime | None = None
    peak_bytes: int | None = None
    refusal: str = ""

    def row(self) -> dict[str, Cell]:
        """All that is told of the cell; what is not known is None."""
        cell, layout, time = self.cell, self.cell.layout, self.time
        told: dict[str, Cell] = {
            "cell": cell.name,
            "model": cell.model.name,
            "architecture": cell.model.architecture,
            "data": cell.data_name,
            "machine": self.machine.name,
            "num_ranks": layout.world_size,
            **{key: layout.to_dict()[key] for key in _LAYOUT},
            "cut": layout.cut if isinstance(layout.cut, str) else ",".join(map(str, layout.cut)),
            "status": "unsupported" if time is None else "ok",
            "reason": self.refusal,
        }
        if time is None or self.peak_bytes is None:
            return dict.fromkeys(COLUMNS) | told
        timeline = time.timeline
        return told | {
            "step_seconds": time.step_seconds,
            "pipeline_seconds": timeline.makespan_seconds,
            "gradient_seconds": time.gradient_seconds,
            "update_seconds": time.update_seconds,
            "bubble": timeline.bubble,
            "imbalance": timeline.imbalance,
            "peak_bytes": self.peak_bytes,
            "capacity_bytes": int(self.machine.device.capacity_bytes),
            "fits": self.peak_bytes <= self.machine.device.capacity_bytes,
            "model_flops": time.model_flops,
            "model_flops_utilisation": time.model_flops_utilisation,
        }


_LAYOUT = (
    *("tp", "sp", "pp", "dp", "zero", "gradient_bucket_bytes", "microbatches", "schedule", "cut", "chunks"),
    *("placement", "transport", "memory_gather", "saved_input", "vocabulary", "recompute"),
)
COLUMNS = (
    *("cell", "model", "architecture", "data", "machine", "num_ranks", *_LAYOUT, "status", "reason"),
    *("step_seconds", "pipeline_seconds", "gradient_seconds", "update_seconds", "bubble", "imbalance"),
    *("peak_bytes", "capacity_bytes", "fits", "model_flops", "model_flops_utilisation"),
)
"""Of the CSV: a cell a row."""


def simulated(cell: launch.cell.Cell, machine: Machine, dtype: str) -> Simulated:
    """A cell's step on a machine, or why it has none."""
    layout, config = cell.layout, cell.model
    source_length, target_length = cell.data.stream_lengths(config)
    try:
        layout.check_sequences(cell.data.sequences)
        cell.data.check_model(config)
        shape = StepShape(
            num_sequences=cell.data.sequences // layout.dp,
            source_length=source_length,
            target_length=target_length,
            dtype_bytes=DTYPE_BYTES[dtype],
        )
        time = step_time(machine, config, layout, shape, optimizer=cell.settings.optimizer)
        ranks = predict(time.plan, shape, optimizer=cell.settings.optimizer)
    except ValueError as error:
        return Simulated(cell=cell, machine=machine, refusal=str(error))
    peak_bytes = max(rank.peak_bytes for rank in ranks)
    return Simulated(cell=cell, machine=machine, shape=shape, time=time, peak_bytes=peak_bytes)


@click.command("simulate")
@click.argument("file", metavar="EXPERIMENT", type=click.Path(path_type=Path))
@click.option("--machine", required=True, help=f"{', '.join(machine_names())}, or a .toml file of that form.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Instead of the experiment's.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help=f"Folder for {FILE_NAME} and pictures.")
@click.option("--timeline", "pictured", metavar="CELL", multiple=True, help="Draw this cell into the folder.")
@format_option
@click.pass_obj
def simulate_command(
    lent: Callable[[str], Drawing],
    *,
    file: Path,
    machine: str,
    dtype: str | None,
    out: Path | None,
    pictured: tuple[str, ...],
    form: Format,
) -> int:
    """Predict step time, bubble and bytes of every cell of EXPERIMENT on a machine, without running anything.

    Machines are nodes of equal devices: bytes, peak FLOPs and what is achieved of them, links within and between nodes.
    Ranks fill nodes in order, tp innermost. Cells may have thousands of ranks. Starts of kernels are not counted, so
    that small models look too fast. With --timeline a cell is drawn as SVG and PNG, ranks and bytes over time, and
    written as a trace that ui.perfetto.dev opens.

    \b
    Examples:
      twinshard simulate launch/experiments/articles.toml --machine h100 --dtype bfloat16
      twinshard simulate clusters.toml --machine my_cluster.toml --out simulated
      twinshard simulate launch/experiments/quick.toml --machine a100 --out simulated \\
          --timeline pair.text.tp1-pp2_aligned-dp1-m4-1f1b-per_stage
    """  # noqa: D301 - click reads the character
    known = load_machine(machine)
    if pictured and out is None:
        raise ValueError(f"--timeline {pictured[0]} needs a folder for its pictures: give --out FOLDER")
    study = load(file)
    # A control repeats its cell: it would be the same numbers.
    cells = [cell for cell in study.cells if not (cell.is_control or cell.engine.compiled)]
    for name in pictured:
        _check_cell(name, [cell.name for cell in cells])
    found = _simulate(cells, known, dtype or study.settings.dtype)
    rows = [one.row() for one in found]
    notes = []
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        table = out / FILE_NAME
        table.write_text(csv_text(COLUMNS, rows), encoding="utf-8", newline="")
        notes.append(f"written to {table}")
        chosen = [one for one in found if one.cell.name in pictured]
        notes += [f"drawn: {path}" for one in chosen for path in _draw(one, out, lent("timelines"))]
    show(
        form,
        sheets=_sheets(study.name, known, rows, notes),
        columns=COLUMNS,
        rows=rows,
        document={"experiment": study.name, "machine": dataclasses.asdict(known), "cells": rows, "notes": notes},
    )
    return 0


def _check_cell(name: str, names: Sequence[str]) -> None:
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
        raise ValueError(f"--timeline {name!r} is no cell; the nearest is {near[0]!r}")


def _simulate(cells: Sequence[launch.cell.Cell], machine: Machine, dtype: str) -> list[Simulated]:
    """All cells, with a bar on the error stream."""
    with counting_bar("cells") as bar:
        return [simulated(cell, machine, dtype) for cell in bar.track(cells, description="simulating")]


def _draw(one: Simulated, folder: Path, drawing: Drawing) -> list[Path]:
    if one.time is None or one.shape is None:
        raise ValueError(f"--timeline {one.cell.name}: there is nothing to draw: {one.refusal}")
    timeline = one.time.timeline
    held = held_bytes(one.time.plan, one.shape, timeline, optimizer=one.cell.settings.optimizer)
    return drawing(
        {"simulated": timeline},
        {"simulated": held},
        title=f"{one.cell.name} on {one.machine.name}",
        folder=folder,
        name=re.sub(r"[^A-Za-z0-9._-]+", "-", one.cell.name),
        capacity_bytes=one.machine.device.capacity_bytes,
    )


def _sheets(name: str, machine: Machine, rows: Sequence[dict[str, Cell]], notes: Sequence[str]) -> list[Sheet]:
    device = machine.device
    told = [
        f"{machine.name}, {machine.devices_per_node} a node",
        f"{device.flops_efficiency:.0%} of peak FLOPs: {device.flops_efficiency_reason}",
        *notes,
    ]
    columns = ("num_ranks", "step_seconds", "bubble", "imbalance", "peak_bytes", "fits", "model_flops_utilisation")
    good = [row for row in rows if row["status"] == "ok"]
    sheets = [
        Sheet(
            title=f"{name}: {len(good)} of {len(rows)} cells simulated", headings=("",), rows=[[line] for line in told]
        )
    ]
    if good:
        headings = ("cell", *(column.replace("_", " ") for column in columns))
        cells = [[row["cell"], *(row[column] for column in columns)] for row in good]
        sheets.append(Sheet(title="steps", headings=headings, rows=cells))
    if len(good) < len(rows):
        refused = [[row["cell"], row["reason"]] for row in rows if row["status"] != "ok"]
        sheets.append(Sheet(title="not simulated", headings=("cell", "reason"), rows=refused))
    return sheets
