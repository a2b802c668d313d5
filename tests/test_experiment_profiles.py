"""Does an experiment read the measured profiles that it names, and is a wrong one an error before anything starts?"""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launch.cli import answer
from launch.experiment import Experiment, load, resolve
from launch.profiles import wanted
from parallel.plans import plan
from parallel.profile import Profile
from parallel.profile_file import load as load_profile
from parallel.profile_file import save
from parallel.work import Work

PAIR: dict[str, Any] = {
    "architecture": "encoder_decoder",
    "width": 8,
    "num_heads": 2,
    "ffn_width": 16,
    "num_encoder_blocks": 3,
    "num_decoder_blocks": 3,
    "vocabulary": 40,
    "max_length": 16,
}
TABLE: dict[str, Any] = {
    "name": "costed",
    "profile": "{model}.{data}.toml",
    "models": {"pair": PAIR},
    "data": {"tokens": {"text": "synthetic", "sequences": 4, "source_length": 6, "target_length": 5}},
    "layouts": [
        {"pp": 2, "microbatches": 2, "cut": ["even", "times"]},
        {"pp": 2, "microbatches": 2, "schedule": "list"},
    ],
}
TEXT = """
name = "costed"
profile = "{model}.{data}.toml"
[models.pair]
architecture = "encoder_decoder"
width = 8
num_heads = 2
ffn_width = 16
num_encoder_blocks = 3
num_decoder_blocks = 3
vocabulary = 40
max_length = 16
[data.tokens]
text = "synthetic"
sequences = 4
source_length = 6
target_length = 5
[[layouts]]
pp = 2
microbatches = 2
cut = ["even", "times"]
"""


def measured(**changes: Any) -> Profile:
    """Of the experiment's step: a decoder block takes as long as all others together."""
    study = resolve(TABLE, reads_profiles=False)
    (counted,) = wanted(study.cells, study.profiles).values()
    second = Work(1.0, 1.0, 1.0)
    costs: dict[str, Any] = {"encoder_block": second, "decoder_block": 9 * second, "head": Work()}
    return dataclasses.replace(counted, **({"unit": "seconds", "encoder_embedding": Work(), **costs} | changes))


def read(folder: Path, profile: Profile | None = None, **changes: Any) -> Experiment:
    if profile is not None:
        save(profile, folder / "pair.tokens.toml")
    return resolve({**TABLE, **changes}, folder)


def test_a_cut_by_times_is_that_of_the_named_profile(tmp_path: Path) -> None:
    even, times, listed = read(tmp_path, measured()).cells
    assert not any(cell.refusal for cell in (even, times, listed))
    assert [stage.first for stage in plan(times.model, times.layout, times.profile).stages] == [0, 4]
    assert listed.profile is listed.measured_profile is not None
    assert times.profile == even.measured_profile


def test_a_cell_that_needs_no_seconds_is_planned_without_them(tmp_path: Path) -> None:
    even = read(tmp_path, measured()).cells[0]
    assert even.profile is None
    assert even.fingerprint("") == read(tmp_path, measured(decoder_block=Work(1.0))).cells[0].fingerprint("")


def test_other_costs_are_another_cell(tmp_path: Path) -> None:
    times = read(tmp_path, measured()).cells[1]
    save(measured(decoder_block=Work(2.0, 2.0, 2.0)), tmp_path / "other.toml")
    other = resolve({**TABLE, "profile": "other.toml"}, tmp_path).cells[1]
    assert times.name == other.name
    assert times.fingerprint("") != other.fingerprint("")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source_length": 7}, "the profile of pair is another's: it has source_length = 7, and the step has 6"),
        ({"num_sequences": 1}, "it has 1 sequences a microbatch, and the step has 2"),
        ({"recompute": "full"}, "it has recompute = 'full', and the layout has 'none'"),
        ({"unit": "flops"}, "it counts FLOPs, and seconds are wanted: measure them with twinshard profile EXPERIMENT"),
    ],
)
def test_a_profile_of_another_step_is_one_clear_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"pair.tokens.toml: .*{message}") as told:
        read(tmp_path, measured(**changes))
    assert "\n" not in str(told.value)


def test_a_profile_of_another_model_is_one_clear_line(tmp_path: Path) -> None:
    other = measured()
    with pytest.raises(ValueError, match=r"it has width = 16, and pair has 8; make one with twinshard profile"):
        read(tmp_path, dataclasses.replace(other, config=other.config.replace(width=16)))


def test_a_missing_profile_is_missed_only_where_it_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"pair.tokens.toml, which is not there: write it with twinshard profile"):
        read(tmp_path)
    (even,) = read(tmp_path, layouts=[{"pp": 2, "microbatches": 2}]).cells
    assert even.measured_profile is None


def test_another_profile_is_passed_over_where_none_is_needed(tmp_path: Path) -> None:
    (even,) = read(tmp_path, measured(source_length=7), layouts=[{"pp": 2, "microbatches": 2}]).cells
    assert even.measured_profile is None


def test_a_place_that_nothing_fills_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"\{layout\} is filled by nothing; known are \{model\}, \{data\}"):
        resolve({**TABLE, "profile": "{layout}.toml"})


def test_without_a_profile_a_cut_by_times_is_refused_as_before() -> None:
    times = resolve({name: value for name, value in TABLE.items() if name != "profile"}).cells[1]
    assert times.refusal == "cut = 'times' needs measured seconds, the profile has FLOPs: try cut = 'flops'"


def test_one_file_for_two_steps_is_a_mistake() -> None:
    layouts = [{"pp": 2, "microbatches": 2}, {"pp": 2, "microbatches": 4}]
    study = resolve({**TABLE, "layouts": layouts}, reads_profiles=False)
    with pytest.raises(ValueError, match="which compute different things"):
        wanted(study.cells, study.profiles)


def test_an_experiment_that_names_no_profile_has_none_to_measure() -> None:
    study = resolve({name: value for name, value in TABLE.items() if name != "profile"}, reads_profiles=False)
    with pytest.raises(ValueError, match="the experiment names no profile"):
        wanted(study.cells, study.profiles)


def test_the_profiles_of_an_experiment_are_measured_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch.ping.measure_message", lambda *_: (0.25, 0.5))
    file = tmp_path / "study.toml"
    file.write_text(TEXT, encoding="utf-8")
    with pytest.raises(ValueError, match="which is not there"):
        load(file)
    assert (
        answer(["profile", str(file), "--repeats", "1", "--warmup", "0", "--backend", "gloo", "--format", "csv"]) == 0
    )
    assert str(tmp_path / "pair.tokens.toml") in capsys.readouterr().out
    profile = load_profile(tmp_path / "pair.tokens.toml")
    assert (profile.transfer_cost, profile.byte_cost) == (0.25, 0.5)
    assert load(file).cells[1].profile == profile


def test_what_an_experiment_decides_cannot_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "study.toml"
    file.write_text(TEXT, encoding="utf-8")
    assert answer(["profile", str(file), "--source-length", "7"]) == 2
    assert "decides what is measured: leave --source-length" in capsys.readouterr().err
