"""Does each engine stand for itself with the schedule that suits it, and against the best of the others?"""

import dataclasses
from typing import Any

import pytest

from parallel.layouts import Layout
from results.fastest import COLUMNS, Row, fastest
from results.schema import Record
from tests.records import by_another_engine, record, unsuccessful

LAYOUT = Layout(pp=2, microbatches=2)


def run(engine: str, seconds: float, layout: Layout = LAYOUT, **changes: Any) -> Record:
    native = record(layout=layout, noise=0.0, cell=f"tiny.{layout.label}.{engine}")
    own = native if engine == "native" else dataclasses.replace(by_another_engine(native), engine=engine)
    return dataclasses.replace(own, step_seconds=[seconds] * len(own.step_seconds), **changes)


def rows(*records: Record) -> dict[str, Row]:
    told = fastest(records)
    assert all(tuple(row) == COLUMNS for row in told)
    return {row["engine"]: row for row in told}


SPLIT = LAYOUT.replace(schedule="zb_h1")


def test_each_engine_counts_with_its_fastest_schedule() -> None:
    told = rows(run("native", 4.0), run("native", 3.0, SPLIT), run("torch", 5.0), run("torch", 6.0, SPLIT))
    native, torch = told["native"], told["torch"]
    assert (native["layout"], native["num_ways"], native["step_seconds"]) == (SPLIT.label, 2, 3.0)
    assert (torch["layout"], torch["num_ways"], torch["step_seconds"]) == (LAYOUT.label, 2, 5.0)
    assert native["ratio"] == pytest.approx(0.6)
    assert (native["against"], native["against_layout"]) == ("torch", LAYOUT.label)
    assert torch["ratio"] == pytest.approx(5 / 3)


def test_an_engine_is_held_against_the_best_of_the_others() -> None:
    told = rows(run("native", 4.0), run("torch", 5.0), run("fairscale", 2.0))
    assert {engine: row["against"] for engine, row in told.items()} == {
        "native": "fairscale",
        "torch": "fairscale",
        "fairscale": "native",
    }


def test_another_axis_is_another_thing_to_do() -> None:
    told = fastest([run("native", 4.0), run("torch", 1.0, Layout(tp=2, microbatches=2))])
    assert [(row["engine"], row["pp"], row["ratio"]) for row in told] == [("native", 2, None), ("torch", 1, None)]


def test_controls_compiled_blocks_and_what_did_not_end_well_do_not_count() -> None:
    others = (
        run("native", 1.0, is_control=True),
        run("native", 1.0, compiled=True),
        dataclasses.replace(unsuccessful("failed", "it fell", LAYOUT), engine="native"),
    )
    assert rows(run("native", 4.0), *others)["native"]["step_seconds"] == 4.0


def test_of_one_step_no_interval_is_known() -> None:
    told = rows(run("native", 4.0), run("torch", 5.0))
    assert None not in (told["native"]["ratio_low"], told["native"]["step_seconds_high"])
    once = rows(*(dataclasses.replace(run(engine, 4.0), step_seconds=[4.0]) for engine in ("native", "torch")))
    assert (once["native"]["step_seconds"], once["native"]["ratio"]) == (4.0, 1.0)
    assert {once["native"][name] for name in ("step_seconds_low", "step_seconds_high", "ratio_low")} == {None}
