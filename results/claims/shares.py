"""Where are a model's parameters and FLOPs: in the blocks, in the ffn? Claims C9 and C10.

Exact shares of every named model. FLOPs are those of a forward at the longest sequence that the model reads, which is
in favour of the blocks, as attention grows with it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from results.claims.verdict import Claim, Evidence, Findings, of_count
from results.tables import Tables

# ---- C9 -------------------------------------------------------------------------------------------------------------

BLOCK_SHARE = 0.95
KINDS = {"parameters": ("block_parameters", "parameters"), "FLOPs": ("block_flops", "forward_flops")}


def find_block_shares(tables: Tables) -> Findings:
    """C9. Share of the blocks in parameters and forward FLOPs."""
    evidence: list[Evidence] = []
    thresholds = []
    for kind, (part, whole) in KINDS.items():
        shares = tables.counts[part] / tables.counts[whole]
        for (_, row), share in zip(tables.counts.iterrows(), shares, strict=True):
            evidence.append(
                Evidence(
                    quantity=f"share of the blocks in {kind}",
                    value=f"{share:.1%}: {int(row[part]):,} of {int(row[whole]):,}",
                    says=of_count(supports=share >= BLOCK_SHARE),
                    basis="predicted",
                    table="counts",
                    cells=(str(row["point"]),),
                )
            )
        thresholds.append(_threshold(tables.counts, shares, kind))
    missing = () if evidence else ("counts of named models",)
    return Findings(evidence=tuple(evidence), missing=missing, condition="; ".join(thresholds))


def _threshold(counts: pd.DataFrame, shares: "pd.Series[float]", kind: str) -> str:
    """From which size on all models hold it, and up to which none does."""
    holds = shares >= BLOCK_SHARE
    sizes = counts["parameters"]
    failing, holding = sizes[~holds], sizes[holds]
    told = []
    always = sizes[sizes > failing.max()] if len(failing) else sizes
    if len(always):
        told.append(f"in every model from {int(always.min()):,} parameters up")
    never = sizes[sizes < holding.min()] if len(holding) else sizes
    if len(never):
        told.append(f"in none up to {int(never.max()):,}")
    llama = shares[counts["point"] == "llama-2-7b"]
    if len(llama):
        told.append(f"LLaMA-2-7B {llama.iloc[0]:.1%}")
    return f"blocks hold {BLOCK_SHARE:.0%} of {kind} {', '.join(told)}"


# ---- C10 ------------------------------------------------------------------------------------------------------------

FFN_SHARE, ABOUT = 2 / 3, 0.05


def find_ffn_shares(tables: Tables) -> Findings:
    """C10. Share of the ffn in a block of each kind, and in the whole model."""
    evidence: list[Evidence] = []
    for _, row in tables.counts.iterrows():
        evidence += _ffn_shares(row)
    missing = () if evidence else ("counts of named models",)
    return Findings(evidence=tuple(evidence), missing=missing, condition=_where(evidence))


def _ffn_shares(row: "pd.Series[Any]") -> Iterator[Evidence]:
    reads_memory = row["architecture"] == "encoder_decoder"
    places = {
        "encoder block": (row["encoder_block_ffn"], row["encoder_block_attention"], row["encoder_block"]),
        "decoder block with cross-attention" if reads_memory else "decoder block": (
            row["decoder_block_ffn"],
            row["decoder_block_attention"],
            row["decoder_block"],
        ),
        "whole model": (row["ffn"], row["self_attention"] + row["cross_attention"], row["parameters"]),
    }
    for place, (ffn, attention, whole) in places.items():
        if pd.isna(whole):
            continue
        yield Evidence(
            quantity=f"share of the ffn in the parameters of a {place}",
            value=f"ffn {ffn / whole:.1%}, attention {attention / whole:.1%}",
            says=of_count(supports=abs(ffn / whole - FFN_SHARE) <= ABOUT),
            basis="predicted",
            table="counts",
            cells=(str(row["point"]),),
            note=f"{int(ffn):,} and {int(attention):,} of {int(whole):,}",
        )


def _where(evidence: Sequence[Evidence]) -> str:
    told: dict[str, list[bool]] = {}
    for row in evidence:
        told.setdefault(row.quantity.rpartition(" of a ")[2], []).append(row.says == "supports")
    parts = [f"{place} {sum(holds)} of {len(holds)}" for place, holds in told.items()]
    return f"the ffn is within {ABOUT * 100:g} points of 2/3 by kind of block: {', '.join(parts)}"


CLAIMS = (
    Claim(
        id="C9",
        article="A",
        section="§6.2, §7.2",
        statement="The blocks hold 95 % or more of a model's parameters and compute (LLaMA-2-7B).",
        quantity="exact shares of parameters and forward FLOPs, for every named model",
        rule=f"supported if at least {BLOCK_SHARE:.0%} of both in every model, contradicted if of neither in any",
        find=find_block_shares,
        needs_records=False,
    ),
    Claim(
        id="C10",
        article="D",
        section="§8, §9",
        statement="The ffn has about 2/3 of the parameters, attention 1/3.",
        quantity="exact shares per encoder block, decoder block and whole model, for every named model",
        rule=f"supported if the ffn has 2/3 within {ABOUT * 100:g} points everywhere, contradicted if nowhere",
        find=find_ffn_shares,
        needs_records=False,
    ),
)
