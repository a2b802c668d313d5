"""Does an experiment file say exactly what is measured, and is every mistake in it an error that names it?"""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from launch.data import Batches, digest
from launch.experiment import Experiment, effective, load, resolve
from models.named import named_model
from parallel.layouts import Layout

ROOT = Path(__file__).resolve().parent.parent

SIZES: dict[str, Any] = {"width": 8, "num_heads": 2, "ffn_width": 16, "vocabulary": 264, "max_length": 32}
PAIR: dict[str, Any] = {"architecture": "encoder_decoder", "num_encoder_blocks": 2, "num_decoder_blocks": 2, **SIZES}
TABLE: dict[str, Any] = {
    "name": "small",
    "models": {"pair": PAIR, "single": {"twin_of": "pair", "architecture": "decoder_only"}},
    "data": {"tokens": {"text": "synthetic", "sequences": 4, "source_length": 6, "target_length": 5}},
    "layouts": [{"tp": [1, 2]}],
}


def changed(**changes: Any) -> dict[str, Any]:
    """The table with some entries replaced, named by their path with double underscores; None removes one."""
    table = copy.deepcopy(TABLE)
    for path, value in changes.items():
        *folders, key = path.split("__")
        place = table
        for folder in folders:
            place = place[folder]
        if value is None:
            del place[key]
        else:
            place[key] = value
    return table


