"""What a record holds: the versioned contract between those who run and those who read.

A record is one JSON file for one run of one cell. It holds facts and raw samples; medians, ratios and verdicts are
derived by readers and stored nowhere. A run that failed, was refused or ran out of memory is a record too, with a
status and a reason. Units stand in the names; a table's column has its field's name.

    version 1    no spans, actions or profile; `Record.from_dict` reads it all the same and leaves them empty
    version 2    when each action of a typical step ran, what actions cost, and what a profile said that they would
    version 3    how long an engine takes to be ready
    version 4    what a step is made of, where the experiment asks for it
    version 5    whether blocks were compiled
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from results.older_records import COMPLETE_SINCE, in_these_words
from results.step_facts import ActionFacts, FigureFacts, OperatorFacts, PartFacts, ProfileFacts, SpanFacts

# A part of the format that stands in a file of its own.
__all__ = ["COMPLETE_SINCE", "ActionFacts", "FigureFacts", "OperatorFacts", "PartFacts", "ProfileFacts", "SpanFacts"]

SCHEMA_VERSION = 5

Status = Literal["ok", "failed", "unsupported", "skipped", "out_of_memory"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """The batch of a step, over all data-parallel ranks."""

    source: str
    """Where the text came from: `django:de,fr,ja`, a file, or `synthetic`."""
    loss_on: str
    num_sequences: int
    source_length: int
    """Padded length of the source stream, 0 when the architecture has none."""
    target_length: int
    source_valid_tokens: int
    target_valid_tokens: int
    loss_tokens: int
    truncated_sequences: int
    source_sharding_padding_tokens: int
    """Positions added to the source stream so that its length divides over the tp ranks."""
    target_sharding_padding_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParityFacts:
    """Worst relative errors against one process, in float64, for a small model on the same layout."""

    model: str
    loss_error: float
    gradient_error: float
    gradient_norm_error: float
    weight_error: float
    replica_error: float
    """Worst disagreement between ranks that hold copies of the same numbers."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PlanFacts:
    """One entry of the plan: what the layout does to one named module."""

    module: str
    block: int
    """Index in the flat block list, -1 outside the blocks."""
    side: str
    """`encoder`, `decoder` or `none`."""
    style: str
    detail: str
    """The entry's choices as text; two modules are treated alike when style and detail are equal."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankFacts:
    """One rank. Lists have one entry a timed step, in the order of `RecordFacts.step_seconds`."""

    rank: int
    dp: int
    pp: int
    tp: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_saved_bytes: int | None
    """Most bytes saved for backward at any time of a step; None of an engine that cannot be looked into."""
    peak_allocated_bytes: int
    """Most bytes of the device allocator, 0 where there is none (CPU)."""
    valid_tokens: int
    """Valid positions of the streams this rank computed on in a step (its share under sp)."""
    padded_tokens: int
    startup_seconds: float | None
    """To partition the model and give it its weights, before the first step; None of an older record."""
    step_seconds: list[float]
    busy_seconds: list[float]
    """Empty, as waiting, where the engine does not let one be told from the other."""
    wait_seconds: list[float]
    pipeline_seconds: list[float]
    """From the beginning of the step to the end of the rank's last action."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StageFacts:
    """One pipeline stage; seconds are means over the ranks that hold it, one entry a timed step."""

    stage: int
    first_block: int
    last_block: int
    num_encoder_blocks: int
    num_decoder_blocks: int
    has_embedding: bool
    has_head: bool
    parameters: int
    """Of the whole stage, all tp shards together, each shared copy counted where it is held."""
    forward_flops: int
    """Matrix products and attention of one step's forward, all tp and dp ranks together."""
    peak_saved_bytes: int
    """Largest of its ranks."""
    forward_busy_seconds: list[float]
    backward_busy_seconds: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """One block; seconds are of one step on one rank (mean over the ranks that hold it)."""

    block: int
    side: str
    index: int
    stage: int
    parameters: int
    forward_flops: int
    """All tp and dp ranks together, one step's forward."""
    forward_busy_seconds: list[float]
    backward_busy_seconds: list[float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationFacts:
    """Equal events of one rank in one step."""

    rank: int
    operation: str
    axis: str
    group_size: int
    site: str
    stream: str
    phase: str
    count: int
    payload_bytes: int
    wire_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EdgeFacts:
    """What one pair of neighbouring stages exchanges in one step (all ranks of the stages together)."""

    edge: str
    """`0>1` forward, `1>0` backward."""
    tensor: str
    """`source`, `memory`, `target`, or keys and values of a decoder block, `kv.3`."""
    count: int
    payload_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a record came from."""

    commit: str
    """Commit of the project, with `+` when the tree was changed, `unknown` outside a checkout."""
    created: str
    """UTC, ISO 8601."""
    hostname: str
    processor: str
    num_cores: int
    memory_bytes: int
    accelerator: str
    versions: dict[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One run of one cell. Empty lists and None stand where a status other than `ok` left nothing to tell."""

    schema_version: int
    experiment: str
    cell: str
    """Readable and unique within the experiment."""
    fingerprint: str
    """Hash of everything that defines the cell: a record is reused only for the same cell."""
    status: Status
    reason: str
    engine: str
    """Who partitioned and ran: `native` fills everything, others leave empty what only a look inside can tell. Where it
    cut the stages by a method of its own instead of the layout's cut, the method follows: `deepspeed:uniform`."""
    compiled: bool
    """Whether blocks were compiled: then times and kept bytes of ranks and stages are of compiled blocks, start-up has
    the first step in it, figures, FLOPs and operators are of blocks as written, and parts of a step are not told."""
    twins: str
    """Name of the family of matched models that this model belongs to."""
    match: str
    """`depth`, `parameters`, `flops`, or `none`."""
    match_mismatch: float
    """Relative residual mismatch against the family's first model."""
    is_control: bool
    """A second, identical run of another cell: what differs between the two is noise."""
    model: dict[str, Any]
    layout: dict[str, Any]
    layout_label: str
    world_size: int
    dtype: str
    device: str
    backend: str
    oversubscribed: bool
    """More ranks than cores (or GPUs): wall time then says little."""
    seed: int
    data: DataFacts | None
    parity: ParityFacts | None
    ledger_matches_recorder: bool | None
    """None of an engine without a ledger: its communication is what the recorder saw, sites and axes unknown."""
    loss: float | None
    gradient_norm: float | None
    warmup_seconds: list[float]
    step_seconds: list[float]
    typical_step: int
    """Index of the timed step of median length, whose spans are told; -1 where there is none."""
    plan: list[PlanFacts]
    ranks: list[RankFacts]
    stages: list[StageFacts]
    blocks: list[BlockFacts]
    actions: list[ActionFacts]
    spans: list[SpanFacts]
    profile: ProfileFacts | None
    """None where the experiment names no profile of the model on this layout."""
    communication: list[CommunicationFacts]
    edges: list[EdgeFacts]
    operators: list[OperatorFacts]
    parts: list[PartFacts]
    figures: list[FigureFacts]
    provenance: Provenance

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Record":
        """Reads a record. Raises ValueError for another version, an unknown status, unknown or missing keys."""
        version = fields.get("schema_version")
        if not isinstance(version, int) or version not in range(1, SCHEMA_VERSION + 1):
            raise ValueError(f"schema_version {version} of a record; this reader knows 1 to {SCHEMA_VERSION}")
        if fields.get("status") not in get_args(Status):
            raise ValueError(f"status {fields.get('status')!r} of a record; known are {', '.join(get_args(Status))}")
        values = dict(_exact(cls, in_these_words(fields, version)))
        for key, row in _ROWS.items():
            values[key] = [row(**_exact(row, entry)) for entry in values[key]]
        for key, part in _PARTS.items():
            if values[key] is not None:
                values[key] = part(**_exact(part, values[key]))
        return cls(**values)


_ROWS: dict[str, type] = {
    "plan": PlanFacts,
    "ranks": RankFacts,
    "stages": StageFacts,
    "blocks": BlockFacts,
    "actions": ActionFacts,
    "spans": SpanFacts,
    "communication": CommunicationFacts,
    "edges": EdgeFacts,
    "operators": OperatorFacts,
    "parts": PartFacts,
    "figures": FigureFacts,
}
_PARTS = {"data": DataFacts, "parity": ParityFacts, "profile": ProfileFacts, "provenance": Provenance}


def _exact(cls: type, fields: Mapping[str, Any]) -> Mapping[str, Any]:
    known = {field.name for field in dataclasses.fields(cls)}
    unknown, missing = sorted(set(fields) - known), sorted(known - set(fields))
    if unknown or missing:
        raise ValueError(
            f"{cls.__name__}: unknown keys {', '.join(unknown) or 'none'}, missing keys {', '.join(missing) or 'none'}"
        )
    return fields
