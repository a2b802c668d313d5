"""What do named models hold, and do they tie? Claims N4, N6, N7 and N10.

Closed counts of every named model, beside published totals: the total of a checkpoint tells whether its head is a
matrix of its own, because only one of the two counts can be met.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from results.claims.printed import Figure, compared, met, of_model
from results.claims.verdict import Claim, Evidence, Findings, of_count
from results.tables import Tables

MILLION = 10**6

# ---- N4 -------------------------------------------------------------------------------------------------------------

ROUGH_TOLERANCE = 0.10
"""Relative error up to which a rough formula is called about right."""


def find_rough(tables: Tables) -> Findings:
    """N4. L 12 d^2 + V d against the exact count of every named model; L are the blocks of both sides."""
    evidence: list[Evidence] = []
    errors: dict[str, float] = {}
    for _, row in tables.counts.iterrows():
        num_blocks = row["num_encoder_blocks"] + row["num_decoder_blocks"]
        rough = num_blocks * 12 * row["width"] ** 2 + row["vocabulary"] * row["width"]
        error = rough / row["parameters"] - 1
        errors[str(row["point"])] = error
        evidence.append(
            Evidence(
                quantity="relative error of L 12 d^2 + V d",
                value=f"{error:+.1%}: {int(rough):,} for {int(row['parameters']):,}",
                says=of_count(supports=abs(error) <= ROUGH_TOLERANCE),
                basis="predicted",
                table="counts",
                cells=(str(row["point"]),),
                note=str(row["architecture"]),
            )
        )
    near = [name for name, error in errors.items() if abs(error) <= ROUGH_TOLERANCE]
    far = sorted((name for name in errors if name not in near), key=lambda name: -abs(errors[name]))
    told = ", ".join(f"{name} {errors[name]:+.0%}" for name in far)
    condition = f"within {ROUGH_TOLERANCE:.0%} for {', '.join(near)}; not for {told}"
    return Findings(evidence=tuple(evidence), missing=_missing(evidence), condition=condition)


# ---- N6 -------------------------------------------------------------------------------------------------------------

CLASSIC = "gpt-classic"
CLASSIC_LOGITS = "2 10 50257"
THIRTY_ODD = (30 * MILLION, 40 * MILLION)


def find_classic(tables: Tables) -> Findings:
    """N6. The small decoder-only model of the article: its count, and the logits that were read off it."""
    row = of_model(tables.counts, CLASSIC)
    shapes = facts(tables.structure, CLASSIC)
    missing = [] if row is not None else [f"counts of {CLASSIC}"]
    missing += [] if "logits" in shapes else [f"logits of {CLASSIC}"]
    if row is None or missing:
        return Findings(evidence=(), missing=tuple(missing))
    count = int(row["parameters"])
    evidence = (
        Evidence(
            quantity="parameters",
            value=f"{count:,}, told as 30-odd million",
            says=of_count(supports=THIRTY_ODD[0] <= count < THIRTY_ODD[1]),
            basis="predicted",
            table="counts",
            cells=(CLASSIC,),
            note=f"blocks {int(row['block_parameters']):,}, embedding {int(row['embedding']):,}, "
            f"head {int(row['head']):,}; {int(row['parameters_tying_head']):,} if tied",
        ),
        shape_evidence(CLASSIC, "logits", shapes["logits"], CLASSIC_LOGITS),
    )
    return Findings(evidence=evidence, condition=met(evidence))


def facts(structure: pd.DataFrame, name: str) -> dict[str, str]:
    """Facts of a built model."""
    rows = structure[structure["point"] == name]
    return dict(zip(rows["fact"], rows["value"], strict=True))


def shape_evidence(name: str, fact: str, found: str, told: str) -> Evidence:
    """Whether a shape, or a number, that was read off a built model is the article's."""
    return Evidence(
        quantity=fact.replace("_", " ").replace(".", " "),
        value=f"{found}, told as {told}",
        says=of_count(supports=found == told),
        basis="traced",
        table="structure",
        cells=(name,),
    )


# ---- N7 -------------------------------------------------------------------------------------------------------------

LARGE = 10**9
"""Parameters from which a model is called large."""
OTHERS_TIE = "A: models tie the head to the embedding"
LLAMA_TIES = "A: LLaMA ties the head to the embedding"
LARGE_DOES_NOT = f"D: models of at least {LARGE:,} parameters do not tie"
SAVED_FIGURE = Figure(
    quantity="A: tying would save",
    printed="131",
    unit="M",
    scale=MILLION,
    ours=lambda row: row["parameters_tying_none"] - row["parameters_tying_head"],
)


