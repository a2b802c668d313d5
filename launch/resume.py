"""Which cells of an experiment are left to run?

    a good record of just this cell           kept
    failed, broken, of another fingerprint    run again; the old record stays until the new one takes its place
    refused by model, layout or batch         recorded as unsupported, never run

Left out: running them (`launch/sweep.py`, `launch/outside.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.cell import Cell
from launch.data import Batches
from launch.env import Backend
from launch.record import is_measured, make_record, record_path, write_record


def left_to_run(
    cells: Sequence[Cell], batches: Batches, output: Path, *, backends: Mapping[int, Backend], fresh: bool
) -> list[Cell]:
    """The cells that must be run, in their order; refused ones are recorded on the way.

    Args:
        cells: of one experiment.
        batches: theirs.
        output: folder of all records.
        backends: by world size; a record of another backend is of another cell.
        fresh: whether to forget all records of these cells first.
    """
    left = []
    for cell in cells:
        if fresh:
            record_path(output, cell).unlink(missing_ok=True)
        fingerprint = batches.fingerprint(cell)
        if is_measured(output, cell, fingerprint=fingerprint, backend=backends.get(cell.world_size, "none")):
            continue
        if cell.refusal:
            record = make_record(cell, fingerprint=fingerprint, status="unsupported", reason=cell.refusal)
            write_record(output, cell, record)
        else:
            left.append(cell)
    return left


def strangers(cells: Sequence[Cell], output: Path) -> tuple[str, ...]:
    """Names of records that stand among those of an experiment and belong to none of its cells.

    An experiment that was changed leaves such records; readers would take them for results of the new one.
    """
    known = {record_path(output, cell) for cell in cells}
    return tuple(sorted(path.stem for path in record_path(output, cells[0]).parent.glob("*.json") if path not in known))
