"""Are the articles' parameter counts right? Claims N1, N2, N3 and N5.

Exact counts by component, against each figure as the article rounds it. Where an article adds up terms, the sum and
what it says of the rest are judged apart.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd

from results.claims.printed import Figure, compared, is_printed_as, met, of_model
from results.claims.verdict import Claim, Evidence, Findings, of_count
from results.tables import Tables

MILLION, BILLION = 10**6, 10**9

# ---- N1 -------------------------------------------------------------------------------------------------------------

BASE = "transformer-base"
PAPER_MILLIONS = "65"
BASE_FIGURES = (
    Figure(quantity="embedding", printed="19", unit="M", scale=MILLION, ours=lambda row: row["embedding"]),
    Figure(quantity="encoder block", printed="3.15", unit="M", scale=MILLION, ours=lambda row: row["encoder_block"]),
    Figure(quantity="decoder block", printed="4.2", unit="M", scale=MILLION, ours=lambda row: row["decoder_block"]),
    Figure(
        quantity="encoder blocks",
        printed="18.9",
        unit="M",
        scale=MILLION,
        ours=lambda row: row["encoder_block"] * row["num_encoder_blocks"],
    ),
    Figure(
        quantity="decoder blocks",
        printed="25.2",
        unit="M",
        scale=MILLION,
        ours=lambda row: row["decoder_block"] * row["num_decoder_blocks"],
    ),
    Figure(quantity="all", printed="63", unit="M", scale=MILLION, ours=lambda row: row["parameters"]),
)


def find_base(tables: Tables) -> Findings:
    """N1. Transformer base by component, and what separates it from the paper's number."""
    row = of_model(tables.counts, BASE)
    if row is None:
        return Findings(evidence=(), missing=(f"counts of {BASE}",))
    rest = _rest(row)
    evidence = [*compared(row, BASE_FIGURES), rest]
    return Findings(evidence=tuple(evidence), condition=met(evidence))


def _rest(row: "pd.Series[Any]") -> Evidence:
    """Norms and positions (a sinusoid has no parameters) against what the paper has more than the matrices' sum."""
    width, ffn = row["width"], 2 * row["width"] * row["ffn_width"]
    matrices = row["vocabulary"] * width
    matrices += row["num_encoder_blocks"] * (4 * width**2 + ffn) + row["num_decoder_blocks"] * (8 * width**2 + ffn)
    left_out = int(row["parameters"] - matrices)
    norms = int(row["norms"])
    return Evidence(
        quantity=f"norms and positions make up the difference to {PAPER_MILLIONS} M",
        value=f"norms {norms:,}, positions 0; all that the sum leaves out {left_out:,}",
        says=of_count(supports=is_printed_as((matrices + left_out) / MILLION, PAPER_MILLIONS)),
        basis="predicted",
        table="counts",
        cells=(BASE,),
        note=f"sum of matrices {matrices:,}, with all the rest {matrices + left_out:,}",
    )


# ---- N2 -------------------------------------------------------------------------------------------------------------

LLAMA = "llama-2-7b"
LLAMA_FIGURES = (
    Figure(quantity="block", printed="201", unit="M", scale=MILLION, ours=lambda row: row["decoder_block"]),
    Figure(quantity="32 blocks", printed="6432", unit="M", scale=MILLION, ours=lambda row: row["block_parameters"]),
    Figure(quantity="total", printed="6738", unit="M", scale=MILLION, ours=lambda row: row["parameters"]),
    Figure(
        quantity="share of blocks",
        printed="95.5",
        unit="%",
        scale=0.01,
        ours=lambda row: row["block_parameters"] / row["parameters"],
    ),
    Figure(quantity="embedding", printed="131", unit="M", scale=MILLION, ours=lambda row: row["embedding"]),
    Figure(
        quantity="share of embedding",
        printed="2",
        unit="%",
        scale=0.01,
        ours=lambda row: row["embedding"] / row["parameters"],
    ),
)


def find_llama(tables: Tables) -> Findings:
    """N2. LLaMA-2-7B by component."""
    row = of_model(tables.counts, LLAMA)
    if row is None:
        return Findings(evidence=(), missing=(f"counts of {LLAMA}",))
    evidence = tuple(compared(row, LLAMA_FIGURES))
    return Findings(evidence=evidence, condition=met(evidence))


# ---- N3 and N5 ------------------------------------------------------------------------------------------------------

SIZES = {"llama-2-7b": "6.7", "llama-2-13b": "13", "llama-2-70b": "70"}
RATIOS = (("llama-2-7b", "llama-2-13b", "2"), ("llama-2-13b", "llama-2-70b", "5.4"))


def find_sizes(tables: Tables) -> Findings:
    """N3. Totals of the three models, in billions."""
    evidence: list[Evidence] = []
    missing = []
    for name, printed in SIZES.items():
        row = of_model(tables.counts, name)
        if row is None:
            missing.append(f"counts of {name}")
            continue
        figure = Figure(quantity=name, printed=printed, unit="B", scale=BILLION, ours=_parameters)
        evidence += compared(row, (figure,))
    return Findings(evidence=tuple(evidence), missing=tuple(missing), condition=met(evidence))


def find_ratios(tables: Tables) -> Findings:
    """N5. How many times as large the next model is."""
    evidence = list(_ratios(tables.counts))
    missing = () if len(evidence) == len(RATIOS) else ("counts of the three LLaMA-2 models",)
    return Findings(evidence=tuple(evidence), missing=missing, condition=met(evidence))


def _ratios(counts: pd.DataFrame) -> Iterator[Evidence]:
    for small, large, printed in RATIOS:
        before, after = of_model(counts, small), of_model(counts, large)
        if before is None or after is None:
            continue
        ratio = after["parameters"] / before["parameters"]
        yield Evidence(
            quantity=f"{small} to {large}",
            value=f"{int(after['parameters']):,} / {int(before['parameters']):,}, printed as x{printed}",
            says=of_count(supports=is_printed_as(ratio, printed)),
            basis="predicted",
            table="counts",
            cells=(small, large),
            note=f"x{ratio:.4g}",
        )


def _parameters(row: "pd.Series[Any]") -> float:
    return float(row["parameters"])


_RULE = "supported if every exact number rounds to the printed one, contradicted if none does"


def _claim(claim_id: str, section: str, statement: str, quantity: str, find: Callable[[Tables], Findings]) -> Claim:
    article, _, place = section.partition(" ")
    return Claim(
        id=claim_id,
        article=article,
        section=place,
        statement=statement,
        quantity=quantity,
        rule=_RULE,
        find=find,
        needs_records=False,
    )


CLAIMS = (
    _claim(
        "N1",
        "D §8",
        "Transformer base has about 63M parameters by adding up; the paper's 65M has LayerNorm and positions besides.",
        "exact count by component, and whether norms and positions lead to 65M",
        find_base,
    ),
    _claim(
        "N2",
        "A §7.2",
        "LLaMA-2-7B has about 201M parameters a block, 6,432M in 32 blocks, 95.5 % of 6,738M; its embedding has 131M, "
        "about 2 %.",
        "exact count by component",
        find_llama,
    ),
    _claim("N3", "A §7.1", "LLaMA-2 models have 6.7B, 13B and 70B parameters.", "exact counts", find_sizes),
    _claim(
        "N5",
        "A §7.3",
        "From 7B to 13B parameters about double; from 13B to 70B they grow 5.4 times.",
        "exact ratios",
        find_ratios,
    ),
)
