"""Does an experiment run to its end whatever its ranks do, leave a record of every cell, and leave no process?

Ranks are started by torchrun, which takes seconds: the tests share a sweep. `tests/faulty_worker.py` breaks ranks.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import commands
from launch.cell import Cell
from launch.env import torchrun_environment
from launch.lock import locked
from launch.record import read_record, record_path
from launch.sweep import Outcome, Sweep
from results.schema import Record, Status

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENT = """
name = "faults"
repeats = 2
warmup = 0
interleave = 1
controls = ["pair.tokens.tp2-pp1_even-dp1-m1-1f1b-per_stage"]
[models.pair]
architecture = "encoder_decoder"
width = 8
num_heads = 2
ffn_width = 16
num_encoder_blocks = 1
num_decoder_blocks = 1
vocabulary = 40
max_length = 16
[data.tokens]
text = "synthetic"
sequences = 6
source_length = 7
target_length = 5
[[layouts]]
pp = 2
microbatches = 3
[[layouts]]
tp = 2
sp = [true, false]
[[layouts]]
pp = 2
microbatches = [1, 2]
[[layouts]]
tp = 4
"""
RAISES, DIES, EXHAUSTS = (f"pair.tokens.tp1-pp2_even-dp1-m{count}-1f1b-per_stage" for count in (1, 2, 3))
SOUND = "pair.tokens.tp2-pp1_even-dp1-m1-1f1b-per_stage"
CONTROL = f"{SOUND}.control"
SHARDED = "pair.tokens.tp2-sp-pp1_even-dp1-m1-1f1b-per_stage"
REFUSED = "pair.tokens.tp4-pp1_even-dp1-m1-1f1b-per_stage"


class Silent:
    """A spectator that remembers.

    Attributes:
        statuses: of each cell, as told.
        most_steps: the largest number of steps that were said to be done.
    """

    def __init__(self) -> None:
        self.statuses: dict[str, Status] = {}
        self.most_steps = self.planned_steps = 0

    def planned(self, num_steps: int, num_cells: int) -> None:
        self.planned_steps = num_steps

    def moved(self, num_steps: int, cell: str, phase: str) -> None:
        self.most_steps = max(self.most_steps, num_steps)

    def settled(self, cell: str, status: Status, reason: str) -> None:
        self.statuses[cell] = status


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Swept:
    """A sweep in which ranks broke."""

    file: Path
    output: Path
    outcome: Outcome
    spectator: Silent
    cells: dict[str, Cell]
    processes: list[str]
    """Command lines that were left."""

    def record(self, name: str) -> Record:
        record = read_record(self.output, self.cells[name])
        assert record is not None
        return record


def processes_with(word: str) -> list[str]:
    """Command lines of running processes that contain a word, this one's left out."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if word in line and path.parent.name != str(os.getpid()):
                found.append(line)
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    folder = tmp_path_factory.mktemp("sweep")
    file, output = folder / "faults.toml", folder / "records"
    file.write_text(EXPERIMENT, encoding="utf-8")
    spectator = Silent()
    sweep = Sweep(file, output, backend="gloo", timeout_seconds=60, worker="tests.faulty_worker")
    outcome = sweep.run(spectator)
    return Swept(
        file=file,
        output=output,
        outcome=outcome,
        spectator=spectator,
        cells={cell.name: cell for cell in sweep.experiment.cells},
        processes=processes_with(str(folder)),
    )


def test_a_rank_that_raises_in_a_step_makes_a_failed_record_that_names_it(swept: Swept) -> None:
    record = swept.record(RAISES)
    assert record.status == "failed"
    assert record.reason == "rank 1 (dp=0 pp=1 cp=0 tp=0) during counting: RuntimeError: broken on purpose"
    assert record.step_seconds == []


def test_a_rank_that_is_killed_makes_a_failed_record_that_names_it(swept: Swept) -> None:
    record = swept.record(DIES)
    assert record.status == "failed"
    assert record.reason == "rank 1 (dp=0 pp=1 cp=0 tp=0) during counting: killed by SIGKILL"


def test_a_rank_without_memory_has_a_status_of_its_own(swept: Swept) -> None:
    record = swept.record(EXHAUSTS)
    assert record.status == "out_of_memory"
    assert record.reason.endswith("MemoryError")


def test_the_other_cells_go_on(swept: Swept) -> None:
    assert set(swept.outcome.failed) == {RAISES, DIES, EXHAUSTS}
    assert set(swept.outcome.measured) == {SOUND, CONTROL, SHARDED}
    assert swept.spectator.statuses[SOUND] == "ok"
    record = swept.record(SHARDED)
    assert record.status == "ok"
    assert record.ledger_matches_recorder
    assert len(record.ranks) == 2
    assert record.data is not None
    assert record.data.source_sharding_padding_tokens == record.data.target_sharding_padding_tokens == 6


def test_a_refused_cell_is_recorded_and_not_run(swept: Swept) -> None:
    assert list(swept.outcome.unsupported) == [REFUSED]
    assert all(swept.outcome.unsupported.values())
    assert swept.record(REFUSED).reason == "2 heads over tp=4: tp must divide 2; try 1, 2"


def test_a_control_is_a_record_of_its_own(swept: Swept) -> None:
    cell, control = swept.record(SOUND), swept.record(CONTROL)
    assert (cell.is_control, control.is_control) == (False, True)
    assert cell.loss == control.loss
    assert cell.communication == control.communication


