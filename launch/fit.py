"""Which layouts of a model fit, and why not on fewer devices? `twinshard fit`, without running anything."""

import dataclasses
import time
from typing import Any, get_args

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from launch.sheets import Cell, Format, Sheet, format_option, show
from launch.step_options import Step, counted_model, device_bytes_of, step_options
from models.config import ModelConfig
from models.costs import parameter_counts
from parallel.fit import Family, Fits, fit
from parallel.layouts import PLAIN_SCHEDULES, AttentionKernel, Layout, MemoryGather
from parallel.loads import Load

PATIENCE_SECONDS = 2.0
"""A search that takes longer shows a bar."""
COLUMNS = (
    "model",
    "devices",
    "tp",
    "sp",
    "pp",
    "dp",
    "max_dp",
    "zero",
    "recompute",
    "fullest_pp",
    "fullest_tp",
    "parameter_bytes",
    "master_weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "peak_activation_bytes",
    "total_bytes",
)
"""Of the table: a family of layouts a row."""


@click.command("fit")
@click.argument("model")
@click.option("--device-bytes", type=float, required=True, callback=device_bytes_of, help="Bytes of a device: 80e9.")
@click.option("--devices", type=int, required=True, help="Most devices.")
@click.option("--devices-per-node", default=8, show_default=True, help="Largest tp.")
@click.option("--microbatches", default=1, show_default=True, help="Microbatches of a step.")
@click.option("--schedule", type=click.Choice(PLAIN_SCHEDULES), default="1f1b", show_default=True)
@click.option("--cut", type=click.Choice(["even", "aligned"]), default="even", show_default=True)
@click.option("--memory-gather", type=click.Choice(get_args(MemoryGather)), default="per_stage", show_default=True)
@click.option("--attention", type=click.Choice(get_args(AttentionKernel)), default="fused", show_default=True)
@step_options
@click.option("--limit", default=20, show_default=True, help="Rows of table and markdown; 0 for all.")
@format_option
def fit_command(
    *,
    model: str,
    device_bytes: int,
    devices: int,
    devices_per_node: int,
    limit: int,
    form: Format,
    **chosen: Any,
) -> int:
    """List every layout of MODEL whose ranks fit on a device, on fewest devices first, and why fewer are not enough.

    MODEL is a name or a config.json of Hugging Face. Layouts that differ in dp alone are one row: from the smallest dp
    that fits to the largest. What ZeRO 3 gathers while it computes is not counted. The exit code is 1 if nothing fits.

    \b
    Examples:
      twinshard fit llama-2-70b --device-bytes 80e9 --devices 1024 --microbatches 8
      twinshard fit t5-11b --device-bytes 40e9 --devices 64 --source-length 512 --target-length 128
    """  # noqa: D301 - click reads the character
    step = Step.of(chosen)
    config, notes = counted_model(model)
    base = Layout(**chosen)
    bar = _Bar()
    with bar.progress:
        found = fit(
            config,
            step.shape(config, base.microbatches),
            base,
            device_bytes=device_bytes,
            num_devices=devices,
            devices_per_node=devices_per_node,
            optimizer=step.optimizer,
            master_weights=step.master_weights,
            observe=bar.observe,
        )
    why = reason(found, device_bytes, devices)
    rows = [_row(config, family) for family in found.families]
    show(
        form,
        sheets=_sheets(config, found, [*notes, *step.unread(config), why], limit),
        columns=COLUMNS,
        rows=rows,
        document={
            "model": config.name,
            "architecture": config.architecture,
            "notes": [*notes, *step.unread(config)],
            "parameters": {"total": parameter_counts(config).total},
            "device_bytes": device_bytes,
            "devices": devices,
            "devices_per_node": devices_per_node,
            "step": dataclasses.asdict(step) | {"microbatches": base.microbatches},
            "num_layouts": found.num_layouts,
            "num_fitting": found.num_fitting,
            "layouts": [
                row | {"layout": family.layout.to_dict()} for row, family in zip(rows, found.families, strict=True)
            ],
            "smallest_by_axes": {_axes(axes): _row(config, family) for axes, family in found.by_axes().items()},
            "closest_on_fewer_devices": _refused(found.closest, device_bytes),
            "reason": why,
        },
    )
    return 0 if found.families else 1


