"""What does the architecture cost a pipeline? Encoder-decoder and decoder-only twin over ranks, lengths and schemes.

    makespan over ideal   step seconds / (microbatches x all work / ranks): 1 is a pipeline without imbalance and bubble
    against twin          the same, over the twin's in the same family of schedules, cut as well as the twin can be
    per FLOP              step seconds per FLOP over the twin's: the former x what one rank alone needs per FLOP, which
                          is no matter of pipelines

    family            decoder-only         encoder-decoder, as others do it     encoder-decoder, as we do it
    1f1b              even, costed cut     even; aligned                        costed cut
    interleaved x2    even, costed cut     folded, each side cut evenly         costed cut
    list x1, x2, x4   searched             -                                    searched: cuts, placements, schedules
    list              the best of them                                          the best of them

Steps have four microbatches a rank, all alike. Whose costs they are stands in `parallel/twin_cases.py`. Where even the
best encoder-decoder misses the twin by more than `CLOSE`, the finer grain of sublayers is simulated too, for both; no
engine cuts there.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from models.costs import forward_flops
from parallel.candidates import CutKind, Pipeline, listed, named
from parallel.grain import grain, least_dealt
from parallel.layouts import Schedule
from parallel.line import Grained, Line
from parallel.placement import Placement
from parallel.profile import Profile
from parallel.twin_cases import Case

CLOSE = 0.03
"""How much more than the twin's a step may take per FLOP to be called as fast."""
MICROBATCHES_PER_RANK = 4
LIST_CHUNKS: dict[Grained, tuple[int, ...]] = {"block": (1, 2, 4), "sublayer": (1, 2)}

Who = Literal["twin", "others", "ours"]
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scheme:
    """A way to run a pipeline under a named schedule."""

    name: str
    family: str
    who: Who
    schedule: Schedule
    cut: CutKind
    placement: Placement = "linear"
    chunks: int = 1


def _pair_of(who: Who, cut: CutKind) -> tuple[Scheme, Scheme]:
    return (
        Scheme(name=f"1f1b {cut}", family="1f1b", who=who, schedule="1f1b", cut=cut),
        Scheme(
            name=f"interleaved x2 {cut}",
            family="interleaved x2",
            who=who,
            schedule="interleaved",
            cut=cut,
            placement="interleaved",
            chunks=2,
        ),
    )


SCHEMES: dict[str, tuple[Scheme, ...]] = {
    "decoder_only": (*_pair_of("twin", "even"), *_pair_of("twin", "costed")),
    "encoder_decoder": (
        _pair_of("others", "even")[0],
        Scheme(name="1f1b aligned", family="1f1b", who="others", schedule="1f1b", cut="aligned"),
        Scheme(
            name="interleaved x2 folded",
            family="interleaved x2",
            who="others",
            schedule="interleaved",
            cut="even",
            placement="folded",
            chunks=2,
        ),
        *_pair_of("ours", "costed"),
    ),
}
"""Named schedules of each architecture; list schedules are everybody's."""

COLUMNS = (
    *("point", "costs", "model", "architecture", "pp", "microbatches", "source_length", "target_length"),
    *("length_ratio", "grain", "scheme", "family", "who", "schedule", "placement", "chunks", "first_atoms"),
    *("stage_imbalance", "imbalance", "bubble", "makespan_over_ideal", "bound", "dealt_bound", "block_grain"),
    *("sublayer_grain", "twin_over_ideal", "against_twin", "one_rank_per_flop", "per_flop_against_twin"),
)


# ---- rows -----------------------------------------------------------------------------------------------------------


def rows(case: Case) -> list[Row]:
    """A row for every pair of lengths and scheme; schemes that need more stages than there are atoms are left out."""
    line = Line(profile=case.profile, grain=case.grain)
    made = [
        (scheme.name, scheme.family, scheme.who, scheme.schedule, _named(line, case.pp, scheme))
        for scheme in SCHEMES[case.profile.config.architecture]
        if case.grain == "block" and case.pp * scheme.chunks <= _most_stages(line, scheme)
    ]
    who: Who = "twin" if case.is_twin else "ours"
    lists = [
        (f"list x{chunks}", f"list x{chunks}", who, "list", _listed(line, case.pp, chunks))
        for chunks in LIST_CHUNKS[case.grain]
        if case.pp * chunks <= line.num_atoms
    ]
    if lists:
        fastest = min(lists, key=lambda told: told[-1].over_ideal)
        lists.append(("list", "list", *fastest[2:]))
    dealt = least_dealt(case.profile, case.pp) if case.grain == "block" else None
    told = []
    for name, family, whose, schedule, pipeline in (*made, *lists):
        row = _row(case, pipeline, dealt) | {"scheme": name, "family": family, "who": whose, "schedule": schedule}
        for source, target in case.pairs:
            at = {"source_length": source, "target_length": target, "length_ratio": source / target}
            told.append(row | at | {"point": _point(case, name, source, target)})
    return told


