"""How large is the space of layouts, and how much does the choice in it matter? Twins on a machine, predicted.

All of these of one model on 16 devices, that it can run, are one row each with the predicted step (`step_time`):

    tp pp dp            powers of two, 16 together            schedule   1f1b, interleaved with two chunks
    cut                 even, by flops; aligned               placement  folded besides, interleaved
    memory              gathered per block, per stage (under sequence parallelism); relayed, direct
    encoder blocks      a quarter, a half, three quarters of all

What stands behind a semicolon, and the last two lines, exist for encoder-decoders alone. T5-large and its decoder-only
twin of equal depth, 480 + 480 positions, 64 sequences of half precision in microbatches of one, with sequence
parallelism wherever tp > 1. `python -m launch.space` writes `results/space.csv` again; a test computes some rows again.
Left out: recomputation, ZeRO, list schedules.
"""

import csv
import io
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launch.machine_files import load_machine
from models.config import ModelConfig
from models.matching import twins
from models.named import named_model
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.machine_profile import machine_profile
from parallel.step_time import step_time

MACHINE, MODEL = "h100", "t5-large"
LENGTHS = (480, 480)
NUM_DEVICES, NUM_SEQUENCES = 16, 64
DEGREES = (1, 2, 4, 8, 16)
COLUMNS = (
    *("point", "machine", "model", "architecture", "num_encoder_blocks", "num_decoder_blocks", "tp", "pp", "dp"),
    *("schedule", "chunks", "placement", "cut", "transport", "memory_gather"),
    *("step_seconds", "model_flops_utilisation"),
)
PATH = Path(__file__).resolve().parent.parent / "results" / "space.csv"


def models() -> Iterator[ModelConfig]:
    """The twin, and the encoder-decoder with all splits of its depth."""
    original = named_model(MODEL)
    yield twins(original, "decoder_only", source_length=LENGTHS[0], target_length=LENGTHS[1]).config
    for share in (1, 2, 3):
        encoder = original.num_blocks * share // 4
        yield original.replace(num_encoder_blocks=encoder, num_decoder_blocks=original.num_blocks - encoder)


def layouts(config: ModelConfig) -> Iterator[Layout]:
    """All layouts of the space that a model can run."""
    has_sides = config.has_cross_attention
    for tp, pp in itertools.product(DEGREES[:4], DEGREES):
        if tp * pp > NUM_DEVICES:
            continue
        dp = NUM_DEVICES // (tp * pp)
        one = Layout(tp=tp, pp=pp, dp=dp, sp=tp > 1, microbatches=NUM_SEQUENCES // dp)
        for placed, cut, transport, gather in itertools.product(
            _placed(one, has_sides),
            ("even", "aligned", "flops") if has_sides and pp > 1 else ("even", "flops") if pp > 1 else ("even",),
            ("relay", "direct") if has_sides and pp > 2 else ("relay",),
            ("per_stage", "per_block") if has_sides and tp > 1 else ("per_stage",),
        ):
            layout = placed.replace(cut=cut, transport=transport, memory_gather=gather)
            # Folded halves are aligned as they are.
            if (layout.placement, cut) != ("folded", "aligned") and _is_legal(config, layout):
                yield layout


def _placed(one: Layout, has_sides: bool) -> Iterator[Layout]:
    yield one
    if one.pp > 1:
        for placement in ("interleaved", "folded") if has_sides else ("interleaved",):
            yield one.replace(schedule="interleaved", placement=placement, chunks=2)


def _is_legal(config: ModelConfig, layout: Layout) -> bool:
    try:
        layout.check_model(config)
    except ValueError:
        return False
    return True


def row(config: ModelConfig, layout: Layout) -> dict[str, Any]:
    """One layout, predicted."""
    machine = load_machine(MACHINE)
    lengths = LENGTHS if config.has_cross_attention else (0, sum(LENGTHS))
    shape = StepShape(
        num_sequences=NUM_SEQUENCES // layout.dp,
        source_length=lengths[0],
        target_length=lengths[1],
        dtype_bytes=2,
    )
    profile = machine_profile(machine, config, layout, shape)
    time = step_time(machine, config, layout, shape, profile=profile)
    blocks = f"{config.num_encoder_blocks}+{config.num_decoder_blocks}"
    told = {name: layout.to_dict()[name] for name in COLUMNS if name in layout.to_dict()}
    return {
        "point": f"{MODEL} {config.architecture} {blocks} {layout.label}",
        "machine": MACHINE,
        "model": MODEL,
        "architecture": config.architecture,
        "num_encoder_blocks": config.num_encoder_blocks,
        "num_decoder_blocks": config.num_decoder_blocks,
        **told,
        "step_seconds": round(time.step_seconds, 9),
        "model_flops_utilisation": round(time.model_flops_utilisation, 9),
    }


def table() -> str:
    """The space as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row(config, layout) for config in models() for layout in layouts(config))
    return text.getvalue()


if __name__ == "__main__":
    PATH.write_text(table(), encoding="utf-8")
