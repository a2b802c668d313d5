"""Are published figures met by our closed forms, and does the command fail when one is not?"""

import csv
import importlib
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from launch import estimators
from launch.cli import answer
from models.named import named_model
from parallel.layouts import Layout
from parallel.parameters import COUNTER_BYTES, num_tensors, parameter_counts, state_bytes
from parallel.plans import plan
from parallel.published_costs import block_activation_bytes, hardware_flops, model_flops, zero_state_bytes
from parallel.share import shares
from results import validation_command
from results.validation import TABLES, validate
from results.validation.rows import FOLDER, Check, Printed

AddRow = Callable[..., Path]


@pytest.fixture
def add_row(tmp_path: Path) -> AddRow:
    """A folder of the published figures with one more row, blank where a column is not told."""

    def add(table: str, **cells: object) -> Path:
        folder = tmp_path / "figures"
        if not folder.exists():
            shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
        path = folder / f"{table}.csv"
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        columns = list(dict.fromkeys([*rows[0], *cells]))
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
            writer.writeheader()
            writer.writerows([*rows, {name: str(value) for name, value in cells.items()}])
        return folder

    return add


def of_row(folder: Path, table: str, row: str) -> dict[str, Check]:
    checks = [check for check in validate(folder, (table,)) if check.row == row]
    return {check.quantity: check for check in checks}


# ---- the project's own figures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", TABLES)
def test_every_published_figure_is_met(table: str) -> None:
    checks = list(validate(tables=(table,)))
    assert checks
    assert [check for check in checks if not check.passed] == []
    assert all(check.source for check in checks)


def test_counts_are_exact_and_formulas_agree_to_the_last_digit() -> None:
    rules = {check.table: check.rule.partition(",")[0].partition(":")[0] for check in validate()}
    assert rules["parameters"] == rules["stacks"] == "exact"
    assert {rules[name] for name in ("zero", "activation_memory", "iteration", "megatron_2021")} == {"as printed"}
    assert all(check.difference == 0 for check in validate(tables=("activation_memory",)))


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("parameters", "parameters"),
        ("stacks", "of_which_cross_attention"),
        ("zero", "zero2_gb"),
        ("activation_memory", "state_gib"),
        ("activation_memory", "activation_tp_sp_selective_gib"),
        ("iteration", "hfu"),
        ("megatron_2021", "parameters_billion"),
        ("measured_memory", "value"),
    ],
)
def test_a_wrong_figure_makes_the_command_fail(
    table: str, column: str, add_row: AddRow, capsys: pytest.CaptureFixture[str]
) -> None:
    with (FOLDER / f"{table}.csv").open(encoding="utf-8", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    # A count is wrong by one; other figures by 3 %, more than any digit or tolerance forgives.
    right = Printed.of(row[column]).value
    wrong = str(int(right) + 1) if table in ("parameters", "stacks") else f"{float(right) * 1.03:.12g}"
    folder = add_row(table, **(row | {column: wrong}))
    assert answer(["validate", table, "--figures", str(folder), "--failed", "--format", "csv"]) == 1
    told = capsys.readouterr()
    assert " 0 not met" not in told.err
    assert {line.split(",")[0] for line in told.out.splitlines()[1:]} == {table}


def test_the_command_tells_ours_and_theirs_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["validate", "parameters", "zero"]) == 0
    out = capsys.readouterr().out
    assert "6,738,415,616" in out
    assert out.endswith(" figures, 0 not met\n")


# ---- rows of other configurations -----------------------------------------------------------------------------------