def cell_names(experiment: Experiment) -> list[str]:
    return [cell.name for cell in experiment.cells]


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no name": ({"name": None}, "experiment lacks name"),
    "unknown setting": ({"repeat": 3}, "experiment: unknown key repeat; did you mean repeats?"),
    "setting of another type": ({"repeats": "five"}, "experiment: repeats = 'five'; it must be a whole number"),
    "true for a number": ({"seed": True}, "experiment: seed = True; it must be a whole number"),
    "no repeats": ({"repeats": 0}, "experiment: repeats = 0; it must be at least 1"),
    "unknown dtype": ({"dtype": "float8"}, "dtype = 'float8'; it must be one of float32, float64, bfloat16"),
    "name of no file": ({"name": "../escape"}, "experiment: name: '../escape' is no name"),
    "unknown engine": (
        {"engine": ["native", "pytorch"]},
        (
            "experiment: engine = 'pytorch'; choose one of native, torch, deepspeed, fairscale, transformers; "
            "the nearest is 'torch'"
        ),
    ),
    "partition method that an engine lacks": (
        {"engine": "torch:uniform"},
        "experiment: engine = 'torch:uniform'; engines that have partition methods of their own are deepspeed:uniform",
    ),
    "engine of another type": ({"engine": 3}, "experiment: engine = 3; it must be text"),
    "no engine": ({"engine": []}, "experiment: engine is an empty list"),
    "no models": ({"models": {}}, r"experiment: no \[models.<name>\] table"),
    "unknown model key": ({"models__pair__widht": 8}, "models.pair: unknown key widht; did you mean width?"),
    "missing model key": ({"models__pair__ffn_width": None}, "models.pair lacks ffn_width"),
    "model that contradicts itself": ({"models__pair__num_heads": 3}, "models.pair: width 8 over 3 heads"),
    "key that a twin does not read": ({"models__single__width": 8}, "models.single: unknown key width"),
    "twin of nothing": ({"models__single__twin_of": "par"}, "twin_of = 'par' is no model of this experiment"),
    "twin of its own kind": ({"models__single__architecture": "encoder_decoder"}, "has another architecture"),
    "models made from each other": (
        {"models__a": {"like": "b"}, "models__b": {"like": "a"}},
        "models.a is made from itself: a <- b <- a",
    ),
    "unused model": (
        {"models__other": PAIR, "layouts": [{"models": ["pair", "single"]}]},
        "models.other is used by no",
    ),
    "no data": ({"data": {}}, r"experiment: no \[data.<name>\] table"),
    "missing data key": ({"data__tokens__text": None}, "data.tokens lacks text"),
    "no sequences": ({"data__tokens__sequences": 0}, "data.tokens: sequences = 0"),
    "key that text does not read": (
        {"data__tokens__text": "django:de", "data__tokens__ragged": True},
        "data.tokens: ragged is read with text = 'synthetic' only",
    ),
    "unknown layout key": ({"layouts": [{"ttp": 2}]}, "layouts 1: unknown key ttp; did you mean tp?"),
    "degree of another type": ({"layouts": [{"tp": [1, "2"]}]}, "layouts 1: tp = '2'; it must be a whole number"),
    "unknown cut": ({"layouts": [{"pp": 2, "cut": "best"}]}, "layouts 1: cut = 'best'"),
    "layout that contradicts itself": ({"layouts": [{"tp": 1, "sp": True}]}, "layouts 1: sp shards the sequence"),
    "too few cuts": ({"layouts": [{"pp": 3, "cut": [1]}]}, r"layouts 1: cut \[1\] makes 2 stages, but pp = 3"),
    "ranks that no layout has": ({"layouts": [{"tp": [1, 2], "ranks": [3]}]}, "no combination has 3 ranks"),
    "unknown model of a layout": ({"layouts": [{"models": ["par"]}]}, "models names 'par', which is none of pair"),
    "unknown control": (
        {"controls": ["pair"]},
        "controls names 'pair', which is no cell; the nearest is 'pair.tokens.tp",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(mistake: str) -> None:
    changes, message = MISTAKES[mistake]
    with pytest.raises(ValueError, match=message):
        resolve(changed(**changes))


def test_the_table_of_the_mistakes_has_none_itself() -> None:
    assert len(resolve(TABLE).cells) == 4


def test_a_file_that_is_missing_or_no_toml_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read .*nothing.toml: No such file"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "broken.toml").write_text("name = ", encoding="utf-8")
    with pytest.raises(ValueError, match=r"broken.toml: Invalid value \(at end of document\)"):
        load(tmp_path / "broken.toml")


def test_lists_are_axes_of_a_product() -> None:
    experiment = resolve(changed(layouts=[{"tp": [1, 2], "pp": [1, 2], "microbatches": [1, 2], "ranks": [2, 4]}]))
    layouts = {(cell.layout.tp, cell.layout.pp, cell.layout.microbatches) for cell in experiment.cells}
    assert layouts == {(1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 2, 2)}


def test_a_list_of_numbers_is_one_cut_and_a_list_of_lists_are_several() -> None:
    one = resolve(changed(layouts=[{"pp": 3, "cut": [1, 2], "models": ["pair"]}, {}]))
    assert one.cells[0].layout.cut == (1, 2)
    several = resolve(changed(layouts=[{"pp": 3, "cut": [[1, 2], [1, 3], "even"], "models": ["pair"]}, {}]))
    assert [cell.layout.cut for cell in several.cells[:3]] == [(1, 2), (1, 3), "even"]


def test_a_combination_that_contradicts_itself_is_no_layout() -> None:
    experiment = resolve(changed(layouts=[{"tp": [1, 2], "sp": [False, True]}]))
    assert {(cell.layout.tp, cell.layout.sp) for cell in experiment.cells} == {(1, False), (2, False), (2, True)}


def test_an_option_that_cannot_matter_makes_no_second_cell() -> None:
    experiment = resolve(changed(layouts=[{"tp": 2, "memory_gather": ["per_block", "per_stage"]}]))
    gathers = {(cell.model.name, cell.layout.memory_gather) for cell in experiment.cells}
    assert gathers == {("pair", "per_block"), ("pair", "per_stage"), ("single", "per_stage")}
    without_sp = resolve(changed(layouts=[{"tp": 2, "saved_input": ["shard", "whole"]}]))
    assert {cell.layout.saved_input for cell in without_sp.cells} == {"shard"}
    without_stages = effective(Layout(cut="aligned"), named_model("tiny-t5"))
    assert without_stages == Layout()


def test_models_of_one_layout_stand_next_to_each_other() -> None:
    experiment = resolve(TABLE)
    assert [(cell.layout.tp, cell.model.name) for cell in experiment.cells] == [
        (1, "pair"),
        (1, "single"),
        (2, "pair"),
        (2, "single"),
    ]


def test_what_a_model_forbids_becomes_a_cell_with_a_reason() -> None:
    table = changed(layouts=[{"tp": [1, 4]}])
    refused = [cell for cell in resolve(table).cells if cell.refusal]
    assert [cell.refusal for cell in refused] == ["2 heads over tp=4: tp must divide 2; try 1, 2"] * 2
    table["layouts"][0]["illegal"] = "skip"
    assert len(resolve(table).cells) == 2


def test_what_a_batch_forbids_becomes_a_cell_with_a_reason() -> None:
    odd = resolve(changed(layouts=[{"dp": 3}])).cells[0]
    assert odd.refusal.startswith("4 sequences over dp=3")
    long = resolve(changed(models__single=None, data__tokens__source_length=100)).cells
    assert "has 32 learned positions, the data has 100" in long[0].refusal


def test_the_positions_of_a_twin_reach_as_far_as_the_longest_pair() -> None:
    pair, single = resolve(changed(data__tokens__source_length=30, data__tokens__target_length=20)).cells[:2]
    assert not pair.refusal
    assert not single.refusal
    assert single.model.max_length == 50


def test_a_control_follows_its_cell_and_differs_in_name_and_fingerprint_only() -> None:
    name = cell_names(resolve(TABLE))[2]
    experiment = resolve(changed(controls=[name]))
    cell, control = experiment.cells[2:4]
    assert control.is_control
    assert control.name == f"{name}.control"
    assert (control.model, control.layout, control.data) == (cell.model, cell.layout, cell.data)
    assert control.fingerprint("") != cell.fingerprint("")


def test_names_are_unique_and_fit_for_files() -> None:
    experiment = resolve(
        changed(layouts=[{"tp": [1, 2], "pp": [1, 2], "sp": [False, True], "cut": ["even", [2]], "recompute": "full"}])
    )
    names = cell_names(experiment)
    assert len(set(names)) == len(names)
    assert all(set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-") for name in names)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"repeats": 6},
        {"dtype": "float64"},
        {"models__pair__ffn_width": 32},
        {"data__tokens__sequences": 8},
        {"data__tokens__loss_on": "all"},
        {"layouts": [{"tp": [1, 2], "microbatches": 2}]},
    ],
)
def test_a_fingerprint_changes_with_what_defines_a_cell(changes: dict[str, Any]) -> None:
    before, after = resolve(TABLE).cells[0], resolve(changed(**changes)).cells[0]
    assert before.fingerprint("tokens") != after.fingerprint("tokens")
    assert before.fingerprint("tokens") == resolve(TABLE).cells[0].fingerprint("tokens")
    assert before.fingerprint("tokens") != before.fingerprint("other tokens")


