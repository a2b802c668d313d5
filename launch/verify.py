"""How is a proof asked for on the command line, and how is it told?"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click
from rich.console import Console
from rich.table import Table

from launch.bars import counting_bar
from launch.case import Case, case_of
from launch.env import BackendChoice
from launch.experiment import effective
from launch.features import ARCHITECTURES
from launch.layout_options import LAYOUT_OPTIONS, layout_of, layout_options
from launch.matrix import cases as matrix_cases
from launch.parity import KINDS, LARGEST_ERROR
from launch.proof import Proof, Verdict
from launch.rank_options import backend_option, timeout_option
from models.config import Architecture, ModelConfig
from models.named import named_model
from parallel.engines.choice import ENGINE_TEXTS, EngineChoice
from parallel.engines.engine import unsupported


@click.command("verify")
@click.option(
    "--architecture",
    type=click.Choice(get_args(Architecture)),
    help="Of the tiny model to partition; each of the three if left out.",
)
@click.option(
    "--model", help="Name of a model (see `twinshard models`) or a config.json; a small relative of it is run."
)
@layout_options
@click.option("--cp", default=1, show_default=True, help="Ranks that share sequences.")
@click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage over the dp ranks.")
@click.option(
    "--engine",
    "engine_text",
    type=click.Choice(ENGINE_TEXTS),
    default="native",
    show_default=True,
    help="Who partitions and runs; after a colon, its own method to cut stages instead of --cut.",
)
@click.option("--compile", "compiled", is_flag=True, help="Compile every block; seconds to minutes a case.")
@click.option("--matrix", is_flag=True, help="Every pair of options of all layouts and models, up to 4 ranks.")
@click.option("--quick", is_flag=True, help="With --matrix: every single option only.")
@backend_option
@timeout_option
@click.pass_context
def verify_command(
    context: click.Context,
    /,
    architecture: Architecture | None,
    model: str | None,
    engine_text: str,
    compiled: bool,
    matrix: bool,
    quick: bool,
    backend: BackendChoice,
    timeout: float,
    **layout: Any,
) -> int:
    """Prove that a layout equals one process.

    The layout runs in float64 on ranks of its own, and one process runs the same step. Loss, every parameter's
    gradient, the gradient norm, the weights after an SGD step, copies on different ranks, and the ledger of what was
    sent against an independent recorder: a relative error above 1e-10 or any other difference fails, and the exit code
    is 1. What an engine cannot run is told with its reason.

    \b
    Examples:
      twinshard verify --tp 2 --sp --pp 2 --microbatches 3
      twinshard verify --model t5-11b --tp 4 --memory-gather per_block
      twinshard verify --engine torch --tp 2 --sp
      twinshard verify --engine deepspeed --cp 2 --dp 2 --zero 1
      twinshard verify --engine fairscale:time --pp 2 --schedule gpipe
      twinshard verify --tp 2 --sp --compile
      twinshard verify --matrix
    """  # noqa: D301 - click reads the character
    engine = EngineChoice.parse(engine_text, compiled=compiled)
    if matrix:
        _refuse_with_matrix(context)
        cases = [dataclasses.replace(case, engine=engine) for case in matrix_cases(quick=quick)]
    elif quick:
        raise ValueError("--quick is a choice of cases: it needs --matrix")
    else:
        wanted = layout_of(layout)
        models = _models(architecture, model)
        for config in models:
            wanted.check_model(config)
        cases = [case_of(config, effective(wanted, config), engine=engine) for config in models]
    able, refused = _runnable(cases)
    proof = Proof(able, backend=backend, timeout_seconds=timeout)
    verdicts = follow(proof, len(able))
    Console(width=max(160, Console().width), markup=False).print(_worst_of_each_kind(verdicts))
    for reason, count in Counter(refused).items():
        click.echo(f"{count} unsupported: {reason}")
    click.echo(last_line(verdicts, num_unsupported=len(refused)))
    return 1 if any(verdict.failures for verdict in verdicts) else 0


def _runnable(cases: Sequence[Case]) -> tuple[list[Case], list[str]]:
    """The cases that their engine can run, and for each other one why not. Raises ValueError when it can run none."""
    able, refused = [], []
    for case in cases:
        reason = unsupported(case.engine, case.config, case.layout)
        if reason is None:
            able.append(case)
        else:
            refused.append(reason)
    if not able:
        raise ValueError(f"nothing to prove: {refused[0]}")
    return able, refused


def _refuse_with_matrix(context: click.Context) -> None:
    for option in ("architecture", "model", *LAYOUT_OPTIONS, "cp", "zero"):
        if context.get_parameter_source(option) is not click.core.ParameterSource.DEFAULT:
            name = option.replace("_", "-")
            raise ValueError(f"--{name} chooses one case, --matrix has all of them: leave one of the two out")


def _models(architecture: Architecture | None, model: str | None) -> list[ModelConfig]:
    if model is None:
        return [named_model(ARCHITECTURES[one]) for one in ([architecture] if architecture else ARCHITECTURES)]
    if architecture is not None:
        raise ValueError(f"--model {model} has an architecture: leave --architecture out")
    return [ModelConfig.from_hf(Path(model)) if Path(model).exists() else named_model(model)]


def follow(proof: Proof, num_cases: int) -> list[Verdict]:
    """Follows a proof to its end with a bar, and tells failures as they come."""
    verdicts: list[Verdict] = []
    console = Console(stderr=True, markup=False)
    bar = counting_bar("")
    # Closed, so that ranks end at once when this is interrupted.
    with bar, contextlib.closing(proof.verdicts()) as found:
        task = bar.add_task("starting ranks", total=num_cases)
        for verdict in found:
            verdicts.append(verdict)
            bar.update(task, advance=1, description=f"{verdict.case.layout.world_size} ranks")
            if verdict.failures:
                told = f"failed {verdict.case.name}: {'; '.join(verdict.failures)}"
                console.print(told, style="red", highlight=False, soft_wrap=True)
    return verdicts


def _worst_of_each_kind(verdicts: Sequence[Verdict]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("compared", "worst relative error", "where"):
        table.add_column(heading, no_wrap=True)
    table.add_column("case")
    for kind in KINDS:
        found = [(verdict.parity.worst(kind), verdict.case.name) for verdict in verdicts if verdict.parity is not None]
        if found:
            worst, name = max(found, key=lambda pair: pair[0].error)
            style = "red" if worst.error > LARGEST_ERROR else None
            table.add_row(kind.replace("_", " "), f"{worst.error:.1e}", worst.name, name, style=style)
    return table


def last_line(verdicts: Sequence[Verdict], *, num_unsupported: int = 0) -> str:
    """`N passed, M failed[, K unsupported], worst relative error X`; X is nan when no case came to an end."""
    num_failed = sum(bool(verdict.failures) for verdict in verdicts)
    worst = max((verdict.parity.worst_error for verdict in verdicts if verdict.parity), default=math.nan)
    unsupported_too = f", {num_unsupported} unsupported" if num_unsupported else ""
    return (
        f"{len(verdicts) - num_failed} passed, {num_failed} failed{unsupported_too}, worst relative error {worst:.1e}"
    )