def test_a_checkpoint_that_has_no_name_here_is_counted_from_its_sizes(add_row: AddRow) -> None:
    folder = add_row(
        "parameters",
        model="mistral-7b",
        architecture="decoder_only",
        parameters=7241732096,
        configuration="V32000 d4096 L32 h32 kv8 ff14336 untied",
        style="llama-2-7b",
    )
    add_row("parameters", model="bert-tiny (model with pooler)", parameters=4385920, configuration="V30522 d128 L2 h2")
    add_row(
        "parameters", model="t5-v1_1-tiny", parameters=26 * 64 + 8 * 2 * 64 + 7, configuration="V26 d64 h2 L1+1 gated"
    )
    assert of_row(folder, "parameters", "mistral-7b")["parameters"].passed
    assert of_row(folder, "parameters", "bert-tiny (model with pooler)")["parameters"].passed
    assert not of_row(folder, "parameters", "t5-v1_1-tiny")["parameters"].passed


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ({"model": "gpt2-x", "configuration": "V9 d8 L1 q4"}, "configuration has 'q4'; known are V, ctx"),
        ({"model": "gpt2-x", "configuration": "V9 d8 L1+1"}, "decoder_only has one stack"),
        ({"model": "gpt2-x", "configuration": "V9 h1 L1"}, "configuration does not tell width"),
        ({"model": "gpt2-x", "configuration": "V9 d8 h3 L1"}, "line 25: width 8 over 3 heads"),
        ({"model": "elmo", "configuration": "V9 d8 L1"}, "no style is known for 'elmo'"),
        ({"model": "gpt2 (quantised)", "configuration": "V9 d8 L1"}, "'quantised' behind a name; known are model"),
        ({"model": "gpt2-x", "configuration": "V9 d16 h2 L1", "parameters": "many"}, "parameters = 'many'"),
        ({"model": "bert-x", "configuration": "V9 d24 h2 L1", "architecture": "decoder_only"}, "is encoder_only, not"),
    ],
)
def test_a_row_that_cannot_be_read_is_one_clear_line(
    cells: dict[str, str], message: str, add_row: AddRow, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = add_row("parameters", **({"parameters": "1"} | cells))
    assert answer(["validate", "parameters", "--figures", str(folder)]) == 2
    assert message in capsys.readouterr().err


def test_missing_files_and_unknown_tables_are_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["validate", "zero", "--figures", str(tmp_path)]) == 2
    assert "zero.csv: no such file" in capsys.readouterr().err
    assert answer(["validate", "zeros"]) == 2
    assert "no table zeros; known are parameters" in capsys.readouterr().err


def test_other_rows_of_every_kind_are_computed(add_row: AddRow) -> None:
    gpt = {"heads": 64, "hidden": 6144, "layers": 48, "tp": 8, "pp": 1, "sequence": 2048, "vocabulary": 51200}
    # 10 + 24 / 8 + 5 a s / (h t) = 26.33 L b s h; 34 / 8; 2, all without interleaving.
    folder = add_row(
        "activation_memory",
        model="22B",
        microbatch=4,
        interleave=1,
        state_gib="45.5625",
        activation_tp_gib="59.25",
        activation_tp_sp_selective_gib="9.5625",
        activation_tp_full_gib="4.5",
        **gpt,
    )
    checks = of_row(folder, "activation_memory", "22B")
    assert checks["activation tp, GiB"].passed
    assert checks["activation tp sp selective, GiB"].passed
    assert checks["activation tp full, GiB"].passed
    assert float(checks["states, GiB"].ours) == 18 * 12 * 48 * 6144**2 / 8 / 2**30

    add_row("zero", parameters_billion="128", data_parallel=1024, zero0_gb=2048, zero1_gb=513, zero2_gb=257, zero3_gb=2)
    assert all(check.passed for check in of_row(folder, "zero", "128B dp 1024").values())

    add_row("stacks", model="t5-large", encoder_stack=302040576, embedding=32899072)
    assert all(check.passed for check in of_row(folder, "stacks", "t5-large").values())


def test_what_megatron_prints_counts_layernorm_for_rmsnorm(add_row: AddRow) -> None:
    width, ffn = 4096, 11008
    block = 4 * width**2 + 3 * width * ffn + 2 * 2 * width
    folder = add_row(
        "measured_memory",
        model="llama-2-7b",
        quantity="weight and optimizer",
        tp=1,
        pp=4,
        dp=2,
        zero=1,
        # The last stage is the most loaded: its head, and a final norm that the first lacks.
        value=f"{(8 * block + 32000 * width + 2 * width) * 12 / 2**20:.2f}",
        unit="MB",
    )
    checks = of_row(folder, "measured_memory", "llama-2-7b")
    assert checks["weight and optimizer, most loaded stage, MB"].passed


# ---- conventions ----------------------------------------------------------------------------------------------------


