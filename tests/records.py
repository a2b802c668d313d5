"""What would a run have written? Complete records, made from plans and closed forms instead of processes.

Plan, stages and edges come from the real torch-free modules, communication from the plan's entries by the rules of
tensor and sequence parallelism, FLOPs and parameters from closed forms, times from FLOPs with seeded noise. Just real
enough for tables, claims and reports to have something to say; nothing here checks the engine.
"""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.named import named_model
from parallel.layouts import Layout
from parallel.plan import Plan
from parallel.plans import plan
from results.files import write_text
from results.schema import (
    SCHEMA_VERSION,
    DataFacts,
    FigureFacts,
    OperatorFacts,
    ParityFacts,
    PlanFacts,
    Provenance,
    Record,
    Status,
)
from results.tables import Tables, build
from tests.synthetic_events import communication, edges
from tests.synthetic_facts import NUM_SEQUENCES, Steps, blocks, busy, ranks, stages
from tests.synthetic_spans import actions, spans

SOURCE_LENGTH, TARGET_LENGTH = 24, 12

ENCODER_DECODER = named_model("tiny-encoder-decoder")
DECODER_ONLY = named_model("tiny-decoder")
ENCODER_ONLY = named_model("tiny-encoder")


def record(
    config: ModelConfig = ENCODER_DECODER,
    layout: Layout | None = None,
    *,
    lengths: tuple[int, int] = (SOURCE_LENGTH, TARGET_LENGTH),
    noise: float = 0.01,
    sample_seed: int = 0,
    **changes: Any,
) -> Record:
    """A run that ended well. `lengths` are those of a pair of texts: a model with one stack reads their sum."""
    layout = layout or Layout()
    partition = plan(config, layout)
    source, target = _streams(config, lengths)
    steps = Steps(noise=noise, seed=f"{sample_seed} {config.name} {layout.label}")
    staged = stages(partition, (source, target), steps)
    step_seconds = steps.samples(1.2 * max(busy(stage) for stage in staged))
    typical = sorted(range(len(step_seconds)), key=lambda index: step_seconds[index])[(len(step_seconds) - 1) // 2]
    cell = f"{config.name} {layout.label}"
    fields: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "experiment": "synthetic",
        "cell": cell,
        "fingerprint": f"{sum(map(ord, cell)):08x}",
        "status": "ok",
        "reason": "",
        "engine": "native",
        "compiled": False,
        "twins": "tiny",
        "match": "none" if config.has_cross_attention else "depth",
        "match_mismatch": 0.0,
        "is_control": False,
        "model": config.to_dict(),
        "layout": layout.to_dict(),
        "layout_label": layout.label,
        "world_size": layout.world_size,
        "dtype": "float32",
        "device": "cpu",
        "backend": "gloo",
        "oversubscribed": layout.world_size > 2,
        "seed": 1,
        "data": _data(config, layout, (source, target)),
        "parity": ParityFacts(
            model="tiny",
            loss_error=1e-16,
            gradient_error=2e-14,
            gradient_norm_error=1e-15,
            weight_error=3e-15,
            replica_error=0.0,
        ),
        "ledger_matches_recorder": True,
        "loss": 5.5,
        "gradient_norm": 1.25,
        "warmup_seconds": [0.5],
        "step_seconds": step_seconds,
        "typical_step": typical,
        "plan": list(_plan(partition)),
        "ranks": ranks(partition, staged, step_seconds, (source, target)),
        "stages": staged,
        "blocks": blocks(partition, (source, target), steps),
        "actions": actions(partition, staged),
        "spans": spans(partition, staged, typical),
        "profile": None,
        "communication": list(communication(partition, (source, target))),
        "edges": list(edges(partition, (source, target))),
        "operators": [OperatorFacts(operator="aten.mm", shapes="[32, 32] [32, 64]", phase="forward", count=4)],
        "parts": [],
        "figures": [
            FigureFacts(
                rank=0, quantity="forward_flops", predicted=4096, traced=4096, measured=4096, must_be_exact=True
            )
        ],
        "provenance": Provenance(
            commit="0123456",
            created="2026-01-02T03:04:05Z",
            hostname="bench",
            processor="test processor",
            num_cores=2,
            memory_bytes=8 * 2**30,
            accelerator="none",
            versions={"python": "3.11.9", "torch": "2.13.0"},
        ),
    }
    return Record(**(fields | changes))


def unsuccessful(status: Status, reason: str, layout: Layout, config: ModelConfig = ENCODER_DECODER) -> Record:
    """A run that left nothing but a status and a reason."""
    return dataclasses.replace(
        record(config),
        cell=f"{config.name} {layout.label}",
        status=status,
        reason=reason,
        layout=layout.to_dict(),
        layout_label=layout.label,
        world_size=layout.world_size,
        data=None,
        parity=None,
        ledger_matches_recorder=False,
        loss=None,
        gradient_norm=None,
        warmup_seconds=[],
        step_seconds=[],
        typical_step=-1,
        plan=[],
        ranks=[],
        stages=[],
        blocks=[],
        actions=[],
        spans=[],
        communication=[],
        edges=[],
        operators=[],
        parts=[],
        figures=[],
    )


