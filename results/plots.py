"""How do the tables look? Pictures of stage balance, bytes by part, twins over layouts, and padding.

One picture a question and family of twins, as PNG. The colours are those of Okabe and Ito (2008), told apart by
colour-blind readers; bars of one architecture have one colour in every picture, and hatching where colours alone would
have to tell. Left out: pictures of what was not measured; a function draws nothing and returns None where there are no
rows.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from results import penalty_sections
from results.files import replacing
from results.runs import positions_row
from results.sites import PARTS
from results.tables import Tables
from results.twins import Line, families, interval_of, measured, select

ARCHITECTURES = ("decoder_only", "encoder_only", "encoder_decoder")
COLOURS = {"decoder_only": "#0072B2", "encoder_only": "#009E73", "encoder_decoder": "#D55E00"}
PART_COLOURS = dict(
    zip(
        PARTS,
        (
            "#56B4E9",  # embedding
            "#0072B2",  # self-attention
            "#D55E00",  # cross-attention
            "#009E73",  # ffn
            "#E69F00",  # memory
            "#F0E442",  # relative bias
            "#BBBBBB",  # norm
            "#CC79A7",  # head
            "#882255",  # loss
            "#000000",  # edge
            "#777777",  # gradients
            "#DDDDDD",  # other
        ),
        strict=True,
    )
)
STAGE_QUANTITIES = {
    "forward_flops": ("forward FLOPs", "#0072B2", ""),
    "busy_seconds": ("busy seconds", "#E69F00", "//"),
    "parameters": ("parameters", "#009E73", ".."),
    "peak_saved_bytes": ("peak saved bytes", "#CC79A7", "xx"),
}
"""Column, name, colour and hatching."""

RESOLUTION = 120
INCHES_A_BAR = 0.22


def draw_all(tables: Tables, folder: Path) -> dict[str, dict[str, Path]]:
    """Draw every picture into a folder; the files by kind of picture and family, none where there was nothing."""
    told = families(tables.runs)
    drawn: dict[str, dict[str, Path]] = {kind: {} for kind in ("twins", "stages", "bytes", "padding", "penalty")}
    for name, lines in told.items():
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
        figures = {
            "twins": twins_over_layouts(name, lines),
            "stages": stage_balance(name, lines, tables.stages),
            "bytes": bytes_by_part(name, lines, tables.communication),
        }
        for kind, figure in figures.items():
            if figure is not None:
                drawn[kind][name] = _save(figure, folder / f"{kind}-{slug}.png")
    figure = padding(tables.runs)
    if figure is not None:
        drawn["padding"][""] = _save(figure, folder / "padding.png")
    for costs in penalty_sections.DRAWN:
        figure = penalty_sections.picture(tables.penalty, costs)
        if figure is not None:
            drawn["penalty"][costs] = _save(figure, folder / f"penalty-{costs}.png")
    return drawn


def twins_over_layouts(name: str, lines: Sequence[Line]) -> Figure | None:
    """Step time with its interval, bytes sent and collectives of a step, a group of bars a layout."""
    if not lines:
        return None
    present = [side for side in ARCHITECTURES if any(side in line.runs for line in lines)]
    height = 1.3 + INCHES_A_BAR * (len(present) + 1) * len(lines)
    figure = Figure(figsize=(11, height), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    columns = (
        ("step_seconds", f"step time, seconds\nmedian and 95 % interval, {_where(lines)}"),
        ("sent_bytes", "bytes sent in a step\nall ranks"),
        ("num_collectives", "collectives in a step\nall ranks"),
    )
    for axis, (column, title) in zip(axes, columns, strict=True):
        for offset, side in enumerate(present):
            at = [index + (offset - (len(present) - 1) / 2) * 0.8 / len(present) for index in range(len(lines))]
            values, errors = _values([line.runs.get(side) for line in lines], column)
            axis.barh(at, values, 0.76 / len(present), color=COLOURS[side], label=_words(side))
            axis.errorbar(values, at, xerr=errors, fmt="none", ecolor="black", elinewidth=1, capsize=2)
        _grid(axis, title)
    axes[0].set_yticks(range(len(lines)), [line.label for line in lines])
    axes[0].invert_yaxis()
    figure.suptitle(f"Twins side by side: {name}", x=0.01, ha="left")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(present), frameon=False)
    return figure


def stage_balance(name: str, lines: Sequence[Line], stages: pd.DataFrame) -> Figure | None:
    """Every stage against the mean of its run: a row an architecture and cut, a column a number of stages."""
    panels: dict[tuple[str, str], dict[int, pd.Series[Any]]] = {}
    for side in ARCHITECTURES:
        for line in lines:
            run = line.runs.get(side)
            if run is not None and run["pp"] > 1:
                panels.setdefault((side, str(run["cut"])), {}).setdefault(int(run["pp"]), run)
    counts = sorted({pp for by_count in panels.values() for pp in by_count})
    if not counts:
        return None
    figure = Figure(figsize=(max(7.5, 2 + 3.2 * len(counts)), 0.9 + 1.9 * len(panels)), layout="constrained")
    grid = figure.subplots(len(panels), len(counts), squeeze=False, sharey=True)
    for row, ((side, cut), by_count) in zip(grid, panels.items(), strict=True):
        for axis, pp in zip(row, counts, strict=True):
            if pp in by_count:
                _stage_bars(axis, select(stages, by_count[pp]))
                axis.set_title(f"{_words(side)}, {cut} cut, {pp} stages", fontsize=9)
            else:
                axis.set_axis_off()
    for row in grid:
        row[0].set_ylabel("stage / mean", fontsize=9)
    handles = {
        label: handle for axis in grid.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.suptitle(f"Stage balance: {name}", x=0.01, ha="left")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def bytes_by_part(name: str, lines: Sequence[Line], communication: pd.DataFrame) -> Figure | None:
    """Bytes that all ranks send in a step, by the part of the model that they serve."""
    bars = []
    for line in lines:
        for side in ARCHITECTURES:
            if side in line.runs:
                events = select(communication, line.runs[side])
                if events["wire_bytes"].sum():
                    bars.append((f"{line.label}\n{_words(side)}", events.groupby("part")["wire_bytes"].sum()))
    if not bars:
        return None
    figure = Figure(figsize=(11, 1.5 + 2 * INCHES_A_BAR * len(bars)), layout="constrained")
    axis = figure.subplots()
    left = np.zeros(len(bars))
    for part in PARTS:
        widths = np.array([float(sums.get(part, 0)) for _, sums in bars])
        if widths.any():
            axis.barh(
                range(len(bars)),
                widths,
                0.75,
                left=left,
                color=PART_COLOURS[part],
                edgecolor="white",
                label=_words(part),
            )
            left += widths
    axis.set_yticks(range(len(bars)), [label for label, _ in bars], fontsize=8)
    axis.invert_yaxis()
    _grid(axis, "bytes sent in a step, all ranks")
    figure.suptitle(f"Bytes by part of the model: {name}", x=0.01, ha="left")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def padding(runs: pd.DataFrame) -> Figure | None:
    """What the positions of a step hold: tokens, padding of the batch, padding for sharding."""
    batches: dict[str, tuple[int, int, int]] = {}
    for _, run in measured(runs).iterrows():
        if not pd.isna(run["num_sequences"]):
            valid, batch, sharding = positions_row(run)
            lengths = f"{run['source_length']} + {run['target_length']} positions"
            label = f"{_words(run['architecture'])}, {run['data_source']}\n{lengths}"
            label += f", tp{run['tp']} sp" if sharding else ""
            batches.setdefault(label, (valid, batch, sharding))
    if not batches:
        return None
    figure = Figure(figsize=(9, 1.2 + 2 * INCHES_A_BAR * len(batches)), layout="constrained")
    axis = figure.subplots()
    left = np.zeros(len(batches))
    totals = np.array([sum(parts) for parts in batches.values()])
    kinds = (
        ("tokens", "#0072B2", ""),
        ("padding of the batch", "#E69F00", "//"),
        ("padding for sharding", "#D55E00", "xx"),
    )
    for index, (label, colour, hatch) in enumerate(kinds):
        widths = np.array([parts[index] for parts in batches.values()]) / totals
        axis.barh(
            range(len(batches)), widths, 0.7, left=left, color=colour, hatch=hatch, edgecolor="white", label=label
        )
        left += widths
    axis.set_yticks(range(len(batches)), list(batches), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1)
    _grid(axis, "share of the positions computed on in a step")
    axis.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
    figure.suptitle("Padding", x=0.01, ha="left")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    return figure


def _where(lines: Sequence[Line]) -> str:
    """What the times were taken on, so that nobody takes gloo for NCCL."""
    return ", ".join(sorted({f"{run['backend']} on {run['device']}" for line in lines for run in line.runs.values()}))


def _values(runs: Sequence["pd.Series[Any] | None"], column: str) -> tuple[list[float], list[list[float]] | None]:
    """Bar lengths (0 where there is no run) and, for times, how far the bounds lie from them."""
    if column != "step_seconds":
        return [0.0 if run is None or pd.isna(run[column]) else float(run[column]) for run in runs], None
    values, below, above = [], [], []
    for run in runs:
        interval = None if run is None else interval_of(run, column)
        value = 0.0 if interval is None or np.isnan(interval.value) else interval.value
        values.append(value)
        below.append(value - interval.low if interval is not None and interval.has_bounds else 0.0)
        above.append(interval.high - value if interval is not None and interval.has_bounds else 0.0)
    return values, [below, above]


def _stage_bars(axis: Axes, stages: pd.DataFrame) -> None:
    busy = stages["forward_busy_seconds_median"] + stages["backward_busy_seconds_median"]
    told = stages.assign(busy_seconds=busy).sort_values("stage")
    shown = [name for name in STAGE_QUANTITIES if told[name].notna().all() and told[name].sum() > 0]
    for offset, name in enumerate(shown):
        label, colour, hatch = STAGE_QUANTITIES[name]
        values = told[name].astype(float) / told[name].astype(float).mean()
        at = told["stage"] + (offset - (len(shown) - 1) / 2) * 0.8 / len(shown)
        axis.bar(at, values, 0.76 / len(shown), color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
    axis.axhline(1, color="black", linewidth=0.8)
    names = [
        f"{stage}\n" + " ".join(f"{count}{mark}" for count, mark in ((encoder, "E"), (decoder, "D")) if count)
        for stage, encoder, decoder in zip(
            told["stage"], told["num_encoder_blocks"], told["num_decoder_blocks"], strict=True
        )
    ]
    axis.set_xticks(told["stage"], names, fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _grid(axis: Axes, title: str) -> None:
    axis.set_xlabel(title, fontsize=9)
    axis.xaxis.set_major_formatter(FuncFormatter(_short))
    axis.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.margins(y=0.02)
    axis.set_xlim(left=0)


def _short(value: float, _: int) -> str:
    """A number on an axis: 1.5M, 20k, 0.05."""
    for limit, mark in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{mark}"
    return f"{value:.3g}"


def _words(name: str) -> str:
    return {"decoder_only": "decoder-only", "encoder_only": "encoder-only", "encoder_decoder": "encoder-decoder"}.get(
        name, name.replace("_", "-")
    )


def _save(figure: Figure, path: Path) -> Path:
    with replacing(path) as unfinished:
        figure.savefig(unfinished, dpi=RESOLUTION, metadata={"Software": None})
    return path
