"""What does a reader see of an accounted model? Sheets, the large numbers first.

    model and step      parameters by component      ranks: states and activations      FLOPs of a step
    communication of the rank that sends most, blocks of a side in one row              caches in generation
    with a twin: both side by side                   with a dry run: predicted and traced, rank by rank

Left out: every rank's every event; `--format csv` and `json` have them.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator

from launch.accounted import Accounted, wire_bytes
from launch.sheets import Cell, Sheet
from models.costs import parameter_counts
from parallel.account import RankAccount
from parallel.figures import RankFigures
from parallel.flops import model_flops

_BLOCK = re.compile(r"\.block\.\d+\.")


def account_sheets(accounted: Accounted) -> Iterator[Sheet]:
    """All sheets of one model."""
    yield _overview(accounted)
    yield _parameters(accounted)
    yield _memory(accounted)
    yield _flops(accounted)
    yield from _communication(accounted)
    if accounted.plan.config.has_decoder:
        yield _caches(accounted)
    if accounted.dry:
        yield _dry(accounted)


def side_by_side(model: Accounted, twin: Accounted) -> Sheet:
    """The numbers in which matched models are compared; of ranks, the largest."""

    def largest(read: Callable[[RankAccount], int]) -> Callable[[Accounted], int]:
        return lambda accounted: max(read(account) for account in accounted.accounts)

    quantities: tuple[tuple[str, Callable[[Accounted], int]], ...] = (
        ("parameters", lambda accounted: parameter_counts(accounted.plan.config).total),
        ("blocks", lambda accounted: accounted.plan.config.num_blocks),
        ("source positions", lambda accounted: accounted.shape.source_length),
        ("target positions", lambda accounted: accounted.shape.target_length),
        ("model FLOPs of a step", _step_flops),
        ("state bytes of a rank", largest(lambda account: account.prediction.states.total)),
        ("peak activation bytes of a rank", largest(lambda account: account.prediction.figures.peak_saved_bytes)),
        ("total bytes of a rank", largest(lambda account: account.prediction.peak_bytes)),
        ("hardware FLOPs of a rank", largest(lambda account: account.prediction.figures.flops.total)),
        ("communications of a rank", largest(lambda account: _num_events(account.prediction.figures))),
        ("wire bytes of a rank", largest(lambda account: wire_bytes(account.prediction.figures.events))),
        ("KV cache bytes of a sequence, a rank", largest(lambda account: account.cache.total)),
    )
    rows: list[list[Cell]] = []
    for name, read in quantities:
        left, right = read(model), read(twin)
        rows.append([name, left, right, right / left if left else None])
    headings = ("quantity", model.plan.config.name, twin.plan.config.name, "ratio")
    return Sheet(title="side by side, largest rank of each", headings=headings, rows=rows)


def _step_flops(accounted: Accounted) -> int:
    return accounted.plan.layout.dp * model_flops(accounted.plan.config, accounted.shape)


def _num_events(figures: RankFigures) -> int:
    return sum(total.count for total in figures.events)


def _overview(accounted: Accounted) -> Sheet:
    config, layout, shape, step = accounted.plan.config, accounted.plan.layout, accounted.shape, accounted.step
    lengths = [
        f"{length} {stream}"
        for stream, length in (("source", shape.source_length), ("target", shape.target_length))
        if length
    ]
    master = " with float32 master weights" if step.master_weights else ""
    rows: list[list[Cell]] = [
        ["architecture", config.architecture],
        ["layout", f"{layout.label} on {layout.world_size} ranks"],
        [
            "step of a replica",
            f"{layout.microbatches} x {step.microbatch} sequences of {' + '.join(lengths)} positions",
        ],
        ["numbers", f"{step.dtype}, {step.optimizer}{master}"],
    ]
    rows += [["note", note] for note in accounted.notes]
    return Sheet(title=config.name, headings=("", ""), rows=rows)


def _parameters(accounted: Accounted) -> Sheet:
    counts = parameter_counts(accounted.plan.config)
    parts = ("embedding", "relative_bias", "self_attention", "cross_attention", "ffn", "norms", "head")
    rows: list[list[Cell]] = [
        [part, getattr(counts, part), getattr(counts, part) / counts.total] for part in parts if getattr(counts, part)
    ]
    rows.append(["total", counts.total, 1.0])
    return Sheet(title="parameters of the model", headings=("component", "parameters", "share"), rows=rows)


def _where(account: RankAccount) -> list[Cell]:
    coordinate = account.prediction.figures.coordinate
    return [f"pp={coordinate.pp} tp={coordinate.tp}", account.prediction.num_ranks]


def _memory(accounted: Accounted) -> Sheet:
    headings: tuple[str, ...] = (
        "rank",
        "ranks alike",
        "parameters",
        "parameter bytes",
        "master bytes",
        "gradient bytes",
        "optimizer bytes",
        "activation bytes, microbatch",
        "activation bytes, peak",
        "total bytes",
    )
    rows = []
    for account in accounted.accounts:
        prediction, figures, states = account.prediction, account.prediction.figures, account.prediction.states
        row = [*_where(account), figures.parameters.total, states.parameters, states.master_weights, states.gradients]
        row += [states.optimizer, figures.saved_bytes, figures.peak_saved_bytes, prediction.peak_bytes]
        if accounted.device_bytes is not None:
            row += [prediction.peak_bytes / accounted.device_bytes, accounted.fits(account)]
        rows.append(row)
    if accounted.device_bytes is not None:
        headings += ("share of the device", "fits")
    return Sheet(title="memory of each distinct rank", headings=headings, rows=rows)


def _flops(accounted: Accounted) -> Sheet:
    headings = ("rank", "ranks alike", "forward", "recompute", "backward", "hardware", "model", "hardware / model")
    rows = []
    for account in accounted.accounts:
        flops, needed = account.prediction.figures.flops, 3 * account.model_forward_flops
        row = [*_where(account), flops.forward, flops.recompute, flops.backward, flops.total, needed]
        rows.append([*row, flops.total / needed])
    return Sheet(title="FLOPs of a step", headings=headings, rows=rows)


def _communication(accounted: Accounted) -> Iterator[Sheet]:
    headings = ("rank", "ranks alike", "communications", "payload bytes", "wire bytes sent")
    rows = []
    for account in accounted.accounts:
        events = account.prediction.figures.events
        sums = [sum(total.payload_bytes for total in events), wire_bytes(events)]
        rows.append([*_where(account), _num_events(account.prediction.figures), *sums])
    yield Sheet(title="communication of a step", headings=headings, rows=rows)
    most = max(accounted.accounts, key=lambda account: wire_bytes(account.prediction.figures.events))
    if not most.prediction.figures.events:
        return
    counts: Counter[tuple[str, ...]] = Counter()
    payload: Counter[tuple[str, ...]] = Counter()
    wire: Counter[tuple[str, ...]] = Counter()
    for total in most.prediction.figures.events:
        event = total.event
        key = (_BLOCK.sub(".block.*.", event.site), event.operation, event.axis, event.stream, event.phase)
        counts[key] += total.count
        payload[key] += total.payload_bytes
        wire[key] += total.wire_bytes
    yield Sheet(
        title=f"sites of the rank that sends most, {most.prediction.figures.coordinate}",
        headings=("site", "operation", "axis", "stream", "phase", "count", "payload bytes", "wire bytes"),
        rows=[[*key, counts[key], payload[key], wire[key]] for key in counts],
    )


def _caches(accounted: Accounted) -> Sheet:
    rows = [
        [*_where(account), account.cache.self_attention, account.cache.cross_attention, account.cache.total]
        for account in accounted.accounts
    ]
    headings = ("rank", "ranks alike", "self-attention bytes", "cross-attention bytes", "total bytes")
    return Sheet(title="KV caches of one sequence in generation", headings=headings, rows=rows)


def _dry(accounted: Accounted) -> Sheet:
    quantities: tuple[tuple[str, Callable[[RankFigures], int]], ...] = (
        ("parameters", lambda figures: figures.parameters.total),
        ("parameter bytes", lambda figures: figures.parameter_bytes),
        ("gradient bytes", lambda figures: figures.gradient_bytes),
        ("communications", _num_events),
        ("wire bytes", lambda figures: wire_bytes(figures.events)),
        ("FLOPs", lambda figures: figures.flops.total),
        ("activation bytes, microbatch", lambda figures: figures.saved_bytes),
        ("activation bytes, peak", lambda figures: figures.peak_saved_bytes),
    )
    rows: list[list[Cell]] = []
    for account, dry in zip(accounted.accounts, accounted.dry, strict=True):
        is_equal = not dry.differences and not dry.remarks
        rows.append([*_where(account), *(read(dry.figures) for _, read in quantities), is_equal])
        if not is_equal:
            off = [read(account.prediction.figures) - read(dry.figures) for _, read in quantities]
            rows.append(["closed form, more by", None, *off, None])
    headings = ("rank", "ranks alike", *(name for name, _ in quantities), "equal to the closed form")
    return Sheet(title="traced by a dry run", headings=headings, rows=rows)