def by_another_engine(told: Record) -> Record:
    """The same run by an engine that cannot be looked into, and that took twice as long."""
    return dataclasses.replace(
        told,
        engine="torch",
        cell=f"{told.cell} torch",
        ledger_matches_recorder=None,
        step_seconds=[2 * seconds for seconds in told.step_seconds],
        plan=[],
        ranks=[dataclasses.replace(rank, peak_saved_bytes=None) for rank in told.ranks],
        stages=[],
        blocks=[],
        communication=[
            dataclasses.replace(row, axis="unknown", site="unknown", stream="unknown", phase="unknown")
            for row in told.communication
        ],
        edges=[],
        operators=[],
        parts=[],
        figures=[],
    )


def study(noise: float = 0.01) -> list[Record]:
    """Twins over the layouts that the claims ask for, a control, and a cell for every way not to end well.

    Without noise every interval is a point, so that what is made of the records is the same with every library.
    """
    pipeline = Layout(pp=2, microbatches=4)
    layouts = (
        Layout(tp=2, microbatches=2),
        Layout(tp=2, sp=True, microbatches=2, memory_gather="per_block"),
        Layout(tp=2, sp=True, microbatches=2),
        pipeline,
        pipeline.replace(cut="aligned"),
        Layout(pp=3, microbatches=4),
    )
    records = [record(ENCODER_DECODER, layout, noise=noise) for layout in layouts]
    for config in (DECODER_ONLY, ENCODER_ONLY):
        records += [
            record(config, layout, noise=noise)
            for layout in layouts
            if layout.cut != "aligned" and not (layout.sp and layout.memory_gather == "per_block")
        ]
    control = record(ENCODER_DECODER, pipeline, noise=noise, sample_seed=1)
    records.append(dataclasses.replace(control, cell=f"{control.cell} control", is_control=True))
    return [
        *records,
        unsuccessful("unsupported", "4 heads over tp=8: tp must divide 4; try 1, 2, 4", Layout(tp=8)),
        unsuccessful("out_of_memory", "rank 1 (pp=1): 12 GiB wanted, 8 GiB there", Layout(dp=2)),
        unsuccessful("failed", "rank 0 | connection closed\nby peer", Layout(dp=4)),
        unsuccessful("skipped", "engine fairscale is not installed", Layout(pp=4)),
    ]


def study_tables(noise: float = 0.01) -> Tables:
    """The tables of the study."""
    return build(study(noise))


def write(folder: Path, records: list[Record]) -> list[Path]:
    """Write records the way a run does: one file each, `<machine>/<experiment>/<number>.json`."""
    paths = []
    for index, entry in enumerate(records):
        path = folder / entry.provenance.hostname / entry.experiment / f"{index:03d}.json"
        write_text(path, json.dumps(entry.to_dict()))
        paths.append(path)
    return paths


# ---- parts ----------------------------------------------------------------------------------------------------------


def _streams(config: ModelConfig, lengths: tuple[int, int]) -> tuple[int, int]:
    if config.has_cross_attention:
        return lengths
    return (sum(lengths), 0) if config.has_encoder else (0, sum(lengths))


def _data(config: ModelConfig, layout: Layout, lengths: tuple[int, int]) -> DataFacts:
    """Two of the source positions and one of the target of every sequence are padding, three of a joint stream."""
    source, target = lengths
    sharded = [-(-length // layout.tp) * layout.tp if layout.sp else length for length in lengths]
    both = bool(source and target)
    return DataFacts(
        source="django:de,fr,ja",
        loss_on="target",
        num_sequences=NUM_SEQUENCES,
        source_length=source,
        target_length=target,
        source_valid_tokens=NUM_SEQUENCES * max(0, source - (2 if both else 3)),
        target_valid_tokens=NUM_SEQUENCES * max(0, target - (1 if both else 3)),
        loss_tokens=NUM_SEQUENCES * (TARGET_LENGTH - 1),
        truncated_sequences=1,
        source_sharding_padding_tokens=NUM_SEQUENCES * (sharded[0] - source),
        target_sharding_padding_tokens=NUM_SEQUENCES * (sharded[1] - target),
    )


def _plan(partition: Plan) -> Iterator[PlanFacts]:
    config = partition.config
    for entry in partition.entries:
        side = entry.module.partition(".")[0]
        inside = entry.module.partition(".block.")[2]
        offset = config.num_encoder_blocks if side == "decoder" else 0
        yield PlanFacts(
            module=entry.module,
            block=int(inside.partition(".")[0]) + offset if inside else -1,
            side=side if side in ("encoder", "decoder") else "none",
            style=entry.style,
            detail=entry.detail,
        )