def find_tying(tables: Tables) -> Findings:
    """N7. Which published totals are met with the head tied, and which without."""
    evidence: list[Evidence] = []
    tied: dict[bool, list[str]] = {True: [], False: []}
    for _, row in tables.counts.dropna(subset=["published_parameters"]).iterrows():
        is_tied = _is_head_tied(row)
        if is_tied is None:
            continue
        tied[is_tied].append(str(row["point"]))
        is_llama = str(row["point"]).startswith("llama")
        evidence.append(_tying(row, LLAMA_TIES if is_llama else OTHERS_TIE, is_tied=is_tied, supports=is_tied))
        if row["parameters"] >= LARGE:
            evidence.append(_tying(row, LARGE_DOES_NOT, is_tied=is_tied, supports=not is_tied))
    missing = list(_missing(evidence))
    llama = of_model(tables.counts, "llama-2-7b")
    if llama is None:
        missing.append("counts of llama-2-7b")
    else:
        evidence += compared(llama, (SAVED_FIGURE,))
    condition = f"heads are the embedding in {_words(tied[True])}; they are not in {_words(tied[False])}"
    return Findings(evidence=tuple(evidence), missing=tuple(missing), condition=condition)


def _is_head_tied(row: "pd.Series[Any]") -> bool | None:
    """Whether the published total is that of a tied head; None if no tying meets it, or both kinds would."""
    met_by = {
        is_tied
        for tying, is_tied in (("none", False), ("source_target", False), ("head", True), ("all", True))
        if row[f"parameters_tying_{tying}"] == row["published_parameters"]
    }
    if row["architecture"] == "encoder_decoder" and met_by == {False, True}:
        # One matrix is shared either by both sides or by target and head: equally many, and the config tells which.
        return bool(row["tying"] in ("head", "all"))
    return met_by.pop() if len(met_by) == 1 else None


def _tying(row: "pd.Series[Any]", quantity: str, *, is_tied: bool, supports: bool) -> Evidence:
    published = int(row["published_parameters"])
    return Evidence(
        quantity=quantity,
        value=f"published {published:,}: the count with the head {'tied' if is_tied else 'apart'}",
        says=of_count(supports=supports),
        basis="predicted",
        table="counts",
        cells=(str(row["point"]),),
    )


# ---- N10 ------------------------------------------------------------------------------------------------------------

PAPER_MILLIONS = {"transformer-base": 65, "transformer-big": 213}
MODES = {"none": "nothing", "source_target": "both embeddings", "all": "both embeddings and head"}


def find_sharing(tables: Tables) -> Findings:
    """N10. Of three ways to share, whose count comes closest to the paper's."""
    evidence: list[Evidence] = []
    for name, millions in PAPER_MILLIONS.items():
        row = of_model(tables.counts, name)
        if row is None:
            continue
        found = {mode: int(row[f"parameters_tying_{mode}"]) for mode in MODES}
        closest = min(found, key=lambda mode: abs(found[mode] - millions * MILLION))
        told = ", ".join(f"{MODES[mode]} shared {count:,}" for mode, count in found.items())
        evidence.append(
            Evidence(
                quantity="way to share whose count is closest to the paper's",
                value=f"{MODES[closest]}, for {millions}M",
                says=of_count(supports=closest == "all"),
                basis="predicted",
                table="counts",
                cells=(name,),
                note=told,
            )
        )
    return Findings(evidence=tuple(evidence), missing=_missing(evidence), condition="the two models differ")


def _missing(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    return () if evidence else ("counts of named models",)


def _words(names: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(names) or "none"


CLAIMS = (
    Claim(
        id="N4",
        article="A",
        section="§7.3",
        statement="A model has about L 12 d^2 + V d parameters.",
        quantity="relative error of the formula for every named model",
        rule=f"supported if within {ROUGH_TOLERANCE:.0%} for every model, contradicted if for none",
        find=find_rough,
        needs_records=False,
    ),
    Claim(
        id="N6",
        article="C",
        section="§7",
        statement="A decoder-only model with vocabulary 50257, d 512, 6 layers, ffn 2048 and a head of its own has "
        "30-odd million parameters; its logits are [2, 10, 50257].",
        quantity="exact count, and the shape of the built model's logits",
        rule="supported if the count lies in [30M, 40M) and the shape is the same, contradicted if neither",
        find=find_classic,
        needs_records=False,
    ),
    Claim(
        id="N7",
        article="A",
        section="§6.2 (against D §10)",
        statement="A: many models, LLaMA among them, tie the head to the embedding, which saves 131M parameters. "
        "D: large models no longer tie.",
        quantity="whether the published total of each model is the count with a tied head or without",
        rule="A is supported by models that tie, D by large ones that do not; supported if every row agrees, "
        "contradicted if none does",
        find=find_tying,
        needs_records=False,
    ),
    Claim(
        id="N10",
        article="D",
        section="§4",
        statement="In the paper, source and target share one embedding matrix, and the output head uses it again.",
        quantity="counts of the three ways to share, against the paper's totals of base and big",
        rule="supported if the count with all three shared is the closest for both, contradicted if for none",
        find=find_sharing,
        needs_records=False,
    ),
)
