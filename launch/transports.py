"""How should the memory travel through a pipeline? `twinshard transports`, from closed forms and a simulated step."""

from typing import Any

import click

from launch.layout_options import LAYOUT_OPTIONS, layout_of, layout_options
from launch.machine_files import load_machine, machine_names
from launch.sheets import Cell, Format, Sheet, format_option, show
from launch.step_options import Step, counted_model, step_options
from parallel.transports import CLOSE, TransportCost, chosen_way, transport_costs

COLUMNS = (
    *("model", "machine", "layout", "way", "is_run", "pipeline_seconds", "bubble", "imbalance"),
    *("egress_rank", "egress_bytes", "sent_bytes", "waiting_bytes"),
)
"""Of the CSV: a way a row."""


@click.command("transports")
@click.argument("model")
@click.option("--machine", required=True, help=f"{', '.join(machine_names())}, or a .toml file of that form.")
@layout_options
@step_options
@format_option
def transports_command(*, model: str, machine: str, form: Format, **chosen: Any) -> int:
    """Compare how the memory of MODEL gets from its encoder to the stages of its decoder, on a machine.

    Relayed from stage to stage, sent directly to each decoder stage, or as keys and values of each block instead of a
    memory: bytes of every edge, what the rank that sends most sends in a step, what was sent and waits to be used, and
    the simulated time of the pipeline. Each is a layout (--transport); is_run says whether an engine runs it.

    \b
    Examples:
      twinshard transports t5-large --machine h100 --pp 8 --microbatches 32 --cut flops --dtype bfloat16
      twinshard transports t5-11b --machine a100 --tp 8 --sp --pp 16 --microbatches 64 --cut flops --format csv
    """  # noqa: D301 - click reads the character
    known = load_machine(machine)
    step = Step.of(chosen)
    config, notes = counted_model(model)
    layout = layout_of({name: chosen[name] for name in LAYOUT_OPTIONS})
    layout.check_model(config)
    costs = transport_costs(known, config, layout, step.shape(config, layout.microbatches))
    of: dict[str, Cell] = {"model": config.name, "machine": known.name}
    of["layout"] = layout.replace(transport="relay").label
    rows = [of | _row(cost) for cost in costs]
    best = chosen_way(costs)
    told = f"{best.way}: of the ways within {CLOSE:.0%} of the fastest that is run, its busiest rank sends least"
    shown = COLUMNS[3:]
    sheets = [
        Sheet(
            title=f"memory of {config.name} on {known.name}, {of['layout']}",
            headings=tuple(name.replace("_", " ") for name in shown),
            rows=[[row[name] for name in shown] for row in rows],
        ),
        _edges(costs),
        Sheet(title="chosen", headings=("",), rows=[[note] for note in (told, *notes)]),
    ]
    document = {
        "model": config.name,
        "machine": known.name,
        "ways": [
            row | {"edge_bytes": {edge.edge.name: edge.size_bytes for edge in cost.edges}}
            for row, cost in zip(rows, costs, strict=True)
        ],
        "chosen": best.way,
        "notes": list(notes),
    }
    show(form, sheets=sheets, columns=COLUMNS, rows=rows, document=document)
    return 0


def _row(cost: TransportCost) -> dict[str, Cell]:
    return {
        "way": cost.way,
        "is_run": cost.is_run,
        "pipeline_seconds": cost.timeline.makespan_seconds,
        "bubble": cost.timeline.bubble,
        "imbalance": cost.timeline.imbalance,
        "egress_rank": cost.egress_rank,
        "egress_bytes": cost.egress_bytes,
        "sent_bytes": cost.sent_bytes,
        "waiting_bytes": cost.waiting_bytes,
    }


def _edges(costs: list[TransportCost]) -> Sheet:
    """Bytes of one microbatch over every edge, forward; backward they are the same."""
    by_way = [{edge.edge: edge.size_bytes for edge in cost.edges} for cost in costs]
    ends = sorted({(edge.first, edge.last) for sizes in by_way for edge in sizes})
    rows: list[list[Cell]] = []
    for first, last in ends:
        sizes = [sum(size for edge, size in way.items() if (edge.first, edge.last) == (first, last)) for way in by_way]
        rows.append([f"{first} -> {last}", *sizes])
    return Sheet(
        title="bytes of one microbatch from stage to stage, as many back",
        headings=("stages", *(cost.way for cost in costs)),
        rows=rows,
    )
