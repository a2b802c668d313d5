"""Does a partitioned step equal the step of one process?

One layout on all ranks in float64, against `launch/reference.py` on rank 0. Of each tensor, with r the reference,

    error = max |x - r| / max |r|          the worst of all tensors counts, and is named

so that an error in few elements of a large tensor is not averaged away, and a tensor with small numbers is not hidden
by one with large numbers. Where r is zero everywhere, x must be: the error is 0 or infinite. It is infinite as well
where x is not finite or has another shape. Both sides must have the same parameters: a missing one and an additional
one fail.

Two steps are taken. The first updates nothing and is watched: the ledger of the native engine must tell what the
recorder saw, and of every engine the recorder must know all that it saw. The second is compared; had anything of the
first stayed in the gradients, it would show. Where blocks are compiled, a step before both does it; nobody can watch
operators there, so blocks are watched as they are written, and compiled ones must tell the same in the ledger. Left
out: which cases to compare (`launch/matrix.py`), and who starts the ranks (`launch/verify.py`).
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from launch.case import Case
from launch.reference import Reference, reference
from models.batch import Batch, synthetic_batch
from models.catalogue import TextPair
from models.text import pair_batch
from parallel.comm import Comm, Groups
from parallel.compiled import as_written, compilations
from parallel.engines.engine import Engine, StepFacts, build
from parallel.engines.gathered import Gathered
from parallel.engines.settings import EngineSettings
from parallel.plans import plan
from parallel.recorder import Recorder
from parallel.sequence import deal
from results.schema import ParityFacts

LARGEST_ERROR = 1e-10
"""Relative, in float64. Only the order of sums may differ, and that costs a few units of 1e-16."""

LEARNING_RATE = 1.0
"""Large, so that an error of the gradient is not small beside the weight that it is subtracted from."""

PAIRS = tuple(
    TextPair(source=source, target=target)
    for source, target in (
        ("yes", "oui"),
        ("no", "nein"),
        ("water", "vesi"),
        ("bread", "brot"),
        ("to", "pour"),
        ("open", "otevřít"),
        ("save as", "enregistrer sous"),
        ("close", "zamknij"),
        ("I", "ich"),
        ("new window", "окно"),
        ("undo", "annuler"),
    )
)
"""Real words, and so short that most lengths a case has are met: some are cut, most are padded."""

KINDS = ("loss", "gradient", "gradient_norm", "weight", "replica")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The largest relative error of one kind, and where it is."""

    error: float
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """How far a layout is from one process; the same on every rank."""

    loss: Worst
    gradient: Worst
    gradient_norm: Worst
    weight: Worst
    replica: Worst
    """Between ranks that hold copies of the same numbers; gradients and weights."""
    missing: tuple[str, ...]
    """Parameters that one process has and the ranks do not, by canonical name."""
    extra: tuple[str, ...]
    ledger: str | None
    """First difference between ledger and recorder, with its rank, or None."""

    @property
    def worst_error(self) -> float:
        return max(self.worst(kind).error for kind in KINDS)

    @property
    def has_passed(self) -> bool:
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """What is not equal, one line each; none when the layout equals one process."""
        told = [f"no gradient of {', '.join(self.missing)}"] if self.missing else []
        told += [f"a gradient of {', '.join(self.extra)}, which one process does not have"] if self.extra else []
        for kind in KINDS:
            worst = self.worst(kind)
            if not worst.error <= LARGEST_ERROR:
                told.append(f"{kind} {worst.name} is off by {worst.error:.1e}".replace("  ", " "))
        return (*told, *([self.ledger] if self.ledger else []))

    def worst(self, kind: str) -> Worst:
        worst: Worst = getattr(self, kind)
        return worst

    def facts(self, model: str) -> ParityFacts:
        """The errors as a record keeps them; `model` names the model that was compared."""
        return ParityFacts(
            model=model,
            loss_error=self.loss.error,
            gradient_error=self.gradient.error,
            gradient_norm_error=self.gradient_norm.error,
            weight_error=self.weight.error,
            replica_error=self.replica.error,
        )

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Parity":
        """The inverse of `to_dict`."""
        worst = {kind: Worst(**fields[kind]) for kind in KINDS}
        return cls(**{**fields, **worst, "missing": tuple(fields["missing"]), "extra": tuple(fields["extra"])})


