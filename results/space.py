"""How large is the space of layouts, and how far apart are the steps in it? The table that `launch/space.py` writes."""

import functools
from pathlib import Path

import pandas as pd


@functools.cache
def build() -> pd.DataFrame:
    """One row a layout; `point` names it."""
    return pd.read_csv(Path(__file__).with_name("space.csv"))
