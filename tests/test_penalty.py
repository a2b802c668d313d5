"""What does an encoder-decoder lose on a pipeline, and is the table that tells it what the code computes?"""

import itertools
import math

import pytest
from click.testing import CliRunner

from launch.penalty import penalty_command, study
from models.config import ModelConfig
from models.named import named_model
from parallel.annealing import several
from parallel.candidates import CutKind, listed, named
from parallel.cuts import best, order
from parallel.figures import StepShape
from parallel.grain import least_dealt
from parallel.layouts import Layout
from parallel.line import Grained, Line
from parallel.partition import crossing
from parallel.penalty import COLUMNS, MICROBATCHES_PER_RANK, joined, rows
from parallel.placement import Placement
from parallel.profile import Profile
from parallel.schedule import check_rows
from parallel.twin_cases import cases, counted, counted_blocks, measured
from results import penalty as stored
from tests.small_models import small_config

T5 = named_model("t5-large")
SHORT = ((2, 6), (4, 4))


def profile(config: ModelConfig, source: int, target: int) -> Profile:
    return Profile.of_flops(config, Layout(), StepShape(num_sequences=1, source_length=source, target_length=target))


def small(num_encoder_blocks: int = 6, num_decoder_blocks: int = 6) -> ModelConfig:
    return small_config("encoder_decoder", num_encoder_blocks=num_encoder_blocks, num_decoder_blocks=num_decoder_blocks)


# ---- the line -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grain", ["block", "sublayer"])
def test_atoms_cost_together_what_the_model_costs(grain: Grained) -> None:
    line = Line(profile=profile(small(), 7, 5), grain=grain)
    whole = line.slice(0, line.num_atoms)
    for part in ("forward", "backward_input", "backward_weight"):
        assert getattr(whole, part) == pytest.approx(getattr(line.profile.model, part), rel=1e-12)
    assert line.num_atoms == (12 if grain == "block" else 2 * 6 + 3 * 6 + 1)


def test_sublayers_of_a_block_cost_together_what_the_block_costs() -> None:
    made = profile(small(), 7, 5)
    fine, whole = Line(profile=made, grain="sublayer"), Line(profile=made)
    for block in range(1, 6):
        assert fine.slice(2 * block, 2 * block + 2).total == pytest.approx(whole.slice(block, block + 1).total)
        first = fine.boundary + 3 * block
        last = 6 + block + 1 if block < 5 else 12
        assert fine.slice(first, first + 3 + (block == 5)).total == pytest.approx(whole.slice(6 + block, last).total)


def test_what_crosses_a_cut_between_blocks_is_what_edges_carry() -> None:
    config = small()
    line, fine = Line(profile=profile(config, 7, 5)), Line(profile=profile(config, 7, 5), grain="sublayer")
    for block in range(1, 12):
        atom = 2 * block if block <= 6 else fine.boundary + 3 * (block - 6)
        assert line.carried(block) == fine.carried(atom) == crossing(config, block)
    assert fine.carried(fine.num_atoms - 1) == ("target",)


def test_the_cut_of_a_line_of_blocks_is_that_of_a_layout() -> None:
    config = small(7, 5)
    made = profile(config, 3, 9)
    for placement, chunks in (("linear", 1), ("interleaved", 2), ("v", 2), ("folded", 2)):
        placed: Placement = placement  # type: ignore[assignment]
        layout = Layout(pp=2, microbatches=8, schedule="list", cut="flops", placement=placed, chunks=chunks)
        cutting = Line(profile=made).cutting(placed, 2, chunks, per_rank=16, per_stage=1)
        assert best(cutting) == made.first_blocks(config, layout.replace(microbatches=1).replace(microbatches=8))


def test_more_stages_than_atoms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^pp = 8 x chunks = 2 stages over 12 blocks: try chunks <= 1$"):
        listed(Line(profile=profile(small(), 7, 5)), pp=8, chunks=2, microbatches=8)


# ---- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [(2, 9), (9, 2), (5, 5)])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_no_dealing_of_blocks_is_better_than_the_bound_and_one_meets_it(
    source: int, target: int, num_ranks: int
) -> None:
    made = profile(small(3, 3), source, target)
    encoder, decoder = made.encoder_block.total, made.decoder_block.total
    blocks = [encoder] * 3 + [decoder] * 2 + [decoder + made.head.total]
    least = min(
        max(sum(cost for cost, rank in zip(blocks, dealt, strict=True) if rank == at) for at in range(num_ranks))
        for dealt in itertools.product(range(num_ranks), repeat=6)
    )
    assert least_dealt(made, num_ranks) == pytest.approx(least, rel=1e-5)
    assert least_dealt(made, num_ranks) <= least


def test_what_is_listed_is_never_below_its_bounds_and_never_slower_than_its_named_schedule() -> None:
    line = Line(profile=profile(small(), 3, 9))
    found = listed(line, pp=2, chunks=2, microbatches=8)
    check_rows(found.table, 8)
    assert 1.0 <= found.bound <= found.over_ideal * (1 + 1e-9)
    ideal = line.profile.model.total / 2
    assert least_dealt(line.profile, 2) / ideal <= found.over_ideal
    usual = named(line, pp=2, microbatches=8, schedule="interleaved", cut="costed", placement="interleaved", chunks=2)
    assert found.over_ideal <= usual.over_ideal * (1 + 1e-9)