def check_parity(case: Case, *, groups: Groups, rank: int, device: torch.device, seed: int = 0) -> Parity:
    """Compares one case with one process. Collective over the world, which must have the layout's size.

    Args:
        case: model, layout and batch.
        groups: made once a process and used for every case.
        rank: of this process.
        device: where the ranks compute; the reference is computed on the CPU of rank 0.
        seed: of weights and batch.

    Raises:
        ValueError: the layout's degrees are not the size of the world.
    """
    partitioning = plan(case.config, case.layout, case.profile)
    comm = Comm.create(plan=partitioning, rank=rank, groups=groups, device=device)
    batch = case_batch(case, seed=seed)
    settings = EngineSettings(
        seed=seed, dtype=torch.float64, device=device, optimizer="sgd", learning_rate=LEARNING_RATE
    )
    engine = build(case.engine, plan=partitioning, comm=comm, settings=settings)
    share = deal(batch, case.layout, comm.coordinate.dp)
    difference = _compiling_difference(engine, share) if case.engine.compiled else None
    with as_written() if case.engine.compiled else contextlib.nullcontext():
        difference = difference or _ledger_difference(engine, share, has_ledger=case.engine.name == "native")
    told = comm.gather_objects((engine.step(share), difference))
    gradients, weights = engine.gather("gradient"), engine.gather("weight")
    parity = None
    if gradients is not None and weights is not None:
        expected = reference(case.config, batch, seed=seed, learning_rate=LEARNING_RATE)
        ledger = next((line for _, line in told if line), None)
        parity = compare([facts for facts, _ in told], gradients, weights, expected, ledger=ledger)
    of_rank_0: Parity = comm.gather_objects(parity)[0]
    return of_rank_0


def case_batch(case: Case, *, seed: int) -> Batch:
    """The sequences of a case, all data-parallel ranks together; the same on every rank."""
    if case.data == "text":
        return pair_batch(
            case.config,
            PAIRS,
            num_sequences=case.num_sequences,
            source_length=case.source_length,
            target_length=case.target_length,
            seed=seed,
            loss_on="all",
        )
    return synthetic_batch(
        case.config,
        num_sequences=case.num_sequences,
        source_length=case.source_length,
        target_length=case.target_length,
        seed=seed,
        ragged=case.data == "ragged",
    )


def compare(
    steps: Sequence[StepFacts],
    gradients: Gathered,
    weights: Gathered,
    expected: Reference,
    *,
    ledger: str | None = None,
) -> Parity:
    """Compares what all ranks made of a step with one process; see the module's docstring for the error.

    Args:
        steps: what each rank told, in their order; all must tell the same.
        gradients: of the ranks, put together.
        weights: likewise, after the step.
        expected: of one process.
        ledger: passed on.
    """
    held, wanted = set(gradients.tensors), set(expected.gradients)
    replica = max((gradients, weights), key=lambda gathered: _largest_if_nan(gathered.replica_error))
    return Parity(
        loss=_worst_number(expected.loss, [step.loss for step in steps]),
        gradient=_worst_tensor(expected.gradients, gradients.tensors),
        gradient_norm=_worst_number(expected.gradient_norm, [step.gradient_norm for step in steps]),
        weight=_worst_tensor(expected.weights, weights.tensors),
        replica=Worst(error=_largest_if_nan(replica.replica_error), name=replica.replica_name),
        missing=tuple(sorted(wanted - held)),
        extra=tuple(sorted(held - wanted)),
        ledger=ledger,
    )


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest |found - expected| over largest |expected|; infinite where the module's docstring says so."""
    if found.shape != expected.shape:
        return math.inf
    if not expected.numel():
        return 0.0
    difference, scale = (found - expected).abs().max().item(), expected.abs().max().item()
    if difference == 0.0:
        return 0.0
    return _largest_if_nan(difference / scale) if scale else math.inf


def _largest_if_nan(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _worst_tensor(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Worst:
    errors = {name: relative_error(found[name], tensor) for name, tensor in expected.items() if name in found}
    name = max(errors, key=lambda name: errors[name])
    return Worst(error=errors[name], name=name)


def _worst_number(expected: float, of_ranks: Sequence[float]) -> Worst:
    wanted = torch.tensor(expected, dtype=torch.float64)
    errors = [relative_error(torch.tensor(number, dtype=torch.float64), wanted) for number in of_ranks]
    return Worst(error=max(errors), name=f"rank {errors.index(max(errors))}")


def _ledger_difference(engine: Engine, share: Batch, *, has_ledger: bool) -> str | None:
    """Where the ledger of this rank differs from what the recorder saw in a step that updates nothing.

    Of an engine without a ledger: what the recorder saw and does not know.
    """
    comm = engine.comm
    comm.ledger.clear()
    with Recorder() as recorder:
        engine.step(share, update=False)
    difference = recorder.first_difference(list(comm.ledger)) if has_ledger else recorder.first_unknown()
    return None if difference is None else f"rank {comm.rank} ({comm.coordinate}): {difference}"


def _compiling_difference(engine: Engine, share: Batch) -> str | None:
    """Compiles in a step that updates nothing; tells when nothing was, or if blocks as written send something else."""
    comm, ledgers = engine.comm, []
    with compilations() as told:
        for context in (contextlib.nullcontext(), as_written()):
            comm.ledger.clear()
            with context:
                engine.step(share, update=False)
            ledgers.append(tuple(comm.ledger))
    difference = None if told else "no block was compiled"
    if ledgers[0] != ledgers[1]:
        difference = f"compiled blocks send {len(ledgers[0])} messages, blocks as written {len(ledgers[1])}"
    return None if difference is None else f"rank {comm.rank} ({comm.coordinate}): {difference}"
