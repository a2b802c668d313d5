"""What do attention and its caches cost? Claims C1, C3 and C4.

An exponent is fitted to FLOPs over lengths: the slope of their logarithms. Caches are those of generation in closed
form, for one sequence of half-precision entries, whole and per rank of tensor parallelism.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd

from results.claims.printed import met
from results.claims.verdict import Claim, Evidence, Findings, of_count
from results.tables import Tables

# ---- C1 -------------------------------------------------------------------------------------------------------------

TERMS = {
    "encoder_self_flops": (2, 0),
    "cross_flops": (1, 1),
    "decoder_self_flops": (0, 2),
}
"""Column of `lengths` -> exponents of source and target that the article gives the term."""

EXPONENT_TOLERANCE = 1e-6
ARCHITECTURES = ("encoder_only", "decoder_only", "encoder_decoder")


def find_exponents(tables: Tables) -> Findings:
    """C1. Fitted exponents of the cores of attention, and of the whole forward for comparison."""
    evidence: list[Evidence] = []
    for _, rows in tables.lengths.groupby("model", sort=False):
        for term, exponents in TERMS.items():
            if rows[term].notna().any():
                for axis, told in zip(("source_length", "target_length"), exponents, strict=True):
                    evidence += _exponent(rows, term, axis, told)
        evidence += _whole(rows)
    told_of = {str(row["architecture"]) for _, row in tables.lengths.iterrows()}
    missing = tuple(f"FLOPs of {name} over lengths" for name in ARCHITECTURES if name not in told_of)
    return Findings(evidence=tuple(evidence), missing=missing, condition=met(evidence))


def _exponent(rows: pd.DataFrame, term: str, axis: str, told: int) -> Iterator[Evidence]:
    """The exponent over one length, the other held at its largest."""
    other = "target_length" if axis == "source_length" else "source_length"
    line = rows[rows[other] == rows[other].max()].sort_values(axis)
    if line[axis].nunique() < 2:
        return
    found = _slope(line[axis], line[term])
    architecture = str(line["architecture"].iloc[0])
    yield Evidence(
        quantity=f"exponent of {term.removesuffix('_flops').replace('_', ' ')} over {axis.partition('_')[0]} positions",
        value=f"{architecture} {found:.6f}, told as {told}",
        says=of_count(supports=abs(found - told) <= EXPONENT_TOLERANCE),
        basis="predicted",
        table="lengths",
        cells=tuple(line["point"]),
        note=str(line["model"].iloc[0]),
    )


def _whole(rows: pd.DataFrame) -> Iterator[Evidence]:
    """What the whole forward does over the same lengths, both sides equally long; it decides nothing."""
    axis = "source_length" if rows["source_length"].max() else "target_length"
    line = rows[(rows["source_length"] == rows["target_length"]) | (rows["source_length"] * rows["target_length"] == 0)]
    line = line.sort_values(axis)
    if line[axis].nunique() < 2:
        return
    lengths = list(line[axis])
    yield Evidence(
        quantity="exponent of the whole forward",
        value=f"{_slope(line[axis].head(2), line['forward_flops'].head(2)):.3f} from {lengths[0]} to {lengths[1]}, "
        f"{_slope(line[axis].tail(2), line['forward_flops'].tail(2)):.3f} from {lengths[-2]} to {lengths[-1]}",
        says="context",
        basis="predicted",
        table="lengths",
        cells=tuple(line["point"]),
        note=str(line["model"].iloc[0]),
    )


def _slope(lengths: "pd.Series[int]", flops: "pd.Series[float]") -> float:
    x, y = np.log(lengths.to_numpy(dtype=float)), np.log(flops.to_numpy(dtype=float))
    return float(np.polyfit(x, y, 1)[0])


# ---- C3 -------------------------------------------------------------------------------------------------------------

NUM_CACHES = {"encoder_only": 0, "decoder_only": 1, "encoder_decoder": 2}


def find_caches(tables: Tables) -> Findings:
    """C3. How many caches of keys and values a model has, and their bytes on one rank of each degree."""
    evidence = []
    for _, row in tables.caches.iterrows():
        told = NUM_CACHES[str(row["architecture"])]
        evidence.append(
            Evidence(
                quantity=f"caches of {row['architecture']}",
                value=f"{int(row['num_caches'])}, told as {told}",
                says=of_count(supports=row["num_caches"] == told),
                basis="predicted",
                table="caches",
                cells=(str(row["point"]),),
                note=f"bytes a rank: {int(row['self_bytes_per_target_position']):,} a target position, "
                f"{int(row['cross_bytes_per_source_position']):,} a source position, "
                f"{int(row['request_bytes']):,} a request of {int(row['source_length'])}+{int(row['target_length'])}",
            )
        )
    told_of = set(tables.caches["architecture"])
    missing = tuple(f"caches of {name}" for name in NUM_CACHES if name not in told_of)
    return Findings(evidence=tuple(evidence), missing=missing, condition=_counts(evidence))


def _counts(evidence: Sequence[Evidence]) -> str:
    wrong = [f"{row.cells[0]} has {row.value}" for row in evidence if row.says == "contradicts"]
    return f"not so for {'; '.join(wrong)}"


# ---- C4 -------------------------------------------------------------------------------------------------------------

GROUPED, UNGROUPED = "llama-2-70b", "llama-2-70b of 64 KV heads"
MUCH = 2.0
"""A cache is cut much if it is at most half as large."""


def find_grouping(tables: Tables) -> Findings:
    """C4. Cache bytes of the 70B model with its 8 KV heads and with 64; on one rank, and where ranks are many."""
    evidence: list[Evidence] = []
    grouped = tables.caches[tables.caches["model"] == GROUPED].set_index("tp")
    ungrouped = tables.caches[tables.caches["model"] == UNGROUPED].set_index("tp")
    for tp in sorted(set(grouped.index) & set(ungrouped.index)):
        before, after = ungrouped.loc[tp], grouped.loc[tp]
        if tp == 1:
            evidence.append(
                Evidence(
                    quantity="KV heads for query heads",
                    value=f"{after['num_kv_heads']} for {after['num_heads']}, told as 8 for 64",
                    says=of_count(supports=(after["num_kv_heads"], after["num_heads"]) == (8, 64)),
                    basis="predicted",
                    table="caches",
                    cells=(str(after["point"]),),
                )
            )
        ratio = before["request_bytes"] / after["request_bytes"]
        evidence.append(
            Evidence(
                quantity="cache bytes with 64 KV heads over those with 8",
                value=f"{int(before['request_bytes']):,} / {int(after['request_bytes']):,} = {ratio:.4g}",
                # A degree beyond the KV heads makes ranks keep copies: told, but not what the article speaks of.
                says=of_count(supports=ratio >= MUCH) if tp == 1 else "context",
                basis="predicted",
                table="caches",
                cells=(str(before["point"]), str(after["point"])),
                note=f"one rank of tp = {tp}",
            )
        )
    missing = () if any(row.says != "context" for row in evidence) else (f"caches of {GROUPED} with 8 and 64 KV heads",)
    return Findings(evidence=tuple(evidence), missing=missing, condition=met(evidence))


CLAIMS = (
    Claim(
        id="C1",
        article="A",
        section="§8.1 (and B §8.1)",
        statement="Attention costs O(N^2); in an encoder-decoder O(Ns^2) + O(Nt Ns) + O(Nt^2).",
        quantity="exponents fitted to the FLOPs of scores and weighted sums, term by term, over 128 to 4,096 positions",
        rule=f"supported if every exponent is the one told, within {EXPONENT_TOLERANCE:g}, contradicted if none is",
        find=find_exponents,
        needs_records=False,
    ),
    Claim(
        id="C3",
        article="A",
        section="§8.1, §8.3",
        statement="In generation an encoder-only model has no KV cache, a decoder-only model one, an encoder-decoder "
        "two.",
        quantity="caches of each named model and their bytes, for every tensor-parallel degree up to 64 that fits it",
        rule="supported if every model has as many as told for its architecture, contradicted if none has",
        find=find_caches,
        needs_records=False,
    ),
    Claim(
        id="C4",
        article="A",
        section="§7.1",
        statement="The 70B model has 8 KV heads for 64 query heads, which cuts its KV cache much.",
        quantity="bytes of the cache with 8 and with 64 KV heads",
        rule=f"supported if the heads are as told and the cache is at most 1/{MUCH:g}, contradicted if neither",
        find=find_grouping,
        needs_records=False,
    ),
)