def test_even_and_aligned_cuts_count_blocks() -> None:
    line = Line(profile=profile(small(7, 5), 3, 9))
    even = named(line, pp=5, microbatches=5, schedule="1f1b", cut="even", placement="linear")
    assert even.starts == (0, 3, 6, 8, 10, 12)
    aligned = named(line, pp=5, microbatches=5, schedule="1f1b", cut="aligned", placement="linear")
    cutting = line.cutting("linear", 5, 1)
    assert 7 in aligned.starts
    assert order(cutting, aligned.starts) <= order(cutting, (0, 4, 7, 9, 11, 12))
    folded = named(line, pp=2, microbatches=4, schedule="interleaved", cut="even", placement="folded", chunks=2)
    assert folded.starts == (0, 4, 7, 10, 12)


def test_chance_finds_a_cut_as_good_as_any_where_all_can_be_compared() -> None:
    line = Line(profile=profile(small(), 3, 9))
    for placement in ("interleaved", "folded"):
        cutting = line.cutting(placement, 2, 2, per_rank=16, per_stage=1)
        begun = (0, 1, 6, 7, 12)
        found = several(cutting, begun[1:-1])
        assert found == several(cutting, begun[1:-1])
        assert order(cutting, begun)[0] > order(cutting, (0, *best(cutting), 12))[0]
        assert min(order(cutting, (0, *cut, 12))[0] for cut in found) == order(cutting, (0, *best(cutting), 12))[0]
        for cut in found:
            assert list(cut) == sorted(set(cut))
            assert placement != "folded" or cut[1] == 6


# ---- published figures ----------------------------------------------------------------------------------------------


def test_blocks_alone_give_the_usual_bubbles_of_a_decoder_only_model() -> None:
    """(p - 1) / m of 1F1B, half of it with two chunks: 1.188 and 1.094 at 4 ranks."""
    for case in cases("blocks", counted_blocks, T5, [(480, 480)], [2, 4]):
        if not case.is_twin:
            continue
        line, microbatches = Line(profile=case.profile), MICROBATCHES_PER_RANK * case.pp
        for chunks, placement in ((1, "linear"), (2, "interleaved")):
            made = named(
                line,
                pp=case.pp,
                microbatches=microbatches,
                schedule="1f1b" if chunks == 1 else "interleaved",
                cut="even",
                placement=placement,  # type: ignore[arg-type]
                chunks=chunks,
            )
            assert made.over_ideal == pytest.approx(1 + (case.pp - 1) / (microbatches * chunks))


def test_costed_cuts_bring_an_encoder_decoder_to_its_twin_where_even_ones_are_far_off() -> None:
    own, twin = (Line(profile=case.profile) for case in cases("blocks", counted_blocks, T5, [(192, 768)], [4]))
    ways: tuple[tuple[Line, CutKind], ...] = ((own, "even"), (own, "costed"), (twin, "costed"))
    even, costed, other = (
        named(line, pp=4, microbatches=16, schedule="1f1b", cut=cut, placement="linear").over_ideal
        for line, cut in ways
    )
    assert even == pytest.approx(1.827, abs=5e-4)
    assert even / other > 1.5
    assert costed / other < 1.04
    searched, least = (listed(line, pp=4, chunks=2, microbatches=16).over_ideal for line in (own, twin))
    assert searched / least < 1.01


# ---- the table ------------------------------------------------------------------------------------------------------


def test_twins_that_read_equally_long_sequences_are_one_case() -> None:
    made = cases("flops", counted, small(), SHORT, [2])
    assert [case.is_twin for case in made] == [False, False, True]
    assert made[-1].pairs == SHORT
    told = rows(made[-1])
    assert len(told) == 2 * len({row["scheme"] for row in told})


def test_measured_costs_fit_their_model_and_lengths() -> None:
    shape = StepShape(num_sequences=1, source_length=4, target_length=4)
    profiles = [profile(small(), 4, 4)]
    assert measured(profiles)(small(), shape, 2) is profiles[0]
    with pytest.raises(ValueError, match=r"^no profile of .* at 2 source and 6 target positions: make one"):
        cases("measured", measured(profiles), small(), SHORT, [2])


def test_rows_of_the_stored_table_are_what_the_code_computes() -> None:
    """After a wanted change: `python -m launch.penalty`."""
    table = stored.build()
    for case in study():
        # The smallest of each kind of costs: the searches of others take seconds.
        if case.costs not in ("flops", "measured") or case.pp != 2 or case.pairs[0] != (192, 768) or case.is_twin:
            continue
        told = {row["point"]: row for row in joined(rows(case))}
        for point, row in told.items():
            kept = table[table["point"] == point].to_dict("records")
            assert len(kept) == 1, point
            for name in COLUMNS[:23]:
                ours, theirs = row[name], kept[0][name]
                blank = isinstance(theirs, float) and math.isnan(theirs)
                same = ours in (None, "") if blank else ours == theirs or str(ours) == str(theirs)
                assert same, (point, name, ours, theirs)


def test_the_stored_table_has_every_case_of_the_study() -> None:
    table = stored.build()
    assert table["point"].is_unique
    wanted = {(case.costs, case.pp, *pair) for case in study() for pair in case.pairs}
    found = table[["costs", "pp", "source_length", "target_length"]].itertuples(index=False, name=None)
    assert set(found) == wanted


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_tells_what_it_was_asked_wrong() -> None:
    for words, told in (
        (["--ratios", "1/0"], "is no whole number above 0"),
        (["--ratios", "1/6"], "960 positions do not divide by 7, as the ratio 1/6 wants; try 959"),
        (["--model", "gpt2"], "gpt2 is decoder_only: a penalty is an encoder-decoder's; try t5-large"),
        (["--blocks-only", "--machine", "h100"], "are different costs; give one of them"),
    ):
        result = CliRunner().invoke(penalty_command, words)
        assert isinstance(result.exception, ValueError), result.output
        assert told in str(result.exception)
