"""How many bytes does a device move for what lies between the products: norms, activations, dropout, softmax?

Such operations compute little and wait for bytes. What they read and write is told by what a backward needs of them: of
k bytes that are kept without recomputation (`parallel/activations.py`)

    forward     2 k      each is written by one operation and read by the next
    backward    3 k      each is read; a gradient of its size is read and written
    recompute   2 k      of what is not kept, once more

These are estimates, not counts: kernels that fuse several operations move less, masks have no gradients. They suffice
to tell why narrow models are slow: k grows with the width of a block, its products with the width's square. Left out:
operands of the products themselves, embeddings' tables, the optimizer (`parallel/step_time.py`).
"""

from models.config import ModelConfig
from models.costs import sides
from parallel.figures import StepShape
from parallel.layouts import Layout, Recompute
from parallel.slices import Slices
from parallel.work import Work

FORWARD_PASSES, BACKWARD_PASSES = 2, 3
_BLOCKS = 3
"""Of a side are enough to tell a block from what comes with the first and the last."""


def traffic_bytes(config: ModelConfig, layout: Layout, shape: StepShape) -> dict[str, Work]:
    """Bytes that one rank moves for each piece of a profile (`parallel/profile.py`) and one microbatch.

    Args:
        config: the model.
        layout: its tp, sp, recompute and attention are read.
        shape: of one microbatch.
    """
    whole = kept_bytes(config, layout, shape, "none")
    left = kept_bytes(config, layout, shape, layout.recompute)
    return {
        piece: Work(
            FORWARD_PASSES * kept,
            # What full recomputation keeps besides, a block's input, is no operation's.
            BACKWARD_PASSES * kept + FORWARD_PASSES * max(0, kept - left[piece]),
            0.0,
        )
        for piece, kept in whole.items()
    }


def kept_bytes(config: ModelConfig, layout: Layout, shape: StepShape, recompute: Recompute) -> dict[str, int]:
    """What is kept of one microbatch, by piece; those of sides that the model lacks are missing."""
    # All blocks of a side are alike: a small model has every piece.
    small = config.replace(
        num_encoder_blocks=_BLOCKS * config.has_encoder, num_decoder_blocks=_BLOCKS * config.has_decoder
    )
    # An input that is kept whole was gathered: what operations between the products wrote is the shard.
    slices = Slices(config=small, layout=layout.replace(recompute=recompute, saved_input="shard"), shape=shape)

    def kept(first: int, last: int) -> int:
        return slices.saved(first, last).total

    pieces: dict[str, int] = {}
    first = 0
    for side in sides(small):
        one, two = kept(first + 1, first + 2), kept(first, first + 2)
        block = two - kept(first, first + 1)
        pieces[f"{side}_block"] = block
        pieces[f"{side}_stage"] = max(0, one - block)
        pieces[f"{side}_embedding"] = max(0, kept(first, first + 1) - one)
        first += _BLOCKS
    pieces["head"] = kept(first - 1, first) - kept(first - 2, first - 1)
    return pieces
