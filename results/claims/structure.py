"""Do built models have the shapes and steps that the articles draw? Claims C2, N8 and N9.

Read off models that were built (`results/structure.csv`, which `python -m launch.structure` writes). A mask has the
shape of what it is laid over: every query of every sequence against every key.
"""

from collections.abc import Mapping

from results.claims.models import facts, shape_evidence
from results.claims.printed import met
from results.claims.verdict import Claim, Evidence, Findings
from results.tables import Tables

SPEECH = {
    "logits": "16 50 26",
    "encoder.self_attention.read": "16 100 100",
    "decoder.self_attention.read": "16 50 50",
    "decoder.cross_attention.read": "16 50 100",
    "decoder.self_attention.read_causal": "True",
    "decoder.cross_attention.read_causal": "False",
}
"""Of 16 sequences of 100 frames and 50 labels."""

CROSS = {
    "speech": {"decoder.cross_attention.read": "16 50 100", "decoder.cross_attention.read_causal": "False"},
    "transformer-base": {"decoder.cross_attention.read": "2 5 7", "decoder.cross_attention.read_causal": "False"},
}
"""Queries of the target against keys of the source: 50 over 100, and 5 over 7."""

SIZES = {"blocks": "6", "width": "512", "heads": "8", "ffn_width": "2048"}
NUM_STEPS = {"encoder": "6", "decoder": "9"}


def find_cross_scores(tables: Tables) -> Findings:
    """C2. What cross-attention's scores are laid over, and whether a causal mask covers them."""
    parts = [_findings(tables, name, told) for name, told in CROSS.items()]
    evidence = tuple(row for part in parts for row in part.evidence)
    missing = tuple(line for part in parts for line in part.missing)
    return Findings(evidence=evidence, missing=missing, condition=met(evidence))


def find_speech(tables: Tables) -> Findings:
    """N8. Logits of the speech-style model, and what its three masks are laid over."""
    return _findings(tables, "speech", SPEECH)


def find_steps(tables: Tables) -> Findings:
    """N9. Sizes of Transformer base, and the steps of its two blocks."""
    told = {f"{side}.{name}": size for side in NUM_STEPS for name, size in SIZES.items()}
    findings = _findings(tables, "transformer-base", told)
    found = facts(tables.structure, "transformer-base")
    evidence: list[Evidence] = list(findings.evidence)
    missing = list(findings.missing)
    for side, count in NUM_STEPS.items():
        steps = found.get(f"{side}.steps")
        if steps is None:
            missing.append(f"{side}.steps of transformer-base")
            continue
        row = shape_evidence("transformer-base", f"steps of the {side} block", str(len(steps.split())), count)
        evidence.append(row)
    return Findings(evidence=tuple(evidence), missing=tuple(missing), condition=met(evidence))


def _findings(tables: Tables, name: str, told: Mapping[str, str]) -> Findings:
    found = facts(tables.structure, name)
    evidence = tuple(shape_evidence(name, fact, found[fact], value) for fact, value in told.items() if fact in found)
    missing = tuple(f"{fact} of {name}" for fact in told if fact not in found)
    return Findings(evidence=evidence, missing=missing, condition=met(evidence))


_RULE = "supported if every fact read off the built model is the article's, contradicted if none is"

CLAIMS = (
    Claim(
        id="C2",
        article="A",
        section="§4.3",
        statement="The scores of cross-attention are Nt x Ns, which is not square, and have no causal mask.",
        quantity="shape of queries against keys in the cross-attention of built models, and whether it is causal",
        rule=_RULE,
        find=find_cross_scores,
        needs_records=False,
    ),
    Claim(
        id="N8",
        article="A",
        section="§9.8",
        statement="The speech-style model gives logits (16, 50, 26); its masks are (16, 100, 100) over padding, "
        "(16, 50, 50) causal and (16, 50, 100) over the memory.",
        quantity="shapes of the built model's logits, and of queries against keys in its three kinds of attention",
        rule=_RULE,
        find=find_speech,
        needs_records=False,
    ),
    Claim(
        id="N9",
        article="A",
        section="§2.2 (and B §2, D §1 to §3)",
        statement="The original Transformer has 6 layers a side, d 512, 8 heads and ffn 2048; an encoder block takes 6 "
        "steps, a decoder block 9.",
        quantity="sizes of the built model, and the steps of its blocks: sublayers, residual sums, norms",
        rule=_RULE,
        find=find_steps,
        needs_records=False,
    ),
)
