"""Does tensor parallelism need more schemes, and more communication, for an encoder-decoder? Claims P1 and P2.

A scheme of a block is what the plan says of its modules: each module's place in the block, style and detail, without
the name of the stream. A signature is one distinct collective: place in the block, operation, phase and payload. Blocks
treated alike have equal schemes and equal sets of signatures. Left out: time, since counts decide.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from results.claims.verdict import Claim, Evidence, Findings, basis_of, of_count
from results.sites import PARTS
from results.tables import Tables
from results.twins import Pair, cell_of, measured, pairs, select

BlockSets = Mapping[tuple[str, int], frozenset[tuple[Hashable, ...]]]
"""By side and block: a set of choices or signatures, the place in the block first."""

VARIANTS = ("tp", "tp+sp per_block", "tp+sp per_stage")
"""What P2 must be judged on: without sequence parallelism, and with it for both ways to gather the memory."""


# ---- P1: one scheme for every block ---------------------------------------------------------------------------------


def find_schemes(tables: Tables) -> Findings:
    """P1. Distinct schemes and signature sets over the blocks of each run under tensor parallelism."""
    evidence: list[Evidence] = []
    told: set[str] = set()
    counts: dict[str, set[int]] = {}
    apart: set[str] = set()
    differing: set[str] = set()
    for _, run in _tensor_parallel(tables.runs).iterrows():
        schemes = block_schemes(select(tables.plan, run))
        if not schemes:
            continue
        told.add(run["architecture"])
        counts.setdefault(run["architecture"], set()).add(len(set(schemes.values())))
        signatures = block_signatures(select(tables.communication, run))
        evidence += _distinct(run, schemes, signatures)
        if run["architecture"] == "encoder_decoder":
            different, only_decoder = _differences(schemes)
            apart |= only_decoder
            differing |= different
            evidence.append(
                Evidence(
                    quantity="sublayers of both sides that are cut differently",
                    value=f"{len(different)} ({', '.join(sorted(different)) or 'none'})",
                    says=of_count(supports=bool(different)),
                    basis=basis_of(run),
                    table="plan",
                    cells=(cell_of(run),),
                )
            )
    wanted = ("decoder_only", "encoder_decoder")
    missing = tuple(f"a run of {name} with tp >= 2 and a plan" for name in wanted if name not in told)
    numbers = (f"{name} {' or '.join(map(str, sorted(found)))}" for name, found in sorted(counts.items()))
    condition = (
        f"schemes of blocks: {', '.join(numbers)}; sublayers of both sides that are cut differently: "
        f"{_words(differing)}; sublayers of the decoder alone: {_words(apart)}"
    )
    return Findings(evidence=tuple(evidence), missing=missing, condition=condition)


def _words(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def block_schemes(plan: pd.DataFrame) -> BlockSets:
    """The scheme of each block: a set of (place, style, detail)."""
    schemes: dict[tuple[str, int], set[tuple[Hashable, ...]]] = {}
    for row in plan[plan["block"] >= 0].to_dict("records"):
        place = str(row["module"]).partition(".block.")[2].partition(".")[2]
        choices = " ".join(word for word in str(row["detail"]).split() if not word.startswith("stream="))
        schemes.setdefault((row["side"], row["block"]), set()).add((place, row["style"], choices))
    return {block: frozenset(scheme) for block, scheme in schemes.items()}


def block_signatures(communication: pd.DataFrame) -> BlockSets:
    """The collectives of each block: a set of (place, operation, phase, payload of the row, count)."""
    signatures: dict[tuple[str, int], set[tuple[Hashable, ...]]] = {}
    inside = communication[(communication["block_index"] >= 0) & (communication["axis"] == "tp")]
    for row in inside.to_dict("records"):
        names = ("place", "operation", "phase", "payload_bytes", "count")
        block = (row["side"], row["block_index"])
        signatures.setdefault(block, set()).add(tuple(row[name] for name in names))
    return {block: frozenset(signature) for block, signature in signatures.items()}


def _distinct(run: "pd.Series[Any]", schemes: BlockSets, signatures: BlockSets) -> list[Evidence]:
    is_one_stack = run["architecture"] == "decoder_only"
    told = (("schemes", schemes, "plan"), ("sets of signatures", signatures, "communication"))
    return [
        Evidence(
            quantity=f"distinct {name} over {run['architecture']} blocks",
            value=f"{len(set(sets.values()))} of {len(sets)} blocks",
            says=of_count(supports=(len(set(sets.values())) == 1) == is_one_stack),
            basis=basis_of(run),
            table=table,
            cells=(cell_of(run),),
        )
        for name, sets, table in told
        if sets
    ]


def _differences(schemes: BlockSets) -> tuple[set[str], set[str]]:
    """Parts that both sides have and cut differently, and parts that only the decoder has."""
    sides: dict[str, dict[str, set[frozenset[tuple[Hashable, ...]]]]] = {"encoder": {}, "decoder": {}}
    for (side, _), scheme in schemes.items():
        for part in {str(entry[0]).partition(".")[0] for entry in scheme}:
            entries = frozenset(entry for entry in scheme if str(entry[0]).partition(".")[0] == part)
            sides[side].setdefault(part, set()).add(entries)
    encoder, decoder = sides["encoder"], sides["decoder"]
    return {part for part in encoder.keys() & decoder.keys() if encoder[part] != decoder[part]}, {
        part for part in decoder if part not in encoder
    }


# ---- P2: more complex communication ---------------------------------------------------------------------------------


def find_complexity(tables: Tables) -> Findings:
    """P2. Signatures, collectives and bytes of the tp axis, twins side by side on the same layout."""
    evidence: list[Evidence] = []
    told: set[str] = set()
    more: dict[str, dict[str, list[bool]]] = {}
    for pair in pairs(_tensor_parallel(tables.runs)):
        variant = _variant(pair)
        if not pair.has_equal_tokens:
            evidence.append(_unequal_tokens(pair))
            continue
        before = _costs(select(tables.communication, pair.one_stack))
        after = _costs(select(tables.communication, pair.encoder_decoder))
        told.add(variant)
        for quantity in before:
            kind = f"{variant}, matched by {pair.match}:"
            more.setdefault(quantity, {}).setdefault(kind, []).append(after[quantity] > before[quantity])
            evidence.append(_compared(pair, variant, quantity, (before[quantity], after[quantity])))
        evidence.append(_shares(pair, variant, select(tables.communication, pair.encoder_decoder)))
    missing = tuple(f"twins side by side under {variant}" for variant in VARIANTS if variant not in told)
    return Findings(evidence=tuple(evidence), missing=missing, condition=_where_more(more))


def _where_more(more: Mapping[str, Mapping[str, Sequence[bool]]]) -> str:
    """The condition: in how many pairs an encoder-decoder has more of each quantity, by kind where pairs differ."""
    told = []
    for quantity, by_kind in more.items():
        every = [is_more for of_kind in by_kind.values() for is_more in of_kind]
        text = f"{quantity} in {sum(every)} of {len(every)} pairs"
        if 0 < sum(every) < len(every):
            split = (f"{kind} {sum(of_kind)} of {len(of_kind)}" for kind, of_kind in by_kind.items())
            text += f" ({'; '.join(split)})"
        told.append(text)
    return f"more {', more '.join(told)}"


def _tensor_parallel(runs: pd.DataFrame) -> pd.DataFrame:
    told = measured(runs)
    return told[(told["tp"] > 1) & told["architecture"].isin(["decoder_only", "encoder_decoder"])]


def _variant(pair: Pair) -> str:
    run = pair.encoder_decoder
    kept = f" {run['saved_input']}" if run["saved_input"] != "shard" else ""
    whole = " whole vocabulary" if run["layout_vocabulary"] == "whole" else ""
    return f"tp+sp {run['memory_gather']}{kept}" if run["sp"] else f"tp{whole}"


def _costs(communication: pd.DataFrame) -> dict[str, int]:
    """What makes communication complex, of one step on the tp axis; of the busiest rank where ranks differ."""
    events = communication[(communication["axis"] == "tp") & (communication["part"] != "gradients")]
    one = events["payload_bytes"] // events["count"]
    kinds = set(zip(events["part"], events["operation"], events["stream"], events["phase"], one, strict=True))
    inside = events[events["block_index"] >= 0]
    blocks = inside.groupby(["rank", "side", "block_index"])["count"].sum()
    by_rank = events.groupby("rank")[["count", "wire_bytes"]].sum()
    return {
        "distinct signatures": len(kinds),
        "collectives of a block": int(blocks.max()) if len(blocks) else 0,
        "collectives of a step": int(by_rank["count"].max()) if len(by_rank) else 0,
        "bytes sent in a step": int(by_rank["wire_bytes"].max()) if len(by_rank) else 0,
    }


def _compared(pair: Pair, variant: str, quantity: str, costs: tuple[int, int]) -> Evidence:
    before, after = costs
    times = f", x{after / before:.3f}" if before else ""
    return Evidence(
        quantity=quantity,
        value=f"decoder-only {before:,}, encoder-decoder {after:,}{times}",
        says=of_count(supports=after > before),
        basis=basis_of(pair.encoder_decoder),
        table="communication",
        cells=pair.cells,
        note=f"{variant}; matched by {pair.match}; {pair.encoder_decoder['layout_label']}",
    )


def _shares(pair: Pair, variant: str, communication: pd.DataFrame) -> Evidence:
    """Where the encoder-decoder's bytes of the tp axis are sent, and how many of them carry the memory."""
    events = communication[(communication["axis"] == "tp") & (communication["part"] != "gradients")]
    total = int(events["wire_bytes"].sum())
    sums = events.groupby("part")["wire_bytes"].sum()
    streams = events.groupby("stream")["wire_bytes"].sum()
    by_stream = ", ".join(f"{stream} {int(size):,}" for stream, size in streams.items())
    told = [f"{part} {sums[part] / total:.1%}" for part in PARTS if total and part in sums.index]
    return Evidence(
        quantity="bytes by part of the model",
        value=f"{', '.join(told) or 'nothing sent'}; bytes by stream: {by_stream or 'none'}",
        says="context",
        basis=basis_of(pair.encoder_decoder),
        table="communication",
        cells=(cell_of(pair.encoder_decoder),),
        note=variant,
    )