def test_a_model_may_be_like_another_or_like_a_published_one() -> None:
    table = changed(
        models__large={"like": "pair", "vocabulary": 512},
        models__published={"like": "tiny-t5", "num_heads": 2},
    )
    by_name = {member.config.name: member.config for member in resolve(table).members}
    assert by_name["large"] == by_name["pair"].replace(name="large", vocabulary=512, source_vocabulary=512)
    assert by_name["published"].num_kv_heads == 2
    assert by_name["published"].head_width == named_model("tiny-t5").head_width


def test_a_family_is_named_after_its_first_model_and_a_model_alone_has_none() -> None:
    members = {member.config.name: member for member in resolve(changed(models__alone=PAIR)).members}
    assert (members["pair"].family, members["pair"].match) == ("pair", "none")
    assert (members["single"].family, members["single"].match) == ("pair", "depth")
    assert members["alone"].family == ""


def test_a_text_that_cannot_be_read_is_an_error_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "empty.tsv").write_text("", encoding="utf-8")
    experiment = resolve(changed(data__tokens__text="empty.tsv"))
    with pytest.raises(ValueError, match=r"data.tokens: .*empty.tsv: no translated pair"):
        Batches(tmp_path).check(experiment)
    with pytest.raises(ValueError, match=r"data.tokens: .*Django has no language 'xx'"):
        Batches(tmp_path).check(resolve(changed(data__tokens__text="django:xx")))


