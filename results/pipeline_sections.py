"""What does the report say of pipelines: how good the simulator is, and what cuts and schedules gain.

Each function returns the paragraphs of one section, from `pipelines.csv` and `improvements.csv`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd

from results import markdown
from results.improvements import BASELINES, QUANTITIES
from results.intervals import Interval
from results.pipelines import ERRORS, error_summary, order_of
from results.tables import Tables
from results.twins import interval_of

SHORT = {"decoder_only": "decoder-only", "encoder_only": "encoder-only", "encoder_decoder": "encoder-decoder"}


def simulated_against_measured(tables: Tables, pictures: Mapping[str, str]) -> Iterator[str]:
    """Errors of the simulator, cell by cell, and pictures of telling ones by their captions."""
    yield "## Pipelines: simulated against measured"
    if tables.pipelines.empty:
        yield "No run tells when the actions of a pipeline ran."
        return
    yield (
        "The table of actions that a run executed was simulated with the run's own costs of actions (means by stage "
        "and kind: medians over the steps, and those of each step against itself), and with the costs of a profile "
        "that was measured apart from it. `measured` is the wall "
        "time of the pipeline of a step, without gradient sums and update. `played` puts the run's busy times on cores "
        "of their own: where ranks outnumber cores (`oversubscribed`), wall time says how many ranks shared one, and "
        "only the error against what was played means anything. Times are medians with 95 % bootstrap intervals."
    )
    summary = error_summary(tables.pipelines)
    chosen = [ERRORS[name] for name in ("simulated_error", "profiled_shape_error")]
    told = (row for _, row in summary.iterrows() if (row["costs"], row["against"]) in chosen)
    yield " ".join(map(_sentence, told))
    columns = ("#ranks", "simulated with", "held against", "#cells", "#median error", "#largest", "#within 10 %")
    yield markdown.table(
        columns,
        [
            (
                *(row[name] for name in ("pp", "costs", "against", "num_cells")),
                *(f"{row[name]:.1%}" for name in ("median_error", "largest_error", "within_10_percent")),
            )
            for _, row in summary.iterrows()
        ],
    )
    for caption, path in pictures.items():
        stem = path.removesuffix(".png")
        others = ", ".join(
            markdown.link(word, f"{stem}.{end}") for word, end in (("SVG", "svg"), ("trace", "trace.json"))
        )
        yield f"{caption[:1].upper()}{caption[1:]} ({others}):"
        yield f"![{path.rpartition('/')[2].removesuffix('.png')}]({path})"
    yield markdown.table(
        (
            *(
                "architecture",
                "layout",
                "#source",
                "#target",
                "measured, s",
                "#simulated, s",
                "#error",
                "#step by step",
            ),
            *("#by profile, s", "#error", "played, s", "#by profile, s", "#error", "#bubble simulated", "#played"),
            *("busiest rank / mean", "note"),
        ),
        [_cell_row(row) for _, row in order_of(tables.pipelines).iterrows()],
    )


def _sentence(row: "pd.Series[Any]") -> str:
    return (
        f"With {row['costs']} the median error over {row['num_cells']} cells on {row['pp']} ranks is "
        f"{row['median_error']:.1%} (against {row['against']})."
    )


def _cell_row(row: "pd.Series[Any]") -> tuple[Any, ...]:
    notes = [
        word for word, is_told in (("oversubscribed", row["oversubscribed"]), ("control", row["is_control"])) if is_told
    ]
    return (
        SHORT[row["architecture"]],
        row["layout_label"],
        row["source_length"] or None,
        row["target_length"] or None,
        _told(interval_of(row, "measured_seconds")),
        row["simulated_seconds"],
        None if row["oversubscribed"] else _percent(row["simulated_error"]),
        None if row["oversubscribed"] else _percent(row["stepwise_error_median"]),
        row["profiled_seconds"],
        None if row["oversubscribed"] else _percent(row["profiled_error"]),
        _told(interval_of(row, "played_seconds")),
        row["profiled_busy_seconds"],
        _percent(row["profiled_busy_error"]),
        _percent(row["simulated_bubble"]),
        _percent(row["played_bubble_median"]),
        _told(interval_of(row, "rank_imbalance")),
        ", ".join(notes),
    )


def gains(tables: Tables) -> Iterator[str]:
    """What cuts and schedules gain over what others do."""
    yield "## Pipelines: what cuts and schedules gain"
    told = tables.improvements
    if told.empty:
        yield "No pipeline has another one to be compared with: the same model and step, cut evenly or along its sides."
        return
    yield (
        "Ratios against the same model on as many ranks under 1F1B, cut into even block counts or into stages that are "
        "encoder or decoder (`aligned`); below 1 is a gain. Busy time of the busiest rank is what the cut decides, "
        "played time what cut and schedule decide together. The last two columns divide both by the work of the same "
        "step, so that the machine's speed at the time does not matter: busiest rank over the mean, and played time "
        "over evenly dealt work. An asterisk marks an interval that stays on its side of 1 by more than the A/A "
        "controls of as many ranks differ."
    )
    yield _noise(told)
    for baseline in BASELINES:
        rows = _gain_rows(told[told["baseline"] == baseline])
        if rows:
            yield f"### Against cut {baseline}, 1F1B"
            yield markdown.table(
                (
                    *("architecture", "#ranks", "#source", "#target", "layout", "step", "busiest rank, s"),
                    *("played, s", "busiest rank / mean", "played / evenly dealt"),
                ),
                rows,
            )
    yield "### Against a pipeline without bubble"
    yield from _penalty(tables.pipelines)


def _gain_rows(told: pd.DataFrame) -> list[tuple[Any, ...]]:
    """A row a cell, a column a quantity."""
    rows: list[tuple[Any, ...]] = []
    for _, group in told.groupby(["experiment", "model", "pp", "source_length", "target_length", "cell"], sort=False):
        cells = {row["quantity"]: row for _, row in group.iterrows()}
        first = group.iloc[0]
        lengths = (first["source_length"] or None, first["target_length"] or None)
        ratios = (_ratio(cells.get(name)) for name in QUANTITIES)
        rows.append((SHORT[first["architecture"]], first["pp"], *lengths, first["layout_label"], *ratios))
    return sorted(rows, key=lambda row: (row[0], row[1], row[2] or 0))


def _noise(told: pd.DataFrame) -> str:
    noise = told.drop_duplicates(["pp", "quantity"])[["pp", "quantity", "noise"]].dropna()
    words = [f"{row['quantity']} on {row['pp']} ranks x{row['noise']:.3f}" for _, row in noise.iterrows()]
    return f"Identical runs differ by up to: {', '.join(words)}." if words else "No control run: noise is not known."


def _penalty(pipelines: pd.DataFrame) -> Iterator[str]:
    """Played time over evenly dealt busy time: of the twin, of what others do, and of the best cell."""
    yield (
        "Played time over busy time dealt evenly to the ranks: 1 is a pipeline without bubble and imbalance. It can be "
        "compared between architectures, whatever they compute."
    )
    own = pipelines[~pipelines["is_control"].astype(bool)]
    rows = []
    for (machine, twins, pp, m), group in own.groupby(["machine", "twins", "pp", "microbatches"], sort=False):
        singles = group[group["architecture"] == "decoder_only"]
        for (source, target), pairs in group[group["architecture"] == "encoder_decoder"].groupby(
            ["source_length", "target_length"], sort=False
        ):
            plain = pairs[(pairs["schedule"] == "1f1b") & (pairs["chunks"] == 1)]
            named = {
                "decoder-only, even, 1F1B": singles[(singles["cut"] == "even") & (singles["schedule"] == "1f1b")],
                "decoder-only, best": _best(singles),
                "even, 1F1B": plain[plain["cut"] == "even"],
                "aligned, 1F1B": plain[plain["cut"] == "aligned"],
                "best": _best(pairs),
            }
            cells = [_told(interval_of(rows_.iloc[0], "over_ideal")) if len(rows_) else "" for rows_ in named.values()]
            best = named["best"].iloc[0]["layout_label"]
            rows.append((machine, twins, pp, m, source, target, *cells, best))
    if rows:
        yield markdown.table(
            (
                *("machine", "twins", "#ranks", "#microbatches", "#source", "#target", "decoder-only, even, 1F1B"),
                *("decoder-only, best", "encoder-decoder, even, 1F1B", "aligned, 1F1B", "best", "which"),
            ),
            rows,
        )


def _best(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sort_values("over_ideal_median", kind="stable").head(1)


def _ratio(row: "pd.Series[Any] | None") -> str:
    if row is None:
        return ""
    mark = "*" if row["outcome"] in ("less", "more") else ""
    return f"{row['ratio']:.3f} [{row['ratio_low']:.3f}, {row['ratio_high']:.3f}]{mark}"


def _told(interval: Interval) -> str:
    return markdown.bounds(interval.value, interval.low, interval.high)


def _percent(share: Any) -> str | None:
    # Without the sign of a zero.
    return None if pd.isna(share) else f"{round(share, 3) + 0.0:.1%}"
