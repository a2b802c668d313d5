"""Are just those runs put side by side that may be, and is noise taken from controls alone?"""

import dataclasses
from typing import Any

import pytest

from parallel.layouts import Layout
from results.schema import Record
from results.tables import make
from results.twins import cell_of, controls, families, noise, pairs
from tests.records import DECODER_ONLY, ENCODER_DECODER, ENCODER_ONLY, record

TP = Layout(tp=2, microbatches=2)
OWN = record(ENCODER_DECODER, TP)
TWIN = record(DECODER_ONLY, TP)


def cells(*records: Record) -> list[tuple[str, str]]:
    return [pair.cells for pair in pairs(make("runs", records))]


def changed(entry: Record, **changes: Any) -> Record:
    return dataclasses.replace(entry, **changes)


def test_twins_on_one_layout_are_a_pair() -> None:
    assert cells(OWN, TWIN) == [(f"synthetic/{TWIN.cell}", f"synthetic/{OWN.cell}")]


@pytest.mark.parametrize(
    "twin",
    [
        record(DECODER_ONLY, TP.replace(tp=1)),
        record(DECODER_ONLY, TP.replace(microbatches=4)),
        record(DECODER_ONLY, TP.replace(sp=True)),
        record(DECODER_ONLY, TP.replace(vocabulary="whole")),
        changed(TWIN, engine="torch"),
        changed(TWIN, twins="others"),
        changed(TWIN, twins=""),
        changed(TWIN, dtype="bfloat16"),
        changed(TWIN, status="failed"),
        changed(TWIN, is_control=True),
        changed(TWIN, provenance=dataclasses.replace(TWIN.provenance, hostname="other")),
        record(ENCODER_ONLY, TP),
    ],
)
def test_what_differs_in_more_than_the_architecture_is_no_pair(twin: Record) -> None:
    assert cells(OWN, twin) == []


def test_models_without_a_family_are_no_twins() -> None:
    assert cells(changed(OWN, twins=""), changed(TWIN, twins="")) == []


def test_one_stack_stands_beside_both_ways_to_gather_a_memory() -> None:
    per_block = record(ENCODER_DECODER, TP.replace(memory_gather="per_block"))
    assert len(cells(OWN, per_block, TWIN)) == 2


def test_the_twin_with_the_same_words_is_preferred() -> None:
    per_block = record(DECODER_ONLY, TP.replace(memory_gather="per_block"))
    assert cells(OWN, per_block, TWIN) == cells(OWN, TWIN, per_block) == cells(OWN, TWIN)


def test_the_twin_with_as_many_tokens_is_preferred() -> None:
    longer = changed(record(DECODER_ONLY, TP, lengths=(40, 12)), cell="longer")
    assert cells(OWN, longer, TWIN) == cells(OWN, TWIN)
    (pair,) = pairs(make("runs", [OWN, longer]))
    assert not pair.has_equal_tokens


def test_a_twin_for_every_match_is_a_pair_of_its_own() -> None:
    by_parameters = changed(TWIN, match="parameters", cell="other")
    told = pairs(make("runs", [OWN, TWIN, by_parameters]))
    assert sorted(pair.match for pair in told) == ["depth", "parameters"]
    assert cells(changed(OWN, match="flops"), TWIN) == []


def test_a_family_has_a_line_a_layout_with_all_architectures() -> None:
    (lines,) = families(make("runs", [OWN, TWIN, record(ENCODER_ONLY, TP)])).values()
    assert [set(line.runs) for line in lines] == [{"encoder_decoder", "decoder_only", "encoder_only"}]


def test_a_family_on_two_machines_is_two_families() -> None:
    moved = [
        changed(entry, provenance=dataclasses.replace(entry.provenance, hostname="other")) for entry in (OWN, TWIN)
    ]
    assert set(families(make("runs", [OWN, TWIN, *moved]))) == {"tiny on bench", "tiny on other"}


def test_a_control_belongs_to_the_run_that_it_repeats() -> None:
    control = changed(OWN, cell="again", is_control=True)
    (told,) = controls(make("runs", [OWN, TWIN, control]))
    assert [cell_of(run) for run in told] == [f"synthetic/{OWN.cell}", "synthetic/again"]


def test_noise_is_the_farthest_that_identical_runs_differ() -> None:
    slower = changed(OWN, cell="again", is_control=True, step_seconds=[1.25] * 9)
    runs = make("runs", [changed(OWN, step_seconds=[1.0] * 9), slower])
    assert noise(runs, "step_seconds", machine="bench", device="cpu") == (1.25, ("synthetic/again",))
    faster = make("runs", [changed(OWN, step_seconds=[1.0] * 9), changed(slower, step_seconds=[0.5] * 9)])
    assert noise(faster, "step_seconds", machine="bench", device="cpu") == (2, ("synthetic/again",))


def test_nothing_is_known_of_noise_without_a_control() -> None:
    runs = make("runs", [OWN, TWIN, changed(OWN, cell="again", is_control=True)])
    assert noise(runs, "step_seconds", machine="elsewhere", device="cpu") is None
    assert noise(make("runs", [OWN, TWIN]), "step_seconds", machine="bench", device="cpu") is None
