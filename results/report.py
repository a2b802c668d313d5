"""What did the study find? One Markdown file with tables, pictures and a verdict on every claim, made from records.

    report.md     question, verdicts, what ran, twins, balance, pipelines, bytes, engines, what failed, evidence
    tables/       every table, and `verdicts.csv` and `evidence.csv`; each number of the report stands in one of them
    pictures/     what the report shows

The text depends on the records alone: the same records give the same file. Left out: opinions; a sentence that says
what was found is computed (`results/claims`).
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from results import capabilities, markdown, penalty_sections, pipeline_pictures, pipeline_sections, sections, tables
from results.claims import judge_all
from results.claims.verdict import ARTICLES, Evidence, Verdict
from results.files import write_table, write_text
from results.load import Loaded, load_records
from results.plots import draw_all

MAX_EVIDENCE_ROWS = 40
"""Rows of evidence shown of one claim; the table holds them all."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """What a report consists of."""

    path: Path
    verdicts: tuple[Verdict, ...]
    num_records: int
    num_refused: int


def report(
    records: Path, output: Path, on_step: Callable[[str], None] = lambda _: None, timelines: Sequence[str] = ()
) -> Written:
    """Read the records of a folder and write report, tables and pictures into another.

    `on_step` is called with the name of each step before it begins, for a display of progress. `timelines` are cells
    that are drawn besides those that the report chooses.

    Raises:
        ValueError: no such folder, no record in it, or a timeline of no measured pipeline.
    """
    on_step("reading records")
    loaded = load_records(records)
    if not loaded.found:
        refused = (
            f"; {len(loaded.refused)} files refused, the first: {loaded.refused[0].reason}" if loaded.refused else ""
        )
        raise ValueError(f"no record in {records}{refused}")
    on_step("making tables")
    told = tables.build(loaded.records)
    folder = output / "tables"
    tables.write(told, folder)
    on_step("judging claims")
    verdicts = tuple(judge_all(told))
    write_table(folder / "verdicts.csv", verdict_table(verdicts))
    write_table(folder / "evidence.csv", evidence_table(verdicts))
    on_step("drawing pictures")
    pictures = {
        kind: {name: path.relative_to(output).as_posix() for name, path in paths.items()}
        for kind, paths in draw_all(told.native, output / "pictures").items()
    }
    drawn = pipeline_pictures.draw(loaded.records, told.pipelines, output / "pictures", timelines)
    pictures["timelines"] = {caption: path.relative_to(output).as_posix() for caption, path in drawn.items()}
    on_step("writing the report")
    path = output / "report.md"
    write_text(path, text(loaded, told, verdicts, pictures, output))
    return Written(path=path, verdicts=verdicts, num_records=len(loaded.found), num_refused=len(loaded.refused))


def verdict_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row a claim: what it says, the rule, the verdict and why."""
    return pd.DataFrame(
        [
            {
                "claim": verdict.claim.id,
                "source": verdict.claim.source,
                "statement": verdict.claim.statement,
                "quantity": verdict.claim.quantity,
                "rule": verdict.claim.rule,
                "outcome": verdict.outcome,
                "reason": verdict.reason,
                "num_evidence": len(verdict.evidence),
            }
            for verdict in verdicts
        ]
    )


def evidence_table(verdicts: Sequence[Verdict]) -> pd.DataFrame:
    """One row a piece of evidence; `cells` names the runs, or points, whose rows in `table` were read."""
    names = [field.name for field in dataclasses.fields(Evidence)]
    rows = [
        {"claim": verdict.claim.id} | {name: getattr(row, name) for name in names} | {"cells": "; ".join(row.cells)}
        for verdict in verdicts
        for row in verdict.evidence
    ]
    return pd.DataFrame(rows, columns=["claim", *names])


