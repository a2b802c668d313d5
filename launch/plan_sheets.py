"""How are the layouts that a search found told: as sheets, rows and a document, and as an experiment to go on with.

Steps of models are compared in seconds per 10^18 FLOPs of the model's mathematics, because twins never have quite the
same number of them. Left out: the search (`parallel/search.py`), and the command (`launch/planning.py`).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from launch.sheets import Cell, Sheet
from models.costs import parameter_counts
from models.named import MODEL_NAMES
from parallel.layouts import Layout
from parallel.search_answer import BEST, Answer, Found
from parallel.search_space import Question
from parallel.toml_text import table_lines

_DEFAULT = Layout()
_LAYOUT = (
    *("tp", "sp", "pp", "dp", "zero", "microbatches", "schedule", "cut", "chunks", "placement", "transport"),
    *("memory_gather", "saved_input", "vocabulary", "recompute", "attention"),
)
COLUMNS = (
    *("model", "architecture", "goal", "machine", "devices", "sequences", "source_length", "target_length", "dtype"),
    *_LAYOUT,
    *("first_blocks", "microbatch", "step_seconds", "slowdown", "seconds_per_exaflop", "pipeline_seconds"),
    *("gradient_seconds", "update_seconds", "bubble", "imbalance", "peak_bytes", "capacity_bytes", "model_flops"),
    *("model_flops_utilisation", "bound_seconds"),
)
"""Of the CSV: a goal of a model a row."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """What was asked about one model, and what was found."""

    question: Question
    answer: Answer

    @property
    def name(self) -> str:
        return self.question.config.name


def rows(planned: Sequence[Planned], *, dtype: str) -> list[dict[str, Cell]]:
    """A row for each goal of each model."""
    return [_row(one, goal, found, dtype) for one in planned for goal, found in one.answer.found.items()]


def _row(one: Planned, goal: str, found: Found, dtype: str) -> dict[str, Cell]:
    question, layout, time = one.question, found.layout, found.time
    best = one.answer.found[BEST].time.step_seconds
    return {
        "model": one.name,
        "architecture": question.config.architecture,
        "goal": goal,
        "machine": question.machine.name,
        "devices": question.num_devices,
        "sequences": question.num_sequences,
        "source_length": question.source_length,
        "target_length": question.target_length,
        "dtype": dtype,
        **{name: getattr(layout, name) for name in _LAYOUT},
        "first_blocks": " ".join(map(str, found.cut)),
        "microbatch": question.size(layout),
        "step_seconds": time.step_seconds,
        "slowdown": time.step_seconds / best,
        "seconds_per_exaflop": _per_exaflop(found),
        "pipeline_seconds": time.timeline.makespan_seconds,
        "gradient_seconds": time.gradient_seconds,
        "update_seconds": time.update_seconds,
        "bubble": time.timeline.bubble,
        "imbalance": time.timeline.imbalance,
        "peak_bytes": found.fullest_bytes,
        "capacity_bytes": int(question.machine.device.capacity_bytes),
        "model_flops": time.model_flops,
        "model_flops_utilisation": time.model_flops_utilisation,
        "bound_seconds": found.bound_seconds,
    }


def _per_exaflop(found: Found) -> float:
    return found.time.step_seconds / (found.time.model_flops / 1e18)


def refusal(one: Planned) -> str | None:
    """Why nothing fits, None where something does: the layout that lacks least, and how many bytes."""
    closest, capacity = one.answer.closest, int(one.question.machine.device.capacity_bytes)
    if one.answer.found or closest is None:
        return None
    return (
        f"{one.name} fits nowhere on {one.question.num_devices:,} devices of {capacity:,} bytes: closest is "
        f"{closest.layout.label}, whose pipeline rank {closest.fullest_rank} needs {closest.fullest_bytes:,} bytes, "
        f"{closest.fullest_bytes - capacity:,} too many; try more devices, shorter sequences or smaller microbatches"
    )


# ---- for a reader ---------------------------------------------------------------------------------------------------


def sheets(planned: Sequence[Planned], told: Sequence[str], text: str, *, dtype: str) -> list[Sheet]:
    """What is asked, the fastest layouts, what restrictions cost, and the experiment."""
    first = planned[0].question
    machine, device = first.machine, first.machine.device
    lines = [
        f"{machine.name}, {machine.devices_per_node} a node; {first.num_sequences:,} sequences a step; {dtype}",
        f"{device.flops_efficiency:.0%} of peak FLOPs: {device.flops_efficiency_reason}",
        *told,
        *(_searched(one) for one in planned),
        *(_stages(one) for one in planned if BEST in one.answer.found and one.answer.found[BEST].layout.pp > 1),
        *filter(None, map(refusal, planned)),
    ]
    title = f"{' and '.join(one.name for one in planned)} on {first.num_devices:,} devices"
    made = [Sheet(title=title, headings=("",), rows=[[line] for line in lines])]
    fitting = [one for one in planned if one.answer.found]
    if not fitting:
        return made
    made.append(_fastest(fitting, dtype))
    made += [_restricted(one) for one in fitting]
    return [*made, Sheet(title="experiment", headings=("",), rows=[[line] for line in text.splitlines()])]


def _searched(one: Planned) -> str:
    question, answer = one.question, one.answer
    lengths = [
        f"{length:,} {stream}"
        for stream, length in (("source", question.source_length), ("target", question.target_length))
        if length
    ]
    parameters = parameter_counts(question.config).total
    told = (
        f"{one.name}: {parameters:,} parameters, {' + '.join(lengths)} positions; {answer.num_frames:,} choices of "
        f"degrees and options, {answer.num_simulated:,} steps simulated, {answer.num_too_large:,} refused by bytes"
    )
    if BEST in answer.found:
        best = answer.found[BEST]
        left = 1 - best.bound_seconds / best.time.step_seconds
        told += f"; what is left untried saves {left:.1%} of the fastest step at most"
    return told


def _fastest(planned: Sequence[Planned], dtype: str) -> Sheet:
    """One column a model."""
    names = (
        *("architecture", *_LAYOUT, "microbatch", "step_seconds", "seconds_per_exaflop", "pipeline_seconds"),
        *("gradient_seconds", "update_seconds", "bubble", "imbalance", "peak_bytes", "capacity_bytes"),
        "model_flops_utilisation",
    )
    best = [_row(one, BEST, one.answer.found[BEST], dtype) for one in planned]
    cells: list[list[Cell]] = [[name.replace("_", " "), *(row[name] for row in best)] for name in names]
    return Sheet(title="fastest layouts", headings=("", *(one.name for one in planned)), rows=cells)


def _restricted(one: Planned) -> Sheet:
    best = one.answer.found[BEST].time.step_seconds
    cells: list[list[Cell]] = [
        [goal, found.time.step_seconds, found.time.step_seconds / best - 1, found.layout.label]
        for goal, found in one.answer.found.items()
    ]
    headings = ("", "step seconds", "longer by", "layout")
    return Sheet(title=f"{one.name}: what restrictions cost", headings=headings, rows=cells)


def _stages(one: Planned) -> str:
    """Blocks of the fastest layout's stages, stages alike together: 6 x 4E, 2D, 3D."""
    middle = one.question.config.num_encoder_blocks
    told = []
    for stage in one.answer.found[BEST].time.plan.stages:
        encoder = max(0, min(stage.last, middle) - stage.first)
        counts = ((encoder, "E"), (stage.num_blocks - encoder, "D"))
        told.append("+".join(f"{count}{letter}" for count, letter in counts if count))
    groups = ((blocks, len(list(alike))) for blocks, alike in itertools.groupby(told))
    runs = ", ".join(blocks if count == 1 else f"{count} x {blocks}" for blocks, count in groups)
    return f"{one.name}: blocks of the fastest layout's stages {runs} (E encoder, D decoder)"


