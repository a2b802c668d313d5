"""Which runs stand side by side?

Twins are matched models of one family; two of their runs are compared when everything that partitions them is equal,
on the same text. A model with one stack has no memory to gather and no side to align a cut to, so for these two
choices it takes the run with the same words if there is one, else any. A control is a second, identical run of a cell:
what differs between the two is noise, and its size decides what a comparison of times can show.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import pandas as pd

from results.intervals import Interval, ratio
from results.runs import KEY, from_text

_EQUAL = (
    "machine",
    "experiment",
    "engine",
    "compiled",
    "twins",
    "tp",
    "pp",
    "dp",
    "cp",
    "sp",
    "zero",
    "gradient_bucket_bytes",
    "chunks",
    "placement",
    "schedule",
    "microbatches",
    "saved_input",
    "layout_vocabulary",
    "recompute",
    "attention",
    "dtype",
    "device",
    "backend",
    "data_source",
    "num_sequences",
)
_SAME_CELL = (
    *_EQUAL,
    "architecture",
    "model",
    "match",
    "layout_label",
    "vocabulary",
    "source_length",
    "target_length",
    "tokens_per_step",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One run of each architecture on one layout: rows of `runs.csv`."""

    one_stack: "pd.Series[Any]"
    encoder_decoder: "pd.Series[Any]"

    @property
    def match(self) -> str:
        """In what the two are matched; the family's first model says `none`."""
        told = {self.one_stack["match"], self.encoder_decoder["match"]} - {"none"}
        return str(next(iter(told), "none"))

    @property
    def has_equal_tokens(self) -> bool:
        """Whether a step of either computes on as many valid tokens; else nothing may be compared."""
        tokens = [self.one_stack["tokens_per_step"], self.encoder_decoder["tokens_per_step"]]
        return not any(pd.isna(count) for count in tokens) and bool(tokens[0] == tokens[1])

    @property
    def cells(self) -> tuple[str, str]:
        return cell_of(self.one_stack), cell_of(self.encoder_decoder)


def cell_of(row: "pd.Series[Any]") -> str:
    """The name of a run in evidence: `experiment/cell`."""
    return f"{row['experiment']}/{row['cell']}"


def measured(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs that ended well and are no control."""
    return runs[(runs["status"] == "ok") & ~runs["is_control"].astype(bool)]


def pairs(runs: pd.DataFrame, one_stack: str = "decoder_only") -> list[Pair]:
    """Every run of an encoder-decoder with its twin's run, in the order of the table; no twin, no pair."""
    told = measured(runs)
    told = told[told["twins"] != ""]
    singles: dict[Hashable, list[pd.Series[Any]]] = {}
    for _, row in told[told["architecture"] == one_stack].iterrows():
        singles.setdefault(tuple(row[list(_EQUAL)]), []).append(row)
    found = []
    for _, row in told[told["architecture"] == "encoder_decoder"].iterrows():
        candidates = [
            single
            for single in singles.get(tuple(row[list(_EQUAL)]), [])
            if single["match"] == row["match"] or "none" in (single["match"], row["match"])
        ]
        nearest: dict[Hashable, pd.Series[Any]] = {}
        for single in sorted(candidates, key=functools.partial(_likeness, row), reverse=True):
            nearest.setdefault((single["model"], single["match"]), single)
        found += [Pair(one_stack=single, encoder_decoder=row) for single in nearest.values()]
    return found


def _likeness(single: "pd.Series[Any]", row: "pd.Series[Any]") -> tuple[bool, ...]:
    return tuple(bool(single[name] == row[name]) for name in ("tokens_per_step", "cut", "memory_gather"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Twins on one layout: the run of an encoder-decoder and those of its twins, by architecture."""

    label: str
    """The encoder-decoder's layout, and the match and the text where there are several."""
    match: str
    runs: dict[str, "pd.Series[Any]"]

    @property
    def encoder_decoder(self) -> "pd.Series[Any]":
        return self.runs["encoder_decoder"]


def families(runs: pd.DataFrame) -> dict[str, list[Line]]:
    """Twins side by side, by family; a family is named `twins` and, if its runs come from several, by machine."""
    lines: dict[tuple[Any, ...], Line] = {}
    told = {architecture: pairs(runs, architecture) for architecture in ("decoder_only", "encoder_only")}
    all_pairs = [pair for found_pairs in told.values() for pair in found_pairs]
    matches = {pair.match for pair in all_pairs}
    texts = {pair.encoder_decoder["data_source"] for pair in all_pairs}
    for architecture, found_pairs in told.items():
        for pair in found_pairs:
            own = pair.encoder_decoder
            label = ", ".join(
                str(word)
                for word, is_told in (
                    (own["layout_label"], True),
                    (pair.match, len(matches) > 1),
                    (own["data_source"], len(texts) > 1),
                )
                if is_told
            )
            key = (*own[list(KEY)], pair.match)
            line = lines.setdefault(key, Line(label=label, match=pair.match, runs={"encoder_decoder": own}))
            line.runs[architecture] = pair.one_stack
    found: dict[tuple[str, str], list[Line]] = {}
    for line in lines.values():
        found.setdefault((line.encoder_decoder["twins"], line.encoder_decoder["machine"]), []).append(line)
    names = [name for name, _ in found]
    return {
        name if names.count(name) == 1 else f"{name} on {machine}": sorted(members, key=_order)
        for (name, machine), members in found.items()
    }


def _order(line: Line) -> tuple[Any, ...]:
    own = line.encoder_decoder
    return (line.match, *(own[name] for name in ("world_size", "tp", "sp", "pp", "cut", "memory_gather")), line.label)


def controls(runs: pd.DataFrame) -> list[tuple["pd.Series[Any]", "pd.Series[Any]"]]:
    """Every control with the run that it repeats; a control whose original did not end well is left out."""
    originals = {tuple(row[list(_SAME_CELL)]): row for _, row in measured(runs).iterrows()}
    found = []
    for _, row in runs[(runs["status"] == "ok") & runs["is_control"].astype(bool)].iterrows():
        original = originals.get(tuple(row[list(_SAME_CELL)]))
        if original is not None:
            found.append((original, row))
    return found


def noise(runs: pd.DataFrame, samples: str, *, machine: str, device: str) -> tuple[float, tuple[str, ...]] | None:
    """How much two identical runs differ, as a factor of at least 1, and the controls that say so.

    `samples` is a column of samples of `runs.csv`. Of several controls on the machine the worst counts, with the bound
    of its interval farthest from 1. None without a control: then nothing is known about noise.
    """
    worst, cells = 1.0, []
    for original, control in controls(runs):
        if original["machine"] != machine or original["device"] != device:
            continue
        told = ratio(from_text(original[samples]), from_text(control[samples]))
        if told.has_bounds and told.low > 0:
            worst = max(worst, told.high, 1 / told.low)
            cells.append(cell_of(control))
    return (worst, tuple(cells)) if cells else None


def select(table: pd.DataFrame, run: "pd.Series[Any]") -> pd.DataFrame:
    """The rows of a table that belong to one run."""
    chosen = pd.Series(data=True, index=table.index)
    for name in KEY:
        chosen &= table[name] == run[name]
    return table[chosen]


def interval_of(run: "pd.Series[Any]", name: str) -> Interval:
    """The median and bounds of a sampled column of `runs.csv`."""
    return Interval(value=float(run[f"{name}_median"]), low=float(run[f"{name}_low"]), high=float(run[f"{name}_high"]))
