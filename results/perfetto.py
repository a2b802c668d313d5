"""How does a viewer of traces read a timeline? As a file of Chrome's trace event format, which Perfetto reads as well.

    process     one rank of one timeline       counter    bytes that it holds
    slice       an action, 2F0                 arrow      a message, from who made it to who uses it

Open it at ui.perfetto.dev or chrome://tracing. Times are microseconds, as the format wants it.

Source: "Trace Event Format", Google, 2016: complete events (X), metadata (M), counters (C), flows (s, f).
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from parallel.schedule import Product
from parallel.timeline import Message, Span, Steps, Timeline
from results.files import replacing

Event = dict[str, Any]
MICROSECONDS = 1e6
_CNAMES = {
    "forward": "thread_state_running",
    "backward": "thread_state_iowait",
    "backward_input": "thread_state_runnable",
    "backward_weight": "good",
}
"""Names of colours that the older viewer knows; the newer one colours by name."""


def write(timelines: Mapping[str, Timeline], held: Mapping[str, Sequence[Steps]], path: Path) -> None:
    """Writes a trace of timelines, by what they are called, and of the bytes that their ranks hold."""
    with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        json.dump(trace(timelines, held), file, separators=(",", ":"))


def trace(timelines: Mapping[str, Timeline], held: Mapping[str, Sequence[Steps]]) -> dict[str, Any]:
    """The document. Processes are numbered through all timelines, in their order."""
    events: list[Event] = []
    first = 0
    arrows = itertools.count()
    for label, timeline in timelines.items():
        events += _processes(label, timeline, first)
        events += _slices(timeline, first)
        events += _arrows(timeline, first, arrows)
        for rank, steps in enumerate(held.get(label, ())):
            events += _counters(steps, first + rank)
        first += len(timeline.spans)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _processes(label: str, timeline: Timeline, first: int) -> Iterator[Event]:
    for rank in range(len(timeline.spans)):
        pid = first + rank
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{label}: rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 0, "args": {"name": "actions"}}


def _slices(timeline: Timeline, first: int) -> Iterator[Event]:
    for rank, row in enumerate(timeline.spans):
        for action, start_seconds, end_seconds in row:
            yield {
                "ph": "X",
                "name": str(action),
                "cat": action.kind,
                "cname": _CNAMES[action.kind],
                "pid": first + rank,
                "tid": 0,
                "ts": start_seconds * MICROSECONDS,
                "dur": (end_seconds - start_seconds) * MICROSECONDS,
                "args": {"kind": action.kind, "stage": action.stage, "microbatch": action.microbatch},
            }


def _arrows(timeline: Timeline, first: int, numbers: Iterator[int]) -> Iterator[Event]:
    places: dict[Product, tuple[int, Span]] = {
        span.action.gives: (rank, span)
        for rank, row in enumerate(timeline.spans)
        for span in row
        if span.action.gives is not None
    }
    for message in timeline.messages:
        made, used = (places[product] for product in _products(message))
        shared = {"name": message.edge.name, "cat": "message", "id": next(numbers), "tid": 0}
        # An arrow holds on to the slice around its end: in the middle of it, nothing can round past it.
        for phase, (rank, span) in (("s", made), ("f", used)):
            middle = (span.start_seconds + span.end_seconds) / 2
            event: Event = {"ph": phase, "pid": first + rank, "ts": middle * MICROSECONDS, **shared}
            if phase == "f":
                event["bp"] = "e"
            yield event


def _products(message: Message) -> tuple[Product, Product]:
    """What the message carries, and what is made with it."""
    ends = (message.edge.first, message.edge.last)
    source, target = ends if message.direction == "forward" else ends[::-1]
    return (message.direction, source, message.microbatch), (message.direction, target, message.microbatch)


def _counters(steps: Steps, pid: int) -> Iterator[Event]:
    for seconds, value in steps:
        yield {"ph": "C", "name": "bytes held", "pid": pid, "ts": seconds * MICROSECONDS, "args": {"bytes": value}}
