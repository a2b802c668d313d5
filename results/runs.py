"""What does one run come to: one row of `runs.csv`, and the columns that name a run in every table.

Samples stay in the row under their field's name, as a JSON list, so that a CSV file alone can be compared. Next to them
stand their median and its interval (`_median`, `_low`, `_high`). Sums over ranks, the largest rank and balance over
stages follow; a run that did not end well has a status, a reason and empty cells.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from parallel.layouts import Layout
from parallel.placement import stage_ranks
from parallel.schedule import Table
from parallel.schedules import BUILDERS
from results.balance import imbalance, padding_waste, rank_bubbles, wall_bubbles
from results.intervals import Interval, Samples, median
from results.measured_steps import MeasuredStep, is_pipeline
from results.schema import DataFacts, Record

Row = dict[str, Any]

IDENTITY = (
    "machine",
    "experiment",
    "cell",
    "status",
    "engine",
    "compiled",
    "architecture",
    "model",
    "twins",
    "match",
    "is_control",
    "layout_label",
    "tp",
    "pp",
    "dp",
    "cp",
    "sp",
    "zero",
    "gradient_bucket_bytes",
    "cut",
    "chunks",
    "placement",
    "transport",
    "schedule",
    "memory_gather",
    "saved_input",
    "layout_vocabulary",
    "microbatches",
    "recompute",
    "attention",
    "vocabulary",
    "source_length",
    "target_length",
    "tokens_per_step",
    "world_size",
    "dtype",
    "device",
    "backend",
)
"""Columns that every table begins with; `machine` is the host name, `vocabulary` the model's rows, and
`layout_vocabulary` whether tp ranks share them."""

KEY = ("machine", "experiment", "cell")
"""The columns that tell one run from all others."""

_BOUNDS = ("_median", "_low", "_high")


def identity(record: Record) -> Row:
    """The columns that name a run. What a refused layout or model does not tell stays empty."""
    layout, data = layout_of(record), record.data
    cut = layout.get("cut", "")
    told: Row = {
        "machine": record.provenance.hostname,
        "architecture": record.model.get("architecture", ""),
        "model": record.model.get("name", ""),
        "cut": cut if isinstance(cut, str) else ",".join(map(str, cut)),
        "layout_vocabulary": layout.get("vocabulary"),
        "vocabulary": record.model.get("vocabulary"),
        "source_length": data.source_length if data else None,
        "target_length": data.target_length if data else None,
        "tokens_per_step": data.source_valid_tokens + data.target_valid_tokens if data else None,
    }
    of_record = {field.name for field in dataclasses.fields(Record)}
    return {
        name: told[name] if name in told else getattr(record, name) if name in of_record else layout.get(name)
        for name in IDENTITY
    }


def layout_of(record: Record) -> dict[str, Any]:
    """The layout with every default told; of a cell that was refused, just what was asked for."""
    return Layout.from_dict(record.layout).to_dict() if record.status == "ok" else record.layout


def run_row(record: Record) -> Row:
    """The row of one run."""
    return {
        **identity(record),
        "reason": record.reason,
        "fingerprint": record.fingerprint,
        "commit": record.provenance.commit,
        "seed": record.seed,
        "oversubscribed": record.oversubscribed,
        "ledger_matches_recorder": record.ledger_matches_recorder,
        "match_mismatch": record.match_mismatch,
        **{name: record.model.get(name) for name in ("width", "ffn_width", "num_encoder_blocks", "num_decoder_blocks")},
        "tying": record.model.get("tying", ""),
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        **_parity(record),
        **_data(record.data),
        **_times(record),
        **_bytes(record),
        **_balance(record),
    }


def to_text(samples: Samples) -> str:
    """Samples as they stand in a cell of a table."""
    return json.dumps(list(samples))


def from_text(text: Any) -> list[float]:
    """The inverse of `to_text`; an empty cell has no samples. Raises ValueError for anything else."""
    if not isinstance(text, str) or not text:
        return []
    samples = json.loads(text)
    if not isinstance(samples, list) or not all(isinstance(sample, int | float) for sample in samples):
        raise ValueError(f"{text!r:.40} is no list of samples")
    return [float(sample) for sample in samples]


def bounded(name: str, interval: Interval) -> Row:
    """Three columns of an interval."""
    return dict(zip((name + bound for bound in _BOUNDS), (interval.value, interval.low, interval.high), strict=True))


def stage_durations(record: Record) -> tuple[list[Samples], list[Samples]]:
    """Forward and backward busy seconds of every stage, one list a stage; empty unless every stage was timed."""
    forward: list[Samples] = [stage.forward_busy_seconds for stage in record.stages]
    backward: list[Samples] = [stage.backward_busy_seconds for stage in record.stages]
    return (forward, backward) if all(forward) and all(backward) else ([], [])


def _parity(record: Record) -> Row:
    names = ("loss_error", "gradient_error", "gradient_norm_error", "weight_error", "replica_error")
    return {f"parity_{name}": getattr(record.parity, name) if record.parity else None for name in names}


def positions(data: DataFacts) -> tuple[int, int]:
    """Positions of both streams that a step computes on: padded by the batch, then for sharding; (batch, sharding)."""
    batch = data.num_sequences * (data.source_length + data.target_length)
    return batch, data.source_sharding_padding_tokens + data.target_sharding_padding_tokens


def positions_row(run: "pd.Series[Any]") -> tuple[int, int, int]:
    """What the positions of a step of `runs.csv` hold: tokens, padding of the batch, padding for sharding."""
    valid = int(run["source_valid_tokens"] + run["target_valid_tokens"])
    batch = int(run["num_sequences"] * (run["source_length"] + run["target_length"]))
    sharding = int(run["source_sharding_padding_tokens"] + run["target_sharding_padding_tokens"])
    return valid, batch - valid, sharding


def _data(data: DataFacts | None) -> Row:
    names = (
        "num_sequences",
        "source_valid_tokens",
        "target_valid_tokens",
        "loss_tokens",
        "truncated_sequences",
        "source_sharding_padding_tokens",
        "target_sharding_padding_tokens",
    )
    row: Row = {"data_source": data.source if data else "", "loss_on": data.loss_on if data else ""}
    row |= {name: getattr(data, name) if data else None for name in names}
    shares: dict[str, float | None] = dict.fromkeys(("source_padding_waste", "target_padding_waste", "padding_waste"))
    if data:
        batch, sharding = positions(data)
        source = data.num_sequences * data.source_length + data.source_sharding_padding_tokens
        shares = {
            "source_padding_waste": padding_waste(data.source_valid_tokens, source),
            "target_padding_waste": padding_waste(data.target_valid_tokens, batch + sharding - source),
            "padding_waste": padding_waste(data.source_valid_tokens + data.target_valid_tokens, batch + sharding),
        }
    return {**row, **shares}


def _times(record: Record) -> Row:
    """Samples of every step with median and bounds: times (means over ranks), bubble, imbalance over the stages."""
    ranks = [rank for rank in record.ranks if rank.busy_seconds]
    waiting = [rank for rank in record.ranks if rank.wait_seconds]
    forward, backward = stage_durations(record)
    samples: dict[str, Samples] = {
        "step_seconds": record.step_seconds,
        "busy_seconds": _mean([rank.busy_seconds for rank in ranks]),
        "wait_seconds": _mean([rank.wait_seconds for rank in waiting]),
        "bubble": _bubble(record),
        "imbalance_busy_seconds": imbalance(np.add(forward, backward)).tolist() if forward else [],
    }
    row: Row = {"num_timed_steps": len(record.step_seconds)}
    for name, values in samples.items():
        row[name] = to_text(values) if values else None
        row |= bounded(name, median(values))
    row["bubble_definition"] = _bubble_definition(record) if samples["bubble"] else ""
    return row


def _mean(lists: Sequence[Samples]) -> list[float]:
    means: list[float] = np.mean(np.asarray(lists), axis=0).tolist() if lists else []
    return means


def _bubble_definition(record: Record) -> str:
    return "schedule" if record.device == "cpu" else "wall"


def _bubble(record: Record) -> list[float]:
    """Mean over pipeline ranks (CPUs: on the played schedule) or ranks (GPUs: of the wall time), for every step."""
    if _bubble_definition(record) == "wall":
        ranks = [rank for rank in record.ranks if rank.busy_seconds]
        return _mean([wall_bubbles(rank.busy_seconds, rank.step_seconds or record.step_seconds) for rank in ranks])
    forward, backward = stage_durations(record)
    if not forward or record.status != "ok":
        return []
    layout = Layout.from_dict(record.layout)
    if not is_pipeline(record) and layout.schedule not in BUILDERS:
        # Without spans nothing tells the order of a list schedule, which was made from costs.
        return []
    forward_of_one, backward_of_one = (
        np.asarray(forward) / layout.microbatches,
        np.asarray(backward) / layout.microbatches,
    )
    table = _table(record, layout)
    played = rank_bubbles(table, forward_of_one, backward_of_one)
    means: list[float] = played.mean(axis=0).tolist()
    return means


def _table(record: Record, layout: Layout) -> Table:
    """As it was executed, or by the name of the schedule."""
    if is_pipeline(record):
        return MeasuredStep(record).table
    return BUILDERS[layout.schedule](stage_ranks(layout.placement, layout.pp, layout.chunks), layout.microbatches)


def _bytes(record: Record) -> Row:
    """Largest rank's storage, and what all ranks and the busiest rank sent; empty where nothing was counted."""
    row: Row = {}
    for name in ("peak_saved_bytes", "peak_allocated_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        row[name] = max((held for rank in record.ranks if (held := getattr(rank, name)) is not None), default=None)
    row["parameters"] = sum(stage.parameters for stage in record.stages) if record.stages else None
    row["forward_flops"] = sum(stage.forward_flops for stage in record.stages) if record.stages else None
    sent: dict[int, int] = {rank.rank: 0 for rank in record.ranks}
    collectives = dict(sent)
    transfers = dict(sent)
    for event in record.communication:
        sent[event.rank] = sent.get(event.rank, 0) + event.wire_bytes
        counts = transfers if event.operation in ("send", "receive") else collectives
        counts[event.rank] = counts.get(event.rank, 0) + event.count * (event.operation != "receive")
    for name, counted in (("sent_bytes", sent), ("num_collectives", collectives), ("num_sends", transfers)):
        row[name] = sum(counted.values()) if record.ranks else None
        row[f"{name}_busiest_rank"] = max(counted.values()) if record.ranks else None
    return row


def _balance(record: Record) -> Row:
    """Imbalance over the stages of what is counted, and over the ranks of the tokens they compute on."""
    names: Mapping[str, Sequence[Any]] = {
        "forward_flops": record.stages,
        "parameters": record.stages,
        "peak_saved_bytes": record.stages,
        "valid_tokens": record.ranks,
    }
    return {
        f"imbalance_{name}": float(imbalance([getattr(part, name) for part in parts])) if parts else None
        for name, parts in names.items()
    }
