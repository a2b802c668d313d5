"""What does each distinct rank hold, send and compute, in training and in generation? All its closed forms together.

    plan + step  ->  for each kind of rank: its prediction, the FLOPs that its part of the model needs, its caches

The FLOPs that a rank's part needs are those of the mathematics, at lengths without padding: a block's forward over the
tp ranks that share it, the head's by vocabulary rows, or evenly if each holds them all, and twice that for the
backward. Hardware FLOPs (in the prediction) are more by padding, replicated KV heads and heads, and what is computed
again:

    utilisation of the hardware = hardware FLOPs / (seconds x peak), of the model = model FLOPs / (seconds x peak)

Summed over the ranks of a replica, model FLOPs are those of `parallel.flops.model_flops` as far as tp divides them.
Left out: time.
"""

import dataclasses

from models.costs import block_flops, embedding_flops
from parallel.context_costs import local_part, predict_context
from parallel.figures import Optimizer, StepShape
from parallel.kv_cache import CacheBytes, cache_bytes
from parallel.plan import Plan
from parallel.predict import RankPrediction, predict
from parallel.share import Share, shares


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankAccount:
    """One kind of rank.

    Attributes:
        prediction: of one training step.
        model_forward_flops: that its part of the model needs for the step's forward; the backward needs twice as many.
        cache: of one sequence in generation, with the step's lengths.
    """

    prediction: RankPrediction
    model_forward_flops: int
    cache: CacheBytes


def account(
    plan: Plan, shape: StepShape, *, optimizer: Optimizer = "adamw", master_weights: bool = False
) -> tuple[RankAccount, ...]:
    """Accounts for one rank of each kind, by stage and then by vocabulary rows.

    Arguments and errors are those of `parallel.predict.predict`, but cp > 1 is told by `parallel.context_costs`: a rank
    then computes and caches its positions of a sequence alone.
    """
    cp = plan.layout.cp
    local_plan, local_shape = local_part(plan, shape)
    told = predict_context if cp > 1 else predict
    predictions = told(plan, shape, optimizer=optimizer, master_weights=master_weights)
    return tuple(
        RankAccount(
            prediction=prediction,
            model_forward_flops=model_forward_flops(share, shape) // cp,
            cache=cache_bytes(
                share,
                source_length=local_shape.source_length,
                target_length=local_shape.target_length,
                dtype_bytes=shape.dtype_bytes,
            ),
        )
        for share, prediction in zip(shares(local_plan), predictions, strict=True)
    )


def model_forward_flops(share: Share, shape: StepShape) -> int:
    """Forward FLOPs of the mathematics of a rank's part, for all sequences of a step.

    What is not dealt by vocabulary rows is dealt evenly over tp, rounded down, even what every tp rank executes whole.
    """
    config, count, tp = share.config, shape.num_sequences, share.layout.tp
    whole = 0
    for side in share.sides:
        block = block_flops(config, side, shape.source_length, shape.target_length, count)
        whole += len(share.blocks(side)) * block.total
    if share.num_shipped:
        block = block_flops(config, "decoder", shape.source_length, shape.target_length, count)
        whole += share.num_shipped * block.cross_memory
    if "encoder" in share.sides and share.has_embedding("encoder"):
        whole += embedding_flops(config, shape.source_length, count)
    if not share.has_head:
        return whole // tp
    length = shape.target_length if config.has_decoder else shape.source_length
    positions = count * length
    whole += 2 * positions * config.width**2 * config.head_transform
    head = 2 * positions * config.width * share.vocabulary("head.weight")
    return whole // tp + head if share.layout.shards_vocabulary else (whole + head) // tp
