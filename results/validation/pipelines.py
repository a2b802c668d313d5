"""Do our schedules, simulated, meet the bubbles that papers publish?

A rate is 1 - m (TF + TB + TW) / cost, cost the longest extent of a rank; a message costs latency alone
(`parallel/timeline.py`, `parallel/simulate.py`). A column `bubble_<schedule>` is told of any schedule that has a name
and one stage a rank; it may be absent or empty.

Source: Qi et al. 2023 (arXiv 2401.10241), tables 5 and 9.
"""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from parallel.schedules import BUILDERS
from parallel.simulate import StageSeconds, TransferSeconds, every_message, simulate
from results.validation.conventions import ZERO_BUBBLE
from results.validation.rows import FOLDER, Check, as_printed, read


def check_bubbles(folder: Path = FOLDER) -> Iterator[Check]:
    """`zero_bubble.csv`: bubble rates of schedules at profiled times."""
    for row in read("zero_bubble", folder):
        num_stages, microbatches = row.whole("stages"), row.whole("microbatches")
        forward, backward_input, backward_weight, latency = (
            float(row.printed(column).value) for column in ("TF_ms", "TB_ms", "TW_ms", "Tcomm_ms")
        )
        seconds = StageSeconds.equal(
            num_stages, forward=forward, backward_input=backward_input, backward_weight=backward_weight
        )
        message = TransferSeconds(latency=latency)
        for column in row.cells:
            schedule = column.removeprefix("bubble_").lower()
            if not column.startswith("bubble_") or not row.has(column):
                continue
            if schedule not in BUILDERS:
                raise ValueError(f"{row.place}: {column} names no schedule; known are {', '.join(BUILDERS)}")
            table = BUILDERS[schedule](range(num_stages), microbatches)
            timeline = simulate(table, seconds, transfer_seconds=every_message(message))
            yield as_printed(
                row,
                column,
                Fraction(timeline.bubble_rate),
                name=f"{row.text('model')} p {num_stages} m {microbatches}",
                quantity=f"bubble rate, {schedule}",
                convention=ZERO_BUBBLE,
            )
