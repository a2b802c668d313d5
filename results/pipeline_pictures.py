"""Which pipelines are drawn, measured above simulated, and where do the pictures go?

    <folder>/timeline-<name>.svg, .png     ranks over time and bytes held       .trace.json    for ui.perfetto.dev

Drawn are the cells with the median and the largest error of every number of ranks, and those that are asked for. Both
timelines are in wall time: where ranks shared cores, actions lasted longer than they were busy in both. Left out: how
it is drawn (`results/timeline.py`).
"""

import difflib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from results import timeline
from results.measured_steps import MeasuredStep
from results.pipelines import telling
from results.schema import Record
from results.twins import cell_of


def draw(
    records: Iterable[Record], pipelines: pd.DataFrame, folder: Path, named: Sequence[str] = ()
) -> dict[str, Path]:
    """Writes pictures and traces; the PNG files by caption.

    Args:
        records: of the study.
        pipelines: its table.
        folder: where to; it is made.
        named: cells, as `cell` or `experiment/cell`, that are drawn besides.

    Raises:
        ValueError: a named cell that is no pipeline with spans.
    """
    steps = {(entry.provenance.hostname, entry.experiment, entry.cell): entry for entry in records}
    chosen = telling(pipelines) if len(pipelines) else {}
    for name in named:
        chosen[f"cell {name}"] = _named(name, pipelines)
    drawn: dict[str, Path] = {}
    for caption, row in chosen.items():
        step = MeasuredStep(steps[row["machine"], row["experiment"], row["cell"]])
        folder.mkdir(parents=True, exist_ok=True)
        told = {"measured": step.measured, "simulated": step.simulated}
        note = f"step {step.record.typical_step + 1} of {step.num_steps}, of median length"
        if row["oversubscribed"]:
            note += f"; {step.layout.world_size} ranks on {step.record.provenance.num_cores} cores"
        _, picture, _ = timeline.write(
            told,
            {label: step.held(one) for label, one in told.items()},
            title=f"{row['cell']}\n{note}",
            folder=folder,
            name=f"timeline-{re.sub(r'[^A-Za-z0-9._]+', '-', caption).strip('-')}",
        )
        drawn[f"{caption}: {cell_of(row)}"] = picture
    return drawn


def _named(name: str, pipelines: pd.DataFrame) -> "pd.Series[Any]":
    rows = [row for _, row in pipelines.iterrows()]
    for row in rows:
        if name in (row["cell"], cell_of(row)):
            return row
    near = difflib.get_close_matches(name, [str(row["cell"]) for row in rows], n=1, cutoff=0.0)
    hint = f"the nearest is {near[0]!r}" if near else "no record tells the spans of one"
    raise ValueError(f"--timeline {name!r} is no measured pipeline; {hint}")
