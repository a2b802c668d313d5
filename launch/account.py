"""What does each rank of a layout hold, send and compute? `twinshard account`, without running anything."""

from typing import Any, get_args

import click

from launch.accounted import COLUMNS, Accounted, DryRank
from launch.accounting_sheets import account_sheets, side_by_side
from launch.layout_options import layout_of, layout_options
from launch.sheets import Format, format_option, show
from launch.step_options import Step, counted_model, device_bytes_of, step_options
from models.config import Architecture, ModelConfig
from models.matching import Match, Twin, twins
from parallel.account import account
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.profile import Profile


@click.command("account")
@click.argument("model")
@layout_options
@click.option("--cp", default=1, show_default=True, help="Context-parallel degree.")
@click.option("--zero", type=click.IntRange(0, 3), default=0, show_default=True, help="ZeRO stage over the dp ranks.")
@click.option("--world-size", type=int, help="Ranks that the degrees must multiply to.")
@step_options
@click.option("--device-bytes", type=float, callback=device_bytes_of, help="Bytes of a device, as in 80e9.")
@click.option("--twin", "with_twin", is_flag=True, help="Account the matched model of the other architecture too.")
@click.option(
    "--match", type=click.Choice(get_args(Match)), default="depth", show_default=True, help="What twins agree in."
)
@click.option("--trace", "with_trace", is_flag=True, help="Run the partitioned code dry, and compare.")
@format_option
def account_command(
    *,
    model: str,
    world_size: int | None,
    device_bytes: int | None,
    with_twin: bool,
    match: Match,
    with_trace: bool,
    form: Format,
    **chosen: Any,
) -> int:
    """Tell what each distinct rank holds, sends and computes in one training step of MODEL, in closed form.

    MODEL is a name that `twinshard models` lists, or a config.json of Hugging Face (or the folder that holds it). What
    changes its mathematics, but no count, is noted. With --trace, the exit code is 1 where a dry run differs.

    \b
    Examples:
      twinshard account t5-11b --tp 8 --sp --dp 4 --microbatches 4 --device-bytes 80e9
      twinshard account llama-2-70b --tp 8 --pp 16 --dp 8 --microbatches 16 --trace
      twinshard account t5-small --tp 2 --source-length 512 --target-length 128 --twin
      twinshard account path/to/config.json --dtype bfloat16 --master-weights --format json
    """  # noqa: D301 - click reads the character
    step = Step.of(chosen)
    layout = layout_of(chosen)
    if world_size is not None:
        layout.check_world(world_size)
    config, notes = counted_model(model)
    if not with_twin:
        accounts = [_accounted(config, layout, step, notes + step.unread(config), device_bytes, with_trace=with_trace)]
        document = accounts[0].document()
    else:
        pair = _pair(config, step)
        twin = twins(config, _other(config), match, source_length=pair[0], target_length=pair[1])
        accounts = [
            _accounted(one, layout, _of_pair(step, one, pair), told, device_bytes, with_trace=with_trace)
            for one, told in ((config, notes), (twin.config, ()))
        ]
        document = accounts[0].document() | {"twin": accounts[1].document() | _match(twin)}
    sheets = [sheet for accounted in accounts for sheet in account_sheets(accounted)]
    if with_twin:
        sheets.insert(0, side_by_side(*accounts))
    rows = [row for accounted in accounts for row in accounted.rows()] if form == "csv" else []
    show(form, sheets=sheets, columns=COLUMNS, rows=rows, document=document)
    return _tell_differences(accounts)


def _accounted(
    config: ModelConfig,
    layout: Layout,
    step: Step,
    notes: tuple[str, ...],
    device_bytes: int | None,
    *,
    with_trace: bool,
) -> Accounted:
    shape = step.shape(config, layout.microbatches)
    made = plan(config, layout, Profile.counted_for(config, layout, shape))
    accounts = account(made, shape, optimizer=step.optimizer, master_weights=step.master_weights)
    if layout.cp > 1:
        notes += (f"cp = {layout.cp}: closed forms of ring attention, which no engine here runs",)
    dry: tuple[DryRank, ...] = ()
    if with_trace:
        from launch.dry_run import dry_run  # noqa: PLC0415 - torch is loaded for a dry run only

        dry = dry_run(made, shape, accounts)
    return Accounted(
        plan=made, shape=shape, step=step, notes=notes, accounts=accounts, device_bytes=device_bytes, dry=dry
    )


def _tell_differences(accounts: list[Accounted]) -> int:
    """Exit code 1, and a line a difference, where a dry run contradicts a closed form."""
    differences = [
        f"{accounted.plan.config.name}: {line}"
        for accounted in accounts
        for dry in accounted.dry
        for line in dry.differences
    ]
    for line in differences:
        click.echo(f"differs: {line}", err=True)
    return 1 if differences else 0


# ---- twins ----------------------------------------------------------------------------------------------------------


def _other(config: ModelConfig) -> Architecture:
    """Decoder-only beside encoder-decoder; encoder-only where the source has no tokens."""
    if not config.has_cross_attention:
        return "encoder_decoder"
    return "encoder_only" if config.feature_width else "decoder_only"


def _pair(config: ModelConfig, step: Step) -> tuple[int, int]:
    """Source and target positions of the texts that both read; the length of one stack is halved if it stands alone."""
    source, target = step.source_length, step.target_length
    if config.has_cross_attention:
        return (config.max_length if source is None else source, config.max_length if target is None else target)
    if source is not None and target is not None:
        return source, target
    own = target if config.has_decoder else source
    length = config.max_length if own is None else own
    given = source if config.has_decoder else target
    if given is None:
        return length // 2, length - length // 2
    return (given, length - given) if config.has_decoder else (length - given, given)


def _of_pair(step: Step, config: ModelConfig, pair: tuple[int, int]) -> Step:
    """The step in which a model reads the pair: two streams, or one sequence of both."""
    source, target = pair if config.has_cross_attention else (sum(pair), sum(pair))
    return Step(
        microbatch=step.microbatch,
        source_length=source,
        target_length=target,
        dtype=step.dtype,
        optimizer=step.optimizer,
        master_weights=step.master_weights,
    )


def _match(twin: Twin) -> dict[str, Any]:
    return {
        "match": twin.match,
        "num_blocks_difference": twin.num_blocks_difference,
        "parameter_mismatch": twin.parameter_mismatch,
        "flop_mismatch": twin.flop_mismatch,
    }
