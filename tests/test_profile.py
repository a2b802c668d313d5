"""Does a profile tell what ranks execute, refuse what it was not made for, and come back from its file?"""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from models.config import ModelConfig
from models.named import named_model
from parallel.figures import StepShape
from parallel.layouts import Layout
from parallel.partition import Carried, stages_of
from parallel.plans import plan
from parallel.predict import predict
from parallel.profile import PIECES, Profile
from parallel.profile_file import load, save
from parallel.share import shares
from parallel.work import Work
from tests.sampled_layouts import samples
from tests.small_models import ARCHITECTURES, small_config


def profile_of(config: ModelConfig, layout: Layout | None = None, *, source: int = 7, target: int = 5) -> Profile:
    shape = StepShape(
        num_sequences=2, source_length=source * config.has_encoder, target_length=target * config.has_decoder
    )
    return Profile.of_flops(config, Layout() if layout is None else layout, shape)


def seconds(config: ModelConfig, **changes: Any) -> Profile:
    """A profile as a measurement would make it; every number different."""
    fields: dict[str, Any] = {
        piece: Work(1e-3 * index, 2e-3 * index + 1e-7, 3e-3 * index) for index, piece in enumerate(PIECES, start=1)
    }
    fields |= {
        "unit": "seconds",
        "transfer_cost": 2e-5,
        "byte_cost": 3e-10,
        "machine": {"processor": 'a "b" \\ c', "n": 2},
    }
    return dataclasses.replace(profile_of(config), **(fields | changes))


# ---- work -----------------------------------------------------------------------------------------------------------


def test_work_adds_and_scales_part_by_part() -> None:
    work = Work(1.0, 2.0, 4.0)
    assert (work.backward, work.total) == (6.0, 7.0)
    assert work + work == 2 * work == work * 2 == Work(2.0, 4.0, 8.0)


@pytest.mark.parametrize("cost", [-1.0, math.inf, math.nan])
def test_a_cost_is_a_number(cost: float) -> None:
    with pytest.raises(ValueError, match=r"^backward_input = .*; a cost is a number, 0 or more$"):
        Work(1.0, cost, 1.0)


