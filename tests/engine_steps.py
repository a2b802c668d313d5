"""One step of any engine on this rank, and how far it is from one process."""

import dataclasses
from collections.abc import Mapping

import torch

from launch.case import Case
from launch.parity import LEARNING_RATE, Parity, case_batch, compare
from launch.reference import reference
from models.config import Architecture, ModelConfig
from parallel.comm import Comm
from parallel.engines.engine import Engine, EngineName, OptimizerName, build
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.sequence import deal
from tests.rank import Worker
from tests.small_models import small_config

CPU = torch.device("cpu")


def engine_case(
    architecture: Architecture, layout: Layout, *, num_sequences: int = 10, changes: Mapping[str, object] = {}
) -> Case:
    """A ragged case of a small model, two lengths unequal; `changes` are fields of its config."""
    fields = {"vocabulary": 30, "relative_buckets": 8, "relative_max_distance": 6, **changes}
    config = small_config(architecture, **fields)
    return Case(
        name=f"{architecture} {layout.label}",
        config=config,
        layout=layout,
        num_sequences=num_sequences,
        source_length=7,
        target_length=5,
    )


def engine_of(
    worker: Worker,
    name: EngineName,
    config: ModelConfig,
    layout: Layout,
    *,
    dtype: torch.dtype = torch.float64,
    optimizer: OptimizerName = "sgd",
    learning_rate: float = LEARNING_RATE,
) -> Engine:
    """An engine on this rank, its weights drawn from seed 0."""
    partitioning = plan(config, layout)
    comm = Comm.create(plan=partitioning, rank=worker.rank, groups=worker.groups, device=CPU)
    return build(
        name,
        plan=partitioning,
        comm=comm,
        seed=0,
        dtype=dtype,
        device=CPU,
        optimizer=optimizer,
        learning_rate=learning_rate,
    )


def proved(worker: Worker, name: EngineName, case: Case) -> Parity | None:
    """Compares the second step of an engine with one process, the first having updated nothing; told by rank 0."""
    engine = engine_of(worker, name, case.config, case.layout)
    batch = case_batch(case, seed=0)
    share = deal(batch, case.layout, engine.comm.coordinate.dp)
    engine.step(share, update=False)
    steps = engine.comm.gather_objects(engine.step(share))
    gradients, weights = engine.gather("gradient"), engine.gather("weight")
    if gradients is None or weights is None:
        return None
    expected = reference(case.config, batch, seed=0, learning_rate=LEARNING_RATE)
    return compare(steps, gradients, weights, expected)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeldBytes:
    """What a rank holds after some steps, and the losses of these."""

    parameters: int
    gradients: int
    optimizer: int
    losses: tuple[float, ...]


def trained(worker: Worker, name: EngineName, case: Case, dtype: torch.dtype, num_steps: int) -> HeldBytes:
    """A few steps of AdamW on one batch."""
    engine = engine_of(worker, name, case.config, case.layout, dtype=dtype, optimizer="adamw", learning_rate=0.02)
    share = deal(case_batch(case, seed=0), case.layout, engine.comm.coordinate.dp)
    losses = tuple(engine.step(share).loss for _ in range(num_steps))
    return HeldBytes(
        parameters=engine.parameter_bytes,
        gradients=engine.gradient_bytes,
        optimizer=engine.optimizer_bytes,
        losses=losses,
    )
