"""How close is equal? Two answers, and no third.

A test that needs a looser one has found a defect, not a tolerance.
"""

EXACT_RTOL = 1e-10
"""Relative, in float64: a partitioned run against one process, where only the order of sums may differ."""

LOGITS_ATOL = 1e-5
"""Absolute, in float32: logits against an independent implementation of the same model."""
