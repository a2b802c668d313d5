"""What do the stages and edges of a cut cost by a profile: the durations that schedules are made and simulated with.

    profile of the pieces + stages  ->  seconds of every stage's actions
    profile of the pieces + edges   ->  latency and occupancy of every message

Seconds stand for whatever unit the profile has. Left out: links of a machine (`parallel/step_time.py`).
"""

from collections.abc import Sequence

from parallel.edges import Edge
from parallel.partition import Stage
from parallel.profile import Profile
from parallel.schedule import Direction
from parallel.simulate import StageSeconds, TransferCost, TransferSeconds
from parallel.work import Work


def stage_seconds(profile: Profile, stages: Sequence[Stage]) -> StageSeconds:
    """Durations of the actions of every stage on one microbatch."""
    return seconds_of([profile.stage(stage) for stage in stages])


def seconds_of(works: Sequence[Work]) -> StageSeconds:
    """Durations of the actions of stages that cost so much."""
    return StageSeconds(
        forward=tuple(work.forward for work in works),
        backward_input=tuple(work.backward_input for work in works),
        backward_weight=tuple(work.backward_weight for work in works),
    )


def message_seconds(profile: Profile) -> TransferCost:
    """Cost of a message over an edge, all its tensors together, on a channel of its own."""

    def transfer_seconds(edge: Edge, _direction: Direction) -> TransferSeconds:
        return TransferSeconds(latency=profile.transfer_cost, occupancy=profile.byte_cost * profile.edge_bytes(edge))

    return transfer_seconds
