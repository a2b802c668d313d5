"""What does the report say of what was run: the sections that are neither claims nor refused files.

Each function returns the paragraphs of one section. Numbers are those of the tables; sums and ratios are made here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from results import markdown
from results.runs import positions_row
from results.schema import Record
from results.sites import PARTS
from results.tables import Tables
from results.twins import families, interval_of, measured, noise, select

Pictures = Mapping[str, Mapping[str, str]]
"""Paths of pictures by kind and family of twins."""

ARCHITECTURES = ("decoder_only", "encoder_only", "encoder_decoder")


def what_ran(records: Sequence[Record]) -> Iterator[str]:
    """Machines, versions and backends, and how many cells ended how."""
    yield "## What ran"
    machines: Counter[tuple[Any, ...]] = Counter()
    for record in (record for record in records if record.backend != "none"):
        where = record.provenance
        gibibytes = f"{where.memory_bytes / 2**30:.0f} GiB"
        machine = (where.hostname, where.processor, where.num_cores, gibibytes, where.accelerator)
        versions = ", ".join(f"{name} {version}" for name, version in sorted(where.versions.items()))
        run = (record.experiment, record.engine, f"{record.backend} on {record.device}", record.dtype)
        machines[*machine, *run, versions, where.commit] += 1
    yield markdown.table(
        (
            *("machine", "processor", "#cores", "memory", "accelerator", "experiment", "engine", "backend", "dtype"),
            *("versions", "commit", "#records"),
        ),
        [(*key, count) for key, count in machines.items()],
    )
    statuses = Counter(record.status for record in records)
    yield "Records by status: " + ", ".join(f"{status} {count}" for status, count in statuses.items()) + "."
    yield from _caveats(records)


def _caveats(records: Sequence[Record]) -> Iterator[str]:
    """What the numbers cannot show."""
    others = Counter(record.engine for record in records if record.engine != "native")
    num_compiled = sum(record.compiled for record in records)
    if num_compiled:
        yield (
            f"{num_compiled} records are of compiled blocks. The tables hold their times, what they sent and what they "
            "kept for the backward; no verdict, comparison or picture reads them."
        )
    if others:
        told = ", ".join(f"{count} of {engine}" for engine, count in others.items())
        yield (
            f"Every verdict, comparison and picture is of the native engine. Of other engines ({told}) the tables hold "
            "what can be told from outside: times, bytes sent, and why they could not run."
        )
    backends = {(record.backend, record.device) for record in records if record.status == "ok"}
    if ("gloo", "cpu") in backends:
        yield (
            "Times and balance were measured on CPUs with gloo. Counts, bytes and FLOPs do not depend on that; times "
            "do, gloo emulates some operations, and **nothing here says anything about NCCL**. Busy time is thread "
            "CPU time."
        )
    if not any(backend == "nccl" for backend, _ in backends):
        yield "No run used NCCL or a GPU."
    num_oversubscribed = sum(record.oversubscribed for record in records if record.status == "ok")
    if num_oversubscribed:
        yield (
            f"{num_oversubscribed} runs had more ranks than cores: their wall time says how many ranks shared a core, "
            "and no more."
        )
    disagreeing = [
        record.cell for record in records if record.status == "ok" and record.ledger_matches_recorder is False
    ]
    if disagreeing:
        yield (
            f"In {len(disagreeing)} runs the ledger was not confirmed event for event by the independent recorder: "
            f"{', '.join(disagreeing)}."
        )


def twins(tables: Tables, pictures: Mapping[str, str]) -> Iterator[str]:
    """Step time, bytes and collectives of matched models, a row a layout and architecture."""
    yield "## Twins side by side"
    told = families(tables.runs)
    if not told:
        yield "No run of an encoder-decoder has a run of its twin on the same layout."
        return
    yield (
        "Models of one family on one layout, with equal text. Ratios are against the decoder-only twin; a time is a "
        "median with its 95 % bootstrap interval, bytes and collectives are of one step over all ranks, exact."
    )
    for name, lines in told.items():
        yield f"### Family {name}"
        yield from _shown([pictures[name]] if name in pictures else [])
        yield markdown.table(
            (
                *("layout", "matched by", "architecture", "step seconds", "#bytes sent", "#ratio", "#collectives"),
                *("#ratio", "#tokens per step", "note"),
            ),
            [row for line in lines for row in _line_rows(line.label, line.match, line.runs)],
        )
    yield from _noise(tables.runs)


def _line_rows(label: str, match: str, runs: dict[str, "pd.Series[Any]"]) -> Iterator[tuple[Any, ...]]:
    base = runs.get("decoder_only")
    for architecture in ARCHITECTURES:
        run = runs.get(architecture)
        if run is None:
            continue
        interval = interval_of(run, "step_seconds")
        ratios = [
            None if base is None or not base[name] else f"{run[name] / base[name]:.3f}"
            for name in ("sent_bytes", "num_collectives")
        ]
        notes = ["oversubscribed"] if run["oversubscribed"] else []
        if base is not None and run["tokens_per_step"] != base["tokens_per_step"]:
            notes.append("tokens per step differ from the decoder-only twin's: not comparable")
        yield (
            label,
            match,
            architecture,
            markdown.bounds(interval.value, interval.low, interval.high),
            run["sent_bytes"],
            ratios[0],
            run["num_collectives"],
            ratios[1],
            run["tokens_per_step"],
            "; ".join(notes),
        )


def _noise(runs: pd.DataFrame) -> Iterator[str]:
    """How much identical runs differ."""
    places = measured(runs)[["machine", "device"]].drop_duplicates()
    for machine, device in places.itertuples(index=False, name=None):
        told = noise(runs, "step_seconds", machine=machine, device=device)
        if told is None:
            yield f"No control run on {machine} ({device}): how much identical runs differ there is not known."
        else:
            yield (
                f"Identical runs on {machine} ({device}) differ in step time by a factor of up to {told[0]:.3f} "
                f"(controls: {', '.join(told[1])}; the farthest bound of their intervals): smaller differences mean "
                "nothing."
            )


def stage_balance(tables: Tables, pictures: Mapping[str, str]) -> Iterator[str]:
    """Imbalance and bubble of every run with several stages."""
    yield "## Stage balance"
    runs = measured(tables.runs)
    runs = runs[runs["pp"] > 1]
    if runs.empty:
        yield "No run has several stages."
        return
    definitions = {
        "schedule": "on CPUs: the share of the schedule, played with measured busy times on cores of their own, in "
        "which a stage is idle",
        "wall": "on GPUs: the share of the wall time in which a rank is idle",
    }
    used = [definitions[name] for name in dict.fromkeys(runs["bubble_definition"]) if name in definitions]
    yield "Imbalance is the largest stage over the mean. " + (f"Bubble, {'; '.join(used)}." if used else "")
    yield from _shown(pictures.values())
    rows = []
    for _, run in runs.sort_values(["twins", "architecture", "pp", "cut"], kind="stable").iterrows():
        busy, bubble = (interval_of(run, name) for name in ("imbalance_busy_seconds", "bubble"))
        rows.append(
            (
                run["architecture"],
                run["layout_label"],
                run["imbalance_forward_flops"],
                markdown.bounds(busy.value, busy.low, busy.high),
                run["imbalance_parameters"],
                run["imbalance_peak_saved_bytes"],
                markdown.bounds(bubble.value, bubble.low, bubble.high),
            )
        )
    columns = ("architecture", "layout", "#FLOPs", "busy seconds", "#parameters", "#peak saved bytes", "bubble")
    yield markdown.table(columns, rows)


def bytes_by_part(tables: Tables, pictures: Mapping[str, str]) -> Iterator[str]:
    """Bytes sent by the part of the model they serve, a row a run that communicates."""
    yield "## Bytes by site"
    yield (
        "Wire bytes that all ranks send in one step, by the part of the model whose site they have; exact, and equal "
        "whatever the backend. `memory` is the encoder's output where it enters a stage of the decoder."
    )
    yield from _shown(pictures.values())
    rows = []
    used: list[str] = []
    sums_by_run = []
    for _, run in measured(tables.runs).iterrows():
        sums = select(tables.communication, run).groupby("part")["wire_bytes"].sum()
        if sums.sum():
            sums_by_run.append((run, sums))
            used += [part for part in sums.index if sums[part]]
    parts = [part for part in PARTS if part in used]
    for run, sums in sums_by_run:
        rows.append((run["architecture"], run["layout_label"], *(sums.get(part) for part in parts), sums.sum()))
    yield markdown.table(("architecture", "layout", *(f"#{part}" for part in parts), "#total"), rows)


def padding(tables: Tables, pictures: Mapping[str, str]) -> Iterator[str]:
    """What the positions of each distinct batch hold."""
    yield "## Padding"
    yield from _shown(pictures.values())
    rows: dict[tuple[Any, ...], None] = {}
    for _, run in measured(tables.runs).iterrows():
        if pd.isna(run["num_sequences"]):
            continue
        valid, batch, sharding = positions_row(run)
        total = valid + batch + sharding
        read = [
            run[name] for name in ("architecture", "data_source", "num_sequences", "source_length", "target_length")
        ]
        rows[*read, valid, batch, sharding, f"{1 - valid / total:.1%}" if total else ""] = None
    yield markdown.table(
        (
            *("architecture", "text", "#sequences", "#source length", "#target length", "#tokens"),
            *("#padding of the batch", "#padding for sharding", "#waste"),
        ),
        rows,
    )


def unsuccessful(tables: Tables) -> Iterator[str]:
    """Cells that did not end well, with their reasons."""
    yield "## Cells that did not end well"
    rows = tables.runs[tables.runs["status"] != "ok"]
    if rows.empty:
        yield "None."
        return
    names = ["experiment", "cell", "status", "reason"]
    yield markdown.table(names, rows[names].itertuples(index=False, name=None))


def _shown(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        yield f"![{path.rpartition('/')[2].removesuffix('.png')}]({path})"
