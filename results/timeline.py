"""What does a step of a pipeline look like? Ranks over time, measured above simulated, and what each rank holds.

    measured    0 |F0|F1|F2|..|B0|F3|B1|...         colour: kind of action      shade: which chunk of the rank
                1 |..|F0|F1|B0|F2|B1|...            number: microbatch          grey: nobody's time
    simulated   0 ...
    bytes held  one line a rank

All rows share one axis of time. The colours are those of Okabe and Ito (2008), as in `results/plots.py`; numbers stand
where there is room for them. Files are SVG and PNG, and a trace for viewers (`results/perfetto.py`). Left out:
messages, which the trace has.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib import colors
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from parallel.schedule import Kind
from parallel.timeline import Span, Steps, Timeline
from results import perfetto
from results.files import replacing

COLOURS: dict[Kind, str] = {
    "forward": "#0072B2",
    "backward": "#D55E00",
    "backward_input": "#E69F00",
    "backward_weight": "#009E73",
}
NAMES: dict[Kind, str] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, input",
    "backward_weight": "backward, weights",
}
IDLE = "#E4E4E4"
LIGHTEST = 0.6
"""How much white the last chunk's colour has; the first has none."""

RESOLUTION = 150
WIDTH_INCHES = 13.0
LANE_INCHES = (0.09, 0.32)
"""Height of a rank: at least, at most."""
PANEL_INCHES = 6.0
"""Height that a panel's ranks share while they are many."""
POINTS_A_DIGIT = 4.3
MOST_VECTORS = 6000
"""Spans of a panel above which they are drawn as pixels."""


def write(
    timelines: Mapping[str, Timeline],
    held: Mapping[str, Sequence[Steps]],
    *,
    title: str,
    folder: Path,
    name: str,
    capacity_bytes: float | None = None,
) -> list[Path]:
    """Writes NAME.svg, NAME.png and NAME.trace.json.

    Args:
        timelines: by what they are called, `measured` and `simulated`; drawn in this order from the top.
        held: bytes of each rank over time, by the same names; those that lack them get no such panel.
        title: of the picture.
        folder: where to; it must exist.
        name: of the files.
        capacity_bytes: of a device, for a line across.
    """
    figure = draw(timelines, held, title=title, capacity_bytes=capacity_bytes)
    paths = []
    for suffix in ("svg", "png"):
        path = folder / f"{name}.{suffix}"
        # Without a date or random names, equal pictures are equal files.
        with replacing(path) as unfinished, mpl.rc_context({"svg.hashsalt": name}):
            metadata = {"Date": None} if suffix == "svg" else {"Software": None}
            figure.savefig(unfinished, format=suffix, dpi=RESOLUTION, metadata=metadata)
        paths.append(path)
    trace = folder / f"{name}.trace.json"
    perfetto.write(timelines, held, trace)
    return [*paths, trace]


def draw(
    timelines: Mapping[str, Timeline],
    held: Mapping[str, Sequence[Steps]],
    *,
    title: str,
    capacity_bytes: float | None = None,
) -> Figure:
    """The picture; arguments as for `write`. Raises ValueError when there is nothing to draw."""
    if not timelines:
        raise ValueError("no timeline to draw: give a measured or a simulated one")
    num_ranks = max(len(timeline.spans) for timeline in timelines.values())
    lane = min(LANE_INCHES[1], max(LANE_INCHES[0], PANEL_INCHES / num_ranks))
    shown = [label for label in timelines if held.get(label)]
    heights = [0.35 + lane * len(timeline.spans) for timeline in timelines.values()] + [1.9] * len(shown)
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.3), layout="constrained")
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    longest = max(timeline.makespan_seconds for timeline in timelines.values())
    scale, unit = _unit(longest)
    for axis, (label, timeline) in zip(axes, timelines.items(), strict=False):
        _lanes(axis, timeline, scale, lane_inches=lane, longest=longest)
        axis.set_title(_told(label, timeline, scale, unit), fontsize=9, loc="left")
    most = max((value for label in shown for steps in held[label] for _, value in steps), default=0.0)
    for axis, label in zip(axes[len(timelines) :], shown, strict=True):
        _bytes(axis, held[label], most, scale, longest, capacity_bytes)
        axis.set_title(
            f"{label}: bytes held by closed form, dark for the first rank, light for the last", fontsize=9, loc="left"
        )
    if shown:
        # One scale, so that heights can be compared.
        highest = max(axis.get_ylim()[1] for axis in axes[len(timelines) :])
        for axis in axes[len(timelines) :]:
            axis.set_ylim(0, highest)
    axes[-1].set_xlabel(f"time, {unit}", fontsize=9)
    axes[-1].set_xlim(0, longest * scale)
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    figure.legend(handles=_legend(timelines.values()), loc="outside lower left", ncols=8, frameon=False, fontsize=8)
    return figure


# ---- ranks over time ------------------------------------------------------------------------------------------------


