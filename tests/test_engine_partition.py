"""Is an engine that cuts by a method of its own told apart from the engine alone, from the command line to a record?"""

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from launch import verify
from launch.case import Case
from launch.cli import answer
from launch.record import make_record
from parallel.engines.engine import ENGINE_TEXTS, engine_and_partition, engine_text, unsupported
from parallel.layouts import Layout
from results.benchmark import compared
from tests.records import by_another_engine, record
from tests.small_cells import cells
from tests.small_models import small_config

ENGINES = ["native", "deepspeed", "deepspeed:type:BlockLayer"]


def test_a_text_is_an_engine_and_a_method_that_it_has() -> None:
    for text in ENGINE_TEXTS:
        assert engine_text(*engine_and_partition(text)) == text
    assert engine_and_partition("deepspeed:type:BlockLayer") == ("deepspeed", "type:BlockLayer")
    assert engine_and_partition("torch") == ("torch", "")
    for text in ("native:uniform", "fairscale:uniform", "deepspeed:", "deepspeed:type:^Start"):
        with pytest.raises(ValueError, match=r"own are deepspeed:uniform, .*, fairscale:size$"):
            engine_and_partition(text)


@pytest.mark.parametrize("text", [text for text in ENGINE_TEXTS if ":" in text])
def test_one_stage_is_not_cut_and_no_size_is_told_without_a_gpu(text: str) -> None:
    name, partition = engine_and_partition(text)
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"needs {name}: pip install 'twinshard[engines]'")
    config, layout = small_config("decoder_only"), Layout(pp=2, schedule="gpipe" if name == "fairscale" else "1f1b")
    line = f"{text} cuts a model into stages, and pp = 1 leaves one; use pp >= 2"
    assert unsupported(name, config, Layout(dp=2), partition) == line
    told = unsupported(name, config, layout, partition)
    if partition != "size" or torch.cuda.is_available():
        assert told is None
    else:
        assert told == "fairscale's balance_by_size reads CUDA's allocator, and there is no GPU: use fairscale:time"


def test_a_method_makes_a_cell_of_its_own_and_stands_in_its_record() -> None:
    native, plain, own = cells(engine=ENGINES, layouts=[{"pp": 2}])[:3]
    assert (own.engine, own.engine_partition, plain.engine_partition) == ("deepspeed", "type:BlockLayer", "")
    assert own.name == f"{native.name}.deepspeed-type-BlockLayer"
    assert len({cell.fingerprint("tokens") for cell in (native, plain, own)}) == 3
    assert make_record(own, fingerprint="", status="skipped").engine == "deepspeed:type:BlockLayer"


def test_a_method_is_held_against_other_engines_and_the_engine_alone() -> None:
    native = record(noise=0.0)
    others = [
        dataclasses.replace(by_another_engine(native), engine=engine, cell=f"{native.cell}.{name}")
        for engine, name in (("deepspeed", "deepspeed"), ("deepspeed:uniform", "deepspeed-uniform"))
    ]
    rows = {row["engine"]: row for row in compared([native, *others])}
    assert rows["deepspeed:uniform"]["step_seconds_against"] == "native"
    assert rows["native"]["step_seconds_against"] in ("deepspeed", "deepspeed:uniform")
    without = {row["engine"]: row for row in compared(others)}
    assert without["deepspeed"]["step_seconds_against"] == "deepspeed:uniform"


def test_the_command_proves_cases_of_a_method() -> None:
    asked: list[Case] = []

    def proof(cases: Sequence[Case], **_: object) -> mock.Mock:
        asked.extend(cases)
        return mock.Mock()

    with mock.patch.object(verify, "Proof", proof), mock.patch.object(verify, "follow", return_value=[]):
        assert answer(["verify", "--engine", "deepspeed:parameters", "--pp", "2"]) == 0
    assert [(case.engine, case.engine_partition) for case in asked] == [("deepspeed", "parameters")] * 3
    assert [Case.from_dict(json.loads(json.dumps(case.to_dict()))) for case in asked] == asked
