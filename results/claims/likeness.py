"""Does one block stand for all, and does one architecture leave fewer choices? Claims P9 and P11.

Blocks are alike where their costs vary by at most 1 %, and measured times, beyond noise, by at most 5 %. Choices are
layouts of the same model on the same devices; what they are worth is how far apart predicted steps are.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from results.balance import coefficient_of_variation
from results.claims.verdict import (
    Claim,
    Evidence,
    Findings,
    basis_of,
    of_count,
    of_time,
    opposite,
    shown,
    why_undecided,
)
from results.intervals import Interval, median
from results.runs import from_text
from results.tables import Tables
from results.twins import cell_of, measured, noise, select

ALIKE, ALIKE_SECONDS = 0.01, 0.05
"""Coefficient of variation, at most, of what is alike: exact numbers, and busy seconds."""
WIDER = 0.05
"""By how much a spread must exceed the twin's to be called wider."""
COUNTED = {"forward_flops": "FLOPs", "parameters": "bytes of parameters"}


# ---- P9: one block stands for all -----------------------------------------------------------------------------------


def find_likeness(tables: Tables) -> Findings:
    """P9. How much blocks vary: in decoder-only models, and in encoder-decoders for contrast."""
    evidence = [*_counted(tables.variation)]
    runs = measured(tables.runs)
    runs = runs[(runs["world_size"] == 1) & (runs["architecture"] != "encoder_only")]
    told: set[str] = set()
    for _, run in runs.iterrows():
        row = _timed(tables, run)
        if row is not None:
            evidence.append(row)
            told.add(run["architecture"])
    missing = tuple(
        f"a run of {side} on one rank, with times of blocks"
        for side in ("decoder_only", "encoder_decoder")
        if side not in told
    )
    return Findings(evidence=tuple(evidence), missing=missing, condition=_where_alike(tables.variation))


def _counted(variation: pd.DataFrame) -> Iterator[Evidence]:
    """Decoder-only blocks must be alike, those of encoder-decoders must not."""
    for architecture, wants_alike in (("decoder_only", True), ("encoder_decoder", False)):
        rows = variation[variation["architecture"] == architecture]
        for name, words in COUNTED.items():
            values = rows[f"variation_{name}"]
            for is_alike, same in rows.groupby(values <= ALIKE):
                told = same[f"variation_{name}"]
                yield Evidence(
                    quantity=f"variation of {words} over blocks of {architecture.replace('_', '-')} models",
                    value=f"{told.min():.3f} to {told.max():.3f} of {len(same)} in {len(rows)} points",
                    says=of_count(supports=bool(is_alike) == wants_alike),
                    basis="predicted",
                    table="variation",
                    cells=tuple(same["point"]),
                )


def _timed(tables: Tables, run: "pd.Series[Any]") -> Evidence | None:
    """Busy seconds of the blocks of one run, which one rank ran; None where they were not taken."""
    blocks = select(tables.blocks, run)
    blocks = blocks[blocks["forward_busy_seconds"].notna() & blocks["backward_busy_seconds"].notna()]
    if len(blocks) < 2:
        return None
    samples = np.array(
        [
            np.add(from_text(row["forward_busy_seconds"]), from_text(row["backward_busy_seconds"]))
            for _, row in blocks.iterrows()
        ]
    )
    interval: Interval = median([float(value) for value in coefficient_of_variation(samples)])
    control = noise(tables.runs, "busy_seconds", machine=run["machine"], device=run["device"])
    factor = control[0] if control else None
    says = of_time(interval, ALIKE_SECONDS, factor)
    if run["architecture"] == "encoder_decoder":
        says = opposite(says)
    return Evidence(
        quantity=f"variation of busy seconds over blocks of {run['architecture'].replace('_', '-')} models",
        value=shown(interval),
        says=says,
        basis=basis_of(run),
        table="blocks",
        cells=(cell_of(run),),
        note=str(run["layout_label"]) if says != "undecided" else why_undecided(interval, factor),
    )


def _where_alike(variation: pd.DataFrame) -> str:
    told = []
    for architecture, rows in variation.groupby("architecture", sort=False):
        flops = rows["variation_forward_flops"]
        told.append(f"{str(architecture).replace('_', '-')} {int((flops <= ALIKE).sum())} of {len(rows)}")
    rows = variation[variation["architecture"] == "encoder_decoder"]
    kinds = ", ".join(map(str, sorted(set(rows["num_kinds"]))))
    return (
        f"FLOPs of all blocks agree within {ALIKE:.0%} at: {', '.join(told)} points; blocks of an encoder-decoder are "
        f"of {kinds} kinds"
    )


# ---- P11: fewer choices ---------------------------------------------------------------------------------------------

