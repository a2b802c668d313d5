"""Do prediction, dry run and measurement say the same of a cell? Each rank answers for itself.

    predicted   closed forms (`parallel/predict.py`)
    traced      the partitioned code, run dry before this process joins the others (`parallel/trace.py`)
    measured    the counting pass of the real run (`parallel/meter.py`)

Parameters, their bytes, FLOPs and every communication event must be equal: else the cell fails, and the rank, the site
and both numbers are its reason. What autograd keeps may be off by 2 %, because the masks of a batch of real text exist
for some microbatches only. Left out: time.
"""

import dataclasses
from collections.abc import Sequence

from launch.cell import Cell
from launch.data import Batches
from launch.step_options import DTYPE_BYTES
from models.batch import Batch
from models.config import ModelConfig
from parallel.figures import RankFigures, StepShape, differences
from parallel.mesh import Coordinate
from parallel.plan import Plan
from parallel.plans import plan
from parallel.predict import predict_rank
from parallel.sequence import deal, microbatches, pad
from parallel.share import share_of
from parallel.trace import trace
from results.schema import FigureFacts

ALLOWED = 0.02
"""Relative difference of kept bytes."""
_KEPT = ("saved_bytes", "peak_saved_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What one rank of one cell must measure."""

    predicted: RankFigures
    traced: RankFigures


def expect(cells: Sequence[Cell], batches: Batches, rank: int) -> dict[str, Expected]:
    """Predicts and traces this rank of every cell, by the cell's name; before the process joins a process group."""
    return {cell.name: _expect(cell, batches.batch(cell), rank) for cell in _watched(cells)}


def _watched(cells: Sequence[Cell]) -> list[Cell]:
    """Cells of the native engine that can be run: nothing is predicted of the others."""
    return [cell for cell in cells if not cell.refusal and cell.engine.name == "native"]


def _expect(cell: Cell, batch: Batch, rank: int) -> Expected:
    planned = plan(cell.model, cell.layout, cell.profile)
    coordinate = cell.layout.mesh.coordinate(rank)
    share = share_of(planned, coordinate)
    shape = step_shape(planned, batch, coordinate, cell.settings.dtype)
    predicted = predict_rank(share, shape, optimizer=cell.settings.optimizer)
    (traced,) = trace(planned, shape, ranks=(share,))
    return Expected(predicted=predicted.figures, traced=traced.figures)


def step_shape(planned: Plan, batch: Batch, coordinate: Coordinate, dtype: str) -> StepShape:
    """The shape of one rank's step; it is ragged when every microbatch has a source to mask."""
    layout, config = planned.layout, planned.config
    mine = deal(batch, layout, coordinate.dp)
    cut = microbatches(pad(mine, planned), layout)
    return StepShape(
        num_sequences=mine.num_sequences,
        source_length=mine.stream_length("source") if config.has_encoder else 0,
        target_length=mine.stream_length("target") if config.has_decoder else 0,
        dtype_bytes=DTYPE_BYTES[dtype],
        is_ragged=all(_is_masked(one, config) for one in cut),
    )


def _is_masked(batch: Batch, config: ModelConfig) -> bool:
    return config.has_encoder and min(batch.source_lengths) < batch.stream_length("source")


def disagreements(expected: Expected, measured: RankFigures) -> list[str]:
    """Lines that name each quantity that differs more than is allowed; none when the three sides agree."""
    lines = []
    for side, figures in (("predicted", expected.predicted), ("traced", expected.traced)):
        allowed = {name: getattr(measured, name) for name in _KEPT if _is_close(figures, measured, name)}
        lines += [
            f"{side} and measured differ: {line}"
            for line in differences(dataclasses.replace(figures, **allowed), measured)
        ]
    return lines


def _is_close(figures: RankFigures, measured: RankFigures, name: str) -> bool:
    found: int = getattr(measured, name)
    return bool(abs(getattr(figures, name) - found) <= ALLOWED * found)


def figure_facts(rank: int, expected: Expected, measured: RankFigures) -> list[FigureFacts]:
    """The rows of one rank."""
    sides = [_quantities(figures) for figures in (expected.predicted, expected.traced, measured)]
    return [
        FigureFacts(
            rank=rank,
            quantity=quantity,
            predicted=sides[0][quantity],
            traced=sides[1][quantity],
            measured=sides[2][quantity],
            must_be_exact=quantity not in _KEPT,
        )
        for quantity in sides[0]
    ]


def _quantities(figures: RankFigures) -> dict[str, int]:
    return {
        "parameters": figures.parameters.total,
        "parameter_bytes": figures.parameter_bytes,
        "gradient_bytes": figures.gradient_bytes,
        "forward_flops": figures.flops.forward,
        "recompute_flops": figures.flops.recompute,
        "backward_flops": figures.flops.backward,
        "saved_bytes": figures.saved_bytes,
        "peak_saved_bytes": figures.peak_saved_bytes,
        "communication_events": sum(total.count for total in figures.events),
        "communication_payload_bytes": sum(total.payload_bytes for total in figures.events),
    }
