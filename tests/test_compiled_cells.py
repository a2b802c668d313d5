"""Are runs of compiled blocks cells of their own, from the experiment to the table?"""

import dataclasses
from pathlib import Path
from unittest import mock

import pandas as pd
import pytest

from launch.data import Batches
from launch.env import world
from launch.experiment import load
from launch.measure import Parities
from launch.progress import Place
from launch.record import is_measured, make_record, read_record, write_record
from launch.worker import Worker, expect_all
from parallel import compiled
from parallel.comm import Groups
from results.benchmark import compared
from results.schema import Record
from results.tables import TABLE_NAMES, Tables, make
from tests.records import record, study
from tests.small_cells import SIZES, cells

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch looks at it
ROOT = Path(__file__).resolve().parent.parent


def test_each_cell_is_run_with_and_without_next_to_each_other() -> None:
    names = [cell.name for cell in cells(compile=[False, True])]
    assert names[1::2] == [f"{name}.compiled" for name in names[::2]]
    assert [cell.engine.compiled for cell in cells(compile=[False, True])] == [False, True] * 2
    assert [cell.engine.compiled for cell in cells(compile=True)] == [True] * 2
    assert [cell.name for cell in cells()] == names[::2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "experiment: compile = 3; it must be true or false"),
        ([True, "no"], "experiment: compile = 'no'; it must be true or false"),
        ([], "experiment: compile is an empty list"),
    ],
)
def test_a_mistake_is_told(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        cells(compile=value)


def test_compiled_cells_can_be_asked_for_beside_those_of_the_file() -> None:
    file = ROOT / "launch/experiments/quick.toml"
    names = [cell.name for cell in load(file).cells]
    told = load(file, compiled_too=True).cells
    assert [cell.name for cell in told if not cell.engine.compiled] == names
    assert sorted(cell.name for cell in told if cell.engine.compiled) == sorted(
        f"{name}.compiled" for name in names if not name.endswith(".control")
    )


def test_a_compiled_cell_has_a_fingerprint_of_its_own_and_the_other_keeps_the_one_it_had(tmp_path: Path) -> None:
    written, made, *_ = cells(compile=[False, True])
    assert written.fingerprint("batch") != made.fingerprint("batch")
    before = make_record(written, fingerprint=written.fingerprint("batch"), status="ok", backend="gloo")
    write_record(tmp_path, written, dataclasses.replace(before, schema_version=4))
    assert is_measured(tmp_path, written, fingerprint=cells()[0].fingerprint("batch"), backend="gloo")
    assert not is_measured(tmp_path, made, fingerprint=made.fingerprint("batch"), backend="gloo")


def test_an_older_record_is_of_blocks_as_written(tmp_path: Path) -> None:
    older = record().to_dict() | {"schema_version": 4}
    del older["compiled"]
    assert not Record.from_dict(older).compiled


def measured(folder: Path) -> list[Record]:
    """A cell with and without; the proof is another test's."""
    gated = {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu", "num_decoder_blocks": 1}
    models = {"single": {"architecture": "decoder_only", **SIZES, **gated}}
    chosen = cells(compile=[False, True], parts=True, repeats=2, models=models)
    with world("gloo") as here, mock.patch.object(compiled, "BACKEND", "aot_eager"):
        batches, place = Batches(folder), Place(folder, is_writer=True)
        expected = expect_all(chosen, batches, rank=here.rank, place=place)
        proof = Parities(here, Groups(timeout_seconds=1.0)).parity(chosen[0])
        with mock.patch.object(Parities, "parity", return_value=proof):
            Worker(here, batches, expected, folder, place, 60.0).measure(chosen)
    records = [read_record(folder, cell) for cell in chosen]
    return [told for told in records if told is not None]


def test_a_record_tells_what_compiled_blocks_took_and_what_blocks_as_written_are(tmp_path: Path) -> None:
    written, made = measured(tmp_path)
    assert (written.status, made.status, made.reason) == ("ok", "ok", "")
    assert (written.compiled, made.compiled) == (False, True)
    assert made.cell == f"{written.cell}.compiled"
    assert made.loss == written.loss
    assert (made.figures, made.operators) == (written.figures, written.operators)
    assert (made.communication, made.edges, made.plan) == (written.communication, written.edges, written.plan)
    assert len(made.step_seconds) == len(made.blocks[0].forward_busy_seconds) == 2
    assert written.parts
    assert not made.parts
    ((mine,), (theirs,)) = (one.ranks for one in (written, made))
    assert mine.startup_seconds is not None
    assert theirs.startup_seconds is not None
    assert theirs.startup_seconds > mine.startup_seconds
    assert theirs.peak_saved_bytes is not None
    assert mine.peak_saved_bytes is not None
    assert 0 < theirs.peak_saved_bytes < mine.peak_saved_bytes


def of_compiled(told: Record, factor: float) -> Record:
    return dataclasses.replace(
        told,
        compiled=True,
        cell=f"{told.cell}.compiled",
        step_seconds=[factor * seconds for seconds in told.step_seconds],
    )


def test_compiled_blocks_are_held_against_the_same_engine_without() -> None:
    written = record(noise=0.0)
    other = dataclasses.replace(written, engine="torch", cell=f"{written.cell}.torch")
    rows = compared([written, of_compiled(written, 0.5), other])
    assert [(row["engine"], row["compiled"]) for row in rows] == [("native", False), ("native", True), ("torch", False)]
    assert [row["step_seconds_against"] for row in rows] == ["torch", "native", "native"]
    assert [row["step_seconds_ratio"] for row in rows] == pytest.approx([1.0, 0.5, 1.0])


def test_a_control_is_held_against_its_own_first_run_alone() -> None:
    written = record(noise=0.0)
    made = of_compiled(written, 0.5)
    faster = [seconds / 4 for seconds in written.step_seconds]
    other = dataclasses.replace(written, engine="torch", cell=f"{written.cell}.torch", step_seconds=faster)
    controls = [dataclasses.replace(one, is_control=True, cell=f"{one.cell}.control") for one in (written, made)]
    rows = compared([written, made, other, *controls])
    assert [row["step_seconds_ratio"] for row in rows if row["is_control"]] == pytest.approx([1.0, 1.0])


def test_verdicts_do_not_read_compiled_blocks() -> None:
    records = study(noise=0.0)
    runs = make("runs", [*records, *(of_compiled(one, 3.0) for one in records)])
    tables = Tables(**dict.fromkeys(TABLE_NAMES, pd.DataFrame())).replace(runs=runs)
    assert list(tables.native.runs["cell"]) == [one.cell for one in records]
