"""Which rank has which stage, and what is refused?"""

import pytest

from parallel.placement import check_chunks, stage_ranks


def test_placements_written_out() -> None:
    assert stage_ranks("linear", 3, 1) == (0, 1, 2)
    assert stage_ranks("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert stage_ranks("v", 3, 2) == (0, 1, 2, 2, 1, 0)
    assert stage_ranks("folded", 2, 2) == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("placement", "pp", "chunks", "message"),
    [
        ("linear", 2, 2, r"placement 'linear' with chunks = 2: it has one chunk a rank; try chunks = 1"),
        ("interleaved", 2, 1, r"two chunks a rank or more; try chunks = 2"),
        ("v", 2, 3, r"two chunks a rank; try chunks = 2"),
        ("folded", 2, 3, r"as many encoder as decoder chunks; try chunks = 4"),
        ("v", 1, 2, r"chunks = 2 on one pipeline rank: chunks are dealt to pp >= 2 ranks; try chunks = 1"),
        ("w", 2, 2, r"placement = 'w'; choose one of linear, interleaved, v, folded"),
        ("linear", 2, 0, r"chunks = 0; it must be at least 1"),
    ],
)
def test_chunks_that_a_placement_cannot_have_are_refused(placement: str, pp: int, chunks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_chunks(placement, pp, chunks)  # type: ignore[arg-type]
