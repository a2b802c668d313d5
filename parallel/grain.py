"""How well could a pipeline be balanced if cuts might fall inside of blocks?

Where stages have one or two blocks, no cut between blocks is even. A finer grain is the sublayer:

    encoder block   self-attention | ffn        decoder block   self-attention | cross-attention | ffn

A sublayer costs its share of its block, as FLOPs share the block out, whatever the unit of the profile. Embeddings and
head, which live with a block otherwise, are pieces of their own too; nothing is charged for what is sent. The answer is
a bound: no engine here cuts inside of blocks.

Another bound needs no cut at all: blocks that do not divide the ranks leave one of them with more, wherever they stand.
24 decoder blocks over 16 ranks put two on one of them, however small encoder blocks are.
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


def least_dealt(profile: Profile, num_ranks: int) -> float:
    """Cost of the most costly rank when any block may stand on any rank: no cut and no placement falls below.

    The head lives with a decoder block, an encoder block where there is no decoder; embeddings and what stages pay once
    are left out.
    """
    config, head = profile.config, profile.head.total
    ends: Side = "decoder" if config.has_decoder else "encoder"
    costs: dict[Side, float] = {side: getattr(profile, f"{side}_block").total for side in sides(config)}
    counts = {side: num_blocks(config, side) for side in sides(config)}
    last = costs[ends] + head
    counts[ends] -= 1
    large = max(costs, key=lambda side: costs[side])
    small = min(costs, key=lambda side: costs[side])

    def fits(capacity: float) -> bool:
        """Whether all small blocks find room beside the large ones; tables by the number of large blocks dealt."""
        if last > capacity:
            return False
        room = {0: 0}
        for rank in range(num_ranks):
            left = capacity - last if rank == 0 else capacity
            mine = range(int(left / costs[large]) + 1)
            then: dict[int, int] = {}
            for dealt, beside in room.items():
                for count in mine:
                    if dealt + count > counts[large]:
                        break
                    more = int((left - count * costs[large]) / costs[small]) if small != large else 0
                    then[dealt + count] = max(then.get(dealt + count, 0), beside + more)
            room = then
        return any(
            dealt >= counts[large] and (small == large or beside >= counts[small]) for dealt, beside in room.items()
        )

    low = max(profile.model.total / num_ranks * 0.5, last * 0.5)
    high = profile.model.total
    while high - low > 1e-7 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low


def sublayer_costs(profile: Profile) -> tuple[float, ...]:
    """Cost of every embedding, sublayer and the head, forward and backward, in the order of the model.

    What a stage pays once for a side stands with the side's first sublayer.
    """
    config = profile.config
    costs: list[float] = []
    for side in sides(config):
        block = getattr(profile, f"{side}_block").total
        mine = [block * share for share in sublayer_shares(profile, side)] * num_blocks(config, side)
        mine[0] += getattr(profile, f"{side}_stage").total
        costs += [getattr(profile, f"{side}_embedding").total, *mine]
    return (*costs, profile.head.total)


def sublayer_shares(profile: Profile, side: Side) -> Sequence[float]:
    """What part of a block's FLOPs each of its sublayers takes, in order."""
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
