"""Which gradients travel over dp together, while the backward still runs?

A gradient may leave when the last microbatch has added to it. The backward comes from the last block of a rank to the
first, so buckets are filled in that order, each with whole blocks until it has `gradient_bucket_bytes` of a layout:

    blocks    e0     e1     e2     d0     d1          bytes of d1 >= the least
    buckets   <- sent last: e0 | e1 e2 | d0 | d1 <- sent first

With a block goes what its slice of the model has beside it: an embedding with block 0 of its stack, a final norm with
the last, the head with the model's last block, a relative bias with the first of its stack here. A tied matrix goes
where the first of its names does: it is whole when its last user is. What is summed over the sequence too (sp) is small
and scattered over all blocks: one bucket more, the last. Without a least all gradients are one message after the last
backward.

Source: Li et al. 2020 (arXiv 2006.15704, section 3.2.3), whose buckets are filled with single tensors. Left out: when
a bucket is whole (`parallel/arrivals.py`).
"""

from collections.abc import Mapping

from models.costs import Side, norm_parameters, num_blocks
from parallel.parameters import (
    around_head,
    around_tokens,
    attention_parameters,
    ffn_parameters,
    kv_parameters,
    relative_parameters,
    token_matrices,
    whole_parameters,
)
from parallel.plan import NO_BLOCK, Plan
from parallel.share import Share


def bucket_parameters(share: Share, dtype_bytes: int) -> dict[tuple[int, ...], int]:
    """Parameters of each bucket of a rank, in the order of sending, by its blocks; () is what sp sums over tp too.

    Of a layout that has a least. `dtype_bytes` is of an element of the gradients.
    """
    counts = block_parameters(share)
    least = share.layout.gradient_bucket_bytes / dtype_bytes
    filled = {blocks: sum(counts[block] for block in blocks) for blocks in fill(counts, least)}
    in_sequence = whole_parameters(share) if share.layout.sp else 0
    return filled | ({(): in_sequence} if in_sequence else {})


def fill(counts: Mapping[int, int], least: float) -> tuple[tuple[int, ...], ...]:
    """Blocks of each bucket, in the order of sending.

    Args:
        counts: elements by block.
        least: elements at which a bucket is full; the last may have fewer.
    """
    buckets: list[tuple[int, ...]] = []
    blocks: tuple[int, ...] = ()
    for block in sorted(counts, reverse=True):
        blocks += (block,)
        if sum(counts[one] for one in blocks) >= least:
            buckets.append(blocks)
            blocks = ()
    return (*buckets, blocks) if blocks else tuple(buckets)


def home_block(plan: Plan, coordinate: int, parameter: str) -> int:
    """Number in the flat block list of the block that a parameter goes with, at a pipeline coordinate that holds it."""
    number = plan.block_number(parameter)
    if number != NO_BLOCK:
        return number
    stack, _, inside = parameter.partition(".")
    if stack == "head":
        return plan.config.num_blocks - 1
    side: Side = "encoder" if stack == "encoder" else "decoder"
    first = 0 if side == "encoder" else plan.config.num_encoder_blocks
    end = first + num_blocks(plan.config, side)
    if inside.startswith("embedding."):
        return first
    if inside.startswith("norm."):
        return end - 1
    return min(block for block in plan.blocks_of(coordinate) if first <= block < end)


def block_parameters(share: Share) -> dict[int, int]:
    """Parameters that go with each block of a rank, by its number in the flat block list.

    Under sp those that every tp rank holds whole are not counted. Where keys and values are shipped, what makes them
    goes with its block's number on the stage of the memory.
    """
    config = share.config
    norm, bias = norm_parameters(config), config.width
    matrices = token_matrices(share)
    # What every tp rank holds whole: all of it counts, or none.
    whole = 0 if share.layout.sp else 1
    counts: dict[int, int] = {}
    for side in share.sides:
        before = 0 if side == "encoder" else config.num_encoder_blocks
        held = share.blocks(side)
        has_cross = side == "decoder" and config.has_cross_attention
        attention = attention_parameters(share) - (1 - whole) * bias * config.attention_output_bias
        ffn = ffn_parameters(share) - (1 - whole) * bias * config.ffn_bias
        for index in held:
            makes_kv = has_cross and index in share.kv_blocks
            counts[before + index] = (1 + has_cross) * attention + ffn + whole * (2 + has_cross) * norm
            counts[before + index] -= (has_cross - makes_kv) * kv_parameters(share)
        counts[before + held[0]] += relative_parameters(share)
        if share.has_embedding(side):
            counts[before] += matrices.get(f"{side}.embedding.token.weight", 0)
            counts[before] += whole * (around_tokens(share, side) + norm * config.embedding_norm)
        if share.has_end(side):
            counts[before + num_blocks(config, side) - 1] += whole * norm * config.final_norm
    for index in set(share.kv_blocks) - set(share.blocks("decoder")):
        counts[config.num_encoder_blocks + index] = kv_parameters(share)
    if share.has_head:
        vocabulary_bias = share.vocabulary("head.weight") * config.head_bias
        counts[config.num_blocks - 1] += matrices.get("head.weight", 0) + vocabulary_bias
        counts[config.num_blocks - 1] += whole * (around_head(share) - vocabulary_bias)
    return counts