def reason(found: Fits, device_bytes: int, devices: int) -> str:
    """Why no layout on fewer devices than the first fits: the closest one's fullest rank, and its bytes."""
    closest = found.closest
    if closest is None:
        return "one device is enough"
    fewer = (
        f"on fewer than {found.families[0].num_devices} devices" if found.families else f"on up to {devices} devices"
    )
    states = closest.states
    parts = (
        ("parameters", states.parameters),
        ("master weights", states.master_weights),
        ("gradients", states.gradients),
        ("optimizer", states.optimizer),
        ("activations", closest.peak_saved_bytes),
    )
    told = " + ".join(f"{name} {count:,}" for name, count in parts if count)
    needs = f"{closest.total_bytes:,} bytes ({told}), {closest.total_bytes - device_bytes:,} too many"
    return (
        f"{fewer} nothing fits: closest is {closest.layout.label} on {closest.layout.world_size}, where rank "
        f"{closest.coordinate} needs {needs}"
    )


class _Bar:
    """A bar on the error stream, once a search has taken a while."""

    def __init__(self) -> None:
        console = Console(stderr=True, markup=False)
        self.progress = Progress(
            TextColumn("depths decided"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self.progress.add_task("depths", visible=False)
        self._start = time.monotonic()

    def observe(self, done: int, total: int) -> None:
        is_long = time.monotonic() - self._start > PATIENCE_SECONDS
        self.progress.update(self._task, completed=done, total=total, visible=is_long)


def _axes(axes: tuple[str, ...]) -> str:
    return "+".join(axes) or "none"


def _row(config: ModelConfig, family: Family) -> dict[str, Cell]:
    layout, fullest = family.layout, family.fullest
    return {
        "model": config.name,
        "devices": family.num_devices,
        "tp": layout.tp,
        "sp": layout.sp,
        "pp": layout.pp,
        "dp": layout.dp,
        "max_dp": family.max_dp,
        "zero": layout.zero,
        "recompute": layout.recompute,
        "fullest_pp": fullest.coordinate.pp,
        "fullest_tp": fullest.coordinate.tp,
        **_bytes(fullest),
    }


def _bytes(load: Load) -> dict[str, Cell]:
    return {
        "parameter_bytes": load.states.parameters,
        "master_weight_bytes": load.states.master_weights,
        "gradient_bytes": load.states.gradients,
        "optimizer_bytes": load.states.optimizer,
        "peak_activation_bytes": load.peak_saved_bytes,
        "total_bytes": load.total_bytes,
    }


def _refused(closest: Load | None, device_bytes: int) -> dict[str, Any] | None:
    if closest is None:
        return None
    return {
        "devices": closest.layout.world_size,
        "layout": closest.layout.to_dict(),
        "coordinates": dataclasses.asdict(closest.coordinate),
        **_bytes(closest),
        "bytes_over": closest.total_bytes - device_bytes,
    }


def _sheets(config: ModelConfig, found: Fits, told: list[str], limit: int) -> list[Sheet]:
    shown = found.families[: limit or None]
    headings = (
        *("devices", "tp", "sp", "pp", "dp", "up to dp", "zero", "recompute"),
        *("fullest rank", "state bytes", "peak activation bytes", "total bytes"),
    )

    def cells(family: Family) -> list[Cell]:
        layout, fullest = family.layout, family.fullest
        rank = f"pp={fullest.coordinate.pp} tp={fullest.coordinate.tp}"
        sizes: list[Cell] = [fullest.states.total, fullest.peak_saved_bytes, fullest.total_bytes]
        degrees: list[Cell] = [
            family.num_devices,
            layout.tp,
            layout.sp,
            layout.pp,
            layout.dp,
            family.max_dp,
            layout.zero,
        ]
        return [*degrees, layout.recompute, rank, *sizes]

    decided = f"{found.num_fitting:,} of {found.num_layouts:,} layouts fit"
    sheets = [Sheet(title=f"{config.name}: {decided}", headings=("",), rows=[[line] for line in told])]
    if found.families:
        rest = len(found.families) - len(shown)
        title = "layouts by devices" + (f" (and {rest:,} more rows: --limit 0, csv or json)" if rest else "")
        sheets.append(Sheet(title=title, headings=headings, rows=[cells(family) for family in shown]))
        smallest: list[list[Cell]] = [[_axes(axes), *cells(family)] for axes, family in found.by_axes().items()]
        sheets.append(Sheet(title="smallest by axes that share states", headings=("axes", *headings), rows=smallest))
    return sheets
