"""Is one block of a model like all the others? How much blocks differ, in closed form.

    coefficient of variation   standard deviation over mean, over all blocks of a model: 0 where all are alike

One row a named model and, where it has two sides, a pair of lengths that share 960 positions between them. Parameters
are bytes alike. Ends (embeddings, head, last norms) are no blocks. What was measured of blocks stands in `blocks.csv`.
"""

import functools
from collections.abc import Iterator
from typing import Any

import pandas as pd

from models.config import ModelConfig
from models.costs import block_costs, sides
from models.named import named_model
from results.balance import coefficient_of_variation
from results.model_counts import NAMES
from results.predicted import PAIR_LENGTHS


@functools.cache
def build() -> pd.DataFrame:
    """One row a model and pair of lengths."""
    return pd.DataFrame([row for name in NAMES for row in _rows(named_model(name))])


def _rows(config: ModelConfig) -> Iterator[dict[str, Any]]:
    longest = (config.max_length * config.has_encoder, config.max_length * config.has_decoder)
    for source, target in PAIR_LENGTHS if config.has_cross_attention else [longest]:
        costs = block_costs(config, source, target)
        yield {
            "point": f"{config.name} of {source}/{target}",
            "model": config.name,
            "architecture": config.architecture,
            "source_length": source,
            "target_length": target,
            "num_blocks": config.num_blocks,
            "num_kinds": len({(cost.flops.total, cost.parameters.total) for cost in costs}),
            "num_sides": len(sides(config)),
            "variation_forward_flops": float(coefficient_of_variation([cost.flops.total for cost in costs])),
            "variation_parameters": float(coefficient_of_variation([cost.parameters.total for cost in costs])),
        }
