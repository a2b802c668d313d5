"""Is the report the one that is stored, is it drawn, and do the commands say what they do?

After a wanted change of the report, store it again and read the difference: `python -m tests.test_results_report`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from parallel.layouts import Layout
from results import markdown, plots
from results.claims import CLAIMS
from results.commands import claims_command, compare_command, report_command
from results.report import Written, report
from results.tables import TABLE_NAMES, build
from tests.records import DECODER_ONLY, ENCODER_DECODER, record, study, unsuccessful, write

STORED = Path(__file__).with_name("stored_report.md")
PNG = b"\x89PNG\r\n\x1a\n"


def study_report(folder: Path) -> Written:
    """The report of the study without noise, with a record that was cut in half among its records."""
    paths = write(folder / "records", study(noise=0.0))
    half = paths[0].read_text(encoding="utf-8")[:1000]
    paths[0].with_name("half.json").write_text(half, encoding="utf-8")
    return report(folder / "records", folder / "output")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("study")
    study_report(made)
    return made


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "output" / "report.md").read_text(encoding="utf-8")


def test_the_report_is_the_stored_one(text: str) -> None:
    assert text == STORED.read_text(encoding="utf-8")


def test_every_link_of_the_report_leads_somewhere(folder: Path, text: str) -> None:
    anchors = {f"#{heading.lower()}" for heading in re.findall(r"^### ([PCN]\d+)$", text, flags=re.MULTILINE)}
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 50
    for target in targets:
        assert target in anchors or (folder / "output" / target).exists(), target


def test_every_table_is_written_beside_the_report(folder: Path) -> None:
    names = {path.stem for path in (folder / "output" / "tables").iterdir()}
    assert names == {*TABLE_NAMES, "verdicts", "evidence"}
    evidence = pd.read_csv(folder / "output" / "tables" / "evidence.csv")
    assert set(evidence["claim"]) == {claim.id for claim in CLAIMS}


def test_pictures_are_whole_files(folder: Path) -> None:
    pictures = sorted((folder / "output" / "pictures").iterdir())
    assert [path.name for path in pictures] == [
        "bytes-tiny.png",
        "padding.png",
        "penalty-flops.png",
        "penalty-measured.png",
        "stages-tiny.png",
        "timeline-largest-error-2-ranks.png",
        "timeline-largest-error-2-ranks.svg",
        "timeline-largest-error-2-ranks.trace.json",
        "timeline-median-error-2-ranks.png",
        "timeline-median-error-2-ranks.svg",
        "timeline-median-error-2-ranks.trace.json",
        "twins-tiny.png",
    ]
    for path in (path for path in pictures if path.suffix == ".png"):
        content = path.read_bytes()
        assert content.startswith(PNG)
        assert content.endswith(b"IEND\xaeB`\x82")
        assert len(content) > 10_000


def test_gloo_is_named_and_nothing_is_concluded_of_nccl(text: str) -> None:
    assert "gloo on cpu" in text
    assert "nothing here says anything about NCCL" in text
    assert "No run used NCCL or a GPU." in text


def test_a_run_on_gpus_is_not_called_a_run_on_cpus(tmp_path: Path) -> None:
    layout = Layout(tp=2, microbatches=2)
    entries = [record(config, layout, device="cuda", backend="nccl") for config in (ENCODER_DECODER, DECODER_ONLY)]
    write(tmp_path, entries)
    text = report(tmp_path, tmp_path / "output").path.read_text(encoding="utf-8")
    assert "NCCL" not in text
    assert "nccl on cuda" in text


def test_nothing_is_drawn_of_nothing(tmp_path: Path) -> None:
    tables = build([unsuccessful("failed", "why", Layout())])
    tables = tables.replace(penalty=tables.penalty.head(0))
    assert plots.draw_all(tables, tmp_path) == {"twins": {}, "stages": {}, "bytes": {}, "padding": {}, "penalty": {}}
    assert list(tmp_path.iterdir()) == []


def test_a_study_of_failures_still_has_a_report(tmp_path: Path) -> None:
    write(tmp_path, [unsuccessful("failed", "why it failed", Layout())])
    text = report(tmp_path, tmp_path / "output").path.read_text(encoding="utf-8")
    assert "why it failed" in text
    assert text.count("**undecided**") >= 7


def test_without_a_record_there_is_no_report(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no record in"):
        report(tmp_path, tmp_path / "output")
    (tmp_path / "half.json").write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="1 files refused, the first: cut off or no JSON"):
        report(tmp_path, tmp_path / "output")
    assert not (tmp_path / "output").exists()


def test_a_cell_of_a_table_stays_in_its_cell() -> None:
    assert markdown.table(("a", "#b"), [("x | y\nz", 12345), (None, 0.12345)]) == (
        "| a | b |\n| --- | ---: |\n| x \\| y z | 12,345 |\n|  | 0.1235 |"
    )


def test_the_commands_are_there_before_the_libraries() -> None:
    program = "import sys, results.commands; print(*sorted({'pandas', 'scipy', 'matplotlib'} & set(sys.modules)))"
    root = Path(__file__).resolve().parent.parent
    told = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert told.stdout.split() == []


# ---- commands -------------------------------------------------------------------------------------------------------


def run(command: object, *arguments: str) -> Result:
    return CliRunner().invoke(command, list(arguments))  # type: ignore[arg-type]


def test_report_tells_where_it_is_and_every_verdict(folder: Path, tmp_path: Path) -> None:
    result = run(report_command, str(folder / "records"), str(tmp_path))
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{tmp_path / 'report.md'}: 19 records, 1 files refused"
    assert lines[1:] == [
        "P1   conditional",
        "P2   conditional",
        "P3   conditional",
        "P4   conditional",
        "P5   supported",
        "P6   conditional",
        "P7   conditional",
        "P8   conditional",
        "P9   undecided",
        "P11  supported",
        "C1   supported",
        "C2   supported",
        "C3   supported",
        "C4   supported",
        "C9   conditional",
        "C10  conditional",
        "N1   conditional",
        "N2   conditional",
        "N3   conditional",
        "N4   conditional",
        "N5   conditional",
        "N6   conditional",
        "N7   conditional",
        "N8   supported",
        "N9   supported",
        "N10  supported",
    ]


def test_claims_are_listed_with_rule_and_verdict(folder: Path) -> None:
    result = run(claims_command, "--records", str(folder / "records"))
    assert result.exit_code == 0
    assert result.stdout.count("  rule: ") == len(CLAIMS)
    assert "P5 (A §8.2): The two sides" in result.stdout
    assert "  supported: all 6 rows that decide support it" in result.stdout
    assert "1 files in" in result.stdout


def test_one_claim_is_listed_with_its_evidence(folder: Path) -> None:
    result = run(claims_command, "p7", "--records", str(folder / "records"))
    assert "    supports    measured  tensors across the boundary: memory" in result.stdout
    assert "      edges.csv: synthetic/tiny-encoder-decoder" in result.stdout
    assert "P1" not in result.stdout


def test_claims_are_listed_without_any_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(claims_command)
    assert result.exit_code == 0
    assert result.stdout.count("  rule: ") == len(CLAIMS)
    assert result.stdout.endswith("No record in results/records: no verdicts on what only runs can decide.\n")


def test_compare_prints_and_writes_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    cells = [f"{config.name} {Layout(tp=2, microbatches=2).label}" for config in (DECODER_ONLY, ENCODER_DECODER)]
    output = tmp_path / "comparison.csv"
    result = run(compare_command, *cells, "--records", str(folder / "records"), "--output", str(output))
    assert result.exit_code == 0
    (line,) = [line for line in result.stdout.splitlines() if " num_collectives " in line]
    assert [word.strip() for word in line.strip("│").split("│")][:4] == [
        "num_collectives",
        "76",
        "100",
        "1.316 = 25/19",
    ]
    table = pd.read_csv(output)
    assert table.loc[table["quantity"] == "num_collectives", "ratio_exact"].tolist() == ["25/19"]
    assert result.stdout.endswith(f"Written to {output}.\n")


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (report_command, ("nowhere",), "no folder nowhere: records are written by a run, or give another folder"),
        (claims_command, ("P99",), "no claim P99; known are P1, P2, P3, P4, P5, P6, P7"),
        (claims_command, ("--records", "nowhere"), "no folder nowhere"),
        (compare_command, ("lost.csv", "lost.json"), "no file lost.csv"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_two(command: object, arguments: tuple[str, ...], message: str) -> None:
    result = run(command, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert message in line


@pytest.mark.parametrize("command", [report_command, claims_command, compare_command])
def test_help_teaches_by_examples(command: object) -> None:
    result = run(command, "--help")
    assert "Examples:\n    twinshard " in result.stdout


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        STORED.write_text(study_report(Path(name)).path.read_text(encoding="utf-8"), encoding="utf-8")
