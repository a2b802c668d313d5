"""Are the layouts that fit those whose every rank is predicted to fit, and is the reason for more devices true?"""

import csv
import io
import itertools
import json
from typing import Any

import pytest

from launch.cli import answer
from models.config import ModelConfig
from models.named import named_model
from parallel.figures import StepShape
from parallel.fit import Fits, fit
from parallel.layouts import Cut, Layout, Schedule
from parallel.plans import plan
from parallel.predict import RankPrediction, predict

NUM_DEVICES = 6


def shape_of(config: ModelConfig, microbatches: int) -> StepShape:
    return StepShape(
        num_sequences=2 * microbatches,
        source_length=12 * config.has_encoder,
        target_length=10 * config.has_decoder,
    )


def fullest(config: ModelConfig, layout: Layout) -> RankPrediction:
    predictions = predict(plan(config, layout), shape_of(config, layout.microbatches))
    return max(predictions, key=lambda prediction: prediction.peak_bytes)


def found_in(fits: Fits) -> dict[Layout, int]:
    """Every layout that fits, a family written out, with the bytes of the first of each."""
    return {
        family.layout.replace(dp=dp): family.fullest.total_bytes
        for family in fits.families
        for dp in range(family.layout.dp, family.max_dp + 1)
    }


def all_layouts(base: Layout) -> list[Layout]:
    layouts = []
    options = itertools.product(
        (1, 2, 4), (1, 2, 3, 4), range(1, 7), (False, True), range(4), ("none", "selective", "full")
    )
    for tp, pp, dp, sp, zero, recompute in options:
        if tp * pp * dp <= NUM_DEVICES and not (sp and tp == 1) and not (zero and dp == 1):
            layouts.append(base.replace(tp=tp, pp=pp, dp=dp, sp=sp, zero=zero, recompute=recompute))
    return layouts


@pytest.mark.parametrize(
    ("name", "schedule", "device_bytes"),
    [
        ("tiny-encoder-decoder", "1f1b", 360_000),
        ("tiny-t5", "gpipe", 500_000),
        ("tiny-llama", "1f1b", 420_000),
        ("tiny-bert", "1f1b", 380_000),
    ],
)
def test_what_fits_is_what_is_predicted_to_fit(name: str, schedule: Schedule, device_bytes: int) -> None:
    config, base = named_model(name), Layout(microbatches=2, schedule=schedule)
    fits = fit(config, shape_of(config, 2), base, device_bytes=device_bytes, num_devices=NUM_DEVICES)
    found = found_in(fits)
    layouts = all_layouts(base)
    expected = {layout for layout in layouts if fullest(config, layout).peak_bytes <= device_bytes}
    assert 0 < len(expected) < len(layouts)
    assert set(found) == expected
    assert (fits.num_layouts, fits.num_fitting) == (len(layouts), len(expected))
    for family in fits.families:
        assert family.fullest.total_bytes == fullest(config, family.layout).peak_bytes


@pytest.mark.parametrize("cut", ["even", "aligned"])
def test_fewer_devices_are_refused_for_the_stated_reason(cut: Cut) -> None:
    config, base = (
        named_model("tiny-encoder-decoder"),
        Layout(microbatches=2, cut=cut) if cut == "even" else Layout(microbatches=2, pp=2, cut=cut),
    )
    device_bytes = 300_000
    fits = fit(config, shape_of(config, 2), base, device_bytes=device_bytes, num_devices=8)
    devices = [family.num_devices for family in fits.families]
    assert devices == sorted(devices)
    closest = fits.closest
    assert closest is not None
    assert closest.layout.world_size < devices[0]
    prediction = fullest(config, closest.layout)
    assert prediction.peak_bytes == closest.total_bytes > device_bytes
    assert prediction.figures.coordinate == closest.coordinate
    assert prediction.states == closest.states
    smaller = [
        layout for layout in all_layouts(base) if layout.world_size < devices[0] and (cut == "even" or layout.pp > 1)
    ]
    assert min(fullest(config, layout).peak_bytes for layout in smaller) == closest.total_bytes


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = answer(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_whole_space_of_a_large_model_is_decided(capsys: pytest.CaptureFixture[str]) -> None:
    line = "fit llama-2-70b --device-bytes 80e9 --devices 1024 --microbatches 8 --format json"
    code, out, err = told(capsys, *line.split())
    assert code == 0, err
    document: dict[str, Any] = json.loads(out)
    assert document["num_layouts"] > 100_000
    first = document["layouts"][0]
    assert first["devices"] == first["tp"] * first["pp"] * first["dp"]
    refused = document["closest_on_fewer_devices"]
    assert refused["devices"] < first["devices"]
    for layout, total_bytes in ((first["layout"], first["total_bytes"]), (refused["layout"], refused["total_bytes"])):
        degrees = [word for key in ("tp", "pp", "dp", "zero") for word in (f"--{key}", str(layout[key]))]
        others = ["--sp"] if layout["sp"] else []
        others += ["--recompute", layout["recompute"], "--microbatches", "8", "--device-bytes", "80e9"]
        code, out, _ = told(capsys, "account", "llama-2-70b", *degrees, *others, "--format", "json")
        ranks = json.loads(out)["ranks"]
        assert max(rank["total_bytes"] for rank in ranks) == total_bytes
        assert all(rank["fits"] for rank in ranks) == (layout == first["layout"])
    assert f"{refused['total_bytes']:,} bytes" in document["reason"]
    assert set(document["smallest_by_axes"]) >= {"tp+pp", "tp+zero", "zero", "pp"}


def test_tables_are_cut_short_and_csv_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("fit", "tiny-t5", "--device-bytes", "3e6", "--devices", "4")
    _, table, _ = told(capsys, *arguments, "--limit", "2")
    assert "more rows" in table
    assert "one device is enough" in table
    _, whole, _ = told(capsys, *arguments, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(whole)))
    assert len(rows) > 2
    assert all(int(row["total_bytes"]) <= 3e6 for row in rows)


def test_nothing_fits_is_exit_code_1_with_the_rank_that_is_too_full(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = told(capsys, "fit", "tiny-t5", "--device-bytes", "1e3", "--devices", "4", "--format", "json")
    document = json.loads(out)
    assert code == 1
    assert document["layouts"] == []
    assert document["reason"].startswith("on up to 4 devices nothing fits: closest is ")
    assert "rank dp=0 pp=" in document["reason"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-t5", "--device-bytes", "1e6"), "Missing option '--devices'"),
        (("tiny-t5", "--devices", "4"), "Missing option '--device-bytes'"),
        (("tiny-t5", "--device-bytes", "1e6", "--devices", "0"), "devices = 0; it must be at least 1"),
        (("tiny-t5", "--device-bytes", "-1", "--devices", "4"), "device-bytes = -1; a device has at least 1 byte"),
        (("tiny-t5", "--device-bytes", "1e6", "--devices", "4", "--source-length", "999"), "source_length = 999"),
        (
            ("tiny-t5", "--device-bytes", "1e6", "--devices", "4", "--devices-per-node", "0"),
            "devices_per_node = 0; it must be at least 1",
        ),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, out, err = told(capsys, "fit", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_schedule_that_the_search_does_not_know_is_refused() -> None:
    config, shape = named_model("t5-small"), StepShape(num_sequences=1, source_length=4, target_length=5)
    for schedule in ("zb_h1", "list"):
        base = Layout.from_dict({"schedule": schedule})
        with pytest.raises(ValueError, match=rf"^schedule = '{schedule}'; layouts are searched for gpipe and 1f1b$"):
            fit(config, shape, base, device_bytes=10**9, num_devices=1)
