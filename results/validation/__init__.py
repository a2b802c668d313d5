"""Do our closed forms give the figures that others published?

    *.csv            published figures, a source in each row; rows of the same kinds may be added
    rows.py          how a figure is read, and when it is met
    conventions.py   how each source counts, where that differs from ours
    counts.py        parameters and stacks of checkpoints
    training.py      states, activations, FLOPs of large models
    pipelines.py     bubbles of schedules
    measured.py      memory and rates of runs on GPUs
    estimators.py    what public estimators say of the same figures

Every row is computed again from `models.costs` and `parallel`; nothing is looked up.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

from results.validation.counts import check_parameters, check_stacks
from results.validation.measured import check_measured
from results.validation.pipelines import check_bubbles
from results.validation.rows import FOLDER, Check
from results.validation.training import check_activations, check_iterations, check_megatron, check_zero

TABLES: dict[str, Callable[[Path], Iterator[Check]]] = {
    "parameters": check_parameters,
    "stacks": check_stacks,
    "zero": check_zero,
    "activation_memory": check_activations,
    "iteration": check_iterations,
    "megatron_2021": check_megatron,
    "zero_bubble": check_bubbles,
    "measured_memory": check_measured,
}
"""Tables of published figures, in the order in which they are told."""


def validate(folder: Path = FOLDER, tables: tuple[str, ...] = ()) -> Iterator[Check]:
    """Every published figure beside ours.

    Args:
        folder: where the CSV files lie.
        tables: names of tables, all without any.

    Raises:
        ValueError: an unknown table, a missing file, or a row that cannot be read.
    """
    unknown = [name for name in tables if name not in TABLES]
    if unknown:
        raise ValueError(f"no table {', '.join(unknown)}; known are {', '.join(TABLES)}")
    for name in tables or TABLES:
        yield from TABLES[name](folder)