def _unequal_tokens(pair: Pair) -> Evidence:
    tokens = [run["tokens_per_step"] for run in (pair.one_stack, pair.encoder_decoder)]
    return Evidence(
        quantity="twins side by side",
        value=f"not compared: tokens per step differ, {tokens[0]} and {tokens[1]}",
        says="context",
        basis=basis_of(pair.encoder_decoder),
        table="runs",
        cells=pair.cells,
    )


CLAIMS = (
    Claim(
        id="P1",
        article="A",
        section="§8.2, §8.3",
        statement="A decoder-only model needs one scheme of tensor parallelism, used again by every block; "
        "an encoder-decoder needs separate ones.",
        quantity="distinct schemes and distinct sets of collectives over the blocks of a model",
        rule="supported if decoder-only blocks have one scheme and one set of collectives, encoder-decoder blocks "
        "several, and the sides differ in the sublayers that both have; contradicted if none of it holds",
        find=find_schemes,
    ),
    Claim(
        id="P2",
        article="A",
        section="§8.2",
        statement="Cross-attention takes keys and values from the encoder, which makes the communication of tensor "
        "parallelism more complex.",
        quantity="distinct signatures, collectives and bytes of the tp axis, per block and step, twins side by side",
        rule="supported if the encoder-decoder has more of each on every layout with equal tokens per step, "
        "contradicted if it has more of none; needs tp, and tp+sp with the memory gathered per block and per stage",
        find=find_complexity,
    ),
)
