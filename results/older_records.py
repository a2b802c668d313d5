"""How is a record of an older version read? In the words of this one, with nothing where it told nothing.

    version 1    no spans, actions or profile, and no time of the pipeline alone
    version 2    no start-up
    version 3    no parts of a step
    version 4    no compiled blocks; else it tells all that this version does

Left out: what a record holds (`results/schema.py`).
"""

from collections.abc import Mapping
from typing import Any

COMPLETE_SINCE = 4
"""Older records lack something that a run tells today."""


def in_these_words(fields: Mapping[str, Any], version: int) -> Mapping[str, Any]:
    """The fields of a record of any known version; it stays known by its version."""
    new: dict[str, Any] = {}
    of_ranks: dict[str, Any] = {}
    if version < 2:
        new |= {"typical_step": -1, "actions": [], "spans": [], "profile": None}
        of_ranks["pipeline_seconds"] = []
    if version < 3:
        of_ranks["startup_seconds"] = None
    if version < 4:
        new["parts"] = []
    if version < 5:
        new["compiled"] = False
    ranks = fields.get("ranks")
    if of_ranks and isinstance(ranks, list) and all(isinstance(rank, dict) for rank in ranks):
        new["ranks"] = [{**of_ranks, **rank} for rank in ranks]
    return {**fields, **new}