def _most_stages(line: Line, scheme: Scheme) -> int:
    smaller = min(line.boundary, line.num_atoms - line.boundary)
    return 2 * smaller if scheme.placement == "folded" else line.num_atoms


def _named(line: Line, pp: int, scheme: Scheme) -> Pipeline:
    return named(
        line,
        pp=pp,
        microbatches=MICROBATCHES_PER_RANK * pp,
        schedule=scheme.schedule,
        cut=scheme.cut,
        placement=scheme.placement,
        chunks=scheme.chunks,
    )


def _listed(line: Line, pp: int, chunks: int) -> Pipeline:
    return listed(line, pp=pp, chunks=chunks, microbatches=MICROBATCHES_PER_RANK * pp)


def _row(case: Case, pipeline: Pipeline, dealt: float | None) -> Row:
    profile, num_stages = case.profile, pipeline.pp * pipeline.chunks
    ideal = profile.model.total / case.pp
    found = grain(profile, num_stages) if num_stages <= profile.config.num_blocks else None
    return {
        "costs": case.costs,
        "model": case.model,
        "architecture": profile.config.architecture,
        "pp": case.pp,
        "microbatches": pipeline.microbatches,
        "grain": case.grain,
        "placement": pipeline.placement,
        "chunks": pipeline.chunks,
        "first_atoms": ",".join(map(str, pipeline.starts[1:-1])),
        "stage_imbalance": pipeline.stage_imbalance,
        "imbalance": pipeline.timeline.imbalance,
        "bubble": pipeline.timeline.bubble,
        "makespan_over_ideal": pipeline.over_ideal,
        "bound": pipeline.bound,
        "dealt_bound": None if dealt is None else max(1.0, dealt / ideal),
        "block_grain": found.blocks / found.ideal if found else None,
        "sublayer_grain": found.sublayers / found.ideal if found else None,
        # For what is joined; no column.
        "ideal_per_flop": ideal * case.pp / _model_flops(profile),
    }


def _model_flops(profile: Profile) -> int:
    """That the mathematics of a microbatch needs, forward and backward."""
    lengths = (profile.source_length, profile.target_length)
    return 3 * forward_flops(profile.config, *lengths, profile.num_sequences)


def _point(case: Case, scheme: str, source: int, target: int) -> str:
    side = "twin" if case.is_twin else case.profile.config.architecture
    return f"{case.costs} {case.model} {side} pp{case.pp} {source}/{target} {case.grain} {scheme}"


def joined(told: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Rows with what the twin comes to: its best of the same costs, ranks, lengths, grain and family."""
    keys = ("costs", "model", "pp", "source_length", "target_length", "grain", "family")
    best: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in told:
        key = tuple(row[name] for name in keys)
        if row["who"] == "twin" and (key not in best or row["makespan_over_ideal"] < best[key]["makespan_over_ideal"]):
            best[key] = row
    found = []
    for row in told:
        twin = best.get(tuple(row[name] for name in keys))
        against: Row = {}
        if twin is not None:
            ratio = row["makespan_over_ideal"] / twin["makespan_over_ideal"]
            alone = row["ideal_per_flop"] / twin["ideal_per_flop"]
            against = {
                "twin_over_ideal": twin["makespan_over_ideal"],
                "against_twin": ratio,
                "one_rank_per_flop": alone,
                "per_flop_against_twin": ratio * alone,
            }
        found.append({name: _rounded({**row, **against}.get(name)) for name in COLUMNS})
    return found


def _rounded(value: Any) -> Any:
    """Six digits behind the point: what a table needs, and what every machine agrees on."""
    return round(value, 6) if isinstance(value, float) else value


def coarse(told: Sequence[Mapping[str, Any]]) -> set[tuple[str, int, int, int]]:
    """Costs, ranks and lengths at which the best list schedule of blocks is not as fast as the twin's."""
    return {
        (row["costs"], row["pp"], row["source_length"], row["target_length"])
        for row in told
        if row["family"] == "list" and row["grain"] == "block" and row["against_twin"] > 1 + CLOSE
    }
