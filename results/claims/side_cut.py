"""Is the pipeline of an encoder-decoder harder to balance than that of its decoder-only twin? Claim P4.

It is where its imbalance (or bubble) exceeds the twin's by more than 0.05, in times by more than 5 %. Ratios of
lengths, vocabularies and 16 stages, which no study can run, are predicted; what was run is measured, and a row says
which. Predicted rows of one kind that agree are told together, as a range. The kinds of cut stand in
`results/predicted.py`, simulated schedules in `results/claims/schemes.py`.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from parallel.penalty import CLOSE
from results.claims import schemes
from results.claims.even_cut import COUNTED
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
from results.intervals import ratio
from results.predicted import CUTS
from results.runs import from_text
from results.tables import Tables
from results.twins import Pair, noise, pairs

Row = Mapping[Any, Any]

HARDER = 0.05
"""By how much an imbalance must exceed the twin's to be called harder."""


def find_harder_balance(tables: Tables) -> Findings:
    """P4. Whether stages per side must be chosen, and the imbalance of every kind of cut against the twin's."""
    predicted = tables.predicted[tables.predicted["question"] == "length_ratio"]
    vocabularies = tables.predicted[tables.predicted["question"] == "pair_vocabulary"]
    evidence = [
        *_choices(predicted),
        *_predicted_harder(predicted, "ratios of lengths"),
        *_predicted_harder(vocabularies, "vocabularies"),
        *schemes.evidence(tables.penalty),
    ]
    told_cuts: set[str] = set()
    for pair in pairs(tables.runs):
        if pair.encoder_decoder["pp"] > 1 and pair.has_equal_tokens:
            told_cuts.add(pair.encoder_decoder["cut"])
            evidence += _measured_harder(tables, pair)
    missing = tuple(f"twins side by side with pp >= 2 and cut {cut}" for cut in CUTS[:2] if cut not in told_cuts)
    condition = f"{_where_harder(predicted)}; {schemes.condition(tables.penalty)}"
    return Findings(evidence=tuple(evidence), missing=missing, condition=condition)


def _choices(predicted: pd.DataFrame) -> Iterator[Evidence]:
    """Does the best split of the stages move with the lengths, and is a cut between the sides the best there is?"""
    told = predicted[predicted["architecture"] == "encoder_decoder"]
    for pp, rows in told.groupby("pp"):
        by_cut = {cut: rows[rows["cut"] == cut].sort_values("length_ratio") for cut in ("aligned", "mixed")}
        aligned, mixed = by_cut["aligned"], by_cut["mixed"]
        splits = [int(count) for count in aligned["num_encoder_stages"]]
        if int(str(pp)) > 2:
            yield _predicted(
                quantity="encoder stages of the best aligned cut",
                value=f"{', '.join(map(str, splits))} of {pp} over source/target {_ratios(aligned)}",
                supports=len(set(splits)) > 1,
                rows=aligned,
            )
        better = [
            float(other) < float(own) - HARDER
            for own, other in zip(aligned["imbalance_forward_flops"], mixed["imbalance_forward_flops"], strict=True)
        ]
        yield _predicted(
            quantity="a choice of stages per side is needed for the best balance",
            value=f"{pp} stages: a mixed cut beats every aligned one by more than {HARDER} "
            f"at {sum(better)} of {len(better)} ratios",
            supports=not any(better),
            rows=mixed,
        )


