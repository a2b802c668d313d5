"""Does one rank prove, count, time and record a cell as it should? In this process, on a world of one."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from launch import measure
from launch.cell import Cell
from launch.data import Batches
from launch.engine_run import Counted, TimedStep
from launch.env import World, world
from launch.facts import positions
from launch.measure import Parities, Run
from launch.parity import Parity, Worst
from launch.progress import Place, num_steps, read_lines
from launch.record import read_record
from launch.worker import Worker, expect_all, shuffled
from models.batch import synthetic_batch
from models.costs import block_costs, forward_flops, parameter_counts
from parallel.comm import Groups
from parallel.layouts import Layout
from parallel.mesh import Coordinate
from parallel.plans import plan
from parallel.recorder import Recorder
from results.schema import ActionFacts, BlockFacts, RankFacts, Record, StageFacts
from tests.small_cells import cells
from tests.small_models import small_config


def worker(here: World, chosen: tuple[Cell, ...], folder: Path) -> Worker:
    """The one rank, which writes records and progress into a folder."""
    batches, place = Batches(folder), Place(folder, is_writer=True)
    expected = expect_all(chosen, batches, rank=here.rank, place=place)
    return Worker(here, batches, expected, folder, place, 60.0)


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world("gloo") as alone:
        yield alone


@pytest.fixture
def measured(here: World, tmp_path: Path) -> Callable[[tuple[Cell, ...]], list[Record]]:
    """Measures cells and reads their records back."""

    def run(chosen: tuple[Cell, ...]) -> list[Record]:
        worker(here, chosen, tmp_path).measure(chosen)
        records = [read_record(tmp_path, cell) for cell in chosen]
        assert None not in records
        return [record for record in records if record is not None]

    return run


def test_a_record_holds_every_pass(measured: Callable[[tuple[Cell, ...]], list[Record]]) -> None:
    for record in measured(cells()):
        assert record.status == "ok"
        assert record.ledger_matches_recorder
        assert record.loss is not None
        assert record.loss == pytest.approx(math.log(40), rel=0.1)
        assert record.data is not None
        assert record.data.loss_tokens == 20
        assert len(record.step_seconds) == 3
        assert len(record.warmup_seconds) == 1
        assert len(record.blocks) == 3
        timed: list[RankFacts | StageFacts | BlockFacts | ActionFacts] = [
            *record.ranks,
            *record.stages,
            *record.blocks,
            *record.actions,
        ]
        samples = [getattr(row, field.name) for row in timed for field in dataclasses.fields(row)]
        assert {len(values) for values in samples if isinstance(values, list)} == {3}
        assert {row.phase for row in record.operators} == {"forward", "backward", "step"}
        (rank,) = record.ranks
        assert rank.peak_saved_bytes is not None
        assert rank.peak_saved_bytes > 0
        assert rank.optimizer_bytes > 2 * rank.parameter_bytes


def test_an_engine_that_cannot_be_looked_into_leaves_empty_what_it_cannot_tell(
    measured: Callable[[tuple[Cell, ...]], list[Record]],
) -> None:
    native, other = measured(cells(engine=["native", "torch"])[:2])
    assert (native.engine, other.engine) == ("native", "torch")
    assert other.status == "ok"
    assert other.ledger_matches_recorder is None
    assert (other.plan, other.stages, other.blocks, other.edges, other.operators, other.figures) == ([],) * 6
    assert (other.loss, other.gradient_norm) == pytest.approx((native.loss, native.gradient_norm))
    assert other.parity is not None
    assert other.parity.gradient_error < 1e-10
    ((mine, told),) = zip(native.ranks, other.ranks, strict=True)
    assert told.peak_saved_bytes is None
    assert (told.parameters, told.optimizer_bytes) == (mine.parameters, mine.optimizer_bytes)
    assert [len(samples) for samples in (told.step_seconds, told.busy_seconds, other.step_seconds)] == [3, 3, 3]
    assert read_back(other) == other


def test_steps_are_taken_apart_where_the_experiment_asks_for_it(
    measured: Callable[[tuple[Cell, ...]], list[Record]],
) -> None:
    native, *_, other = measured(cells(engine=["native", "torch"], parts=True)[:2])
    ((mine,), (told,)) = native.parts, other.parts
    assert (len(mine.products_seconds), len(mine.products_alone_seconds), len(mine.messages_alone_seconds)) == (3, 3, 3)
    assert min(mine.products_seconds + mine.products_alone_seconds + told.products_seconds) > 0
    assert (told.products_alone_seconds, told.messages_alone_seconds) == ([], [])
    assert read_back(native) == native


def read_back(record: Record) -> Record:
    """The record as a reader gets it from its file."""
    return Record.from_dict(json.loads(json.dumps(record.to_dict())))


def test_busy_time_and_waiting_make_up_a_step(measured: Callable[[tuple[Cell, ...]], list[Record]]) -> None:
    (rank,) = measured(cells()[:1])[0].ranks
    assert rank.startup_seconds is not None
    assert rank.startup_seconds > 0
    for step, busy, wait in zip(rank.step_seconds, rank.busy_seconds, rank.wait_seconds, strict=True):
        assert busy > 0
        assert wait == max(0.0, step - busy)


def test_spans_are_the_table_in_the_order_in_which_it_ran(measured: Callable[[tuple[Cell, ...]], list[Record]]) -> None:
    for cell, record in zip(cells(), measured(cells()), strict=True):
        (row,) = plan(cell.model, cell.layout).table
        assert [span.action for span in record.spans] == [str(action) for action in row]
        times = [seconds for span in record.spans for seconds in (span.start_seconds, span.end_seconds)]
        assert times == sorted(times)
        (rank,) = record.ranks
        assert times[-1] <= rank.pipeline_seconds[record.typical_step] + 1e-3
        assert all(pipeline < step for pipeline, step in zip(rank.pipeline_seconds, rank.step_seconds, strict=True))
        busy = sum(span.busy_seconds for span in record.spans)
        assert 0 < busy <= rank.busy_seconds[record.typical_step]


def test_counted_parameters_and_flops_are_those_of_the_formulas(
    measured: Callable[[tuple[Cell, ...]], list[Record]],
) -> None:
    for cell, record in zip(cells(), measured(cells()), strict=True):
        assert record.data is not None
        lengths = (record.data.source_length, record.data.target_length, record.data.num_sequences)
        (stage,) = record.stages
        assert stage.parameters == parameter_counts(cell.model).total
        assert stage.forward_flops == forward_flops(cell.model, *lengths)
        costs = block_costs(cell.model, *lengths)
        assert [row.forward_flops for row in record.blocks] == [cost.flops.total for cost in costs]
        assert [row.parameters for row in record.blocks] == [cost.parameters.total for cost in costs]
        assert [row.side for row in record.blocks] == [cost.side for cost in costs]


@pytest.mark.parametrize("option", [{"recompute": "full"}, {"recompute": "selective"}, {"attention": "materialised"}])
def test_flops_of_a_forward_do_not_depend_on_how_it_is_executed(
    option: dict[str, str], measured: Callable[[tuple[Cell, ...]], list[Record]]
) -> None:
    (stage,) = measured(cells(layouts=[{**option, "models": ["pair"]}, {"microbatches": 2}])[:1])[0].stages
    assert stage.forward_flops == forward_flops(cells()[0].model, 6, 5, 4)


def test_cells_take_turns_and_the_lines_of_progress_are_as_many_as_promised(here: World, tmp_path: Path) -> None:
    chosen = cells()
    worker(here, chosen, tmp_path).measure(chosen)
    lines, _ = read_lines(tmp_path)
    done = [line for line in lines if line.event != "begin"]
    assert len(done) == len(chosen) * num_steps(chosen[0].settings)
    timed = [line.cell for line in done if line.phase == "timing"]
    rounds = [timed[start : start + len(chosen)] for start in range(0, len(timed), len(chosen))]
    assert [sorted(one) for one in rounds] == [sorted(cell.name for cell in chosen)] * 3


def test_a_timed_step_comes_right_after_one_that_is_not(here: World, tmp_path: Path) -> None:
    steps: list[str] = []
    time_step = Run.time_step

    def timed(run: Run) -> TimedStep:
        steps.append(f"time {run.cell.name}")
        return time_step(run)

    with (
        mock.patch.object(Run, "settle", lambda run: steps.append(f"settle {run.cell.name}")),
        mock.patch.object(Run, "time_step", timed),
    ):
        chosen = cells(warmup=0, repeats=2)
        worker(here, chosen, tmp_path).measure(chosen)
    assert len(steps) == 2 * 2 * len(chosen)
    assert steps[1::2] == [step.replace("settle", "time") for step in steps[::2]]
    assert steps[::2] == [step.replace("time", "settle") for step in steps[1::2]]


def test_rounds_have_orders_of_their_own_that_are_the_same_on_every_rank() -> None:
    orders = [shuffled(range(9), f"timing {index}") for index in range(5)]
    assert len(set(map(tuple, orders))) == 5
    assert orders[0] == shuffled(range(9), "timing 0")
    assert [sorted(order) for order in orders] == [list(range(9))] * 5


def test_cells_that_are_not_interleaved_are_recorded_one_by_one(here: World, tmp_path: Path) -> None:
    chosen = cells(interleave=1)
    worker(here, chosen, tmp_path).measure(chosen)
    lines, _ = read_lines(tmp_path)
    events = [(line.cell, line.event) for line in lines]
    first, second = (cell.name for cell in chosen)
    assert events.index((first, "recorded")) < events.index((second, "begin"), events.index((second, "end")))


def test_a_cell_that_is_not_equal_to_one_process_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[[tuple[Cell, ...]], list[Record]]
) -> None:
    proof = Parities.parity

    def unequal(self: Parities, cell: Cell) -> tuple[Parity, str]:
        parity, model = proof(self, cell)
        return dataclasses.replace(parity, gradient=Worst(error=1e-3, name="head.weight")), model

    monkeypatch.setattr(Parities, "parity", unequal)
    (record,) = measured(cells()[:1])
    assert record.status == "failed"
    assert record.reason == "not equal to one process: gradient head.weight is off by 1.0e-03"
    assert record.parity is not None
    assert record.parity.gradient_error == 1e-3
    assert record.step_seconds == []


def test_an_error_without_bound_is_told_in_the_reason_alone(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[[tuple[Cell, ...]], list[Record]]
) -> None:
    proof = Parities.parity

    def unequal(self: Parities, cell: Cell) -> tuple[Parity, str]:
        parity, model = proof(self, cell)
        return dataclasses.replace(parity, loss=Worst(error=math.inf, name="rank 0")), model

    monkeypatch.setattr(Parities, "parity", unequal)
    (record,) = measured(cells()[:1])
    assert "loss rank 0 is off by inf" in record.reason
    assert record.parity is None


def test_a_ledger_that_differs_from_the_recorder_fails_the_cell(
    monkeypatch: pytest.MonkeyPatch, measured: Callable[[tuple[Cell, ...]], list[Record]]
) -> None:
    sound = Recorder.first_difference

    def differing(self: Recorder, ledger: Any) -> str | None:
        # The proof has a ledger of its own; only the counted step is to differ.
        return "event 3 is missing" if len(self.events) == 0 and is_counting else sound(self, ledger)

    is_counting = False
    count = measure.Run.count

    def counting(self: Run) -> Counted:
        nonlocal is_counting
        is_counting = True
        return count(self)

    monkeypatch.setattr(Recorder, "first_difference", differing)
    monkeypatch.setattr(Run, "count", counting)
    (record,) = measured(cells()[:1])
    assert record.status == "failed"
    assert record.reason == "rank 0: ledger and recorder differ: event 3 is missing"
    assert not record.ledger_matches_recorder


def test_watching_changes_nothing(here: World, tmp_path: Path) -> None:
    losses = []
    for watched in (False, True):
        run = Run(cells()[0], Batches(tmp_path).batch(cells()[0]), here, Groups(60.0))
        if watched:
            run.count()
            run.time_blocks()
            run.time_step()
        else:
            for _ in range(3):
                run.engine.step(run.share)
        losses.append(run.engine.step(run.share).loss)
    assert losses[0] == losses[1]


def test_blocks_lose_their_hooks(here: World, tmp_path: Path) -> None:
    run = Run(cells()[0], Batches(tmp_path).batch(cells()[0]), here, Groups(60.0))
    run.count()
    run.time_blocks()
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    assert not any(getattr(block, kind) for block in run.blocks.values() for kind in kinds)


def test_positions_of_the_ranks_add_up_to_those_of_the_streams() -> None:
    config = small_config("encoder_decoder", positions="rope")
    layout = Layout(tp=2, sp=True, pp=2, cut="aligned")
    batch = synthetic_batch(config, num_sequences=3, source_length=7, target_length=5, seed=2, ragged=True)
    partitioning = plan(config, layout)
    told = {
        (pp, tp): positions(batch, partitioning, Coordinate(dp=0, pp=pp, cp=0, tp=tp), partitioning.blocks_of(pp))
        for pp in (0, 1)
        for tp in (0, 1)
    }
    for pp, lengths, padded in ((0, batch.source_lengths, 8), (1, batch.target_lengths, 6)):
        assert told[pp, 0][0] + told[pp, 1][0] == sum(lengths)
        assert sum(told[pp, 0]) == sum(told[pp, 1]) == 3 * padded // 2
    assert positions(batch, partitioning, Coordinate(dp=0, pp=1, cp=0, tp=0), ()) == (0, 0)


def test_positions_of_ranks_that_share_sequences_add_up_to_those_of_the_stream() -> None:
    config = small_config("decoder_only", positions="rope")
    batch = synthetic_batch(config, num_sequences=3, source_length=7, target_length=5, seed=2, ragged=True)
    partitioning = plan(config, Layout(cp=2, tp=2, sp=True))
    ranks = [Coordinate(dp=0, pp=0, cp=cp, tp=tp) for cp in (0, 1) for tp in (0, 1)]
    told = [positions(batch, partitioning, rank, partitioning.blocks_of(0)) for rank in ranks]
    assert sum(valid for valid, _ in told) == sum(batch.target_lengths)
    assert {valid + padding for valid, padding in told} == {3 * 8 // 4}