def test_the_twins_of_a_family_read_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("ab\tcd\nef\tgh\n", encoding="utf-8")
    pair, single = resolve(changed(data__tokens__text="pairs.tsv")).cells[:2]
    batches = Batches(tmp_path)
    two, one = batches.batch(pair), batches.batch(single)
    assert sum(two.source_lengths) + sum(two.target_lengths) == sum(one.target_lengths)
    assert two.num_loss_tokens() == one.num_loss_tokens()


@pytest.mark.parametrize("ragged", [False, True])
def test_a_synthetic_pair_in_a_row_is_trained_on_its_target(tmp_path: Path, ragged: bool) -> None:
    single = resolve(changed(data__tokens__ragged=ragged)).cells[1]
    batch = Batches(tmp_path).batch(single)
    rows = (batch.labels != -100).sum(dim=1).tolist()
    assert rows == [max(1, length - 6) for length in batch.target_lengths]
    assert ragged or rows == [5] * 4


def test_a_digest_tells_batches_apart(tmp_path: Path) -> None:
    first = Batches(tmp_path).batch(resolve(TABLE).cells[0])
    again = Batches(tmp_path).batch(resolve(TABLE).cells[0])
    other = Batches(tmp_path).batch(resolve(changed(seed=1)).cells[0])
    assert digest(first) == digest(again) != digest(other)


def test_what_the_engine_does_not_run_becomes_a_cell_with_a_reason() -> None:
    refused = resolve(changed(layouts=[{"dp": 2, "zero": 2}])).cells
    assert all("zero = 2" in cell.refusal for cell in refused)


def test_every_engine_runs_every_cell_next_to_the_others() -> None:
    cells = resolve(changed(engine=["native", "torch"], layouts=[{"tp": 2}])).cells
    assert [(cell.model.name, cell.engine.name) for cell in cells] == [
        (model, engine) for model in ("pair", "single") for engine in ("native", "torch")
    ]
    native, torch = cells[:2]
    assert torch.name == f"{native.name}.torch"
    assert native.fingerprint("tokens") != torch.fingerprint("tokens")
    (alone, _) = resolve(changed(layouts=[{"tp": 2}])).cells
    assert (alone.name, alone.fingerprint("tokens")) == (native.name, native.fingerprint("tokens"))


def test_an_engine_that_cannot_refuses_its_own_cell_only_even_where_what_is_illegal_is_skipped() -> None:
    layouts = [{"dp": 2, "zero": [0, 2], "models": ["pair"], "illegal": "skip"}, {}]
    refusals = {
        (cell.engine.name, cell.layout.zero): cell.refusal
        for cell in resolve(changed(engine=["native", "torch"], layouts=layouts)).cells
        if cell.layout.dp == 2
    }
    assert refusals.pop(("native", 2)) == (
        "the native engine deals optimizer states, nothing else: zero = 2; use zero <= 1"
    )
    assert refusals == {("native", 0): "", ("torch", 0): "", ("torch", 2): ""}


def test_an_engine_that_is_not_installed_refuses_its_cells_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _package: None)
    cells = resolve(changed(engine=["fairscale", "native"], layouts=[{}])).cells
    assert [cell.refusal for cell in cells] == [
        "the fairscale engine is not installed: pip install 'twinshard[engines]'",
        "",
    ] * 2


@pytest.mark.parametrize("file", sorted((ROOT / "launch/experiments").glob("*.toml")), ids=lambda file: file.stem)
def test_the_experiments_of_the_project_resolve_and_have_controls(file: Path) -> None:
    experiment = load(file)
    assert experiment.name == file.stem
    Batches(file.parent).check(experiment)
    assert any(cell.is_control for cell in experiment.cells)
    architectures = {cell.model.architecture for cell in experiment.cells}
    assert {"encoder_decoder", "decoder_only"} <= architectures
