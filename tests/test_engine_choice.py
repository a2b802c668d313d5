"""Is who runs and how one choice, from the command line to a record, and are no two choices taken for one?"""

import dataclasses
import importlib.util
import itertools
import json
import re
from collections.abc import Sequence
from unittest import mock

import pytest
import torch

from launch import verify
from launch.case import Case
from launch.cli import answer
from launch.record import make_record
from parallel.engines.choice import ENGINE_TEXTS, NATIVE, EngineChoice
from parallel.engines.engine import unsupported
from parallel.layouts import Layout, Schedule
from results.benchmark import compared
from tests.records import by_another_engine, record
from tests.small_cells import cells
from tests.small_models import small_config

ENGINES = ["native", "deepspeed", "deepspeed:type:BlockLayer"]


def test_a_text_is_an_engine_and_a_method_that_it_has() -> None:
    assert [EngineChoice.parse(text).text for text in ENGINE_TEXTS] == list(ENGINE_TEXTS)
    assert EngineChoice.parse("deepspeed:type:BlockLayer") == EngineChoice("deepspeed", "type:BlockLayer")
    assert EngineChoice.parse("torch", compiled=True) == EngineChoice("torch", compiled=True)
    assert EngineChoice.parse("native") == NATIVE
    for text in ("native:uniform", "fairscale:uniform", "deepspeed:", "deepspeed:type:^Start"):
        with pytest.raises(ValueError, match=r"own are deepspeed:uniform, .*, fairscale:size$"):
            EngineChoice.parse(text)


@pytest.mark.parametrize(
    ("text", "near"), [("Native", "native"), ("pytorch", "torch"), ("deep-speed", "deepspeed"), ("fair", "fairscale")]
)
def test_an_unknown_engine_is_told_with_the_nearest(text: str, near: str) -> None:
    line = (
        f"engine = {text!r}; choose one of native, torch, deepspeed, fairscale, transformers; the nearest is {near!r}"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(line)}$"):
        EngineChoice.parse(text)


def test_every_choice_has_a_name_of_its_own_and_comes_back_from_its_record() -> None:
    (cell, _) = cells()
    assert EngineChoice("fairscale", "time", compiled=True).suffix == ".fairscale-time.compiled"
    assert EngineChoice(compiled=True).suffix == ".compiled"
    assert cell.engine.suffix == ""
    names = set()
    for text, compiled in itertools.product(ENGINE_TEXTS, (False, True)):
        own = dataclasses.replace(cell, engine=EngineChoice.parse(text, compiled=compiled))
        told = make_record(own, fingerprint="", status="skipped")
        assert (told.engine, told.compiled) == (text, compiled)
        assert EngineChoice.parse(told.engine, compiled=told.compiled) == own.engine
        assert own.name == cell.name + own.engine.suffix
        names.add(own.name)
    assert len(names) == 2 * len(ENGINE_TEXTS)


@pytest.mark.parametrize("text", [text for text in ENGINE_TEXTS if ":" in text])
def test_one_stage_is_not_cut_and_no_size_is_told_without_a_gpu(text: str) -> None:
    choice = EngineChoice.parse(text)
    if importlib.util.find_spec(choice.name) is None:
        pytest.skip(f"needs {choice.name}: pip install 'twinshard[engines]'")
    schedule: Schedule = "gpipe" if choice.name == "fairscale" else "1f1b"
    config, layout = small_config("decoder_only"), Layout(pp=2, schedule=schedule)
    line = f"{text} cuts a model into stages, and pp = 1 leaves one; use pp >= 2"
    assert unsupported(choice, config, Layout(dp=2)) == line
    told = unsupported(choice, config, layout)
    if choice.partition != "size" or torch.cuda.is_available():
        assert told is None
    else:
        assert told == "fairscale's balance_by_size reads CUDA's allocator, and there is no GPU: use fairscale:time"


def test_a_method_makes_a_cell_of_its_own_and_stands_in_its_record() -> None:
    native, plain, own = cells(engine=ENGINES, layouts=[{"pp": 2}])[:3]
    assert (own.engine, plain.engine) == (EngineChoice("deepspeed", "type:BlockLayer"), EngineChoice("deepspeed"))
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
    assert [case.engine for case in asked] == [EngineChoice("deepspeed", "parameters")] * 3
    assert [Case.from_dict(json.loads(json.dumps(case.to_dict()))) for case in asked] == asked
