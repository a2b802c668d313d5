"""Does `twinshard profile` measure what the model computes, and tell it in a file that cuts can read?"""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launch.cli import answer
from launch.passage import NUM_BLOCKS, Passage, rank_config
from launch.piece_seconds import measured_profile
from launch.ping import SIZES_BYTES, fit, measure_message
from models.architectures import build
from models.batch import synthetic_batch
from models.config import ModelConfig
from models.costs import parameter_counts
from models.initial import initialise
from models.named import named_model
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.profile import PIECES, Profile
from parallel.profile_file import load
from parallel.work import Work
from tests.small_models import ARCHITECTURES, small_config

ROOT = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")
TINY = "tiny-t5"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = answer(("profile", *arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def counted(config: ModelConfig, layout: Layout | None = None) -> Profile:
    shape = StepShape(
        num_sequences=2, source_length=7 * config.has_encoder, target_length=5 * config.has_decoder, dtype_bytes=8
    )
    return Profile.of_flops(config, Layout() if layout is None else layout, shape)


# ---- what is measured -----------------------------------------------------------------------------------------------


def whole(config: ModelConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the short model by plain PyTorch."""
    with torch.device("meta"):
        model = build(config)
    initialise(model, config, seed=0, dtype=torch.float64, device=CPU)
    batch = synthetic_batch(config, num_sequences=2, source_length=7, target_length=5, seed=0).to(CPU, torch.float64)
    assert model.loss is not None
    loss: Tensor = model.loss(model(batch, {})["logits"], batch.labels)
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "relative", "tying": "head"},
        {"positions": "rope", "activation": "swiglu", "norm_position": "post"},
        {"head_transform": True, "num_token_types": 2, "embedding_norm": True},
    ],
)
@pytest.mark.parametrize("is_split", [True, False])
def test_the_pieces_together_are_the_model(
    is_split: bool, architecture: Any, recompute: Any, changes: dict[str, Any]
) -> None:
    config = small_config(architecture, relative_buckets=8, relative_max_distance=6, **changes)
    layout = Layout(recompute=recompute)
    passage = Passage(counted(config, layout), is_split=is_split, dtype=torch.float64, device=CPU)
    passage.run()
    loss, gradients = whole(rank_config(config, 1))
    assert passage._ran[-1].given.item() == pytest.approx(loss.item(), rel=1e-12)
    compared = 0
    for name, parameter in passage._model.named_parameters():
        # The norm between encoder and memory is no piece, and what is behind it gets another gradient.
        if config.has_cross_attention and name.startswith("encoder."):
            continue
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-10, atol=1e-12, msg=name)
        compared += 1
    assert compared > 10


@pytest.mark.parametrize("is_split", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_piece_that_has_flops_gets_seconds(architecture: Any, is_split: bool) -> None:
    config = small_config(architecture, num_encoder_blocks=3 * (architecture != "decoder_only"))
    passed: list[int] = []
    flops = counted(config)
    profile, spreads = measured_profile(
        flops,
        is_split=is_split,
        dtype="float64",
        backend="gloo",
        message=(1e-6, 1e-9),
        warmup=1,
        repeats=3,
        passed=lambda: passed.append(1),
    )
    assert len(passed) == 4
    assert (profile.unit, profile.transfer_cost, profile.byte_cost) == ("seconds", 1e-6, 1e-9)
    assert (profile.config, profile.shape) == (config, flops.shape)
    for piece in PIECES:
        work, has_flops = getattr(profile, piece), getattr(flops, piece).total > 0
        if has_flops:
            assert min(work.forward, work.backward_input, work.backward_weight) > 0.0
            assert spreads[piece] > 0.0
        side = piece.partition("_")[0]
        if side in ("encoder", "decoder"):
            assert (work.forward > 0.0) == getattr(config, f"has_{side}")


@pytest.mark.parametrize(("recompute", "ffns", "cores"), [("none", 1, 1), ("selective", 1, 2), ("full", 2, 2)])
def test_what_is_computed_again_is_measured_too(recompute: Any, ffns: int, cores: int) -> None:
    layout = Layout(recompute=recompute, attention="materialised")
    passage = Passage(counted(small_config("decoder_only"), layout), is_split=True, dtype=torch.float64, device=CPU)
    decoder = passage._model.decoder
    assert decoder is not None
    ran: list[str] = []
    block: Any = decoder.block["0"]
    block.ffn.register_forward_hook(lambda *_: ran.append("ffn"))
    # Only the materialised core passes its probabilities through a dropout.
    block.self_attention.core_dropout.register_forward_hook(lambda *_: ran.append("core"))
    passage.run()
    assert (ran.count("ffn"), ran.count("core")) == (ffns, cores)


@pytest.mark.parametrize(("is_split", "expected"), [(True, Work(2.0, 6.0, 2.0)), (False, Work(20.0, 30.0, 10.0))])
def test_a_profile_holds_medians_of_what_came_after_the_warmup(
    monkeypatch: pytest.MonkeyPatch, is_split: bool, expected: Work
) -> None:
    factors = {True: iter([900.0, 1.0, 5.0, 2.0]), False: iter([900.0, 5.0, 1.0, 2.0])}

    def run(passage: Passage) -> dict[tuple[str, str], float]:
        splits = passage._deferral is not None
        parts = (
            {"forward": 1.0, "backward_input": 3.0, "backward_weight": 1.0}
            if splits
            else {"forward": 10.0, "backward": 20.0}
        )
        factor = next(factors[splits])
        return {("decoder_block", part): factor * seconds for part, seconds in parts.items()}

    monkeypatch.setattr(Passage, "run", run)
    profile, spreads = measured_profile(
        counted(small_config("decoder_only")),
        is_split=is_split,
        dtype="float32",
        backend="gloo",
        message=(0.0, 0.0),
        warmup=1,
        repeats=3,
        passed=lambda: None,
    )
    assert profile.decoder_block == expected
    assert profile.machine["backward"] == ("split" if is_split else "whole")
    assert spreads["decoder_block"] == (5.0 - 1.0) / 2.0


def test_seconds_of_blocks_are_those_of_one() -> None:
    config = small_config("decoder_only", num_decoder_blocks=5)
    passage = Passage(counted(config), is_split=False, dtype=torch.float64, device=CPU)
    passage._clock.now = iter(range(100)).__next__  # type: ignore[method-assign]
    passage.run()
    ((start, end),) = (span for key, span in passage._spans.items() if key == ("decoder_block", "forward"))
    passage._clock.now = iter(range(100)).__next__  # type: ignore[method-assign]
    assert passage.run()["decoder_block", "forward"] == (end - start) / NUM_BLOCKS


def test_blocks_of_one_rank_are_measured_as_its_shard() -> None:
    config = named_model("t5-small").replace(vocabulary=1001, source_vocabulary=1001)
    small = rank_config(config, 4)
    assert (small.num_heads, small.ffn_width, small.head_width) == (2, 512, config.head_width)
    assert (small.vocabulary, small.num_encoder_blocks, small.num_decoder_blocks) == (251, NUM_BLOCKS, NUM_BLOCKS)
    flops = counted(config, Layout(tp=4))
    alone = counted(small)
    for piece in PIECES:
        assert getattr(flops, piece) == getattr(alone, piece)
    assert parameter_counts(small).total < parameter_counts(config).total / 4
    assert rank_config(config, 4, "whole") == small.replace(vocabulary=1001, source_vocabulary=1001)
    whole = counted(config, Layout(tp=4, vocabulary="whole"))
    assert whole.head == counted(small.replace(vocabulary=1001, source_vocabulary=1001)).head


# ---- messages -------------------------------------------------------------------------------------------------------


def test_latency_and_bandwidth_are_read_off_the_smallest_and_the_largest_message() -> None:
    seconds = [(size, 3e-5 + 2e-9 * size) for size in SIZES_BYTES]
    latency, per_byte = fit(seconds)
    assert latency == pytest.approx(3e-5)
    assert per_byte == pytest.approx(2e-9)
    # A clock that disagrees with itself makes nothing negative.
    assert fit([(10, 2e-6), (1000, 1e-6)]) == (2e-6, 0.0)


def test_two_ranks_exchange_messages() -> None:
    latency, per_byte = measure_message("gloo", 100.0)
    assert 1e-7 < latency + 1024 * per_byte < 1.0
    assert 1e-12 < per_byte < 1e-6


def test_ranks_that_do_not_answer_in_time_are_told_of() -> None:
    with pytest.raises(ValueError, match=r"^two ranks over gloo did not exchange a message: nothing was done in time$"):
        measure_message("gloo", 0.01)


# ---- the command ----------------------------------------------------------------------------------------------------


def test_a_measured_profile_is_written_and_cuts_by_time(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    code, out, err = told(capsys, TINY, "--repeats", "2", "--warmup", "1", "--source-length", "64", "--out", str(file))
    assert (code, err) == (0, "")
    assert out.startswith(f"{TINY} (encoder_decoder): one microbatch of 1 x 64 source and 128 target positions")
    assert f"written to {file}" in out
    profile = load(file)
    assert (profile.unit, profile.source_length, profile.target_length) == ("seconds", 64, 128)
    assert {"processor", "torch", "device", "created"} <= set(profile.machine)
    made = plan(named_model(TINY), Layout(pp=2, cut="times", schedule="list", microbatches=2), profile)
    assert len(made.stages) == 2


def test_counting_needs_no_torch_and_no_measurement(tmp_path: Path) -> None:
    program = (
        "import sys; from launch.cli import answer;"
        f"code = answer(['profile', 't5-11b', '--flops', '--tp', '8', '--out', {str(tmp_path / 'p.toml')!r}]);"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    config = named_model("t5-11b")
    shape = StepShape(num_sequences=1, source_length=config.max_length, target_length=config.max_length)
    assert load(tmp_path / "p.toml") == Profile.of_flops(config, Layout(tp=8), shape)


def test_all_forms_tell_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("t5-small", "--flops", "--microbatch", "2", "--format")
    rows = list(csv.DictReader(io.StringIO(told(capsys, *arguments, "csv")[1])))
    document = json.loads(told(capsys, *arguments, "json")[1])
    assert [row["piece"] for row in rows] == ["encoder_block", "decoder_block", "head"]
    assert [{key: str(value) for key, value in row.items()} for row in document["pieces"]] == rows
    assert sum(float(row["share_of_model"]) for row in rows) == pytest.approx(1.0)
    table = told(capsys, *arguments, "table")[1]
    gflop = float(rows[0]["forward_flops"]) * 1e-9
    assert f"{gflop:.4g}" in table
    assert "most costly stage over the mean, at best" in table


def test_a_twin_is_profiled_on_the_same_pair_and_may_be_long(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lengths = ("--source-length", "192", "--target-length", "64", "--flops")
    for name, option in (("own", "--long"), ("twin", "--twin")):
        assert told(capsys, TINY, option, *lengths, "--out", str(tmp_path / f"{name}.toml"))[0] == 0
    own, twin = load(tmp_path / "own.toml"), load(tmp_path / "twin.toml")
    assert (own.source_length, own.target_length, twin.source_length, twin.target_length) == (192, 64, 0, 256)
    assert own.config == named_model(TINY).replace(max_length=192)
    assert twin.config.architecture == "decoder_only"
    assert twin.config.num_decoder_blocks == own.config.num_blocks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("t5-smal",), "error: unknown model 't5-smal'; did you mean t5-small"),
        ((TINY, "--tp", "3"), "error: 4 heads over tp=3: tp must divide 4; try 1, 2, 4"),
        ((TINY, "--source-length", "999"), "error: source_length = 999: tiny-t5 reads 1 to 128 source positions"),
        (("gpt2", "--twin"), "error: --twin is for encoder-decoders: gpt2 is decoder_only; leave it out"),
        (
            ("bart-base", "--long", "--source-length", "2000"),
            "error: bart-base has learned 1024 positions, and sequences have 2000: shorten them",
        ),
        ((TINY, "--microbatch", "0"), "error: microbatch = 0; a microbatch has at least 1 sequence"),
        ((TINY, "--repeats", "0"), "error: Invalid value for '--repeats': 0 is not in the range x>=1."),
        ((TINY, "--flops", "--message"), "error: --flops counts, and a message has no FLOPs"),
        (
            (TINY, "--out", "nowhere/profile.toml"),
            "error: cannot write nowhere/profile.toml: there is no folder nowhere",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = told(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(message)
    assert err.count("\n") == 1
