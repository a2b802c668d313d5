"""Do the two sides of an encoder-decoder have to be handled apart under sequence parallelism? Claim P5.

A sequence layout is a length that a stream has on a rank: streams of equal length are handled alike, streams of unequal
length are padded, sharded and gathered each on its own. What that costs is told beside it: padding waste, bytes by
stream, and how evenly valid tokens fall on the ranks.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from results.claims.verdict import Claim, Evidence, Findings, basis_of, of_count
from results.tables import Tables
from results.twins import cell_of, measured, pairs, select

ARCHITECTURES = ("decoder_only", "encoder_decoder")


def find_lengths(tables: Tables) -> Findings:
    """P5. Lengths and streams under sequence parallelism, and what padding two streams costs on real text."""
    runs = measured(tables.runs)
    sharded = runs[runs["sp"].astype(bool) & runs["architecture"].isin(ARCHITECTURES)]
    evidence: list[Evidence] = []
    lengths: dict[bool, list[int]] = {}
    for _, run in sharded.iterrows():
        if run["architecture"] == "encoder_decoder":
            is_equal = bool(run["source_length"] == run["target_length"])
            lengths.setdefault(is_equal, []).append(len(_shards(run)))
        events = select(tables.communication, run)
        evidence += [*_layouts(run, events), _bytes(run, events)]
    real = runs[~runs["data_source"].isin(["", "synthetic"])]
    compared = [run for pair in pairs(real) for run in (pair.one_stack, pair.encoder_decoder)]
    evidence += _padding(compared)
    missing = [f"a run of {name} with sp" for name in ARCHITECTURES if name not in set(sharded["architecture"])]
    if not compared:
        missing.append("twins side by side on real text")
    return Findings(
        evidence=tuple(evidence),
        missing=tuple(missing),
        condition="lengths that an encoder-decoder shards: "
        + ", ".join(
            f"{' or '.join(sorted({str(count) for count in told}))} where source and target are "
            f"{'equally' if is_equal else 'unequally'} long ({len(told)} runs)"
            for is_equal, told in sorted(lengths.items())
        ),
    )


def _layouts(run: "pd.Series[Any]", events: pd.DataFrame) -> Iterator[Evidence]:
    """How many lengths a rank holds shards of, and how many streams its collectives carry."""
    is_one_stack = run["architecture"] == "decoder_only"
    inside = events[(events["axis"] == "tp") & (events["block_index"] >= 0)]
    streams = sorted({str(stream) for stream in inside["stream"]} - {"none"})
    for name, told, table in (
        ("sequence layouts", _shards(run), "runs"),
        ("streams gathered in blocks", streams, "communication"),
    ):
        if told:
            yield Evidence(
                quantity=f"{name} of {run['architecture']}",
                value=f"{len(told)} ({', '.join(map(str, told))})",
                says=of_count(supports=(len(told) == 1) == is_one_stack),
                basis=basis_of(run),
                table=table,
                cells=(cell_of(run),),
                note=f"lengths {' and '.join(map(str, _lengths(run)))} over {run['tp']} ranks",
            )


def _lengths(run: "pd.Series[Any]") -> list[int]:
    return [int(length) for length in (run["source_length"], run["target_length"]) if length]


def _shards(run: "pd.Series[Any]") -> list[int]:
    """Distinct lengths that a rank holds."""
    return sorted({-(-length // int(run["tp"])) for length in _lengths(run)})


def _bytes(run: "pd.Series[Any]", events: pd.DataFrame) -> Evidence:
    inside = events[(events["axis"] == "tp") & (events["stream"] != "none")]
    sums = inside.groupby("stream")["wire_bytes"].sum()
    return Evidence(
        quantity="bytes by stream, and tokens over ranks",
        value=f"{', '.join(f'{stream} {int(total):,} bytes' for stream, total in sums.items()) or 'nothing sent'}; "
        f"largest over mean of valid tokens {run['imbalance_valid_tokens']:.3f}",
        says="context",
        basis=basis_of(run),
        table="communication",
        cells=(cell_of(run),),
    )


def _padding(runs: list["pd.Series[Any]"]) -> Iterator[Evidence]:
    """Padding of the batches that the twins were run on, once for each batch that an architecture read."""
    batches: dict[tuple[Any, ...], list[pd.Series[Any]]] = {}
    for run in runs:
        names = ("architecture", "data_source", "num_sequences", "source_length", "target_length", "padding_waste")
        batches.setdefault(tuple(run[name] for name in names), []).append(run)
    for told in batches.values():
        run = told[0]
        sides = [side for side in ("source", "target") if run[f"{side}_length"]]
        waste = ", ".join(f"{side} {run[f'{side}_padding_waste']:.1%}" for side in sides)
        yield Evidence(
            quantity=f"padding of {run['architecture']} on real text",
            value=f"{run['padding_waste']:.1%} ({waste})",
            says="context",
            basis=basis_of(run),
            table="runs",
            cells=tuple(dict.fromkeys(cell_of(row) for row in told)),
            note=f"{run['data_source']}, {run['num_sequences']} sequences",
        )


CLAIMS = (
    Claim(
        id="P5",
        article="A",
        section="§8.2",
        statement="The two sides of an encoder-decoder may have different lengths and are handled apart by sequence "
        "parallelism; a decoder-only model has one length.",
        quantity="distinct lengths and streams that are sharded; padding waste, bytes by stream and tokens by rank",
        rule="supported if every encoder-decoder shards several lengths and streams and every decoder-only model one; "
        "contradicted if none does; needs both under sp, and twins on real text",
        find=find_lengths,
    ),
)
