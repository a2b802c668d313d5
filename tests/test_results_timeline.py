"""Do pictures and traces of a timeline show what it holds?"""

import json
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from parallel.placement import stage_ranks
from parallel.schedules import BUILDERS
from parallel.simulate import StageSeconds, TransferSeconds, every_message, simulate
from parallel.timeline import Span, Timeline, peak
from results import perfetto
from results.timeline import COLOURS, draw, write

RANKS = stage_ranks("interleaved", 2, 2)
SIMULATED = simulate(
    BUILDERS["interleaved"](RANKS, 4),
    StageSeconds.equal(4, forward=0.001, backward_input=0.001, backward_weight=0.001),
    transfer_seconds=every_message(TransferSeconds(latency=0.0002)),
)
HELD = SIMULATED.held((1e6,) * 4, base=(5e6, 6e6))
MEASURED = Timeline(
    spans=tuple(tuple(Span(action, start * 1.1, end * 1.1) for action, start, end in row) for row in SIMULATED.spans)
)
BOTH = {"measured": MEASURED, "simulated": SIMULATED}


def of(events: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == phase]


# ---- traces ---------------------------------------------------------------------------------------------------------


def test_a_trace_has_a_slice_for_every_action_in_microseconds() -> None:
    events = perfetto.trace({"simulated": SIMULATED}, {})["traceEvents"]
    slices = {(event["pid"], event["name"]): event for event in of(events, "X")}
    assert len(slices) == sum(map(len, SIMULATED.spans))
    for rank, row in enumerate(SIMULATED.spans):
        for action, start_seconds, end_seconds in row:
            event = slices[rank, str(action)]
            assert event["ts"] == pytest.approx(start_seconds * 1e6)
            assert event["dur"] == pytest.approx((end_seconds - start_seconds) * 1e6)
            assert event["args"] == {"kind": action.kind, "stage": action.stage, "microbatch": action.microbatch}


def test_ranks_of_all_timelines_are_named_processes() -> None:
    events = perfetto.trace(BOTH, {})["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in of(events, "M") if event["name"] == "process_name"}
    assert names == {0: "measured: rank 0", 1: "measured: rank 1", 2: "simulated: rank 0", 3: "simulated: rank 1"}
    assert {event["pid"] for event in of(events, "X")} == set(names)


def test_an_arrow_joins_who_made_a_message_with_who_uses_it() -> None:
    events = perfetto.trace({"simulated": SIMULATED}, {})["traceEvents"]
    begins = {event["id"]: event for event in of(events, "s")}
    ends = {event["id"]: event for event in of(events, "f")}
    assert len(begins) == len(ends) == len(SIMULATED.messages)
    slices = of(events, "X")
    for number, begin in begins.items():
        made, used = (around(slices, event) for event in (begin, ends[number]))
        assert made["pid"] != used["pid"]
        assert made["args"]["microbatch"] == used["args"]["microbatch"]
        assert abs(made["args"]["stage"] - used["args"]["stage"]) == 1
        assert made["ts"] + made["dur"] <= used["ts"]
        assert ends[number]["bp"] == "e"


def around(slices: list[dict[str, Any]], event: dict[str, Any]) -> dict[str, Any]:
    """The one slice in which an arrow ends; viewers find it in the same way."""
    (found,) = (
        one for one in slices if one["pid"] == event["pid"] and one["ts"] < event["ts"] < one["ts"] + one["dur"]
    )
    return found


def test_bytes_are_a_counter() -> None:
    events = perfetto.trace({"simulated": SIMULATED}, {"simulated": HELD})["traceEvents"]
    counted = [(event["ts"], event["args"]["bytes"]) for event in of(events, "C") if event["pid"] == 1]
    assert counted == [(seconds * 1e6, value) for seconds, value in HELD[1]]


def test_a_trace_is_a_document_that_viewers_read(tmp_path: Path) -> None:
    path = tmp_path / "step.trace.json"
    perfetto.write(BOTH, {"simulated": HELD}, path)
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["displayTimeUnit"] == "ms"
    for event in document["traceEvents"]:
        assert {"ph", "name", "pid"} <= set(event)
        assert event["ph"] == "M" or event["ts"] >= 0


# ---- pictures -------------------------------------------------------------------------------------------------------


def test_every_action_is_drawn_in_the_colour_of_its_kind_and_chunk() -> None:
    figure = draw({"simulated": SIMULATED}, {}, title="step")
    drawn = [one for one in figure.axes[0].collections if isinstance(one, PolyCollection)]
    boxes: Counter[bytes] = Counter()
    for one in drawn:
        boxes[np.asarray(one.get_facecolor()).tobytes()] += len(one.get_paths())
    # Lanes are idle all along; a forward and a backward in two shades each, eight of every one.
    assert sorted(boxes.values()) == [2, 8, 8, 8, 8]
    numbers = Counter(text.get_text() for text in figure.axes[0].texts)
    assert set(numbers) <= {"0", "1", "2", "3"}
    assert sum(numbers.values()) > 0


def test_measured_stands_above_simulated_on_one_axis_of_time() -> None:
    figure = draw(BOTH, {"simulated": HELD}, title="step", capacity_bytes=20e6)
    panels = [axis for axis in figure.axes if axis.get_title(loc="left")]
    assert [axis.get_title(loc="left").partition(":")[0] for axis in panels] == ["measured", "simulated", "simulated"]
    assert panels[0].get_position().y0 > panels[1].get_position().y0
    for axis in panels:
        assert axis.get_xlim() == pytest.approx((0.0, MEASURED.makespan_seconds * 1e3))
    lines = panels[2].get_lines()
    assert np.asarray(lines[0].get_ydata()).max() == peak(HELD[0]) / 1e6
    assert np.asarray(lines[-1].get_ydata()).tolist() == [20, 20], "what a device holds"


def test_only_kinds_that_are_there_are_explained() -> None:
    def explained(name: str, stages: int) -> list[str]:
        timeline = simulate(BUILDERS[name](range(stages), 3), StageSeconds.equal(stages))
        return [text.get_text() for text in draw({"simulated": timeline}, {}, title="").legends[0].get_texts()]

    assert explained("1f1b", 2) == ["forward", "backward", "idle"]
    assert explained("zb_h1", 2) == ["forward", "backward, input", "backward, weights", "idle"]


def test_files_are_whole_and_equal_for_equal_timelines(tmp_path: Path) -> None:
    for folder in ("once", "again"):
        paths = write(BOTH, {"simulated": HELD}, title="a step", folder=tmp_path / folder, name="cell")
        assert [path.name for path in paths] == ["cell.svg", "cell.png", "cell.trace.json"]
    for name in ("cell.svg", "cell.png", "cell.trace.json"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    ElementTree.parse(tmp_path / "once" / "cell.svg")  # noqa: S314 - we wrote it
    assert (tmp_path / "once" / "cell.png").read_bytes().startswith(b"\x89PNG")


def test_many_ranks_are_drawn_as_pixels() -> None:
    timeline = simulate(BUILDERS["1f1b"](range(40), 100), StageSeconds.equal(40))
    figure = draw({"simulated": timeline}, {"simulated": timeline.held((1.0,) * 40)}, title="many")
    spans = [drawn for drawn in figure.axes[0].collections if drawn.get_rasterized()]
    assert len(spans) == 2
    assert figure.get_size_inches()[1] < 12


def test_nothing_to_draw_is_told() -> None:
    with pytest.raises(ValueError, match="no timeline to draw"):
        draw({}, {}, title="nothing")


def test_every_kind_has_a_colour_of_its_own() -> None:
    assert len(set(COLOURS.values())) == len(COLOURS) == 4