def _predicted_harder(predicted: pd.DataFrame, over: str) -> Iterator[Evidence]:
    """Imbalance, and bubble, of every kind of cut and of the best, against the twin's on the same lengths."""
    points = list(_pair_points(predicted))
    for name, cut in itertools.product(("imbalance_forward_flops", "imbalance_parameters", "bubble"), (*CUTS, "best")):
        excess = _excess(points, cut, name)
        for (pp, is_harder), told in itertools.groupby(sorted(excess, key=_agreement), key=_agreement):
            same = list(told)
            yield Evidence(
                quantity=f"{name} of the {cut} cut against the twin's",
                value=f"{pp} stages: {_range([point.own for point in same])} against "
                f"{_range([point.twin for point in same])}",
                says=of_count(supports=is_harder),
                basis="predicted",
                table="predicted",
                cells=tuple(point.name for point in same),
                note=f"{len(same)} of {sum(point.pp == pp for point in excess)} {over}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Excess:
    """What an encoder-decoder and its twin come to at one number of stages and one ratio of lengths."""

    pp: int
    name: str
    own: float
    twin: float

    @property
    def is_harder(self) -> bool:
        return self.own > self.twin + HARDER


def _agreement(point: _Excess) -> tuple[int, bool]:
    return point.pp, point.is_harder


def _pair_points(predicted: pd.DataFrame) -> Iterator[tuple[list[Row], list[Row]]]:
    """The rows of encoder-decoder and twin, all kinds of cut, for every number of stages, lengths and vocabulary."""
    points: dict[tuple[Any, ...], tuple[list[Row], list[Row]]] = {}
    for row in predicted.to_dict("records"):
        key = (row["pp"], row["source_length"] + row["target_length"], row["length_ratio"], row["vocabulary"])
        sides = points.setdefault(key, ([], []))
        sides[row["architecture"] != "encoder_decoder"].append(row)
    yield from points.values()


def _excess(points: Iterable[tuple[list[Row], list[Row]]], cut: str, name: str) -> list[_Excess]:
    """A quantity of a kind of cut at every point where both have it; of the best cut, whichever that is for each."""
    found = []
    for sides in points:
        own, twin = (
            [row for row in side if cut in ("best", row["cut"]) and not math.isnan(row[name])] for side in sides
        )
        if own and twin:
            best = min(own, key=lambda row: float(row[name]))
            value, other = float(best[name]), min(float(row[name]) for row in twin)
            found.append(_Excess(pp=int(best["pp"]), name=str(best["point"]), own=value, twin=other))
    return found


def _where_harder(predicted: pd.DataFrame) -> str:
    """The condition: at how many points each kind of cut is harder to balance than the twin's."""
    points = list(_pair_points(predicted))
    told = []
    for cut in (*CUTS, "best"):
        excess = _excess(points, cut, "imbalance_forward_flops")
        told.append(f"{cut} {sum(point.is_harder for point in excess)} of {len(excess)}")
    return f"predicted FLOPs are harder to balance than the twin's by kind of cut: {', '.join(told)} points"


def _measured_harder(tables: Tables, pair: Pair) -> Iterator[Evidence]:
    own, twin = pair.encoder_decoder, pair.one_stack
    for name in COUNTED:
        column = f"imbalance_{name}"
        if not pd.isna(own[column]) and not pd.isna(twin[column]):
            yield Evidence(
                quantity=f"{column} of the {own['cut']} cut against the twin's",
                value=f"{own[column]:.3f} against {twin[column]:.3f}",
                says=of_count(supports=own[column] > twin[column] + HARDER),
                basis=basis_of(own),
                table="runs",
                cells=pair.cells,
                note=str(own["layout_label"]),
            )
    for column in ("imbalance_busy_seconds", "bubble"):
        interval = ratio(from_text(twin[column]), from_text(own[column]))
        control = noise(tables.runs, column, machine=own["machine"], device=own["device"])
        factor = control[0] if control else None
        says = opposite(of_time(interval, 1 + HARDER, factor))
        yield Evidence(
            quantity=f"{column} of the {own['cut']} cut against the twin's",
            value=f"x{shown(interval)}",
            says=says,
            basis=basis_of(own),
            table="runs",
            cells=pair.cells,
            note=str(own["layout_label"]) if says != "undecided" else why_undecided(interval, factor),
        )


def _predicted(*, quantity: str, value: str, supports: bool, rows: pd.DataFrame) -> Evidence:
    return Evidence(
        quantity=quantity,
        value=value,
        says=of_count(supports=supports),
        basis="predicted",
        table="predicted",
        cells=tuple(map(str, rows["point"])),
    )


def _ratios(rows: pd.DataFrame) -> str:
    return ", ".join(f"{float(value):.3g}" for value in rows["length_ratio"])


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.3f}", f"{max(values):.3f}"
    return low if low == high else f"{low} to {high}"


CLAIMS = (
    Claim(
        id="P4",
        article="A",
        section="§8.2",
        statement="An encoder-decoder must choose how many stages each side gets, and is harder to balance.",
        quantity="encoder stages of the best aligned cut; imbalance of FLOPs, parameters, saved bytes and busy time, "
        "and bubble, of even, aligned, mixed and folded cuts against the decoder-only twin's; predicted for "
        "source/target 1/4 to 4, vocabularies of 1k to 256k and 2 to 16 stages; simulated steps of named and list "
        "schedules, with counted, closed and measured costs",
        rule="supported if the best split moves with the lengths, no mixed cut beats it, and every imbalance exceeds "
        f"the twin's by more than {HARDER}, and every simulated pipeline over its ideal by more than {CLOSE:.0%}; "
        "contradicted if none of it holds; needs measured twins cut even and aligned",
        find=find_harder_balance,
    ),
)
