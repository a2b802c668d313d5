"""What would a rank hold and compute of any contiguous slice of a model, were that slice its stage?

Cuts are chosen before there is a plan, so a slice is told as the only stage of a plan made up for it. Every number is
that of the closed forms of ranks: parameters (`parallel/parameters.py`), states, kept activations
(`parallel/activations.py`), FLOPs (`parallel/flops.py`). Of the tp ranks the one with most vocabulary rows is told.
Left out: what a rank with several stages shares between them.
"""

import dataclasses
import functools

from models.config import ModelConfig
from parallel.activations import Saved, saved_bytes
from parallel.figures import Optimizer, PhaseFlops, StepShape
from parallel.flops import step_flops
from parallel.layouts import Layout
from parallel.mesh import Coordinate
from parallel.parameters import parameter_counts, state_bytes
from parallel.partition import Stage
from parallel.plan import Plan
from parallel.share import Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slices:
    """The slices of one model under one layout; all numbers are of one microbatch.

    Attributes:
        config: the model.
        layout: its pipeline, chunks and cut are not read.
        shape: of one microbatch.
        optimizer: whose states are held.
    """

    config: ModelConfig
    layout: Layout
    shape: StepShape
    optimizer: Optimizer = "adamw"

    @functools.cached_property
    def _alone(self) -> Layout:
        return self.layout.replace(
            pp=1, chunks=1, placement="linear", schedule="1f1b", cut="even", cp=1, microbatches=1
        )

    def share(self, first: int, last: int) -> Share:
        """What the rank holds whose one stage is blocks [first, last)."""
        stage = Stage(index=0, first=first, last=last, inputs=(), outputs=())
        alone = Plan(config=self.config, layout=self._alone, stages=(stage,), shared=(), entries=(), edges=(), table=())
        # Where the ranks' vocabulary rows differ, the last one has most.
        return Share(plan=alone, coordinate=Coordinate(dp=0, pp=0, cp=0, tp=self.layout.tp - 1), num_ranks=1)

    def parameters(self, first: int, last: int) -> int:
        """Parameters, a tensor with several names counted once."""
        return parameter_counts(self.share(first, last)).total

    def state_bytes(self, first: int, last: int) -> int:
        """Bytes of parameters, gradients and optimizer."""
        return state_bytes(self.share(first, last), self.shape.dtype_bytes, self.optimizer).total

    def saved(self, first: int, last: int) -> Saved:
        """What is kept for the backward of one microbatch."""
        return saved_bytes(self.share(first, last), self.shape, self.shape.num_sequences)

    def flops(self, first: int, last: int) -> dict[str, PhaseFlops]:
        """FLOPs by component."""
        return step_flops(self.share(first, last), self.shape)