def test_a_figure_stands_for_all_numbers_that_print_so() -> None:
    printed = Printed.of("41.3")
    assert (printed.low, printed.high) == (Fraction("41.25"), Fraction("41.35"))
    assert Printed.of("1.410915e17").unit == 10**11
    for text in ("", "about 3", "nan", "inf"):
        with pytest.raises(ValueError, match="must be a number"):
            Printed.of(text)


def test_digits_are_cut_off_only_where_the_source_does_so(add_row: AddRow) -> None:
    gpt = {"heads": 160, "hidden": 25600, "layers": 128, "gpus": 1, "sequence": 2048, "vocabulary": 51200}
    folder = add_row("megatron_2021", parameters_billion="1008.03", **gpt)
    assert not of_row(folder, "megatron_2021", "1008.03B")["parameters, billion"].difference < 0
    assert of_row(folder, "megatron_2021", "1008.03B")["parameters, billion"].passed is False
    assert of_row(FOLDER, "zero", "1000B dp 64")["states, ZeRO-2, GB"].passed


def test_published_states_are_those_of_the_prediction_but_for_step_counters() -> None:
    """The shared terms: 2 + 2 + 4 + 8 bytes, dealt by stage; predicted are whole elements, and step counters."""
    config = named_model("tiny-t5")
    for zero in (0, 1, 2, 3):
        layout = Layout(dp=4, tp=2, zero=zero, microbatches=1)
        for share in shares(plan(config, layout)):
            told = state_bytes(share, 2, "adamw", master_weights=True)
            published = zero_state_bytes(parameter_counts(share).total, dp=4, zero=zero)
            num_counters = 1 if zero else num_tensors(share)
            rounding = told.total - COUNTER_BYTES * num_counters - published
            assert 0 <= rounding < 16


@pytest.mark.parametrize(("sp", "factor"), [(False, 15 + Fraction(28, 4)), (True, Fraction(43, 4))])
def test_a_decoder_block_with_memory_keeps_its_own_and_the_memorys_terms(sp: bool, factor: Fraction) -> None:
    config, (source, target), b, t = named_model("transformer-base"), (512, 128), 8, 4
    found = block_activation_bytes(
        config, "decoder", source_length=source, target_length=target, microbatch=b, tp=t, sp=sp
    )
    hidden = b * config.width
    scores = Fraction(5 * config.num_heads * b * target * (target + source), t)
    assert found == factor * target * hidden + Fraction(4 * source * hidden, t) + scores


def test_recomputed_cores_cost_their_forward_or_all_of_it() -> None:
    config = named_model("gpt2")
    model = model_flops(config, length=1024, num_sequences=2)
    core = 12 * 4 * 2 * 768 * 1024**2
    told: dict[str, Any] = {"length": 1024, "num_sequences": 2}
    assert hardware_flops(config, recompute="none", **told) == model
    assert hardware_flops(config, recompute="selective", **told) == model + core
    assert (
        hardware_flops(config, recompute="selective", recomputed_core="forward_and_backward", **told)
        == model + 3 * core
    )


# ---- public estimators ----------------------------------------------------------------------------------------------


def test_the_kept_estimates_are_of_published_figures_and_ours_are_never_worse() -> None:
    checks = {(check.table, check.row, check.quantity): check for check in validate()}
    with (FOLDER / "estimators.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {"deepspeed", "llm-analysis"} <= {row["estimator"] for row in rows}
    for row in rows:
        check = checks[row["table"], row["row"], row["quantity"]]
        assert row["version"]
        assert abs(check.difference) <= abs(Fraction(row["estimate"]) - check.theirs)


def test_estimates_stand_beside_ours_with_both_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with (FOLDER / "estimators.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    absent = dict.fromkeys(rows[0], "") | {"estimator": "other", "note": "not installed: no module"}
    monkeypatch.setattr(validation_command, "_estimates", lambda _: [*rows, absent])
    assert answer(["validate", "parameters", "zero", "--estimators", "--format", "csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + sum(row["table"] in ("parameters", "zero") for row in rows)
    assert any("t5-v1_1-base" in line and "+0.000%" in line and "-9.966%" in line for line in lines)
    assert lines[-1].endswith("other,,,not installed: no module")


def test_an_estimator_that_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", refuse)
    rows = list(estimators.estimates(FOLDER))
    assert [row[0] for row in rows] == ["llm-analysis", "deepspeed", "accelerate"]
    assert all(row[-1].startswith("not installed: ") for row in rows)
