"""What can each engine do? `twinshard capabilities`, found by running it and comparing with one process.

    equal          to one process, as `twinshard verify` asks for it, with the worst relative error
    wrong          it ran to the end and is not: what differs, with the worst relative error
    unsupported    the engine does not take the layout, with its reason; nothing was run
    failed         it did not come to the end, with the reason

All cases have two ranks and share launches; after a failure the others go on in a new one (`launch/proof.py`).
`twinshard capabilities --out results/capabilities.csv` writes the table of the report again; a test says when it has to
be. Left out: which case shows a feature (`launch/features.py`), and the transformers engine, which has no second rank:
`twinshard verify --engine transformers` compares that one.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from launch.env import BackendChoice
from launch.features import ARCHITECTURES, FEATURES, Capability, capabilities
from launch.proof import Proof, Verdict
from launch.rank_options import backend_option, timeout_option
from launch.sheets import Cell, Format, Sheet, csv_text, format_option, show
from launch.verify import follow
from models.config import Architecture
from parallel.engines.choice import PARTITIONING_ENGINES, EngineName
from parallel.engines.engine import unsupported

COLUMNS = ("engine", "architecture", "feature", "axis", "layout", "status", "worst_relative_error", "reason")
Row = dict[str, Cell]


@click.command("capabilities")
@click.option(
    "--engine", "engines", type=click.Choice(PARTITIONING_ENGINES), multiple=True, help="Again for more [default: all]."
)
@click.option("--architecture", "architectures", type=click.Choice(tuple(ARCHITECTURES)), multiple=True)
@click.option("--feature", "features", type=click.Choice(tuple(FEATURES)), multiple=True)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write all rows to this CSV file too.")
@backend_option
@timeout_option
@format_option
def capabilities_command(
    *,
    engines: tuple[EngineName, ...],
    architectures: tuple[Architecture, ...],
    features: tuple[str, ...],
    out: Path | None,
    backend: BackendChoice,
    timeout: float,
    form: Format,
) -> int:
    """Tell what each engine can do with each architecture, by running it on two ranks.

    A feature is equal when loss, gradients, their norm and the weights after a step are those of one process, in
    float64 to 1e-10. What is wrong, failed or not supported is told with its reason and does not end the command. The
    exit code is 1 when anything is wrong or failed.

    \b
    Examples:
      twinshard capabilities
      twinshard capabilities --engine torch --feature pp --feature tied
      twinshard capabilities --format markdown --out capabilities.csv
    """  # noqa: D301 - click reads the character
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"cannot write {out}: there is no folder {out.parent}")
    asked = list(
        capabilities(
            engines or PARTITIONING_ENGINES, architectures or tuple(ARCHITECTURES), features or tuple(FEATURES)
        )
    )
    rows = found(asked, backend=backend, timeout_seconds=timeout)
    if out is not None:
        out.write_text(csv_text(COLUMNS, rows), encoding="utf-8", newline="")
    show(form, sheets=_sheets(rows), columns=COLUMNS, rows=rows, document={"capabilities": rows})
    return 1 if any(row["status"] in ("wrong", "failed") for row in rows) else 0


def found(asked: Sequence[Capability], *, backend: BackendChoice, timeout_seconds: float) -> list[Row]:
    """Runs what its engine supports, and returns a row each, in the order in which they were asked for."""
    refusals = {one.case.name: unsupported(one.case.engine, one.case.config, one.case.layout) for one in asked}
    able = [one.case for one in asked if refusals[one.case.name] is None]
    verdicts = follow(Proof(able, backend=backend, timeout_seconds=timeout_seconds), len(able)) if able else []
    by_name = {verdict.case.name: verdict for verdict in verdicts}
    return [row(one, by_name.get(one.case.name), refusals[one.case.name] or "") for one in asked]


def row(capability: Capability, verdict: Verdict | None, refusal: str) -> Row:
    """What came out of one case; `verdict` is None for one that was refused."""
    status, error, reason = "unsupported", None, refusal
    if verdict is not None:
        status, reason = "failed", "; ".join(verdict.failures)
        if verdict.parity is not None:
            status, error = ("wrong" if verdict.failures else "equal"), verdict.parity.worst_error
    return {
        "engine": capability.engine,
        "architecture": capability.architecture,
        "feature": capability.feature,
        "axis": capability.axis,
        "layout": capability.case.layout.label,
        "status": status,
        "worst_relative_error": error,
        "reason": " ".join(reason.split()),
    }


def _sheets(rows: Sequence[Row]) -> list[Sheet]:
    """A matrix an architecture, then every reason once."""
    engines = list(dict.fromkeys(str(row["engine"]) for row in rows))
    sheets = []
    for architecture in dict.fromkeys(str(row["architecture"]) for row in rows):
        lines: dict[tuple[Cell, Cell], dict[str, Cell]] = {}
        for row in rows:
            if row["architecture"] == architecture:
                lines.setdefault((row["feature"], row["axis"]), {})[str(row["engine"])] = _told(row)
        sheets.append(
            Sheet(
                title=f"{architecture}: equal to one process, with the worst relative error",
                headings=("feature", "on", *engines),
                rows=[[*key, *(by_engine[engine] for engine in engines)] for key, by_engine in lines.items()],
            )
        )
    reasons = Counter((row["engine"], row["status"], row["reason"]) for row in rows if row["reason"])
    if reasons:
        told = [[engine, status, count, reason] for (engine, status, reason), count in reasons.items()]
        sheets.append(Sheet(title="why not", headings=("engine", "", "cases", "reason"), rows=told))
    return sheets


def _told(row: Row) -> str:
    error = row["worst_relative_error"]
    return str(row["status"]) if error is None else f"{row['status']} {error:.0e}"
