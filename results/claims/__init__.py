"""Which claims are judged? Every group's claims, in the order of the report; `judge_all` reads the tables."""

from collections.abc import Callable, Iterable, Iterator

from results.claims import (
    even_cut,
    flow,
    inference,
    likeness,
    models,
    placement,
    sequence,
    shares,
    side_cut,
    structure,
    tensor,
    totals,
)
from results.claims.verdict import Claim, Verdict, judge
from results.tables import Tables


def _order(claim_id: str) -> tuple[int, int]:
    """Parallelism first, then compute, then numbers."""
    return "PCN".index(claim_id[0]), int(claim_id[1:])


_GROUPS = (
    tensor,
    even_cut,
    side_cut,
    sequence,
    flow,
    likeness,
    placement,
    inference,
    shares,
    totals,
    models,
    structure,
)

CLAIMS: tuple[Claim, ...] = tuple(
    sorted((claim for group in _GROUPS for claim in group.CLAIMS), key=lambda claim: _order(claim.id))
)


def chosen(ids: Iterable[str]) -> tuple[Claim, ...]:
    """The claims of these ids, or all without any.

    Raises:
        ValueError: an unknown id.
    """
    known = {claim.id: claim for claim in CLAIMS}
    wanted = [name.upper() for name in ids]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(f"no claim {', '.join(unknown)}; known are {', '.join(known)}")
    return tuple(known[name] for name in wanted) or CLAIMS


def judge_all(
    tables: Tables, claims: Iterable[Claim] = CLAIMS, on_claim: Callable[[], None] = lambda: None
) -> Iterator[Verdict]:
    """The verdict on each claim, from runs of the native engine; `on_claim` is called after each, to show progress."""
    native = tables.native
    for claim in claims:
        yield judge(claim, native)
        on_claim()
