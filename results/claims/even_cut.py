"""Does an even cut balance the pipeline of a decoder-only model, as its blocks are alike? Claim P3.

A cut is balanced when its largest stage is at most 10 % above the mean. What unbalances it stands at its ends, the
embedding and the head, and where the stages do not divide the blocks. Ranges that no study can run (vocabulary, depth,
16 stages) are predicted; what was run is measured, and a row says which.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from results.claims.verdict import (
    Basis,
    Claim,
    Evidence,
    Findings,
    Says,
    basis_of,
    of_count,
    of_time,
    shown,
    why_undecided,
)
from results.tables import Tables
from results.twins import cell_of, interval_of, measured, noise

BALANCED = 1.10
"""Largest stage over mean, at most, of a cut that is called balanced."""

COUNTED = ("forward_flops", "parameters", "peak_saved_bytes")
"""Columns `imbalance_...` of `runs.csv` that are exact."""


def find_even_balance(tables: Tables) -> Findings:
    """P3. Imbalance of the even cut of decoder-only models, predicted over vocabulary and depth, and measured."""
    predicted = tables.predicted[tables.predicted["question"] == "vocabulary"]
    evidence = list(_predicted_balance(predicted))
    evidence += _simulated_balance(tables.penalty)
    runs = measured(tables.runs)
    runs = runs[(runs["architecture"] == "decoder_only") & (runs["pp"] > 1) & (runs["cut"] == "even")]
    for _, run in runs.iterrows():
        evidence += _measured_balance(tables, run)
    missing = () if len(runs) else ("a decoder-only run with pp >= 2 and an even cut",)
    return Findings(evidence=tuple(evidence), missing=missing, condition=_threshold(predicted))


def _predicted_balance(predicted: pd.DataFrame) -> Iterator[Evidence]:
    """By number of stages, where it divides the blocks or not: the largest head still balanced, the smallest not."""
    divides = predicted["num_blocks"] % predicted["pp"] == 0
    for name in ("forward_flops", "parameters"):
        for (pp, divided), rows in predicted.groupby([predicted["pp"], divides]):
            is_balanced = rows[f"imbalance_{name}"] <= BALANCED
            for says, told in ((True, rows[is_balanced]), (False, rows[~is_balanced])):
                if told.empty:
                    continue
                row = told.sort_values("head_to_stage_flops").iloc[-1 if says else 0]
                value, head = row[f"imbalance_{name}"], row["head_to_stage_flops"]
                yield Evidence(
                    quantity=f"imbalance of {name}",
                    value=f"{value:.3f} at a head of {head:.1%} of a stage",
                    says=of_count(supports=says),
                    basis="predicted",
                    table="predicted",
                    cells=(str(row["point"]),),
                    note=f"{pp} stages{'' if divided is True else ', which do not divide the blocks'}: the "
                    f"{'largest head' if says else 'smallest head not'} balanced; {len(told)} of {len(rows)} points",
                )


def _simulated_balance(penalty: pd.DataFrame) -> Iterator[Evidence]:
    """Work of the ranks of simulated pipelines: counted, in closed form on a machine, and with measured pieces."""
    rows = penalty[(penalty["who"] == "twin") & (penalty["scheme"] == "1f1b even")]
    for _, row in rows.drop_duplicates(["costs", "pp"]).iterrows():
        yield Evidence(
            quantity="imbalance of work, simulated",
            value=f"{row['imbalance']:.3f}",
            says=of_count(supports=row["imbalance"] <= BALANCED),
            basis="predicted",
            table="penalty",
            cells=(str(row["point"]),),
            note=f"{row['pp']} stages, costs: {row['costs']}; of its step, {row['bubble']:.0%} is bubble",
        )


def _threshold(predicted: pd.DataFrame) -> str:
    """The condition: how large a head may be, where the number of stages divides the number of blocks."""
    divides = predicted["num_blocks"] % predicted["pp"] == 0
    told = []
    for pp, rows in predicted[divides].groupby("pp"):
        shares = rows.loc[rows["imbalance_forward_flops"] <= BALANCED, "head_to_stage_flops"]
        told.append(f"{shares.max():.0%} at {pp} stages" if len(shares) else f"none at {pp} stages")
    condition = (
        f"the FLOPs of an even cut are within {BALANCED - 1:.0%} while the head costs at most this share of a stage's "
        f"blocks: {', '.join(told)}"
    )
    ragged = predicted[~divides]
    if len(ragged) and (ragged["imbalance_forward_flops"] > BALANCED).all():
        condition += "; never where the stages do not divide the blocks"
    return condition


def _measured_balance(tables: Tables, run: "pd.Series[Any]") -> Iterator[Evidence]:
    cell, basis = cell_of(run), basis_of(run)
    for name in COUNTED:
        value = run[f"imbalance_{name}"]
        if not pd.isna(value):
            says = of_count(supports=value <= BALANCED)
            yield _measured(f"imbalance of {name}", f"{value:.3f}", says, basis, cell, run["layout_label"])
    interval = interval_of(run, "imbalance_busy_seconds")
    control = noise(tables.runs, "imbalance_busy_seconds", machine=run["machine"], device=run["device"])
    factor = control[0] if control else None
    says_time = of_time(interval, BALANCED, factor)
    note = run["layout_label"] if says_time != "undecided" else why_undecided(interval, factor)
    yield _measured("imbalance of busy seconds", shown(interval), says_time, basis, cell, note)


def _measured(quantity: str, value: str, says: Says, basis: Basis, cell: str, note: str) -> Evidence:
    return Evidence(quantity=quantity, value=value, says=says, basis=basis, table="runs", cells=(cell,), note=note)


CLAIMS = (
    Claim(
        id="P3",
        article="A",
        section="§8.2",
        statement="The blocks of a decoder-only model are alike, so an even cut balances its pipeline.",
        quantity="largest over mean stage of the even cut, embedding and head on board: FLOPs, parameters, saved "
        "bytes, busy time; predicted for vocabularies of 1k to 256k and 24 to 80 blocks, simulated for T5-large's twin",
        rule=f"supported if the imbalance is at most {BALANCED} everywhere, contradicted if nowhere; needs a measured "
        "run",
        find=find_even_balance,
    ),
)