def test_no_process_is_left_after_failures(swept: Swept) -> None:
    assert swept.processes == []


def test_progress_ends_where_it_was_planned_to(swept: Swept) -> None:
    assert swept.spectator.most_steps == swept.spectator.planned_steps


def test_a_failed_run_ends_with_exit_code_1_and_a_good_one_with_0(
    swept: Swept, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sweep, "run", lambda *_, **__: swept.outcome)
    arguments = [str(swept.file), "--output", str(swept.output)]
    assert commands.run_command.main(arguments, standalone_mode=False) == 1
    assert "3 measured, 1 unsupported, 3 failed" in capsys.readouterr().err
    monkeypatch.setattr(Sweep, "run", lambda *_, **__: dataclasses.replace(swept.outcome, failed={}))
    assert commands.run_command.main(arguments, standalone_mode=False) == 0


def test_a_second_run_keeps_good_records_and_repeats_failed_and_broken_ones(swept: Swept) -> None:
    before = swept.record(SOUND)
    path = record_path(swept.output, swept.cells[SHARDED])
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    stranger = path.with_name("gone.tokens.tp8.json")
    stranger.write_text(text, encoding="utf-8")
    outcome = Sweep(swept.file, swept.output, backend="gloo", timeout_seconds=60).run(Silent())
    assert set(outcome.kept) == {SOUND, CONTROL}
    assert set(outcome.measured) == {SHARDED, RAISES, DIES, EXHAUSTS}
    assert outcome.failed == {}
    assert outcome.strangers == ("gone.tokens.tp8",)
    stranger.unlink()
    assert swept.record(SOUND) == before
    edges = [(row.edge, row.tensor, row.count) for row in swept.record(DIES).edges]
    assert edges == [("0>1", "memory", 2), ("1>0", "memory", 2)]


def test_a_run_from_outside_measures_what_is_left_for_its_ranks(swept: Swept) -> None:
    record_path(swept.output, swept.cells[SOUND]).unlink()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "launch", str(swept.file), "--output", str(swept.output), "--backend", "gloo"]
    result = subprocess.run(
        command, check=False, env=torchrun_environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert "1 measured, 0 failed" in result.stdout
    assert swept.record(SOUND).status == "ok"


def test_two_runs_into_one_folder_exclude_each_other(swept: Swept, tmp_path: Path) -> None:
    sweep = Sweep(swept.file, tmp_path, backend="gloo")
    with locked(tmp_path / "faults"), pytest.raises(ValueError, match=f"another run writes to .* {os.getpid()}"):
        sweep.run(Silent())
    with locked(tmp_path / "faults"), locked(tmp_path / "other"):
        pass


def test_a_fresh_run_forgets_records_of_cells_that_are_gone(tmp_path: Path) -> None:
    file = tmp_path / "refused.toml"
    file.write_text(EXPERIMENT[: EXPERIMENT.index("[[layouts]]")].replace("controls", "#"), encoding="utf-8")
    file.write_text(file.read_text(encoding="utf-8") + "[[layouts]]\ntp = 4\n", encoding="utf-8")
    stranger = tmp_path / "faults" / "gone.json"
    stranger.parent.mkdir()
    stranger.touch()
    assert Sweep(file, tmp_path).run(Silent()).strangers == ("gone",)
    assert Sweep(file, tmp_path).run(Silent(), fresh=True).strangers == ()
    assert not stranger.exists()


@contextlib.contextmanager
def long_run(folder: Path, *, repeats: int) -> Iterator[tuple[Path, "subprocess.Popen[str]"]]:
    """A run of three cells on one rank from the command line, and the folder of its records."""
    head = EXPERIMENT[: EXPERIMENT.index("[[layouts]]")].replace("controls", "#")
    text = head.replace("repeats = 2", f"repeats = {repeats}")
    file = folder / "long.toml"
    file.write_text(f"{text}[[layouts]]\nmicrobatches = [1, 2, 3]\n", encoding="utf-8")
    command = [sys.executable, "-m", "launch", "run", str(file), "--output", str(folder), "--backend", "gloo"]
    with subprocess.Popen(command, env=torchrun_environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            yield folder / "faults", process
        finally:
            process.kill()


def wait_for(folder: Path, pattern: str) -> Path:
    """The first file below a folder with such a name, once there is one."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in folder.glob(pattern):
            return path
        time.sleep(0.05)
    raise AssertionError(f"no {pattern} in two minutes")


def test_after_a_stop_records_stay_and_no_process_does(tmp_path: Path) -> None:
    with long_run(tmp_path, repeats=300) as (folder, process):
        path = wait_for(folder, "*.json")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130
        assert f"stopped: what was measured stays in {folder}; the same command goes on from there" in err
        assert json.loads(path.read_text(encoding="utf-8"))["status"] == "ok"
        assert len(list(folder.glob("*.json"))) < 3
        assert processes_with(str(folder)) == []


def test_no_rank_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    # Far more steps than the test waits for: ranks that were not ended would still be there.
    with long_run(tmp_path, repeats=1_000_000) as (folder, process):
        wait_for(folder, ".launch/1/progress")
        assert processes_with(str(folder)) != []
        process.kill()
        process.wait()
        deadline = time.monotonic() + 30
        while processes_with(str(folder)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_with(str(folder)) == []
