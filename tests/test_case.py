"""Does a small relative stand for its large model, and does a case refuse what cannot be compared?"""

import dataclasses
import itertools

import pytest

from launch.case import Case, case_of, small_relative
from models.config import ModelConfig
from models.costs import parameter_counts
from models.named import MODEL_NAMES, named_model
from parallel.figures import StepShape
from parallel.layouts import Layout, NamedCut
from parallel.plan import Plan
from parallel.plans import plan
from parallel.profile import Profile

LAYOUTS = (
    Layout(),
    Layout(tp=2, sp=True, pp=2, microbatches=2),
    Layout(tp=8, memory_gather="per_block"),
    Layout(pp=4, cut="aligned", microbatches=3, schedule="gpipe"),
    Layout(pp=3, cut=(1, 2)),
    Layout(tp=4, pp=4, dp=2),
    Layout(pp=2, chunks=2, placement="interleaved", schedule="interleaved", cut="aligned", microbatches=2),
    Layout(pp=2, chunks=2, placement="folded", schedule="interleaved", microbatches=2),
    Layout(pp=2, chunks=2, placement="v", schedule="zb_v", cut=(1, 2, 3)),
)
SIZES = {
    "name",
    "width",
    "num_heads",
    "num_kv_heads",
    "head_width",
    "ffn_width",
    "num_encoder_blocks",
    "num_decoder_blocks",
    "vocabulary",
    "source_vocabulary",
    "max_length",
    "relative_buckets",
    "relative_max_distance",
    "feature_width",
    "dropout",
    "attention_dropout",
    "ffn_dropout",
}
"""Fields in which a small relative may differ."""


def is_legal(config: ModelConfig, layout: Layout) -> bool:
    try:
        plan(config, layout)
    except ValueError:
        return False
    return True


PAIRS = [
    (named_model(name), layout)
    for name, layout in itertools.product(MODEL_NAMES, LAYOUTS)
    if is_legal(named_model(name), layout)
]


def treatment(made: Plan) -> set[tuple[object, ...]]:
    """How kinds of modules are treated, whatever their sizes and numbers of blocks."""
    told: set[tuple[object, ...]] = set()
    for entry in made.entries:
        kind = ".".join("*" if part.isdigit() else part for part in entry.module.split("."))
        replicas = tuple(part.replicas(made.layout.tp) for part in entry.parts)
        told.add((kind, entry.style, entry.stream, entry.entering, entry.leaving, replicas))
    return told


def kinds(made: Plan) -> list[tuple[object, ...]]:
    """What each stage has of both sides, and what enters and leaves it."""
    middle = made.config.num_encoder_blocks
    return [(s.first < middle, s.last > middle, s.inputs, s.outputs) for s in made.stages]


@pytest.mark.parametrize(("config", "layout"), PAIRS, ids=lambda given: getattr(given, "label", None) or given.name)
def test_a_small_relative_has_the_structure_of_its_model(config: ModelConfig, layout: Layout) -> None:
    small, cut = small_relative(config, layout)
    for field in dataclasses.fields(ModelConfig):
        if field.name not in SIZES:
            assert getattr(small, field.name) == getattr(config, field.name), field.name
    assert small.num_heads // small.num_kv_heads == config.num_heads // config.num_kv_heads
    assert (small.num_heads * small.head_width == small.width) == (config.num_heads * config.head_width == config.width)
    assert small.vocabulary % layout.tp == config.vocabulary % layout.tp
    assert (small.feature_width > 0) == (config.feature_width > 0)
    assert cut.replace(cut="even") == layout.replace(cut="even")
    large_plan, small_plan = plan(config, layout), plan(small, cut)
    assert treatment(small_plan) == treatment(large_plan)
    assert kinds(small_plan) == kinds(large_plan)
    assert [shared.ranks for shared in small_plan.shared] == [shared.ranks for shared in large_plan.shared]
    for side in ("num_encoder_blocks", "num_decoder_blocks"):
        assert getattr(small, side) >= min(2, getattr(config, side))
    assert parameter_counts(small).total < 2_000_000


@pytest.mark.parametrize("cut", ["parameters", "flops", "memory"])
def test_a_small_relative_is_cut_where_costs_cut_its_model(cut: NamedCut) -> None:
    config = named_model("t5-base")
    layout = Layout(pp=4, cut=cut, microbatches=4, schedule="list")
    profile = Profile.of_flops(config, layout, StepShape(num_sequences=4, source_length=512, target_length=32))
    case = case_of(config, layout, profile)
    assert kinds(plan(case.config, case.layout, case.profile)) == kinds(plan(config, layout, profile))
    with pytest.raises(ValueError, match=f"^cut = '{cut}' balances what blocks cost, and there is no profile"):
        case_of(config, layout)


def test_a_layout_that_the_model_itself_forbids_is_refused() -> None:
    with pytest.raises(ValueError, match="40 heads over tp=16"):
        case_of(named_model("llama-2-13b"), Layout(tp=16))


def test_the_case_of_a_model_has_a_ragged_end_and_odd_lengths() -> None:
    case = case_of(named_model("t5-small"), Layout(dp=2, microbatches=3))
    assert case.num_sequences == 2 * 5
    assert case.data == "ragged"
    assert case.source_length % 2 == case.target_length % 2 == 1


@pytest.mark.parametrize("data", ["full", "ragged"])
def test_a_case_is_read_back_as_it_was_written(data: str) -> None:
    layout = Layout(tp=2, sp=True, pp=3, cut=(1, 3), microbatches=2)
    case = dataclasses.replace(case_of(named_model("tiny-t5"), layout), data=data)  # type: ignore[arg-type]
    assert Case.from_dict(case.to_dict()) == case


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": named_model("bert-base")}, "bert-base drops out"),
        ({"data": "random"}, "data = 'random'; choose one of full, ragged, text"),
        ({"data": "text", "config": named_model("tiny-speech")}, "tiny-speech reads features"),
        ({"data": "text", "config": named_model("tiny-decoder").replace(vocabulary=11)}, "text needs 264 rows"),
        ({"layout": Layout(pp=5)}, "pp = 5 stages over 4 blocks"),
        ({"layout": Layout(pp=2, cut=(4,))}, "cuts must rise"),
        ({"layout": Layout(dp=4)}, "6 sequences over dp=4"),
    ],
)
def test_a_case_that_cannot_be_compared_is_refused(changes: dict[str, object], message: str) -> None:
    fields = {
        "name": "case",
        "config": named_model("tiny-decoder"),
        "layout": Layout(),
        "num_sequences": 6,
        "source_length": 7,
        "target_length": 9,
    }
    with pytest.raises(ValueError, match=message):
        Case(**{**fields, **changes})  # type: ignore[arg-type]
