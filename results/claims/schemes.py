"""What do simulated pipelines say of an encoder-decoder against its twin? A part of claim P4.

Read is `penalty.csv`: the makespan over the ideal of the encoder-decoder over that of its twin in the same family of
schedules. As others run it (even counts, aligned stages, folded chunks) and as it can be run (costed cuts, list
schedules), each the best there is at a point. It is as fast as its twin where it takes at most 3 % more.
"""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from parallel.penalty import CLOSE
from results.claims.verdict import Evidence, of_count

QUANTITIES = {
    "others": "pipeline over its ideal, simulated, as others run encoder-decoders, against the twin",
    "ours": "pipeline over its ideal, simulated, of costed cuts and list schedules, against the twin",
}
POINT = ["costs", "pp", "source_length", "target_length"]


def best(penalty: pd.DataFrame, who: str, grain: str = "block") -> pd.DataFrame:
    """The fastest row of each point: of what others do, or of the list schedules."""
    rows = penalty[(penalty["who"] == who) & (penalty["grain"] == grain)]
    if who == "ours":
        rows = rows[rows["family"] == "list"]
    return rows.loc[rows.groupby(POINT, sort=False)["makespan_over_ideal"].idxmin()]


def against(penalty: pd.DataFrame, who: str) -> pd.DataFrame:
    """Of each point, `against_best`: over the twin's fastest way of the same families."""
    rows = best(penalty, who)
    families = ["1f1b", "interleaved x2"] if who == "others" else ["list"]
    twins = penalty[(penalty["who"] == "twin") & (penalty["grain"] == "block") & penalty["family"].isin(families)]
    least = twins.groupby(POINT)["makespan_over_ideal"].min().rename("twin_best")
    joined = rows.join(least, on=POINT)
    return joined.assign(against_best=joined["makespan_over_ideal"] / joined["twin_best"])


def evidence(penalty: pd.DataFrame) -> Iterator[Evidence]:
    """A row a kind of costs and number of ranks, whose ratios of lengths agree."""
    for who, quantity in QUANTITIES.items():
        told = against(penalty, who)
        told = told.assign(is_harder=told["against_best"] > 1 + CLOSE)
        for key, rows in told.groupby(["costs", "pp", "is_harder"], sort=False):
            costs, pp, is_harder = key[0], key[1], bool(rows["is_harder"].iloc[0])
            num_ratios = ((told["costs"] == costs) & (told["pp"] == pp)).sum()
            yield Evidence(
                quantity=quantity,
                value=f"{pp} ranks, {costs}: x{_range(rows['against_best'])}",
                says=of_count(supports=is_harder),
                basis="predicted",
                table="penalty",
                cells=tuple(rows["point"]),
                note=f"{len(rows)} of {num_ratios} ratios of lengths"
                + (_why(penalty, rows) if is_harder and who == "ours" else ""),
            )


def _why(penalty: pd.DataFrame, rows: pd.DataFrame) -> str:
    """What blocks allow at best where they are too coarse, and what sublayers reach."""
    words = f"; {_range(rows['makespan_over_ideal'])}, and no dealing of blocks is below {_range(rows['dealt_bound'])}"
    finer = best(penalty, "ours", "sublayer").set_index(POINT)
    there = [tuple(row) for row in rows[POINT].itertuples(index=False) if tuple(row) in finer.index]
    if there:
        reached = finer.loc[there]
        words += f"; cut between sublayers, in simulation alone, x{_range(reached['against_twin'])} of a twin cut so"
    return words


def condition(penalty: pd.DataFrame) -> str:
    """At how many points each is harder."""
    told = []
    for who, words in (("others", "as others run them"), ("ours", "with costed cuts and list schedules")):
        excess = against(penalty, who)["against_best"]
        told.append(f"{words} at {int((excess > 1 + CLOSE).sum())} of {len(excess)} (up to x{excess.max():.3f})")
    return (
        f"simulated pipelines, over their ideal, take over {CLOSE:.0%} more than the twin's {' and '.join(told)} points"
    )


def _range(values: "pd.Series[Any]") -> str:
    low, high = f"{values.min():.3f}", f"{values.max():.3f}"
    return low if low == high else f"{low} to {high}"
