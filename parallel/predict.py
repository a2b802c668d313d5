"""What does each rank of a layout hold, send, compute and keep in one step? Told in closed form, before anything runs.

    plan + step  ->  one prediction for each kind of rank

Nothing here imports torch: any model on any number of ranks is answered at once. The formulas stand where they are
derived: `parameters` and states, `events`, `flops`, `keeps` and `cores` of activations, all over `share`, the part that
a rank holds.

Exactly equal to what the native engine does on CPUs: parameters, bytes, events, FLOPs, kept activations. Left out:
time, and ranks under context parallelism.
"""

import dataclasses

from parallel.activations import Saved, peak_over, saved_bytes
from parallel.events import step_events
from parallel.figures import Optimizer, PhaseFlops, RankFigures, StepShape
from parallel.flops import step_flops
from parallel.layouts import microbatch_sizes
from parallel.parameters import StateBytes, parameter_counts, state_bytes
from parallel.plan import Plan
from parallel.share import Share, shares


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankPrediction:
    """One kind of rank.

    Attributes:
        figures: what traced and measured ranks must equal.
        num_ranks: how many ranks of the mesh are of this kind.
        states: bytes that stay from step to step.
        flops: by component.
        saved: bytes kept of the first microbatch by the rank's first stage, by component.
    """

    figures: RankFigures
    num_ranks: int
    states: StateBytes
    flops: dict[str, PhaseFlops]
    saved: Saved

    @property
    def peak_bytes(self) -> int:
        """States and the most that is kept for the backward."""
        return self.states.total + self.figures.peak_saved_bytes


def predict(
    plan: Plan, shape: StepShape, *, optimizer: Optimizer = "adamw", master_weights: bool = False
) -> tuple[RankPrediction, ...]:
    """Predicts one step for one rank of each kind, by stage and then by vocabulary rows.

    Args:
        plan: of the model and the layout; the layout's ZeRO stage is accounted.
        shape: sequences of a data-parallel rank, lengths, dtype.
        optimizer: whose states are held.
        master_weights: whether it updates a float32 copy.

    Raises:
        ValueError: lengths that the model cannot read, sequences that do not fill the microbatches, cp > 1.
    """
    return tuple(
        predict_rank(share, shape, optimizer=optimizer, master_weights=master_weights) for share in shares(plan)
    )


def predict_rank(
    share: Share,
    shape: StepShape,
    *,
    optimizer: Optimizer = "adamw",
    master_weights: bool = False,
) -> RankPrediction:
    """Predicts one step for one rank.

    Args:
        share: the rank, from `parallel.share`.
        shape: as for `predict`.
        optimizer: as for `predict`.
        master_weights: as for `predict`.

    Raises:
        ValueError: as `predict` does.
    """
    shape.check(share.config)
    states = state_bytes(share, shape.dtype_bytes, optimizer, master_weights=master_weights)
    sizes = microbatch_sizes(shape.num_sequences, share.layout.microbatches)
    saved = [{size: saved_bytes(chunk, shape, size) for size in set(sizes)} for chunk in share.chunks]
    by_action = {
        (stage.index, microbatch): held[size]
        for stage, held in zip(share.stages, saved, strict=True)
        for microbatch, size in enumerate(sizes)
    }
    flops = step_flops(share, shape)
    figures = RankFigures(
        coordinate=share.coordinate,
        parameters=parameter_counts(share),
        parameter_bytes=states.parameters,
        gradient_bytes=states.gradients,
        events=step_events(share, shape),
        flops=sum(flops.values(), start=PhaseFlops()),
        saved_bytes=saved[0][sizes[0]].total,
        peak_saved_bytes=peak_over(share.plan.table[share.coordinate.pp], by_action),
    )
    first = saved[0][sizes[0]]
    return RankPrediction(figures=figures, num_ranks=share.num_ranks, states=states, flops=flops, saved=first)
