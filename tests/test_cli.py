"""Does the command line teach, answer at once, and tell a mistake in one line?"""

import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from launch import cli
from launch.cli import COMMANDS, answer, commands

ROOT = Path(__file__).resolve().parent.parent


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = answer(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_answers_without_torch() -> None:
    program = "import sys; from launch.cli import answer; answer(['--help']); sys.exit('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0
    assert all(name in result.stdout for name in COMMANDS)


def test_models_and_plan_answer_without_torch() -> None:
    program = (
        "import sys; from launch.cli import answer; answer(['models']); answer(['plan', 't5-small', '--tp', '2']);"
        "sys.exit('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_no_arguments_are_a_call_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys)
    assert code == 0
    assert out.startswith("Usage: twinshard")


@pytest.mark.parametrize("name", ["run", "models", "plan", "measure"])
def test_every_command_teaches_with_examples(name: str) -> None:
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    assert command.help is not None
    assert "Examples:" in command.help


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rnu",), "error: no command 'rnu'; did you mean run?"),
        (("run",), "error: Missing argument 'FILE'."),
        (("run", "nothing.toml"), "error: cannot read nothing.toml: No such file or directory"),
        (("run", "nothing.toml", "--backend", "mpi"), "error: Invalid value for '--backend'"),
        (("plan", "t5-smal"), "error: unknown model 't5-smal'; did you mean t5-small"),
        (("plan", "gpt2", "--tp", "5"), "error: 12 heads over tp=5: tp must divide 12; try 1, 2, 3, 4, 6, 12"),
        (("plan", "gpt2", "--pp", "13"), "error: pp = 13 stages over 12 blocks"),
        (("plan", "gpt2", "--pp", "2", "--cut", "best"), "error: cut = 'best'; choose one of even, aligned, "),
        (("models", "nothing"), "error: no model has 'nothing' in its name"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = told(capsys, *arguments)
    assert code == 2
    assert err.startswith(message)
    assert err.count("\n") == 1


def test_an_experiment_with_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text('name = "wrong"\nmodel = {}\n', encoding="utf-8")
    code, _, err = told(capsys, "run", str(file))
    assert code == 2
    assert err == f"error: {file}: experiment: unknown key model; did you mean models?\n"


def test_debug_shows_where_a_mistake_was_found() -> None:
    with pytest.raises(ValueError, match="unknown model"):
        answer(["--debug", "plan", "nothing"])


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def broken() -> None:
        raise KeyError("bug")

    monkeypatch.setitem(cli.COMMANDS, "broken", ("tests.test_cli:broken", ""))
    monkeypatch.setattr(sys.modules[__name__], "broken", broken, raising=False)
    with pytest.raises(KeyError, match="bug"):
        answer(["broken"])


def test_plan_shows_stages_entries_and_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "plan", "t5-small", "--tp", "2", "--pp", "2", "--cut", "aligned", "--microbatches", "2")
    assert code == 0
    assert "E0-E5" in out
    assert "decoder.block.*.cross_attention.kv" in out
    assert "0: 0F0 0F1 .   0B0 .   0B1\n1: .   1F0 1B0 1F1 1B1 ." in out
    assert "encoder.embedding.token.weight is held by pipeline rank 0" in out


def test_models_are_listed_with_their_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "models", "t5-small")
    assert code == 0
    assert "60,506,624" in out


def test_cells_are_listed_without_running_them(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "run", str(ROOT / "launch/experiments/quick.toml"), "--list")
    assert code == 0
    assert "cells of quick" in out


def test_the_installed_command_is_this_one() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    assert scripts == {"twinshard": f"{cli.__name__}:{cli.main.__name__}"}
