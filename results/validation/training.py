"""Do our closed forms meet what papers publish of training: states, activations, parameters, FLOPs of large GPTs?

All models here are GPTs as Megatron-LM builds them: F = 4 D, biases, LayerNorm, learned positions, a tied head. A
rate is FLOPs over printed seconds, so ours is a range as wide as their last digit. A column may be absent or empty,
for figures that a paper does not tell of a model. Left out: how the seconds come about.

Sources: those of `parallel.published_costs`.
"""

import re
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from models.config import ModelConfig
from models.costs import parameter_counts
from parallel.layouts import Recompute
from parallel.published_costs import (
    block_activation_bytes,
    first_stage_blocks,
    gpt_parameters,
    hardware_flops,
    model_flops,
    square_block_parameters,
    zero_state_bytes,
)
from results.validation.conventions import KORTHIKANTI, MEGATRON, ZERO, Convention
from results.validation.rows import FOLDER, Check, Row, as_printed, over, read

PEAK_FLOPS = 312 * 10**12
"""Of an A100 in half precision, a second; what the papers divide by."""


def read_gpt(row: Row) -> ModelConfig:
    """The GPT of a row: heads, hidden, layers, sequence, vocabulary."""
    width = row.whole("hidden")
    return ModelConfig(
        name=row.cells.get("model") or f"{row.text('parameters_billion')}B",
        architecture="decoder_only",
        width=width,
        num_heads=row.whole("heads"),
        ffn_width=4 * width,
        num_decoder_blocks=row.whole("layers"),
        vocabulary=row.whole("vocabulary"),
        max_length=row.whole("sequence"),
        tying="head",
    )


def count_parameters(config: ModelConfig, convention: Convention) -> int:
    """Parameters of a GPT, as many as a convention counts."""
    if convention.parameters == "square_blocks":
        return square_block_parameters(config)
    return gpt_parameters(config) if convention.parameters == "gpt" else parameter_counts(config).total


def check_zero(folder: Path = FOLDER) -> Iterator[Check]:
    """`zero.csv`: bytes of model states of one rank under ZeRO stages 1 to 3; a column zero0_gb would be without it."""
    for row in read("zero", folder):
        count, dp = row.printed("parameters_billion").value * 10**9, row.whole("data_parallel")
        for zero in range(4):
            column = f"zero{zero}_gb"
            if row.has(column):
                states = zero_state_bytes(count, dp=dp, zero=zero, gradient_bytes=ZERO.gradient_bytes)
                yield as_printed(
                    row,
                    column,
                    states / ZERO.unit_bytes,
                    name=f"{row.text('parameters_billion')}B dp {dp}",
                    quantity=f"states, ZeRO-{zero}, GB",
                    convention=ZERO,
                )


_ACTIVATION = re.compile(r"activation(_tp)?(_sp)?(_selective|_full)?_gib")
"""Columns of activations: which of tensor parallelism, sequence parallelism and recomputation are on."""


def check_activations(folder: Path = FOLDER) -> Iterator[Check]:
    """`activation_memory.csv`: states and activations of a rank of the first stage.

    A column `activation_tp_sp_selective_gib` is told with tensor and sequence parallelism and selective
    recomputation; any of the words may be left out, and `full` may stand for `selective`.
    """
    for row in read("activation_memory", folder):
        config = read_gpt(row)
        tp, pp = row.whole("tp"), row.whole("pp")
        told: dict[str, Any] = {"name": config.name, "convention": KORTHIKANTI}
        if row.has("state_gib"):
            states = zero_state_bytes(
                Fraction(count_parameters(config, KORTHIKANTI), tp * pp),
                dp=1,
                zero=0,
                gradient_bytes=KORTHIKANTI.gradient_bytes,
            )
            yield as_printed(row, "state_gib", states / KORTHIKANTI.unit_bytes, quantity="states, GiB", **told)
        for column in filter(row.has, row.cells):
            if options := _ACTIVATION.fullmatch(column):
                recompute: Recompute = "none"
                if options[3]:
                    recompute = "selective" if options[3] == "_selective" else "full"
                one = block_activation_bytes(
                    config,
                    "decoder",
                    target_length=row.whole("sequence"),
                    microbatch=row.whole("microbatch"),
                    tp=tp if options[1] else 1,
                    sp=bool(options[2]),
                    recompute=recompute,
                )
                blocks = first_stage_blocks(config.num_blocks, pp=pp, interleave=row.whole("interleave", 1))
                quantity = column.removesuffix("_gib").replace("_", " ") + ", GiB"
                yield as_printed(row, column, blocks * one / KORTHIKANTI.unit_bytes, quantity=quantity, **told)


def check_iterations(folder: Path = FOLDER) -> Iterator[Check]:
    """`iteration.csv`: FLOPs of an iteration, and their rate over the printed seconds as a share of the peak.

    `mfu` and `hfu` belong to `seconds_sp_selective`; `mfu_full_recompute` and `hfu_full_recompute` to
    `seconds_full_recompute`.
    """
    for row in read("iteration", folder):
        config, length, batch = read_gpt(row), row.whole("sequence"), row.whole("global_batch")
        peak = row.whole("gpus") * PEAK_FLOPS
        told: dict[str, Any] = {"name": config.name, "convention": KORTHIKANTI}
        model = model_flops(config, length=length, num_sequences=batch)
        if row.has("model_flops_per_iteration"):
            yield as_printed(row, "model_flops_per_iteration", model, quantity="model FLOPs of an iteration", **told)
        variants: tuple[tuple[str, str, Recompute], ...] = (
            ("", "seconds_sp_selective", "selective"),
            ("_full_recompute", "seconds_full_recompute", "full"),
        )
        for suffix, seconds, recompute in variants:
            hardware = hardware_flops(
                config,
                length=length,
                num_sequences=batch,
                recompute=recompute,
                recomputed_core=KORTHIKANTI.recomputed_core,
            )
            for column, flops in ((f"mfu{suffix}", model), (f"hfu{suffix}", hardware)):
                if row.has(column):
                    rate = over(Fraction(flops, peak), row.printed(seconds))
                    yield as_printed(row, column, rate, quantity=column.replace("_", " "), **told)


def check_megatron(folder: Path = FOLDER) -> Iterator[Check]:
    """`megatron_2021.csv`: parameters, and how the rates of one GPU and of all follow from each other."""
    for row in read("megatron_2021", folder):
        config = read_gpt(row)
        told: dict[str, Any] = {"name": config.name, "convention": MEGATRON}
        count = Fraction(count_parameters(config, MEGATRON), 10**9)
        yield as_printed(row, "parameters_billion", count, quantity="parameters, billion", **told)
        if not row.has("teraflops_per_gpu"):
            continue
        rate = row.printed("teraflops_per_gpu")
        tera, peta = Fraction(10**12), Fraction(1000)
        derived = {
            "percent_of_peak": (100 * tera / PEAK_FLOPS, "rate of a GPU, % of peak"),
            "aggregate_petaflops": (row.whole("gpus") / peta, "rate of all GPUs, PFLOP/s"),
        }
        for column, (factor, quantity) in derived.items():
            if row.has(column):
                yield as_printed(row, column, (rate.low * factor, rate.high * factor), quantity=quantity, **told)
