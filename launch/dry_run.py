"""Does the partitioned code, run dry, do what the closed forms say? One rank of each kind.

Parameters, bytes of parameters and gradients, events and FLOPs must be equal. Kept activations may be off by 2 %, and
whatever they are off by is told. Loading this loads torch.
"""

import dataclasses
from collections.abc import Sequence

from launch.accounted import DryRank
from parallel.account import RankAccount
from parallel.figures import RankFigures, StepShape, differences
from parallel.plan import Plan
from parallel.trace import trace

ALLOWED = 0.02
"""Relative error of a closed form of activations."""
_CLOSED_FORMS = ("saved_bytes", "peak_saved_bytes")


def dry_run(plan: Plan, shape: StepShape, accounts: Sequence[RankAccount]) -> tuple[DryRank, ...]:
    """Traces every rank that is accounted and compares.

    Raises ValueError for a layout that the native engine does not run.
    """
    if plan.layout.cp > 1:
        raise ValueError(
            f"cp = {plan.layout.cp}: the native engine, which is traced, runs no context parallelism; use cp = 1"
        )
    return tuple(
        compare(account.prediction.figures, traced.figures)
        for account, traced in zip(accounts, trace(plan, shape), strict=True)
    )


def compare(predicted: RankFigures, traced: RankFigures) -> DryRank:
    """A rank's two figures side by side."""
    within = {
        field: getattr(traced, field)
        for field in _CLOSED_FORMS
        if abs(getattr(predicted, field) - getattr(traced, field)) <= ALLOWED * getattr(traced, field)
    }
    exact = dataclasses.replace(predicted, **within)
    return DryRank(
        figures=traced,
        differences=tuple(differences(exact, traced)),
        remarks=tuple(differences(predicted, exact)),
    )
