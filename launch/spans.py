"""When did each rank do what, and what did its actions cost: rows of a record for timelines and simulations.

    timed steps of all ranks  ->  spans of the typical step      start and end of every action, busy seconds
                              ->  actions                        mean seconds of each stage's kinds, step by step
    profile of the pieces     ->  what it says of the stages     told beside them, so that readers can compare

The ranks of a step begin at a barrier and leave it one after the other. On one host they read one clock, and seconds
count from the first that left; on several each counts from its own leaving. Everything here is arithmetic on plain
numbers. Left out: what is made of the rows (`results/measured_steps.py`).
"""

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from launch.engine_run import TimedAction
from launch.facts import Report
from parallel.plan import Plan
from parallel.profile import Profile
from parallel.schedule import Kind
from parallel.stage_costs import stage_seconds
from results.schema import ActionFacts, ProfileFacts, SpanFacts


def typical_step(step_seconds: Sequence[float]) -> int:
    """Index of the step of median length, the shorter of two in the middle; -1 without steps."""
    order = sorted(range(len(step_seconds)), key=lambda index: step_seconds[index])
    return order[(len(order) - 1) // 2] if order else -1


def span_facts(reports: Sequence[Report], step: int, *, is_one_host: bool) -> list[SpanFacts]:
    """Spans of one timed step; a row an action, rank by rank."""
    if step < 0:
        return []
    first = min(one.steps[step].begun for one in reports)
    rows = []
    for one in reports:
        late = one.steps[step].begun - first if is_one_host else 0.0
        rows += [
            SpanFacts(
                rank=one.facts.rank,
                action=str(timed.action),
                start_seconds=timed.start + late,
                end_seconds=timed.end + late,
                busy_seconds=timed.busy,
            )
            for timed in one.steps[step].actions
        ]
    return rows


def action_facts(reports: Sequence[Report]) -> list[ActionFacts]:
    """Mean seconds of an action, by rank, stage and kind, one entry a timed step."""
    rows = []
    for one in reports:
        steps = [_by_kind(step.actions) for step in one.steps]
        for stage, kind in steps[0] if steps else ():
            taken = [step[stage, kind] for step in steps]
            rows.append(
                ActionFacts(
                    rank=one.facts.rank,
                    stage=stage,
                    kind=kind,
                    busy_seconds=[fmean(timed.busy for timed in actions) for actions in taken],
                    wall_seconds=[fmean(timed.end - timed.start for timed in actions) for actions in taken],
                )
            )
    return rows


def _by_kind(actions: Sequence[TimedAction]) -> dict[tuple[int, Kind], list[TimedAction]]:
    found: dict[tuple[int, Kind], list[TimedAction]] = defaultdict(list)
    for timed in actions:
        found[timed.action.stage, timed.action.kind].append(timed)
    return found


def profile_facts(profile: Profile | None, plan: Plan) -> ProfileFacts | None:
    """What a measured profile says of a plan's stages."""
    if profile is None:
        return None
    seconds = stage_seconds(profile, plan.stages)
    return ProfileFacts(
        forward_seconds=list(seconds.forward),
        backward_input_seconds=list(seconds.backward_input),
        backward_weight_seconds=list(seconds.backward_weight),
        latency_seconds=profile.transfer_cost,
        seconds_per_byte=profile.byte_cost,
        machine=dict(profile.machine),
    )