def document(
    planned: Sequence[Planned], told: Sequence[str], text: str, *, dtype: str, step: dict[str, Any]
) -> dict[str, Any]:
    """All of it, nothing rounded."""
    return {
        "machine": dataclasses.asdict(planned[0].question.machine),
        "step": step | {"sequences": planned[0].question.num_sequences},
        "notes": list(told),
        "models": [
            {
                "model": one.name,
                "config": one.question.config.to_dict(),
                "num_frames": one.answer.num_frames,
                "num_simulated": one.answer.num_simulated,
                "num_too_large": one.answer.num_too_large,
                "refusal": refusal(one),
                "goals": {
                    goal: _row(one, goal, found, dtype) | {"layout": found.explicit.to_dict()}
                    for goal, found in one.answer.found.items()
                },
            }
            for one in planned
        ],
        "experiment": text,
    }


# ---- to go on with --------------------------------------------------------------------------------------------------


def experiment(planned: Sequence[Planned], *, model: str, match: str, dtype: str, pair: tuple[int, int]) -> str:
    """The fastest layouts as a file that `twinshard simulate` reads; empty where nothing fits or a text has no target.

    Cuts are written in numbers, so that they do not depend on a machine.
    """
    fitting = [one for one in planned if one.answer.found]
    if not fitting or not all(pair):
        return ""
    question = planned[0].question
    is_named = model in MODEL_NAMES
    fields = {"like": model} if is_named else {k: v for k, v in question.config.to_dict().items() if k != "name"}
    settings = {"name": "plan", "dtype": _DTYPES.get(dtype, dtype), "optimizer": question.optimizer}
    written = [*table_lines("", settings), *table_lines("models.model", fields)]
    if len(planned) > 1:
        twin = {"twin_of": "model", "architecture": planned[1].question.config.architecture, "match": match}
        written += table_lines("models.twin", twin)
    lengths = {"source_length": pair[0], "target_length": pair[1]}
    written += table_lines("data.step", {"text": "synthetic", "sequences": question.num_sequences} | lengths)
    for one, name in zip(planned, ("model", "twin"), strict=False):
        if BEST in one.answer.found:
            layout = one.answer.found[BEST].explicit.to_dict()
            chosen = {key: value for key, value in layout.items() if value != getattr(_DEFAULT, key)}
            written += table_lines("[layouts]", {"models": [name]} | chosen)
    return "\n".join(written).lstrip() + "\n"


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64", "fp16": "bfloat16", "float16": "bfloat16"}
"""What an experiment calls them; half precision of either kind takes as long."""
