"""What does each piece of a model cost on this machine? `twinshard profile`, whose file cuts and schedules read."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import click
from click.core import ParameterSource

from launch.bars import counting_bar
from launch.profiles import wanted
from launch.sheets import Cell, Format, Sheet, format_option, show
from launch.step_options import Step, counted_model
from models.config import ModelConfig
from models.matching import long_enough, twins
from parallel.grain import grain
from parallel.layouts import AttentionKernel, Layout, Recompute, Vocabulary
from parallel.profile import PIECES, Profile, Unit
from parallel.profile_file import save
from parallel.work import Work

MEASURED_DTYPES = ("float32", "bfloat16", "float64")
_PARTS = ("forward", "backward_input", "backward_weight")
_SHOWN: dict[Unit, tuple[str, float]] = {"seconds": ("ms", 1e3), "flops": ("GFLOP", 1e-9)}
"""What a reader sees of a unit, and how many of those one is."""
_STAGES = (2, 4, 8, 16, 32, 64)
_MESSAGE_SECONDS = 120.0
"""How long two ranks may take to start and to exchange their messages."""


@click.command("profile")
@click.argument("model", metavar="MODEL|EXPERIMENT")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the profile to this TOML file.")
@click.option("--flops", "counts", is_flag=True, help="Count FLOPs in closed form; measure nothing.")
@click.option("--microbatch", default=1, show_default=True, help="Sequences of a microbatch.")
@click.option("--twin", "of_twin", is_flag=True, help="Profile its decoder-only twin of equal depth, on the same pair.")
@click.option("--long", "grows", is_flag=True, help="Read sequences longer than the model is made for.")
@click.option("--source-length", type=int, help="Source positions [default: the model's maximum].")
@click.option("--target-length", type=int, help="Target positions [default: the model's maximum].")
@click.option("--dtype", type=click.Choice(MEASURED_DTYPES), default="float32", show_default=True)
@click.option("--tp", default=1, show_default=True, help="Tensor-parallel degree: measure the shard of one rank.")
@click.option("--vocabulary", type=click.Choice(get_args(Vocabulary)), default="sharded", show_default=True)
@click.option("--recompute", type=click.Choice(get_args(Recompute)), default="none", show_default=True)
@click.option("--attention", type=click.Choice(get_args(AttentionKernel)), default="fused", show_default=True)
@click.option("--split", "is_split", is_flag=True, help="For schedules that split the backward, such as zb_h1.")
@click.option("--message", "sends", is_flag=True, help="Also measure a message between two ranks of this machine.")
@click.option("--repeats", type=click.IntRange(1), default=15, show_default=True, help="Passes of all pieces.")
@click.option("--warmup", type=click.IntRange(0), default=3, show_default=True, help="Passes that are thrown away.")
@click.option(
    "--backend",
    # As launch.env.BackendChoice, which would load torch for --help.
    type=click.Choice(("auto", "gloo", "nccl")),
    default="auto",
    show_default=True,
    help="auto takes a GPU where there is one; gloo measures on a CPU.",
)
@format_option
def profile_command(
    *, model: str, out: Path | None, counts: bool, of_twin: bool, grows: bool, sends: bool, form: Format, **chosen: Any
) -> int:
    """Measure what the pieces of MODEL cost on this machine: embeddings, an encoder and a decoder block, the head.

    MODEL is a name that `twinshard models` lists, or a config.json of Hugging Face. Of an EXPERIMENT (a .toml file) all
    profiles that it names are measured, a message between two ranks too, and written where it reads them.

    Of each piece the forward and both halves of the backward of one microbatch (gradients of its input, then of its
    weights) are told in busy seconds: medians of CPU time of the thread, or of a GPU's events. A whole backward is
    faster than two halves of a small model and slower on a large head: --split measures what split schedules run. The
    file is what a cut by times reads. With --flops the same costs are counted, and nothing is measured.

    \b
    Examples:
      twinshard profile t5-small --source-length 512 --target-length 128 --out t5-small.toml
      twinshard profile t5-small --message --repeats 30 --out t5-small.toml
      twinshard profile t5-11b --tp 8 --dtype bfloat16 --recompute full
      twinshard profile t5-11b --tp 8 --flops --format csv
      twinshard profile t5-large --source-length 640 --target-length 320 --long --out t5-large.toml
      twinshard profile t5-large --source-length 640 --target-length 320 --twin --out twin.toml
      twinshard profile launch/experiments/pipelines.toml
    """  # noqa: D301 - click reads the character
    _check_file(out)
    measuring = {name: chosen.pop(name) for name in ("repeats", "warmup", "backend", "is_split")}
    if model.endswith(".toml"):
        return _measure_all(Path(model), form, measuring)
    config, notes = counted_model(model)
    if of_twin:
        config = _twin(config, chosen)
    elif grows:
        config = long_enough(config, max(chosen["source_length"] or 1, chosen["target_length"] or 1))
    layout = Layout(**{name: chosen[name] for name in ("tp", "vocabulary", "recompute", "attention")})
    layout.check_model(config)
    step = Step(
        microbatch=chosen["microbatch"],
        source_length=chosen["source_length"],
        target_length=chosen["target_length"],
        dtype=chosen["dtype"],
        optimizer="adamw",
        master_weights=False,
    )
    profile = Profile.of_flops(config, layout, step.shape(config, 1))
    notes += step.unread(config)
    spreads: dict[str, float] = {}
    if counts:
        if sends:
            raise ValueError("--flops counts, and a message has no FLOPs: leave --message or --flops")
    else:
        profile, spreads = _measured(profile, step.dtype, sends=sends, **measuring)
    if out is not None:
        save(profile, out)
        notes += (f"written to {out}",)
    _show(profile, spreads, notes, form)
    return 0


def _measure_all(file: Path, form: Format, measuring: dict[str, Any]) -> int:
    """Measures and writes every profile that an experiment names."""
    given = click.get_current_context()
    own = [*_DECIDED, "sends", "counts", "of_twin", "grows", "out"]
    wrong = [name for name in own if given.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    if wrong:
        raise ValueError(f"{file} decides what is measured: leave --{_WORDS.get(wrong[0], wrong[0]).replace('_', '-')}")
    # Engines, and so torch, are loaded with it.
    from launch.experiment import load  # noqa: PLC0415

    study = load(file, reads_profiles=False)
    rows: list[dict[str, Cell]] = []
    for path, counted in wanted(study.cells, study.profiles).items():
        profile, spreads = _measured(counted, study.settings.dtype, sends=not rows, **measuring)
        if rows:
            latency, per_byte = (float(str(rows[0][name])) for name in ("transfer_cost", "byte_cost"))
            profile = dataclasses.replace(profile, transfer_cost=latency, byte_cost=per_byte)
        path.parent.mkdir(parents=True, exist_ok=True)
        save(profile, path)
        own_row: dict[str, Cell] = {"file": str(path), "model": profile.config.name}
        own_row |= {name: getattr(profile, name) for name in ("source_length", "target_length", "num_sequences")}
        own_row |= {"model_seconds": profile.model.total, "spread": max(spreads.values())}
        rows.append(own_row | {"transfer_cost": profile.transfer_cost, "byte_cost": profile.byte_cost})
    sheet = Sheet(
        title=f"profiles of {study.name}",
        headings=tuple(name.replace("_", " ") for name in rows[0]),
        rows=[list(row.values()) for row in rows],
    )
    show(form, sheets=[sheet], columns=list(rows[0]), rows=rows, document={"experiment": study.name, "profiles": rows})
    return 0


_DECIDED = ("microbatch", "source_length", "target_length", "dtype", "tp", "vocabulary", "recompute", "attention")
_WORDS = {"sends": "message", "counts": "flops", "of_twin": "twin", "grows": "long"}


def _twin(config: ModelConfig, chosen: dict[str, Any]) -> ModelConfig:
    """The decoder-only twin; it reads source and target as one sequence."""
    if not config.has_cross_attention:
        raise ValueError(f"--twin is for encoder-decoders: {config.name} is {config.architecture}; leave it out")
    source, target = (chosen[f"{stream}_length"] or config.max_length for stream in ("source", "target"))
    chosen |= {"source_length": None, "target_length": source + target}
    return twins(config, "decoder_only", source_length=source, target_length=target).config


def _check_file(out: Path | None) -> None:
    """A mistake in the name of the file must not cost a measurement."""
    if out is not None and not out.parent.is_dir():
        raise ValueError(f"cannot write {out}: there is no folder {out.parent}")


def _measured(
    counted: Profile, dtype: str, *, sends: bool, is_split: bool, repeats: int, warmup: int, backend: Any
) -> tuple[Profile, dict[str, float]]:
    """The profile in seconds, and the relative spread of each piece."""
    # torch is loaded for a measurement only.
    from launch.piece_seconds import measured_profile  # noqa: PLC0415
    from launch.ping import measure_message  # noqa: PLC0415

    message = measure_message(backend, _MESSAGE_SECONDS) if sends else (0.0, 0.0)
    with _bar(warmup + repeats) as passed:
        return measured_profile(
            counted,
            is_split=is_split,
            dtype=dtype,
            backend=backend,
            message=message,
            warmup=warmup,
            repeats=repeats,
            passed=passed,
        )


@contextmanager
def _bar(total: int) -> Iterator[Callable[[], None]]:
    """A bar of passes on the error stream; yields what moves it on."""
    # Seldom, because who draws takes time from who is measured.
    bar = counting_bar("passes", transient=False, refresh_per_second=2)
    with bar:
        task = bar.add_task("measuring", total=total)
        yield lambda: bar.advance(task)


# ---- what is told ---------------------------------------------------------------------------------------------------


def _show(profile: Profile, spreads: dict[str, float], notes: tuple[str, ...], form: Format) -> None:
    rows = _rows(profile, spreads)
    sheets = [_pieces(profile, rows), _grains(profile)]
    told = _messages(profile) + notes
    if told:
        sheets.append(Sheet(title="notes", headings=("",), rows=[[note] for note in told]))
    document = {
        "model": profile.config.name,
        "unit": profile.unit,
        "source_length": profile.source_length,
        "target_length": profile.target_length,
        "num_sequences": profile.num_sequences,
        "pieces": rows,
        "transfer_cost": profile.transfer_cost,
        "byte_cost": profile.byte_cost,
        "machine": dict(profile.machine),
        "notes": list(notes),
    }
    show(form, sheets=sheets, columns=list(rows[0]), rows=rows, document=document)


def _rows(profile: Profile, spreads: dict[str, float]) -> list[dict[str, Cell]]:
    """One row a piece that costs something; `times` is how often the model has it."""
    config, whole = profile.config, profile.model.total
    times = {"encoder_block": config.num_encoder_blocks, "decoder_block": config.num_decoder_blocks}
    rows: list[dict[str, Cell]] = []
    for piece in PIECES:
        work: Work = getattr(profile, piece)
        if work.total:
            count = times.get(piece, 1)
            row: dict[str, Cell] = {"piece": piece, "times": count}
            row |= {f"{part}_{profile.unit}": getattr(work, part) for part in _PARTS}
            row |= {"share_of_model": count * work.total / whole}
            rows.append(row | ({"spread": spreads[piece]} if spreads else {}))
    return rows


def _pieces(profile: Profile, rows: list[dict[str, Cell]]) -> Sheet:
    told, scale = _SHOWN[profile.unit]
    config = profile.config
    lengths = ((profile.source_length, "source"), (profile.target_length, "target"))
    reads = " and ".join(f"{length} {stream}" for length, stream in lengths if length)
    shown = [
        [
            cell * scale if name.endswith(profile.unit) and isinstance(cell, float) else cell
            for name, cell in row.items()
        ]
        for row in rows
    ]
    return Sheet(
        title=f"{config.name} ({config.architecture}): one microbatch of {profile.num_sequences} x {reads} positions",
        headings=tuple(name.replace(profile.unit, told).replace("_", " ") for name in rows[0]),
        rows=shown,
    )


def _grains(profile: Profile) -> Sheet:
    """How even stages can be: the most costly one over the mean."""
    most = profile.config.num_blocks
    rows: list[list[Cell]] = []
    for num_stages in (count for count in _STAGES if count <= most):
        found = grain(profile, num_stages)
        rows.append([num_stages, found.blocks / found.ideal, found.sublayers / found.ideal])
    return Sheet(
        title="most costly stage over the mean, at best",
        headings=("stages", "cut between blocks", "between sublayers"),
        rows=rows,
    )


def _messages(profile: Profile) -> tuple[str, ...]:
    if not profile.transfer_cost and not profile.byte_cost:
        return ()
    rate = f"{1e-9 / profile.byte_cost:.3g} GB/s" if profile.byte_cost else "bytes free"
    return (f"a message between two ranks here: {1e6 * profile.transfer_cost:.3g} us and {rate}",)
