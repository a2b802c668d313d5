"""What does an encoder-decoder cost a pipeline, simulated: the table that `python -m launch.penalty` writes.

One row a kind of costs, number of ranks, pair of lengths, grain and scheme (`parallel/penalty.py`), as CSV because its
searches take minutes. Kinds of costs: `blocks` and `flops` are counted, `h100` is a machine in closed form, `measured`
are the profiles under `results/reference/profiles`, and `again` those of a second measurement. A test computes some of
its rows.
"""

import functools
from pathlib import Path

import pandas as pd

PATH = Path(__file__).with_name("penalty.csv")
MEASURED = ("measured", "again")
"""Kinds of costs that were measured."""


@functools.cache
def build() -> pd.DataFrame:
    """The table, and `point` names a row."""
    return pd.read_csv(PATH, dtype={"first_atoms": str})