def _lanes(axis: Axes, timeline: Timeline, scale: float, *, lane_inches: float, longest: float) -> None:
    chunks = _chunks(timeline)
    boxes: dict[str, list[list[tuple[float, float]]]] = defaultdict(list)
    for rank, row in enumerate(timeline.spans):
        axis.broken_barh([(0, timeline.makespan_seconds * scale)], (rank - 0.42, 0.84), color=IDLE, linewidth=0)
        for span in row:
            left, right = span.start_seconds * scale, span.end_seconds * scale
            corners = [(left, rank - 0.42), (right, rank - 0.42), (right, rank + 0.42), (left, rank + 0.42)]
            boxes[_colour(span, chunks)].append(corners)
    is_many = sum(map(len, timeline.spans)) > MOST_VECTORS
    for colour, polygons in boxes.items():
        edges = "none" if is_many else "white"
        drawn = PolyCollection(polygons, facecolors=colour, edgecolors=edges, linewidths=0.3, rasterized=is_many)
        axis.add_collection(drawn, autolim=False)
    _numbers(axis, timeline, scale, chunks, lane_inches=lane_inches, longest=longest)
    num_ranks = len(timeline.spans)
    axis.set_ylim(num_ranks - 0.5, -0.5)
    step = max(1, round(0.16 / lane_inches))
    axis.set_yticks(range(0, num_ranks, step))
    axis.set_ylabel("rank", fontsize=9)
    axis.tick_params(labelsize=8, length=2)
    axis.spines[["top", "right", "left"]].set_visible(False)
    idle = axis.twinx()
    idle.set_ylim(axis.get_ylim())
    shares = [f"{bubble:.0%} idle" for bubble in timeline.bubbles]
    idle.set_yticks(range(0, num_ranks, step), shares[::step], fontsize=7)
    idle.tick_params(length=0)
    idle.spines[["top", "right", "left", "bottom"]].set_visible(False)


def _numbers(
    axis: Axes, timeline: Timeline, scale: float, chunks: dict[int, float], *, lane_inches: float, longest: float
) -> None:
    """The number of the microbatch, where it fits into its span."""
    points_a_second = WIDTH_INCHES * 0.9 * 72 / longest if longest else 0.0
    size = min(7.5, lane_inches * 72 * 0.7)
    if size < 4.5:
        return
    for rank, row in enumerate(timeline.spans):
        for span in row:
            text = str(span.action.microbatch)
            room = (span.end_seconds - span.start_seconds) * points_a_second
            if room < POINTS_A_DIGIT * len(text) * size / 7.5 + 0.5:
                continue
            colour = "white" if _is_dark(_colour(span, chunks)) else "black"
            middle = (span.start_seconds + span.end_seconds) / 2 * scale
            axis.text(middle, rank, text, ha="center", va="center_baseline", fontsize=size, color=colour, clip_on=True)


def _chunks(timeline: Timeline) -> dict[int, float]:
    """How light a stage is drawn: the first chunk of its rank in full colour, the last one lightest."""
    lightness: dict[int, float] = {}
    for row in timeline.spans:
        stages = sorted({span.action.stage for span in row})
        for index, stage in enumerate(stages):
            lightness[stage] = LIGHTEST * index / max(1, len(stages) - 1)
    return lightness


def _colour(span: Span, chunks: dict[int, float]) -> str:
    light = chunks[span.action.stage]
    red, green, blue = (part + (1.0 - part) * light for part in colors.to_rgb(COLOURS[span.action.kind]))
    return colors.to_hex((red, green, blue))


def _is_dark(colour: str) -> bool:
    red, green, blue = colors.to_rgb(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.55


def _told(label: str, timeline: Timeline, scale: float, unit: str) -> str:
    return (
        f"{label}: {timeline.makespan_seconds * scale:.4g} {unit}, bubble {timeline.bubble:.1%}, "
        f"busiest rank over mean {timeline.imbalance:.3f}"
    )


def _legend(timelines: Iterable[Timeline]) -> list[Patch]:
    rows = [row for timeline in timelines for row in timeline.spans]
    kinds = {span.action.kind for row in rows for span in row}
    handles = [Patch(facecolor=colour, label=NAMES[kind]) for kind, colour in COLOURS.items() if kind in kinds]
    handles.append(Patch(facecolor=IDLE, label="idle"))
    if any(len({span.action.stage for span in row}) > 1 for row in rows):
        handles.append(Patch(facecolor="none", label="lighter: later chunk of a rank"))
    return handles


# ---- bytes over time ------------------------------------------------------------------------------------------------


def _bytes(
    axis: Axes, rows: Sequence[Steps], most: float, scale: float, longest: float, capacity_bytes: float | None
) -> None:
    divisor, unit = next((size, name) for size, name in _BYTE_UNITS if most >= size or size == 1)
    shades = mpl.colormaps["viridis"]
    for rank, steps in enumerate(rows):
        times = [seconds * scale for seconds, _ in steps] + [longest * scale]
        values = [value / divisor for _, value in steps]
        colour = shades(rank / max(1, len(rows) - 1) * 0.9)
        axis.step(times, [*values, values[-1]], where="post", color=colour, linewidth=1.1)
    if capacity_bytes is not None:
        axis.axhline(capacity_bytes / divisor, color="black", linestyle="--", linewidth=0.9)
    axis.set_ylim(bottom=0)
    axis.set_ylabel(unit, fontsize=9)
    axis.tick_params(labelsize=8, length=2)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


def _unit(seconds: float) -> tuple[float, str]:
    """What seconds are multiplied with to be read easily."""
    for limit, scale, unit in ((1.0, 1.0, "seconds"), (1e-3, 1e3, "milliseconds")):
        if seconds >= limit:
            return scale, unit
    return 1e6, "microseconds"
