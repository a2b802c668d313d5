"""Cells of a small experiment."""

from typing import Any

from launch.cell import Cell
from launch.experiment import resolve

SIZES: dict[str, Any] = {"width": 8, "num_heads": 2, "ffn_width": 16, "vocabulary": 40, "max_length": 16}


def cells(**settings: Any) -> tuple[Cell, ...]:
    """A cell of an encoder-decoder and one of its twin, on one rank with two microbatches."""
    table: dict[str, Any] = {
        "name": "one",
        "repeats": 3,
        "models": {
            "pair": {"architecture": "encoder_decoder", "num_encoder_blocks": 2, "num_decoder_blocks": 1, **SIZES},
            "single": {"twin_of": "pair", "architecture": "decoder_only"},
        },
        "data": {"tokens": {"text": "synthetic", "sequences": 4, "source_length": 6, "target_length": 5}},
        "layouts": [{"microbatches": 2}],
    }
    return resolve({**table, **settings}).cells
