"""Do closed form and dry run agree where ranks hold several stages, backwards are split, or memory travels directly?"""

from typing import Any

import pytest

from parallel.figures import StepShape, differences
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.predict import predict
from parallel.profile import Profile
from parallel.trace import trace
from tests.small_models import small_config

ALLOWED = 0.02
"""Relative difference of the kept bytes' peak."""
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"schedule": "zb_h1"},
    {"schedule": "zb_h2", "tp": 2},
    {"schedule": "list"},
    {"schedule": "zb_v", "placement": "v", "chunks": 2, "tp": 2, "sp": True},
    {"schedule": "interleaved", "placement": "interleaved", "chunks": 2},
    {"schedule": "interleaved", "placement": "folded", "chunks": 2, "tp": 2, "transport": "direct"},
    {"schedule": "1f1b", "pp": 3, "transport": "direct"},
    {"schedule": "zb_h1", "recompute": "full"},
    {"schedule": "zb_h2", "recompute": "selective"},
    {"schedule": "zb_v", "placement": "v", "chunks": 2, "tp": 2, "sp": True, "recompute": "full"},
    {"schedule": "zb_h1", "tp": 2, "sp": True, "saved_input": "whole", "memory_gather": "per_block"},
    {"schedule": "zb_v", "placement": "v", "chunks": 2, "tp": 2, "vocabulary": "whole"},
)


@pytest.mark.parametrize("fields", LAYOUTS, ids=lambda fields: Layout(**{"pp": 2, **fields}).label)
def test_predicted_ranks_equal_traced_ones(fields: dict[str, Any]) -> None:
    config = small_config("encoder_decoder", num_encoder_blocks=3, num_decoder_blocks=3, width=64, head_width=16)
    layout = Layout(**{"pp": 2, "microbatches": 3, **fields})
    shape = StepShape(num_sequences=6, source_length=7, target_length=5)
    made = plan(config, layout, Profile.counted_for(config, layout, shape))
    for predicted, traced in zip(predict(made, shape), trace(made, shape), strict=True):
        lines = differences(predicted.figures, traced.figures)
        assert [line for line in lines if "peak_saved_bytes" not in line] == []
        peak = predicted.figures.peak_saved_bytes
        assert abs(traced.figures.peak_saved_bytes - peak) <= ALLOWED * peak
