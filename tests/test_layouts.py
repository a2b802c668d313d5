"""Does a layout say what is wrong before any process starts, and survive being written down?"""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.layouts import Layout, microbatch_sizes
from parallel.plans import plan
from tests.small_models import small_config


def told(message: str) -> str:
    """A whole message as a pattern."""
    return f"^{re.escape(message)}$"


# ---- a layout by itself -------------------------------------------------------------------------------------------


ROWS, OR_WHOLE = "every rank needs a row; try", ", or vocabulary = 'whole'"
CUTS = "choose one of even, aligned, parameters, flops, times, memory or a list of first blocks"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp": 0}, "tp = 0; it must be at least 1"),
        ({"pp": -1}, "pp = -1; it must be at least 1"),
        ({"dp": 0}, "dp = 0; it must be at least 1"),
        ({"microbatches": 0}, "microbatches = 0; it must be at least 1"),
        ({"tp": "2"}, "tp = '2'; it must be a whole number"),
        ({"dp": 2.0}, "dp = 2.0; it must be a whole number"),
        ({"microbatches": True}, "microbatches = True; it must be a whole number"),
        ({"sp": "yes", "tp": 2}, "sp = 'yes'; it must be true or false"),
        ({"schedule": "zero"}, "schedule = 'zero'; choose one of gpipe, 1f1b, interleaved, zb_h1, zb_h2, zb_v, list"),
        ({"memory_gather": "never"}, "memory_gather = 'never'; choose one of per_block, per_stage"),
        (
            {"gradient_bucket_bytes": 8},
            "gradient_bucket_bytes = 8 sums over the dp ranks: it needs dp >= 2, got dp = 1",
        ),
        (
            {"gradient_bucket_bytes": -1, "dp": 2},
            "gradient_bucket_bytes = -1; it must be at least 0, which is one sum a step",
        ),
        ({"gradient_bucket_bytes": 0.5, "dp": 2}, "gradient_bucket_bytes = 0.5; it must be a whole number"),
        (
            {"gradient_bucket_bytes": 8, "dp": 2, "zero": 1},
            "gradient_bucket_bytes = 8 sums whole gradients: it needs zero = 0, got zero = 1",
        ),
        ({"saved_input": "half", "tp": 2, "sp": True}, "saved_input = 'half'; choose one of shard, whole"),
        ({"vocabulary": "dealt"}, "vocabulary = 'dealt'; choose one of sharded, whole"),
        (
            {"vocabulary": "whole", "tp": 2, "sp": True},
            (
                "vocabulary = 'whole' needs whole sequences at the head, and sp shards them: "
                "use sp = false, or vocabulary = 'sharded'"
            ),
        ),
        ({"recompute": "all"}, "recompute = 'all'; choose one of none, selective, full"),
        ({"attention": "flash"}, "attention = 'flash'; choose one of fused, materialised"),
        (
            {"cut": "equal"},
            f"cut = 'equal'; {CUTS}",
        ),
        (
            {"cut": 3, "pp": 2},
            f"cut = 3; {CUTS}",
        ),
        (
            {"cut": [1.5], "pp": 2},
            f"cut = [1.5]; {CUTS}",
        ),
        ({"cut": [1, 2], "pp": 2}, "cut [1, 2] makes 3 stages, but pp = 2; give 1 cuts"),
        ({"cut": [], "pp": 2}, "cut [] makes 1 stages, but pp = 2; give 1 cuts"),
        (
            {"chunks": 2, "pp": 2},
            "placement 'linear' with chunks = 2: it has one chunk a rank; try chunks = 1, or placement = 'interleaved'",
        ),
        (
            {"placement": "v", "chunks": 2, "pp": 2},
            (
                "schedule '1f1b' cannot run on placement 'v': it needs placement linear; "
                "schedules for 'v' are gpipe, zb_v, list"
            ),
        ),
        ({"transport": "air"}, "transport = 'air'; choose one of relay, direct, kv"),
        ({"cp": 0}, "cp = 0; it must be at least 1"),
        ({"zero": 4, "dp": 2}, "zero = 4; choose 0 (off), 1, 2 or 3"),
        ({"zero": "1", "dp": 2}, "zero = '1'; it must be a whole number"),
        ({"zero": 1}, "zero = 1 shards over the dp ranks: it needs dp >= 2, got dp = 1"),
        ({"sp": True}, "sp shards the sequence over the tp ranks: it needs tp >= 2, got tp = 1"),
    ],
)
def test_a_contradiction_is_one_clear_line(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=told(message)):
        Layout.from_dict(fields)


