"""How well could a pipeline be balanced if cuts might fall inside of blocks?

Where stages have one or two blocks, no cut between blocks is even. A finer grain is the sublayer:

    encoder block   self-attention | ffn        decoder block   self-attention | cross-attention | ffn

A sublayer costs its share of its block, as FLOPs share the block out, whatever the unit of the profile. Embeddings and
head, which live with a block otherwise, are pieces of their own too; nothing is charged for what is sent. The answer is
a bound: no engine here cuts inside of blocks.
"""

import dataclasses
from collections.abc import Callable, Sequence

from models.costs import Side, num_blocks, sides
from parallel.cuts import Cutting, least_maximum
from parallel.layouts import Layout
from parallel.profile import Profile
from parallel.slices import Slices

SUBLAYERS = ("self_attention", "cross_attention", "ffn")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Grain:
    """Least cost that the most costly stage can have, in the unit of a profile.

    Attributes:
        blocks: cut between blocks.
        sublayers: cut between sublayers, embeddings and head.
        ideal: the whole model divided by the number of stages.
    """

    blocks: float
    sublayers: float
    ideal: float


def grain(profile: Profile, num_stages: int) -> Grain:
    """What cuts of each grain reach. Raises ValueError for more stages than blocks."""
    config = profile.config
    most = config.num_blocks
    if not 1 <= num_stages <= most:
        raise ValueError(f"{num_stages} stages over {most} blocks: every stage needs a block; try 1 to {most}")
    costs = sublayer_costs(profile)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    return Grain(
        blocks=_least(lambda first, last: profile.slice(first, last).total, config.num_blocks, num_stages),
        sublayers=_least(lambda first, last: sums[last] - sums[first], len(costs), num_stages),
        ideal=profile.model.total / num_stages,
    )


def sublayer_costs(profile: Profile) -> tuple[float, ...]:
    """Cost of every embedding, sublayer and the head, forward and backward, in the order of the model.

    What a stage pays once for a side stands with the side's first sublayer.
    """
    config = profile.config
    costs: list[float] = []
    for side in sides(config):
        block = getattr(profile, f"{side}_block").total
        mine = [block * share for share in _shares(profile, side)] * num_blocks(config, side)
        mine[0] += getattr(profile, f"{side}_stage").total
        costs += [getattr(profile, f"{side}_embedding").total, *mine]
    return (*costs, profile.head.total)


def _shares(profile: Profile, side: Side) -> Sequence[float]:
    """What part of a block's FLOPs each of its sublayers takes."""
    config = profile.config
    layout = Layout(tp=profile.tp, sp=profile.sp, recompute=profile.recompute, attention=profile.attention)
    first = 0 if side == "encoder" else config.num_encoder_blocks
    parts = Slices(config=config, layout=layout, shape=profile.shape).flops(first, first + 1)
    flops = [parts[name].total for name in SUBLAYERS if parts[name].total]
    return [part / sum(flops) for part in flops]


def _least(cost: Callable[[int, int], float], num_pieces: int, num_stages: int) -> float:
    scale = 2**40 / cost(0, num_pieces)
    cutting = Cutting(
        num_blocks=num_pieces,
        ranks=range(num_stages),
        held=lambda _, first, last: round(scale * cost(first, last)),
        sent=lambda _stage, _first, _last: 0,
    )
    return least_maximum(cutting) / scale