def text(
    loaded: Loaded, told: tables.Tables, verdicts: Sequence[Verdict], pictures: sections.Pictures, output: Path
) -> str:
    """The report itself. `pictures` are paths relative to `output`, by kind and family of twins."""
    native = told.native
    parts = [
        *_question(),
        *_verdicts(verdicts),
        *sections.what_ran(loaded.records),
        *sections.twins(native, pictures["twins"]),
        *sections.stage_balance(native, pictures["stages"]),
        *pipeline_sections.simulated_against_measured(native, pictures["timelines"]),
        *pipeline_sections.gains(native),
        *sections.bytes_by_part(native, pictures["bytes"]),
        *sections.padding(native, pictures["padding"]),
        *penalty_sections.section(told.penalty, pictures["penalty"].values()),
        *capabilities.section(told.capabilities),
        *sections.unsuccessful(told),
        *_refused(loaded, output),
        *_evidence(verdicts),
    ]
    return "\n\n".join(parts) + "\n"


def _question() -> Iterator[str]:
    names = ", ".join(markdown.link(name, f"tables/{name}.csv") for name in tables.TABLE_NAMES)
    yield "# How much harder are encoder-decoder models to parallelise?"
    yield (
        "Articles say that encoder-decoder models are harder to parallelise than decoder-only ones. Matched models of "
        "both were built from the same blocks, partitioned alike and run. Every number below comes from the tables "
        f"beside this file ({names}), which are made from the records. Where a range is too wide to be run, closed "
        "forms stand in: such rows say `predicted`."
    )


def _verdicts(verdicts: Sequence[Verdict]) -> Iterator[str]:
    yield "## Verdicts"
    yield markdown.table(
        ("claim", "source", "what it says", "verdict", "because"),
        [
            (
                markdown.link(verdict.claim.id, f"#{verdict.claim.id.lower()}"),
                verdict.claim.source,
                verdict.claim.statement,
                f"**{verdict.outcome}**",
                verdict.reason,
            )
            for verdict in verdicts
        ],
    )
    used = sorted({verdict.claim.article for verdict in verdicts})
    yield "Sources: " + "; ".join(f"{key}: {ARTICLES[key]}" for key in used) + "."


def _refused(loaded: Loaded, output: Path) -> Iterator[str]:
    yield "## Refused records"
    if not loaded.refused:
        yield "None."
        return
    yield "These files were found among the records and are not taken for any."
    rows = []
    for entry in loaded.refused:
        target = Path(os.path.relpath(entry.path, output)).as_posix()
        name = entry.path.relative_to(loaded.folder).as_posix()
        rows.append((markdown.link(name, target), entry.reason))
    yield markdown.table(("file", "reason"), rows)


def _evidence(verdicts: Sequence[Verdict]) -> Iterator[str]:
    """A section a claim: rule, verdict, and its evidence, rows of one quantity that say the same told once."""
    yield "## Evidence"
    yield (
        "Rows of one quantity that say the same are told once, by the first of them; all stand in "
        f"{markdown.link('evidence.csv', 'tables/evidence.csv')}."
    )
    for verdict in verdicts:
        claim = verdict.claim
        yield f"### {claim.id}"
        yield f"{claim.statement} ({claim.source})"
        yield f"Decided by: {claim.quantity}.  \nRule: {claim.rule}.  \n**{verdict.outcome}**: {verdict.reason}."
        groups = [list(group) for _, group in itertools.groupby(sorted(verdict.evidence, key=_likeness), key=_likeness)]
        if groups:
            rows = [_evidence_row(group) for group in groups[:MAX_EVIDENCE_ROWS]]
            yield markdown.table(("quantity", "#rows", "say", "first of them", "basis", "table", "cells"), rows)
        if len(groups) > MAX_EVIDENCE_ROWS:
            yield f"{len(groups) - MAX_EVIDENCE_ROWS} more kinds of rows stand in the table."


_SAYS = ("supports", "contradicts", "undecided", "context")


def _likeness(row: Evidence) -> tuple[Any, ...]:
    return _SAYS.index(row.says), row.quantity, row.basis


def _evidence_row(rows: Sequence[Evidence]) -> tuple[Any, ...]:
    first = rows[0]
    value = f"{first.value} ({first.note})" if first.note else first.value
    cells = first.cells[0] if len(first.cells) == 1 else f"{first.cells[0]} and {len(first.cells) - 1} more"
    table = markdown.link(first.table, f"tables/{first.table}.csv")
    return first.quantity, len(rows), first.says, value, first.basis, table, cells
