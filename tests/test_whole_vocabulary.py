"""Is a vocabulary that every tp rank holds whole that of one process, and what does it cost and save?"""

import pytest

from launch.experiment import effective
from launch.layout_tables import LayoutTable
from launch.machine_files import load_machine
from models.config import Architecture
from parallel.account import account
from parallel.figures import StepShape
from parallel.flops import model_flops
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.predict import predict
from parallel.rank_bytes import RankBytes
from parallel.search import search
from parallel.search_answer import BEST
from parallel.search_space import Question
from parallel.step_time import step_time
from tests.engine_steps import POST_NORM, RELATIVE, TIED, engine_case, proved, tying
from tests.small_models import ARCHITECTURES, small_config
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

WHOLE = Layout(tp=2, vocabulary="whole", microbatches=3)
UNTIED = {**RELATIVE, "tying": "none", "head_scale": True}
CHUNKS = WHOLE.replace(pp=2, schedule="zb_v", placement="v", chunks=2)
SHAPE = StepShape(num_sequences=6, source_length=8, target_length=6, dtype_bytes=4)

# ---- equal to one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "layout", "changes"),
    [
        ("decoder_only", WHOLE, TIED),
        ("encoder_only", WHOLE, UNTIED),
        ("encoder_decoder", WHOLE.replace(recompute="full", memory_gather="per_block"), TIED),
        ("encoder_decoder", WHOLE, {**POST_NORM, "feature_width": 6, "tying": "none"}),
    ],
    ids=["tied", "untied", "recomputed", "features"],
)
def test_two_ranks_equal_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], two_ranks: Ranks
) -> None:
    parity = two_ranks.run(proved, engine_case("native", architecture, layout, changes=tying(architecture, changes)))[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


@pytest.mark.parametrize(
    ("architecture", "layout", "changes"),
    [
        ("decoder_only", WHOLE.replace(tp=4), {**UNTIED, "vocabulary": 3}),
        ("encoder_decoder", WHOLE.replace(tp=4), TIED),
        ("decoder_only", WHOLE.replace(pp=2, schedule="zb_h1"), TIED),
        ("encoder_only", WHOLE.replace(pp=2, schedule="gpipe"), {**POST_NORM, "tying": "head"}),
        ("encoder_decoder", WHOLE.replace(pp=2, cut=(2,)), TIED),
        ("encoder_decoder", CHUNKS, {**UNTIED, "vocabulary": 11}),
        ("encoder_decoder", WHOLE.replace(dp=2, zero=1), TIED),
        ("encoder_only", WHOLE.replace(dp=2), UNTIED),
    ],
    ids=["fewer rows than ranks", "four", "split", "stages", "tied stages", "chunks", "zero1", "replicas"],
)
def test_four_ranks_equal_one_process(
    architecture: Architecture, layout: Layout, changes: dict[str, object], four_ranks: Ranks
) -> None:
    case = engine_case("native", architecture, layout, changes=tying(architecture, changes))
    parity = four_ranks.run(proved, case)[0]
    assert parity.failures == ()
    assert parity.worst_error <= EXACT_RTOL


# ---- what it costs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tying", ["none", "all"])
def test_every_rank_holds_all_rows_and_multiplies_all_of_them(tying: str) -> None:
    config = small_config("encoder_decoder", tying=tying, head_bias=True)
    sharded, whole = (predict(plan(config, Layout(tp=4, vocabulary=held)), SHAPE) for held in ("sharded", "whole"))
    assert [rank.num_ranks for rank in whole] == [4]
    (rank,) = whole
    matrices = {"none": 3, "all": 1}[tying]
    elsewhere = config.vocabulary * (matrices * config.width + 1)
    held = sum(one.num_ranks * one.figures.parameters.total for one in sharded)
    assert 4 * rank.figures.parameters.total == held + 3 * elsewhere
    flops = sum(one.num_ranks * one.figures.flops.total for one in sharded)
    product = 2 * SHAPE.num_sequences * SHAPE.target_length * config.width * config.vocabulary
    assert 4 * rank.figures.flops.total == flops + 3 * 3 * product


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_mathematics_needs_is_dealt_over_the_ranks_all_the_same(architecture: Architecture) -> None:
    config = small_config(architecture, head_transform=True)
    shape = StepShape(
        num_sequences=4, source_length=8 * config.has_encoder, target_length=6 * config.has_decoder, dtype_bytes=4
    )
    for layout in (Layout(tp=4, vocabulary="whole"), Layout(tp=2, pp=2, vocabulary="whole")):
        ranks = account(plan(config, layout), shape)
        assert 3 * sum(one.prediction.num_ranks * one.model_forward_flops for one in ranks) == model_flops(
            config, shape
        )


def test_with_one_rank_either_vocabulary_is_the_same() -> None:
    config = small_config("encoder_decoder")
    sharded, whole = (predict(plan(config, Layout(vocabulary=held)), SHAPE) for held in ("sharded", "whole"))
    assert sharded == whole


# ---- as an option ---------------------------------------------------------------------------------------------------


def test_an_axis_of_an_experiment_leaves_out_what_sp_forbids_and_one_rank_makes_no_difference_to() -> None:
    table = {"tp": [1, 2], "sp": [False, True], "vocabulary": ["sharded", "whole"]}
    config = small_config("decoder_only")
    layouts = {effective(layout, config) for layout in LayoutTable.read(table, "layouts 1").layouts()}
    assert layouts == {Layout(), Layout(tp=2), Layout(tp=2, sp=True), Layout(tp=2, vocabulary="whole")}


def asked(**fixed: object) -> Question:
    """Of fewer rows than ranks, which only whole vocabularies leave to every tp."""
    config = small_config("decoder_only", vocabulary=3)
    machine = load_machine("a100")
    return Question(config=config, machine=machine, num_devices=4, num_sequences=4, target_length=6, fixed=fixed)


def test_a_search_tries_it_where_it_is_given_and_then_nothing_else() -> None:
    free, given = asked().frames(), list(asked(vocabulary="whole").frames())
    assert {(frame.tp, frame.vocabulary) for frame in free} == {(1, "sharded"), (2, "sharded")}
    assert {(frame.tp, frame.sp, frame.vocabulary) for frame in given} == {
        (1, False, "sharded"),
        (2, False, "whole"),
        (4, False, "whole"),
    }
    with pytest.raises(ValueError, match="vocabulary = 'whole' needs whole sequences at the head"):
        asked(vocabulary="whole", sp=True)


def test_a_search_finds_what_a_step_with_it_takes() -> None:
    question = asked(vocabulary="whole", tp=4)
    found = search(question).found[BEST]
    layout, shape = found.layout, question.shape(1)
    assert layout.vocabulary == "whole"
    assert found.time.step_seconds == step_time(question.machine, question.config, layout, shape).step_seconds
    assert found.fullest_bytes == max(rank.peak_bytes for rank in predict(plan(question.config, layout), shape))


def test_bytes_of_ranks_are_those_of_either_vocabulary_whichever_was_asked_for_first() -> None:
    config = asked().config.replace(vocabulary=30)
    bytes_of = RankBytes(config=config, source_length=0, target_length=6, dtype_bytes=2)
    shape = StepShape(num_sequences=2, target_length=6, dtype_bytes=2)
    for layout in (Layout(tp=2), Layout(tp=2, vocabulary="whole")):
        predicted = max(rank.peak_bytes for rank in predict(plan(config, layout), shape))
        assert bytes_of.fullest(layout, (), 2) == (predicted, 0)
