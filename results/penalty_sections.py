"""How are simulated pipelines of twins shown: a picture a kind of costs, and a section of the report.

The picture has one panel a number of ranks and one line a scheme: makespan over the ideal against the ratio of lengths.
Blue is decoder-only, orange an encoder-decoder as others run it, green as it can be run; dashed is cut between
sublayers, which no engine does.
"""

from collections.abc import Iterable, Iterator

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from results import markdown
from results.claims.schemes import POINT, against, best

DRAWN = ("flops", "measured")
"""Kinds of costs that have a picture."""

_LINES: dict[tuple[str, str], tuple[str, str]] = {
    ("twin", "1f1b costed"): ("#56B4E9", "o"),
    ("twin", "list"): ("#0072B2", "o"),
    ("others", "1f1b even"): ("#D55E00", "s"),
    ("others", "1f1b aligned"): ("#E69F00", "s"),
    ("others", "interleaved x2 folded"): ("#CC79A7", "s"),
    ("ours", "1f1b costed"): ("#66CCAA", "^"),
    ("ours", "list"): ("#009E73", "^"),
}
_WHOSE = {"twin": "decoder-only", "others": "encoder-decoder", "ours": "encoder-decoder"}


def picture(penalty: pd.DataFrame, costs: str) -> Figure | None:
    """Makespan over ideal against source over target length; None where there is nothing of these costs."""
    rows = penalty[penalty["costs"] == costs]
    ranks = sorted(set(rows["pp"]))
    if not ranks:
        return None
    figure = Figure(figsize=(3.3 * len(ranks), 4.2), layout="constrained")
    panels = figure.subplots(1, len(ranks), squeeze=False, sharey=True)[0]
    for axis, pp in zip(panels, ranks, strict=True):
        _panel(axis, rows[rows["pp"] == pp])
        axis.set_title(f"{pp} ranks", fontsize=9)
    panels[0].set_ylabel("makespan over ideal", fontsize=9)
    handles = {
        label: handle for axis in panels for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.suptitle(f"What a pipeline loses, simulated with costs: {costs}", x=0.01, ha="left")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _panel(axis: Axes, rows: pd.DataFrame) -> None:
    for (who, scheme), (colour, marker) in _LINES.items():
        for grain, line in (("block", "-"), ("sublayer", "--")):
            told = rows[(rows["who"] == who) & (rows["scheme"] == scheme) & (rows["grain"] == grain)]
            told = told.sort_values("length_ratio")
            if len(told):
                label = f"{_WHOSE[who]}, {scheme}{', cut between sublayers' if grain == 'sublayer' else ''}"
                axis.plot(
                    told["length_ratio"],
                    told["makespan_over_ideal"],
                    line,
                    color=colour,
                    marker=marker,
                    markersize=4,
                    label=label,
                )
    ratios = sorted(set(rows["length_ratio"]))
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_locator(FixedLocator(ratios))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda ratio, _: f"{ratio:g}" if ratio >= 1 else f"1/{1 / ratio:g}"))
    axis.set_xlabel("source over target length", fontsize=9)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def section(penalty: pd.DataFrame, pictures: Iterable[str]) -> Iterator[str]:
    """What encoder-decoders take against their twins, at every number of ranks."""
    yield "## Pipelines of twins, simulated"
    yield (
        "Makespan over the ideal (all work dealt evenly, no bubble) with four microbatches a rank, over ratios of "
        "lengths from 1/4 to 4. `x` is against the twin's best in the same families of schedules. Cuts between "
        "sublayers are simulated only, and only where cuts between blocks leave too much."
    )
    for path in pictures:
        yield f"![{path.rpartition('/')[2].removesuffix('.png')}]({path})"
    rows = []
    others, ours = against(penalty, "others"), against(penalty, "ours")
    finer = best(penalty, "ours", "sublayer")
    for (costs, pp), told in ours.groupby(["costs", "pp"], sort=False):
        before = others[(others["costs"] == costs) & (others["pp"] == pp)]
        cut = finer[(finer["costs"] == costs) & (finer["pp"] == pp)]
        rows.append(
            (
                costs,
                pp,
                _range(told["twin_best"]),
                _range(before["makespan_over_ideal"]),
                f"x{_range(before['against_best'])}",
                _range(told["makespan_over_ideal"]),
                f"x{_range(told['against_best'])}",
                _range(told["dealt_bound"]),
                f"x{_range(cut['against_twin'])} at {len(cut)} of {len(told[POINT])}" if len(cut) else "",
            )
        )
    yield markdown.table(
        (
            *("costs", "#ranks", "#decoder-only", "#encoder-decoder as others run it", "#x the twin's named"),
            *("#with costed cuts and lists", "#x the twin's listed", "#no dealing of blocks is below", "#sublayers"),
        ),
        rows,
    )


def _range(values: "pd.Series[float]") -> str:
    low, high = f"{values.min():.3f}", f"{values.max():.3f}"
    return low if low == high else f"{low} to {high}"