# ---- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", samples(40, seed=7), ids=str)
def test_stages_cost_what_their_ranks_execute(sample: Any) -> None:
    layout = sample.plan.layout
    shape = dataclasses.replace(sample.shape, num_sequences=2 * layout.microbatches)
    profile = Profile.of_flops(sample.plan.config, layout, shape)
    largest: dict[int, float] = {}
    for told in predict(sample.plan, shape):
        pp = told.figures.coordinate.pp
        # Ranks of a stage differ in vocabulary rows; a profile tells of the one that has most.
        largest[pp] = max(largest.get(pp, 0.0), told.figures.flops.total)
    assert set(largest) == set(range(layout.pp))
    for pp, flops in largest.items():
        work = sum((profile.stage(stage) for stage in sample.plan.stages_of(pp)), start=Work())
        assert work.total * layout.microbatches == flops


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_weights_half_is_one_product_for_each_weight(architecture: Any, tp: int) -> None:
    """Counted from the matrices themselves: 2 x positions x elements, keys and values of the memory at its length."""
    config = small_config(architecture, activation="swiglu", num_heads=4, num_kv_heads=2, head_width=6, vocabulary=30)
    profile = profile_of(config, Layout(tp=tp, recompute="full"))
    width, query, key = 16, 4 * 6 // tp, 2 * 6 // tp
    self_attention, ffn = width * (query + 2 * key) + query * width, 3 * width * 24 // tp
    source, target = 2 * 7, 2 * 5
    cross = 2 * (target * 2 * width * query + source * 2 * width * key) if config.has_cross_attention else 0
    if config.has_encoder:
        assert profile.encoder_block.backward_weight == 2 * source * (self_attention + ffn)
    if config.has_decoder:
        assert profile.decoder_block.backward_weight == 2 * target * (self_attention + ffn) + cross
    predicted = target if config.has_decoder else source
    assert profile.head == Work(*[float(2 * predicted * width * 30 // tp)] * 3)


def test_recomputation_stands_with_the_inputs_half() -> None:
    config = small_config("encoder_decoder")
    none, full = (profile_of(config, Layout(recompute=choice)) for choice in ("none", "full"))
    again = full.decoder_block.backward_input - none.decoder_block.backward_input
    assert again == none.decoder_block.forward
    assert full.decoder_block.backward_weight == none.decoder_block.backward_weight


def test_features_have_no_gradient_of_their_input() -> None:
    work = profile_of(named_model("tiny-speech")).encoder_embedding
    assert (work.forward > 0, work.backward_input) == (True, 0.0)
    assert work.backward_weight == work.forward


def test_looking_tokens_up_is_free_and_a_side_that_is_not_there_costs_nothing() -> None:
    profile = profile_of(small_config("decoder_only"))
    assert profile.decoder_embedding == profile.encoder_block == profile.encoder_embedding == Work()


def test_stages_add_up_to_the_model_with_every_end_once() -> None:
    config = small_config("encoder_decoder", num_encoder_blocks=3, num_decoder_blocks=4)
    profile = seconds(config, encoder_stage=Work(), decoder_stage=Work())
    expected = (
        profile.encoder_embedding
        + 3 * profile.encoder_block
        + profile.decoder_embedding
        + 4 * profile.decoder_block
        + profile.head
    )
    for cut in ((), (3,), (1, 2, 5), (1, 2, 3, 4, 5, 6)):
        total = sum((profile.stage(stage) for stage in stages_of(config, cut)), start=Work())
        assert total.total == pytest.approx(expected.total)


def test_a_stage_pays_for_each_side_that_it_has_blocks_of() -> None:
    config = small_config("encoder_decoder", num_encoder_blocks=2, num_decoder_blocks=2)
    profile = seconds(config, head=Work(), encoder_embedding=Work(), decoder_embedding=Work())
    first, both, last = (profile.stage(stage) for stage in stages_of(config, (1, 3)))
    assert first == profile.encoder_stage + profile.encoder_block
    assert both.total == pytest.approx((first + profile.decoder_stage + profile.decoder_block).total)
    assert last == profile.decoder_stage + profile.decoder_block


@pytest.mark.parametrize(("name", "positions"), [("source", 8), ("memory", 8), ("target", 6)])
def test_bytes_that_cross_are_those_of_the_padded_stream(name: Carried, positions: int) -> None:
    profile = profile_of(small_config("encoder_decoder"))
    unpadded = 7 if name != "target" else 5
    assert profile.carried_bytes(name) == unpadded * 2 * 16 * 4
    sharded = profile_of(small_config("encoder_decoder"), Layout(tp=2, sp=True))
    assert sharded.carried_bytes(name) == positions // 2 * 2 * 16 * 4
    costed = seconds(small_config("encoder_decoder"))
    assert costed.message((name,)) == 2e-5 + 3e-10 * costed.carried_bytes(name)
    assert costed.message(()) == 0.0


# ---- whose profile --------------------------------------------------------------------------------------------------

OURS = named_model("t5-small")


@pytest.mark.parametrize(
    ("config", "layout", "changes", "message"),
    [
        (OURS.replace(width=256), Layout(), {}, "width = 512, and t5-small has 256"),
        (named_model("t5-base"), Layout(), {}, "width = 512, and t5-base has 768"),
        (named_model("gpt2"), Layout(), {}, "architecture = 'encoder_decoder', and gpt2 has 'decoder_only'"),
        (OURS, Layout(tp=2), {}, "tp = 1, and the layout has 2"),
        (OURS, Layout(recompute="full"), {}, "recompute = 'none', and the layout has 'full'"),
        (OURS, Layout(), {"source_length": 8}, "source_length = 7, and the step has 8"),
        (OURS, Layout(), {"target_length": 7}, "target_length = 5, and the step has 7"),
        (OURS, Layout(), {"dtype_bytes": 2}, "dtype_bytes = 4, and the step has 2"),
        (OURS, Layout(), {"num_sequences": 3}, "2 sequences a microbatch, and the step has 3"),
        (OURS, Layout(microbatches=2), {"num_sequences": 6}, "2 sequences a microbatch, and the step has 3"),
    ],
)
def test_a_profile_of_something_else_is_refused_in_one_line(
    config: ModelConfig, layout: Layout, changes: dict[str, Any], message: str
) -> None:
    shape = dataclasses.replace(StepShape(num_sequences=2, source_length=7, target_length=5), **changes)
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the whole line is compared
        profile_of(OURS).check(config, layout, shape)
    expected = f"the profile of t5-small is another's: it has {message}; make one with twinshard profile"
    assert str(refusal.value) == expected


def test_a_profile_of_sharded_rows_does_not_fit_whole_ones_unless_there_is_one_rank() -> None:
    sharded, whole = Layout(tp=2), Layout(tp=2, vocabulary="whole")
    with pytest.raises(ValueError, match="it has vocabulary = 'sharded', and the layout has 'whole'"):
        profile_of(OURS, sharded).check(OURS, whole)
    profile_of(OURS, whole).check(OURS, whole)
    profile_of(OURS, sharded.replace(tp=1)).check(OURS, whole.replace(tp=1))


def test_a_profile_fits_its_own_model_under_any_name_and_any_pipeline() -> None:
    layout = Layout(pp=2, microbatches=4, cut="flops")
    shape = StepShape(num_sequences=7, source_length=7, target_length=5)
    profile_of(OURS).check(OURS.replace(name="other"), layout, shape)


def test_a_cut_with_the_profile_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the profile of t5-small is another's"):
        plan(named_model("t5-base"), Layout(pp=2, cut="flops"), profile_of(OURS))


def test_a_cut_by_times_wants_seconds_and_one_by_flops_takes_them() -> None:
    layout = Layout(pp=2, cut="times")
    with pytest.raises(ValueError, match=r"^cut = 'times' needs measured seconds, the profile has FLOPs"):
        plan(OURS, layout, profile_of(OURS))
    measured = seconds(OURS, encoder_block=Work(1.0, 1.0, 1.0), decoder_block=Work(1e-3, 0.0, 0.0))
    by_times = plan(OURS, layout, measured)
    by_flops = plan(OURS, layout.replace(cut="flops"), measured)
    assert by_times.stages[0].last < OURS.num_encoder_blocks < by_flops.stages[0].last
    assert by_flops.stages == plan(OURS, layout.replace(cut="flops"), profile_of(OURS)).stages


def test_a_block_without_cost_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^decoder_block costs nothing; a block of t5-small has work to do$"):
        seconds(OURS, decoder_block=Work())


# ---- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5-small", "gpt2", "bert-base", "tiny-speech"])
def test_a_profile_comes_back_from_its_file(tmp_path: Path, name: str) -> None:
    config = named_model(name)
    lacking = {f"{side}_{part}": Work() for side in ("encoder", "decoder") for part in ("embedding", "stage", "block")}
    lacking = {key: work for key, work in lacking.items() if not getattr(config, f"has_{key.partition('_')[0]}")}
    layout = Layout(tp=2, vocabulary="whole", recompute="full")
    for profile in (profile_of(config, layout), seconds(config, **lacking)):
        save(profile, tmp_path / "profile.toml")
        again = load(tmp_path / "profile.toml")
        assert again == profile
        assert again.machine == profile.machine


def test_a_file_that_does_not_tell_the_vocabulary_has_it_sharded(tmp_path: Path) -> None:
    file = tmp_path / "profile.toml"
    save(profile_of(OURS, Layout(tp=2)), file)
    file.write_text(file.read_text().replace('vocabulary = "sharded"\n', ""))
    assert load(file) == profile_of(OURS, Layout(tp=2))


def test_a_file_names_the_unit_of_every_cost(tmp_path: Path) -> None:
    save(seconds(OURS), tmp_path / "profile.toml")
    text = (tmp_path / "profile.toml").read_text()
    costs = text.split("[encoder_embedding]")[1].split("[machine]")[0]
    keys = [line.partition(" = ")[0] for line in costs.splitlines() if " = " in line]
    assert len(keys) == 3 * len(PIECES) + 2
    assert all("seconds" in key for key in keys)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "format = 2", "format = 2; this version reads profiles of format 1"),
        ("format = 1", "", "format = None; this version reads profiles of format 1"),
        ('unit = "seconds"', 'unit = "hours"', "unit = 'hours'; choose one of flops, seconds"),
        ("[message]", "[massage]", "profile: unknown key massage; known are"),
        ("latency_seconds", "latency", "message: unknown key latency; known are latency_seconds, seconds_per_byte"),
        ("latency_seconds = 2e-05", "", "message lacks latency_seconds"),
        ("seconds_per_byte = 3e-10", "seconds_per_byte = -1", "seconds_per_byte = -1; a cost is a number, 0 or more"),
        ("forward_seconds = 0.001\n", 'forward_seconds = "1"\n', "encoder_embedding: forward_seconds = '1'; a cost is"),
        ("forward_seconds = 0.001\n", "forward_seconds = inf\n", "forward_seconds = inf; a cost is a number"),
        ("tp = 1", "tp = true", "tp = True; it must be a whole number"),
        ("sp = false", "sp = 0", "sp = 0; it must be true or false"),
        ('vocabulary = "sharded"', 'vocabulary = "half"', "vocabulary = 'half'; choose one of sharded, whole"),
        ('recompute = "none"', 'recompute = "some"', "recompute = 'some'; choose one of none, selective, full"),
        ("source_length = 7", "source_length = 9999", "t5-small reads 1 to 512 source positions"),
        ("width = 512", "width = 500", "model: width 500 over 8 heads"),
        ("width = 512", 'width = "512"', "model: "),
        ("num_sequences = 2", "num_sequences = 0", "num_sequences = 0; a step has at least 1 sequence"),
        ("[layout]", "[layout", "Expected ']'"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "profile.toml"
    # Without its head width a config tells whether its numbers agree.
    save(seconds(OURS), file)
    text = file.read_text().replace(f"head_width = {OURS.head_width}\n", "")
    assert old in text
    file.write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError) as refusal:  # noqa: PT011 - the beginning and the message are compared
        load(file)
    assert str(refusal.value).startswith(f"{file}: ")
    assert message in str(refusal.value)


def test_a_missing_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^cannot read .*nothing.toml: No such file or directory$"):
        load(tmp_path / "nothing.toml")


def test_ranks_are_told_by_the_one_with_most_vocabulary_rows() -> None:
    made = plan(small_config("decoder_only", vocabulary=29), Layout(tp=4))
    rows = [share.vocabulary("head.weight") for share in shares(made)]
    assert profile_of(made.config, made.layout).head.forward == 2 * 2 * 5 * 16 * max(rows)
