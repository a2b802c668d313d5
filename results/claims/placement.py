"""When does a model need tensor parallelism, when a pipeline, when both? Claim P8.

The smallest layouts that fit, by way to divide a model (`results/smallest.py`): where a block alone is larger than a
device nothing helps but cutting it; where tensor parallelism inside a node does not suffice, stages have to. The model
and device are enough to name a row's group, and ZeRO stands beside them for comparison.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from results.claims.verdict import Claim, Evidence, Findings, of_count
from results.tables import Tables

DOUBLED_TOLERANCE = 0.01
"""A block at twice the width has four times the parameters but for biases and norms."""
WAYS = ("none", "tp", "pp", "tp+pp")


def find_needs(tables: Tables) -> Findings:
    """P8. Blocks at twice the width, and what fits on one device, with one axis, with both."""
    evidence = [*_doubled(tables.counts)]
    needs: dict[str, list[str]] = {"one axis is enough": [], "only both fit": [], "not even both fit": []}
    num_too_large = 0
    for _, rows in tables.fits.groupby(["model", "device_bytes"], sort=False):
        fewest = {str(row["way"]): row["num_devices"] for _, row in rows.iterrows()}
        if any(way not in fewest for way in WAYS):
            continue
        device = int(rows["device_bytes"].iloc[0])
        name = f"{rows['model'].iloc[0]} on {device // 10**9} GB"
        num_too_large += bool((rows["block_state_bytes"] > device).any())
        evidence += _large_block(name, rows, fewest, device)
        if not pd.isna(fewest["none"]):
            continue
        evidence += _both(name, rows, fewest)
        is_enough = not (pd.isna(fewest["tp"]) and pd.isna(fewest["pp"]))
        kind = "one axis is enough" if is_enough else "only both fit"
        needs["not even both fit" if not is_enough and pd.isna(fewest["tp+pp"]) else kind].append(name)
    missing = [] if any(needs.values()) else ["a model that one device cannot train"]
    missing += [] if num_too_large else ["a block that one device cannot train"]
    told = [f"{kind} for {', '.join(names)}" for kind, names in needs.items() if names]
    return Findings(evidence=tuple(evidence), missing=tuple(missing), condition="; ".join(told))


def _doubled(counts: pd.DataFrame) -> Iterator[Evidence]:
    for _, row in counts.iterrows():
        for side in ("encoder", "decoder"):
            before, after = row[f"{side}_block"], row[f"{side}_block_doubled"]
            if pd.isna(before):
                continue
            yield Evidence(
                quantity="parameters of a block at twice the width",
                value=f"x{after / before:.4f}: {int(before):,} to {int(after):,}",
                says=of_count(supports=abs(after / before / 4 - 1) <= DOUBLED_TOLERANCE),
                basis="predicted",
                table="counts",
                cells=(str(row["point"]),),
                note=f"{side} block",
            )


def _large_block(name: str, rows: pd.DataFrame, fewest: dict[str, Any], device: int) -> Iterator[Evidence]:
    """Where one block's states exceed a device, neither it alone nor stages may fit."""
    size = int(rows["block_state_bytes"].iloc[0])
    if size <= device:
        return
    needs_tensor = pd.isna(fewest["none"]) and pd.isna(fewest["pp"])
    yield Evidence(
        quantity="a block larger than a device needs tensor parallelism",
        value=f"a block needs {size:,} bytes; stages alone {_devices(fewest['pp'])}, both {_devices(fewest['tp+pp'])}",
        says=of_count(supports=bool(needs_tensor)),
        basis="predicted",
        table="fits",
        cells=tuple(rows["point"]),
        note=name,
    )


def _both(name: str, rows: pd.DataFrame, fewest: dict[str, Any]) -> Iterator[Evidence]:
    """Of models that one device cannot train: whether both axes are needed."""
    yield Evidence(
        quantity="both tensor and pipeline parallelism are needed",
        value=", ".join(f"{way} {_devices(fewest[way])}" for way in fewest if way != "none"),
        says=of_count(supports=bool(pd.isna(fewest["tp"]) and pd.isna(fewest["pp"]))),
        basis="predicted",
        table="fits",
        cells=tuple(rows["point"]),
        note=name,
    )


def _devices(count: Any) -> str:
    return "nowhere" if pd.isna(count) else f"from {int(count)} devices"


CLAIMS = (
    Claim(
        id="P8",
        article="A",
        section="§7.3",
        statement="Twice the width quadruples a block's parameters, until one device cannot hold a layer, which asks "
        "for tensor parallelism; depth asks for a pipeline; deployments often need both.",
        quantity="parameters of a block at twice the width; the fewest devices on which each model trains, by axis, "
        "for devices of 24, 40 and 80 GB",
        rule=f"supported if blocks grow fourfold within {DOUBLED_TOLERANCE:.0%}, a block larger than a device is never "
        "trained by stages alone, and no model beyond one device is trained with one axis",
        find=find_needs,
        needs_records=False,
    ),
)