SPREADS = {"slowest over fastest": (0.0, 1.0), "middle half, highest over lowest": (0.25, 0.75)}
"""Spreads of predicted steps per FLOP, by their quantiles."""


def find_choices(tables: Tables) -> Findings:
    """P11. Layouts that twins can choose from, and how far apart the predicted steps are."""
    space = tables.space
    twin = space[space["architecture"] == "decoder_only"]
    own = space[space["architecture"] == "encoder_decoder"]
    if twin.empty or own.empty:
        return Findings(evidence=(), missing=("predicted steps of twins over their layouts",))
    half = own[own["num_encoder_blocks"] == own["num_decoder_blocks"]]
    splits = set(own["num_encoder_blocks"])
    evidence = [
        _choice(
            "number of layouts",
            f"{len(half)} against {len(twin)} of the twin",
            supports=len(half) > len(twin),
            rows=pd.concat([half.head(1), twin.head(1)]),
        ),
        _choice(
            "number of ways to split the depth",
            f"{len(splits)} of those tried against 1 of the twin",
            supports=len(splits) > 1,
            rows=own.drop_duplicates("num_encoder_blocks"),
        ),
    ]
    for words, quantiles in SPREADS.items():
        for told, rows in (("one split of the depth", half), ("all splits", own)):
            spread, other = _spread(rows, quantiles), _spread(twin, quantiles)
            evidence.append(
                _choice(
                    f"spread of predicted seconds per FLOP: {words}",
                    f"x{spread:.3f} against x{other:.3f}",
                    supports=spread > other * (1 + WIDER),
                    rows=pd.concat([_ends(rows), _ends(twin)]),
                    note=told,
                )
            )
    return Findings(evidence=tuple(evidence), condition=_worth(own, half, twin))


def _spread(rows: pd.DataFrame, quantiles: tuple[float, float]) -> float:
    """Of seconds per FLOP: the inverse of utilisation, whose quantiles change places."""
    low, high = rows["model_flops_utilisation"].quantile(list(quantiles))
    return float(high / low)


def _ends(rows: pd.DataFrame) -> pd.DataFrame:
    return rows.sort_values("model_flops_utilisation").iloc[[0, -1]]


def _worth(own: pd.DataFrame, half: pd.DataFrame, twin: pd.DataFrame) -> str:
    """The condition: how the best layouts compare, and what the choices that only one side has are worth."""
    best, other = half["model_flops_utilisation"].max(), twin["model_flops_utilisation"].max()
    is_plain = (half["transport"] == "relay") & (half["memory_gather"] == "per_stage") & (half["placement"] != "folded")
    plain = half[is_plain & half["cut"].isin(["even", "flops"])]["model_flops_utilisation"].max()
    by_split = own.groupby("num_encoder_blocks")["model_flops_utilisation"].max()
    return (
        f"the best of {len(half)} layouts uses {best:.1%} of the devices, of the twin's {len(twin)} {other:.1%}; "
        f"without what only encoder-decoders have to choose it is {plain:.1%}; the best by encoder blocks is "
        f"{', '.join(f'{value:.1%} at {count}' for count, value in by_split.items())}"
    )


def _choice(quantity: str, value: str, *, supports: bool, rows: pd.DataFrame, note: str = "") -> Evidence:
    return Evidence(
        quantity=quantity,
        value=value,
        says=of_count(supports=supports),
        basis="predicted",
        table="space",
        cells=tuple(rows["point"]),
        note=note,
    )


CLAIMS = (
    Claim(
        id="P9",
        article="A",
        section="§8.3",
        statement="Any one block of a decoder-only model represents all of them, so its analysis is simpler.",
        quantity="coefficient of variation over the blocks of a model: FLOPs and bytes of parameters of every named "
        "model, busy seconds of runs on one rank; decoder-only, and encoder-decoder for contrast",
        rule=f"supported if decoder-only blocks vary by at most {ALIKE:.0%} ({ALIKE_SECONDS:.0%} in busy seconds) and "
        "those of encoder-decoders by more, contradicted if none of it holds; needs runs of both on one rank",
        find=find_likeness,
    ),
    Claim(
        id="P11",
        article="A",
        section="§8.3",
        statement="Growing a decoder-only model has three knobs and no ratio of encoder to decoder to decide.",
        quantity="number of layouts of T5-large and its twin on 16 devices and splits of its depth, and the spread of "
        "the predicted seconds per FLOP over them",
        rule=f"supported if the encoder-decoder has more to choose from and every spread is over {WIDER:.0%} wider "
        "than the twin's, contradicted if none of it holds",
        find=find_choices,
        needs_records=False,
    ),
)