def test_unknown_keys_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^unknown layout keys micro_batches, vpp; known are tp, pp, dp, cp, sp, "):
        Layout.from_dict({"tp": 2, "vpp": 1, "micro_batches": 2})


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    tp, pp, dp = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    zero = draw(st.integers(0, 3)) if dp > 1 else 0
    is_whole = draw(st.booleans())
    explicit = st.lists(st.integers(1, 20), min_size=pp - 1, max_size=pp - 1).map(tuple)
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=draw(st.integers(1, 3)),
        zero=zero,
        gradient_bucket_bytes=draw(st.sampled_from([0, 1, 4096])) if dp > 1 and not zero else 0,
        sp=tp > 1 and not is_whole and draw(st.booleans()),
        microbatches=draw(st.integers(1, 32)),
        schedule=draw(st.sampled_from(["gpipe", "1f1b"])),
        cut=draw(st.one_of(st.sampled_from(["even", "aligned"]), explicit)),
        memory_gather=draw(st.sampled_from(["per_block", "per_stage"])),
        saved_input=draw(st.sampled_from(["shard", "whole"])),
        vocabulary="whole" if is_whole else "sharded",
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        attention=draw(st.sampled_from(["fused", "materialised"])),
    )


@settings(deadline=None)
@given(layouts())
def test_a_layout_survives_being_written_and_read(layout: Layout) -> None:
    assert Layout.from_dict(layout.to_dict()) == layout


@settings(deadline=None)
@given(layouts(), layouts())
def test_layouts_have_equal_labels_only_if_they_are_equal(first: Layout, second: Layout) -> None:
    assert (first.label == second.label) == (first == second)


@settings(deadline=None)
@given(layouts())
def test_every_single_change_shows_in_the_label(layout: Layout) -> None:
    changed = [
        layout.replace(dp=layout.dp + 1),
        layout.replace(tp=layout.tp + 1),
        layout.replace(cp=layout.cp + 1),
        layout.replace(microbatches=layout.microbatches + 1),
        layout.replace(schedule="gpipe" if layout.schedule == "1f1b" else "1f1b"),
        layout.replace(memory_gather="per_block" if layout.memory_gather == "per_stage" else "per_stage"),
        layout.replace(saved_input="whole" if layout.saved_input == "shard" else "shard"),
        layout.replace(recompute="full" if layout.recompute != "full" else "selective"),
        layout.replace(attention="fused" if layout.attention == "materialised" else "materialised"),
        layout.replace(cut="even" if layout.cut != "even" else "aligned"),
    ]
    if not layout.sp:
        changed.append(layout.replace(vocabulary="whole" if layout.vocabulary == "sharded" else "sharded"))
    if layout.tp > 1 and layout.vocabulary == "sharded":
        changed.append(layout.replace(sp=not layout.sp))
    if layout.dp > 1:
        changed.append(layout.replace(zero=(layout.zero + 1) % 4, gradient_bucket_bytes=0))
        changed.append(layout.replace(zero=0, gradient_bucket_bytes=layout.gradient_bucket_bytes + 1))
    assert layout.label not in {other.label for other in changed}


def test_the_world_is_the_product_of_the_degrees() -> None:
    layout = Layout(tp=2, pp=3, dp=4)
    assert layout.world_size == 24
    layout.check_world(24)
    message = "tp 2 x pp 3 x dp 4 x cp 1 = 24 ranks, but the world is 8; start 24 processes or change a degree"
    with pytest.raises(ValueError, match=told(message)):
        layout.check_world(8)


