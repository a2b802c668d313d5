"""Which rank runs which stage: placements of the chunks of a pipeline.

Stages are counted along the model, ranks along the pipeline axis; a rank with several stages has several chunks.

    placement      4 ranks, stage -> rank                  chunks      who hands over to itself
    linear         0 1 2 3                                 1
    interleaved    0 1 2 3  0 1 2 3  ...                   2 or more   nobody (one rank: always)
    v              0 1 2 3  3 2 1 0                        2           the last rank, at the turn
    folded         0 1 2 3 | 0 1 2 3                       even        nobody

`folded` is for encoder-decoders: the first half of the stages is the encoder's, the second half the decoder's, so that
every rank holds as many chunks of the one as of the other. The cut sees to that; for the schedule it is interleaved.

Sources: interleaved, Narayanan et al. 2021 (arXiv 2104.04473), section 2.2; v, Qi et al. 2024 (arXiv 2405.15362).
"""

import functools
from typing import Literal, get_args

Placement = Literal["linear", "interleaved", "v", "folded"]


def check_chunks(placement: Placement, pp: int, chunks: int) -> None:
    """Raises ValueError unless a placement can have so many chunks a rank."""
    if placement not in get_args(Placement):
        raise ValueError(f"placement = {placement!r}; choose one of {', '.join(get_args(Placement))}")
    if chunks < 1:
        raise ValueError(f"chunks = {chunks}; it must be at least 1")
    if pp == 1 and chunks > 1:
        raise ValueError(f"chunks = {chunks} on one pipeline rank: chunks are dealt to pp >= 2 ranks; try chunks = 1")
    rules = {
        "linear": (chunks == 1, "has one chunk a rank", "chunks = 1, or placement = 'interleaved'"),
        "interleaved": (chunks >= 2, "has two chunks a rank or more", "chunks = 2, or placement = 'linear'"),
        "v": (chunks == 2, "goes down the ranks and up again: two chunks a rank", "chunks = 2"),
        "folded": (chunks % 2 == 0, "has as many encoder as decoder chunks", f"chunks = {chunks + chunks % 2}"),
    }
    holds, rule, nearest = rules[placement]
    if not holds:
        raise ValueError(f"placement {placement!r} with chunks = {chunks}: it {rule}; try {nearest}")


@functools.lru_cache(maxsize=1024)
def stage_ranks(placement: Placement, pp: int, chunks: int) -> tuple[int, ...]:
    """Pipeline coordinate of every stage; pp x chunks of them. Raises ValueError as `check_chunks` does."""
    check_chunks(placement, pp, chunks)
    down = tuple(range(pp))
    return down + down[::-1] if placement == "v" else down * chunks
