"""Do the closed forms add up to the model, and are the cuts what they are called?"""

import itertools

import pytest

from models.config import ModelConfig
from models.costs import embedding_flops, forward_flops, head_flops, parameter_counts
from models.named import MODEL_NAMES, named_model
from parallel.partition import stages_of
from results import predicted
from results.predicted import Work, aligned, even, folded_flops, mixed

LENGTHS = (24, 12)


def work_of(config: ModelConfig) -> Work:
    return Work.of(config, *LENGTHS)


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_one_stage_holds_the_whole_model(name: str) -> None:
    config = named_model(name)
    work = work_of(config)
    assert sum(work.stage_parameters(())) == parameter_counts(config).total
    assert sum(work.stage_flops(())) == forward_flops(config, *LENGTHS) - embedding_flops(config, LENGTHS[0])


@pytest.mark.parametrize("pp", [2, 3, 5, 8])
@pytest.mark.parametrize("cut", ["even", "aligned", "mixed"])
def test_no_flop_is_lost_by_any_cut(cut: str, pp: int) -> None:
    work = work_of(named_model("t5-small"))
    starts = {"even": even(work, pp), "aligned": aligned(work, pp)[0], "mixed": mixed(work, pp)}[cut]
    assert sum(work.stage_flops(starts)) == sum(work.flops)
    assert len(stages_of(work.config, starts)) == pp


def test_a_tied_table_is_counted_once_where_it_has_two_users_and_again_elsewhere() -> None:
    config = named_model("t5-small")  # one table for source, target and head
    table = config.vocabulary * config.width
    total = parameter_counts(config).total
    relative_bias = config.relative_buckets * config.num_heads
    # Cut between the sides: the decoder's stage holds a second copy, for both its users.
    assert sum(work_of(config).stage_parameters((6,))) == total + table
    # Cut in the decoder too: the head's stage holds a third, and the decoder's relative biases are held twice.
    assert sum(work_of(config).stage_parameters((6, 9))) == total + 2 * table + relative_bias


def test_the_mixed_cut_is_the_best_of_all_contiguous_cuts() -> None:
    config = named_model("tiny-t5").replace(num_encoder_blocks=4, num_decoder_blocks=5)
    for lengths in ((8, 32), (32, 8), (20, 20)):
        work = Work.of(config, *lengths)
        for pp in range(1, 7):
            best = min(max(work.stage_flops(starts)) for starts in itertools.combinations(range(1, 9), pp - 1))
            assert max(work.stage_flops(mixed(work, pp))) == best


def test_the_aligned_cut_keeps_the_sides_apart_and_is_the_best_that_does() -> None:
    work = Work.of(named_model("t5-small"), 96, 12)
    for pp in range(2, 9):
        starts, num_encoder_stages = aligned(work, pp)
        assert work.config.num_encoder_blocks in starts
        assert starts.index(work.config.num_encoder_blocks) == num_encoder_stages - 1
        assert max(work.stage_flops(starts)) >= max(work.stage_flops(mixed(work, pp)))


def test_a_longer_source_takes_more_encoder_stages() -> None:
    config = named_model("t5-large")
    splits = [aligned(Work.of(config, source, target), 8)[1] for source, target in predicted.PAIR_LENGTHS]
    assert splits == sorted(splits)
    assert splits[0] < splits[-1]


def test_the_head_stands_on_the_last_stage() -> None:
    config = named_model("gpt2")
    work = work_of(config)
    first, *_, last = work.stage_flops(even(work, 4))
    assert last - first == head_flops(config, LENGTHS[1])


def test_folding_puts_the_first_and_the_last_chunk_together() -> None:
    work = work_of(named_model("tiny-encoder-decoder"))
    chunks = work.stage_flops((1, 2, 3))
    assert folded_flops(work, 2) == [chunks[0] + chunks[3], chunks[1] + chunks[2]]


def test_the_table_covers_what_the_claims_ask_for() -> None:
    table = predicted.build()
    vocabulary = table[table["question"] == "vocabulary"]
    assert (vocabulary["vocabulary"].min(), vocabulary["vocabulary"].max()) == (1024, 262144)
    assert set(vocabulary["pp"]) == {2, 4, 8, 16}
    pair = table[table["question"] == "length_ratio"]
    assert set(pair["length_ratio"]) == {0.25, 0.5, 1, 2, 4}
    assert (pair["pp"].min(), pair["pp"].max()) == (2, 16)
    assert set(pair["cut"]) == set(predicted.CUTS)
    assert set(pair["architecture"]) == {"encoder_decoder", "decoder_only"}
    assert table["point"].is_unique


def test_twins_read_as_many_positions() -> None:
    table = predicted.build()
    pair = table[table["question"] == "length_ratio"]
    assert set(pair["source_length"] + pair["target_length"]) == {960}


def test_an_even_cut_is_unbalanced_by_the_head_alone_where_stages_divide_blocks() -> None:
    table = predicted.build()
    rows = table[(table["question"] == "vocabulary") & (table["num_blocks"] % table["pp"] == 0)]
    share = rows["head_to_stage_flops"]
    by_hand = (1 + share) * rows["pp"] / (rows["pp"] + share)
    assert rows["imbalance_forward_flops"].tolist() == pytest.approx(by_hand.tolist())
