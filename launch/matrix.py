"""Which partitionings does `twinshard verify --matrix` prove equal to one process?

Every option that can change what is computed or sent, in a covering array: each legal pair of values meets in at least
one case (`launch/covering.py`), on models so small that a case takes about a second.

    OPTIONS   names and values        RULES   which values exclude each other        cases()   the cases

A rule is either a contradiction that ModelConfig or Layout refuses too, or marks a value that would say nothing there
(a cut without stages). Left out: dtypes other than float64, and dropout (see `launch/case.py`).
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from launch.case import Case
from launch.covering import Choice, Rule, Value, covering_array
from launch.matrix_models import BLOCKS, LENGTHS, config_of
from models.config import GATED, ModelConfig
from models.vocabulary import VOCABULARY
from parallel.layouts import Cut, Layout

_MESHES: dict[str, dict[str, Any]] = {
    "tp2 sp pp2": {"tp": 2, "sp": True, "pp": 2},
    "tp2 sp dp2": {"tp": 2, "sp": True, "dp": 2},
    "tp2 pp2": {"tp": 2, "pp": 2},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "tp4 sp": {"tp": 4, "sp": True},
    "tp4": {"tp": 4},
    "pp4": {"pp": 4},
    "dp4": {"dp": 4},
    "tp2 sp": {"tp": 2, "sp": True},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "dp2": {"dp": 2},
    "one": {},
}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "gpipe": {"schedule": "gpipe"},
    "zb_h1": {"schedule": "zb_h1"},
    "zb_h2": {"schedule": "zb_h2"},
    "list": {"schedule": "list"},
    "interleaved": {"schedule": "interleaved", "placement": "interleaved", "chunks": 2},
    "folded": {"schedule": "interleaved", "placement": "folded", "chunks": 2},
    "zb_v": {"schedule": "zb_v", "placement": "v", "chunks": 2},
}
_SEQUENCES = {1: 2, 2: 4, 3: 5, 4: 4}
"""Sequences of one data-parallel rank by number of microbatches; 5 in 3 leave a ragged last one."""
_BUCKET_BYTES = 3000
"""Of gradients that replicas sum behind the backward; most of these models then have several buckets."""

# The most constrained options stand first: a greedy choice then seldom has to go back.
OPTIONS: dict[str, tuple[Value, ...]] = {
    "mesh": tuple(_MESHES),
    "architecture": ("encoder_decoder", "decoder_only", "encoder_only"),
    "cut": ("even", "aligned", "mixed"),
    "blocks": tuple(BLOCKS),
    "schedule": tuple(_SCHEDULES),
    "transport": ("relay", "direct", "kv"),
    "tying": ("none", "head", "source_target", "all"),
    "front_end": ("tokens", "features"),
    "data": ("full", "ragged", "text"),
    "vocabulary": (11, VOCABULARY, 50257),
    "vocabularies": ("one", "two"),
    "activation": ("relu", "gelu", "gelu_tanh", "swiglu", "geglu"),
    "head": ("plain", "bias", "transform"),
    "positions": ("sinusoidal", "learned", "rope", "relative"),
    "microbatches": tuple(_SEQUENCES),
    "lengths": tuple(LENGTHS),
    "kv_heads": (4, 2, 1),
    "recompute": ("none", "selective", "full"),
    "memory_gather": ("per_stage", "per_block"),
    "saved_input": ("shard", "whole"),
    "layout_vocabulary": ("sharded", "whole"),
    "attention": ("fused", "materialised"),
    "norm": ("layernorm", "rmsnorm"),
    "norm_position": ("pre", "post"),
    "final_norm": (True, False),
    "embedding_norm": (False, True),
    "biases": (True, False),
    "scales": ("default", "other"),
    "wide_heads": (False, True),
    "token_types": (0, 2),
    "zero": (0, 1),
}


RULES = (
    Rule(
        "chunks are dealt to pipeline ranks, and each has a block",
        ("mesh", "schedule", "blocks"),
        lambda mesh, schedule, blocks: not _has_chunks(schedule) or 1 < _num_stages(mesh) <= sum(BLOCKS[blocks]) / 2,
    ),
    Rule(
        "a folded side has a block for each rank, and the cut is given",
        ("mesh", "cut", "blocks", "schedule"),
        lambda mesh, cut, blocks, schedule: (
            schedule != "folded" or (cut != "mixed" and min(BLOCKS[blocks]) >= _num_stages(mesh))
        ),
    ),
    Rule(
        "only an encoder_decoder is folded",
        ("architecture", "schedule"),
        lambda architecture, schedule: schedule != "folded" or architecture == "encoder_decoder",
    ),
    Rule(
        "a mixed stage needs more blocks than chunks",
        ("mesh", "cut", "blocks", "schedule"),
        lambda mesh, cut, blocks, schedule: (
            cut != "mixed" or not _has_chunks(schedule) or 2 * _num_stages(mesh) < sum(BLOCKS[blocks])
        ),
    ),
    Rule(
        "keys and values are shipped to other stages, one a rank",
        ("mesh", "architecture", "schedule", "transport"),
        lambda mesh, architecture, schedule, transport: (
            transport != "kv"
            or (architecture == "encoder_decoder" and _num_stages(mesh) > 1 and not _has_chunks(schedule))
        ),
    ),
    Rule("states are dealt over replicas", ("mesh", "zero"), lambda mesh, zero: not zero or "dp" in str(mesh)),
    Rule("without stages nothing is cut", ("mesh", "cut"), lambda mesh, cut: cut == "even" or _num_stages(mesh) > 1),
    Rule(
        "a mixed stage needs more blocks than stages",
        ("mesh", "cut", "blocks"),
        lambda mesh, cut, blocks: cut != "mixed" or _num_stages(mesh) < sum(BLOCKS[blocks]),
    ),
    Rule(
        "only what sp makes products gather is kept whole",
        ("mesh", "saved_input"),
        lambda mesh, saved_input: saved_input == "shard" or "sp" in _MESHES[mesh],
    ),
    Rule(
        "sp shards what a head with a whole vocabulary sees",
        ("mesh", "layout_vocabulary"),
        lambda mesh, held: held == "sharded" or "sp" not in _MESHES[mesh],
    ),
    Rule(
        "without tp every vocabulary is whole",
        ("mesh", "layout_vocabulary"),
        lambda mesh, held: held == "sharded" or "tp" in _MESHES[mesh],
    ),
    Rule(
        "source embeddings are tied in an encoder_decoder only",
        ("architecture", "tying"),
        lambda architecture, tying: tying in ("none", "head") or architecture == "encoder_decoder",
    ),
    Rule(
        "features need an encoder",
        ("architecture", "front_end"),
        lambda architecture, front_end: front_end == "tokens" or architecture != "decoder_only",
    ),
    Rule(
        "features have no embedding to tie",
        ("architecture", "tying", "front_end"),
        lambda architecture, tying, front_end: (
            front_end == "tokens" or tying == "none" or (tying == "head" and architecture == "encoder_decoder")
        ),
    ),
    Rule(
        "text has no features", ("front_end", "data"), lambda front_end, data: front_end != "features" or data != "text"
    ),
    Rule(
        "text needs a row for each byte",
        ("data", "vocabulary"),
        lambda data, rows: data != "text" or rows >= VOCABULARY,
    ),
    Rule(
        "a second vocabulary needs two streams of tokens",
        ("architecture", "front_end", "vocabularies"),
        lambda architecture, front_end, vocabularies: (
            vocabularies == "one" or (architecture == "encoder_decoder" and front_end == "tokens")
        ),
    ),
    Rule(
        "tied source and target share a vocabulary",
        ("tying", "vocabularies"),
        lambda tying, vocabularies: vocabularies == "one" or tying in ("none", "head"),
    ),
    Rule(
        "a head's transform has no gate",
        ("activation", "head"),
        lambda activation, head: head != "transform" or activation not in GATED,
    ),
)


def case(choice: Mapping[str, Value]) -> Case:
    """The case of a complete choice. Raises ValueError when the model or the layout contradicts itself."""
    layout_fields, schedule_fields = _MESHES[str(choice["mesh"])], _SCHEDULES[str(choice["schedule"])]
    config = config_of(choice)
    layout = Layout(
        **layout_fields,
        zero=int(choice["zero"]),
        microbatches=int(choice["microbatches"]),
        **schedule_fields,
        cut=_cut(str(choice["cut"]), config, layout_fields.get("pp", 1) * schedule_fields.get("chunks", 1)),
        transport=choice["transport"],  # type: ignore[arg-type]
        memory_gather=choice["memory_gather"],  # type: ignore[arg-type]
        saved_input=choice["saved_input"],  # type: ignore[arg-type]
        vocabulary=choice["layout_vocabulary"],  # type: ignore[arg-type]
        recompute=choice["recompute"],  # type: ignore[arg-type]
        attention=choice["attention"],  # type: ignore[arg-type]
    )
    source_length, target_length = LENGTHS[str(choice["lengths"])]
    return Case(
        name="unnamed",
        config=config,
        layout=layout,
        data=choice["data"],  # type: ignore[arg-type]
        num_sequences=_SEQUENCES[layout.microbatches] * layout.dp,
        source_length=source_length,
        target_length=target_length,
    )


@functools.cache
def choices() -> tuple[Choice, ...]:
    """The covering array: in its rows every legal pair of values occurs; and a row more of each architecture."""
    rows = covering_array(OPTIONS, RULES)
    return (*rows, *(_uneven_labels(rows, architecture) for architecture in OPTIONS["architecture"]))


def _uneven_labels(rows: Sequence[Choice], architecture: Value) -> Choice:
    """Ranks of dp have different numbers of labels, which pairs leave to chance: the first ragged row, on dp alone."""
    ragged = next(row for row in rows if (row["architecture"], row["data"]) == (architecture, "ragged"))
    plain = {"cut": "even", "schedule": "1f1b", "transport": "relay", "saved_input": "shard"}
    return {**ragged, **plain, "layout_vocabulary": "sharded", "mesh": "dp4", "microbatches": 3}


@functools.cache
def cases(*, quick: bool = False) -> tuple[Case, ...]:
    """The cases of the matrix, those of one world size together, smallest world first; the same on every call.

    Every second of those whose replicas sum whole gradients does so in buckets: an option more would cost the array too
    much. `quick` takes only as many cases as show every single value, for a first answer while working on something.
    """
    chosen = [case(choice) for choice in (_few(choices()) if quick else choices())]
    for index in [index for index, one in enumerate(chosen) if one.layout.dp > 1 and not one.layout.zero][::2]:
        layout = chosen[index].layout.replace(gradient_bucket_bytes=_BUCKET_BYTES)
        chosen[index] = dataclasses.replace(chosen[index], layout=layout)
    chosen.sort(key=lambda unnamed: unnamed.layout.world_size)
    return tuple(
        dataclasses.replace(unnamed, name=f"{index:03d} {unnamed.config.architecture} {unnamed.layout.label}")
        for index, unnamed in enumerate(chosen)
    )


def _few(rows: tuple[Choice, ...]) -> list[Choice]:
    """Rows that together show every value: always the one that shows most of what is left."""
    left = {item for row in rows for item in row.items()}
    few = []
    while left:
        few.append(max(rows, key=lambda row: len(left & row.items())))
        left -= few[-1].items()
    return few


def _num_stages(mesh: Value) -> int:
    stages: int = _MESHES[str(mesh)].get("pp", 1)
    return stages


def _has_chunks(schedule: Value) -> bool:
    return "chunks" in _SCHEDULES[str(schedule)]


def _cut(cut: str, config: ModelConfig, num_stages: int) -> Cut:
    """`mixed` becomes the first explicit cut that spares the boundary: one stage holds encoder and decoder blocks.

    3+2 blocks, 4 stages    E0 | E1 | E2 D0 | D1        1+5 blocks, 2 stages    E0 D0 | D1 D2 D3 D4
    """
    if cut != "mixed":
        return "aligned" if cut == "aligned" else "even"
    boundary = config.num_encoder_blocks if config.has_cross_attention else 0
    return tuple(first for first in range(1, config.num_blocks) if first != boundary)[: num_stages - 1]
