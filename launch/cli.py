"""What can one type? The command line: names of commands, where each stands, and how an error is told.

A command is imported when it is asked for, so that help and errors answer at once. A user's mistake is one line on the
error stream and exit code 2; a cell or case that failed is exit code 1; a bug shows its traceback.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

COMMANDS = {
    "run": ("launch.commands:run_command", "Measure the cells of an experiment, or what is left of it."),
    "verify": ("launch.verify:verify_command", "Prove that layouts equal one process."),
    "capabilities": ("launch.capabilities:capabilities_command", "Tell what each engine can do, by running it."),
    "bench": ("launch.bench:bench_command", "Measure engines in turns, each against the best other."),
    "ds-config": ("launch.ds_configs:ds_config_command", "Write what DeepSpeed reads of an experiment's cells."),
    "compare": ("results.commands:compare_command", "Put two runs side by side, with intervals."),
    "report": ("results.commands:report_command", "Write tables, pictures and verdicts from records."),
    "claims": ("results.commands:claims_command", "List the claims and how each is judged."),
    "validate": ("results.validation_command:validate_command", "Hold our closed forms against published figures."),
    "account": ("launch.account:account_command", "Tell what each rank of a layout holds, sends and computes."),
    "fit": ("launch.fit:fit_command", "Find every layout that fits on a device, on fewest devices first."),
    "models": ("launch.inspection:models_command", "List the models that can be called by name, by component."),
    "profile": ("launch.profiling:profile_command", "Measure what the pieces of a model cost on this machine."),
    "simulate": ("launch.simulation:simulate_command", "Predict the steps of an experiment on a machine."),
    "transports": ("launch.transports:transports_command", "Compare how the memory gets to the decoder's stages."),
    "plan": ("launch.planning:plan_command", "Search the fastest layouts on a machine, or show what one does."),
    "penalty": ("launch.penalty:penalty_command", "Simulate what an encoder-decoder costs a pipeline, and its twin."),
}
"""Name -> where the command stands, and what it does in one line."""

LENT = {"timelines": "results.timeline:write", "benchmark": "results.benchmark:benchmark"}
"""What commands of `launch`, which know neither pictures nor records, may ask for by name."""

_UNLISTED = {"measure": "launch.commands:measure_command"}
"""What a rank does that torchrun started with `-m launch FILE`."""

HELP = """How much harder are encoder-decoder models to parallelise than decoder-only ones?

twinshard builds matched models of both architectures from the same blocks, partitions them with tensor, sequence,
pipeline and data parallelism, proves each partitioning equal to one process, measures it, and judges what was claimed.

\b
The whole study:
  twinshard run launch/experiments/articles.toml
  twinshard report
\b
A first look, without any process:
  twinshard models
  twinshard plan t5-small --tp 4 --sp --pp 2 --microbatches 4
  twinshard account t5-11b --tp 8 --dp 4 --device-bytes 80e9
  twinshard fit llama-2-70b --device-bytes 80e9 --devices 1024
  twinshard plan t5-11b --machine a100 --devices 64 --sequences 512
\b
With ranks started from outside, on one node or several (see launch/scripts):
  torchrun --nproc-per-node 4 -m launch FILE
"""


class Commands(click.Group):
    """A group whose commands are imported one by one, when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        target = COMMANDS[cmd_name][0] if cmd_name in COMMANDS else _UNLISTED.get(cmd_name)
        if target is None:
            return None
        command: click.Command = _loaded(target)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and name not in _UNLISTED and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.command(cls=Commands, help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(package_name="twinshard", prog_name="twinshard")
def commands(debug: bool) -> None:
    """All commands; `debug` is read by `answer`."""


def _lent(name: str) -> Any:
    return _loaded(LENT[name])


def _loaded(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)


def answer(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; a mistake is told in one line."""
    words = list(arguments) or ["--help"]
    if words[0].endswith(".toml"):
        words.insert(0, "measure")
    shows_traceback = words[0] == "--debug"
    try:
        returned = commands.main(words, prog_name="twinshard", standalone_mode=False, obj=_lent)
        return returned if isinstance(returned, int) else 0
    except click.Abort:
        return 130
    except click.ClickException as error:
        if shows_traceback:
            raise
        return _tell(error.format_message())
    except BrokenPipeError:
        # Whoever read the output has seen enough.
        sys.stderr.close()
        return 141
    except ValueError as error:
        if shows_traceback:
            raise
        return _tell(str(error))
    except OSError as error:
        if shows_traceback or error.filename is None:
            raise
        return _tell(f"{error.filename}: {error.strerror}")


def _tell(message: str) -> int:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    return 2


def main() -> None:
    """The command `twinshard`, and `python -m launch`."""
    sys.exit(answer(sys.argv[1:]))
