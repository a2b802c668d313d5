"""One step of any engine on this rank, and how far it is from one process."""

import dataclasses
from collections.abc import Mapping

import torch

from launch.case import Case
from launch.parity import LEARNING_RATE, Parity, case_batch, check_parity
from models.config import Architecture
from parallel.comm import Comm
from parallel.engines.choice import EngineChoice
from parallel.engines.engine import Engine, OptimizerName, build
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.sequence import deal
from tests.rank import Worker
from tests.small_models import small_config

CPU = torch.device("cpu")
RELATIVE: dict[str, object] = {"positions": "relative", "head_bias": True, "head_transform": True}
TIED: dict[str, object] = {
    "positions": "rope",
    "activation": "swiglu",
    "head_scale": True,
    "embedding_scale": True,
    "head_bias": True,
}
POST_NORM: dict[str, object] = {"norm_position": "post", "num_token_types": 2, "embedding_norm": True}
"""Fields of models that engines are tried on."""


def engine_case(
    engine: str,
    architecture: Architecture,
    layout: Layout,
    *,
    changes: Mapping[str, object] = {},
    source_length: int = 7,
    target_length: int = 5,
    num_sequences: int = 10,
) -> Case:
    """A ragged case of a small model, two lengths unequal; `changes` are fields of its config, `engine` as written."""
    fields = {"vocabulary": 30, "relative_buckets": 8, "relative_max_distance": 6, **changes}
    config = small_config(architecture, **fields)
    return Case(
        name=f"{architecture} {layout.label}",
        config=config,
        layout=layout,
        engine=EngineChoice.parse(engine),
        num_sequences=num_sequences,
        source_length=source_length,
        target_length=target_length,
    )


def tying(architecture: Architecture, changes: dict[str, object]) -> dict[str, object]:
    """`TIED` with as much tied as an architecture has; other changes as they are."""
    if changes is not TIED:
        return changes
    return changes | {"tying": "all" if architecture == "encoder_decoder" else "head"}


def engine_of(
    worker: Worker,
    case: Case,
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: OptimizerName = "sgd",
    learning_rate: float = LEARNING_RATE,
) -> Engine:
    """The engine of a case on this rank, its weights drawn from seed 0."""
    partitioning = plan(case.config, case.layout, case.profile)
    comm = Comm.create(plan=partitioning, rank=worker.rank, groups=worker.groups, device=CPU)
    settings = EngineSettings(seed=0, dtype=dtype, device=CPU, optimizer=optimizer, learning_rate=learning_rate)
    return build(case.engine, plan=partitioning, comm=comm, settings=settings)


def proved(worker: Worker, case: Case) -> Parity:
    """How far a case is from one process."""
    return check_parity(case, groups=worker.groups, rank=worker.rank, device=CPU)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeldBytes:
    """What a rank holds after some steps, and the losses of these."""

    parameters: int
    gradients: int
    optimizer: int
    losses: tuple[float, ...]


def trained(worker: Worker, case: Case, dtype: torch.dtype, num_steps: int) -> HeldBytes:
    """A few steps of AdamW on one batch."""
    engine = engine_of(worker, case, dtype=dtype, optimizer="adamw", learning_rate=0.02)
    share = deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp)
    losses = tuple(engine.step(share).loss for _ in range(num_steps))
    return HeldBytes(
        parameters=engine.parameter_bytes,
        gradients=engine.gradient_bytes,
        optimizer=engine.optimizer_bytes,
        losses=losses,
    )