# ---- a layout and a model -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        (
            Layout(tp=4),
            {"num_heads": 6, "num_kv_heads": 6, "width": 24},
            "6 heads over tp=4: tp must divide 6; try 1, 2, 3, 6",
        ),
        (
            Layout(tp=3),
            {"num_heads": 6, "num_kv_heads": 2, "width": 24},
            "2 KV heads over tp=3: one must divide the other; try tp = 1, 2",
        ),
        (
            Layout(tp=4),
            {"ffn_width": 26},
            "ffn width 26 over tp=4: tp must divide it; the nearest width that works is 24",
        ),
        (Layout(tp=4), {"ffn_width": 1}, "ffn width 1 over tp=4: tp must divide it; the nearest width that works is 4"),
        (Layout(tp=4), {"vocabulary": 3}, f"vocabulary 3 over tp=4: {ROWS} tp <= 3{OR_WHOLE}"),
        (
            Layout(tp=4),
            {"source_vocabulary": 2},
            f"vocabulary 2 over tp=4: {ROWS} tp <= 2{OR_WHOLE}",
        ),
        (Layout(pp=6), {}, "pp = 6 stages over 5 blocks: every stage needs a block; try pp <= 5"),
        (
            Layout(cut="aligned"),
            {},
            "cut = 'aligned' needs pp >= 2: an encoder stage and a decoder stage; try cut = 'even'",
        ),
    ],
)
def test_a_model_that_a_layout_cannot_partition_is_refused_before_it_is_planned(
    layout: Layout, changes: dict[str, object], message: str
) -> None:
    config = small_config("encoder_decoder", **changes)
    with pytest.raises(ValueError, match=told(message)):
        layout.check_model(config)
    with pytest.raises(ValueError, match=told(message)):
        plan(config, layout)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_fewer_kv_heads_than_ranks_are_fine(tp: int) -> None:
    Layout(tp=tp).check_model(small_config("decoder_only", num_kv_heads=1))


# ---- a layout and a batch -----------------------------------------------------------------------------------------


def test_sequences_that_dp_does_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=told("7 sequences over dp=2: dp must divide them; try 8")):
        Layout(dp=2).check_sequences(7)


def test_too_few_sequences_for_the_microbatches_of_each_rank_are_refused() -> None:
    Layout(dp=2, microbatches=2).check_sequences(6)
    message = "2 sequences do not fill 3 microbatches of 1: try 3 sequences or 2 microbatches"
    with pytest.raises(ValueError, match=told(message)):
        Layout(dp=2, microbatches=3).check_sequences(4)


def test_microbatches_written_out() -> None:
    assert microbatch_sizes(6, 3) == (2, 2, 2)
    assert microbatch_sizes(7, 3) == (3, 3, 1)
    assert microbatch_sizes(5, 1) == (5,)


def test_a_microbatch_that_would_be_empty_is_refused_with_numbers_that_work() -> None:
    message = "8 sequences do not fill 5 microbatches of 2: try 9 sequences or 4 microbatches"
    with pytest.raises(ValueError, match=told(message)):
        microbatch_sizes(8, 5)
    assert len(microbatch_sizes(9, 5)) == 5
    assert len(microbatch_sizes(8, 4)) == 4


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 40))
def test_microbatches_hold_every_sequence_and_only_the_last_is_ragged(num_sequences: int, microbatches: int) -> None:
    try:
        sizes = microbatch_sizes(num_sequences, microbatches)
    except ValueError as error:
        tried = list(map(int, re.findall(r"\d+", str(error))))
        assert microbatch_sizes(tried[3], microbatches)
        assert microbatch_sizes(num_sequences, tried[4])
        return
    assert sum(sizes) == num_sequences
    assert len(sizes) == microbatches
    assert len(set(sizes[:-1])) <= 1
    assert 1 <= sizes[-1] <= sizes[0]
