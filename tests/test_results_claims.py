"""Does the verdict on each claim change when the rows do, and with them alone?

P3 and P4 stand in `test_results_pipeline.py`.
"""

import dataclasses

import pytest

from models.config import Tying
from parallel.layouts import Layout
from results.tables import Tables, build
from results.twins import measured
from tests.judging import is_own, outcome, verdict, with_cells, without
from tests.records import DECODER_ONLY, ENCODER_DECODER, record, study, study_tables


@pytest.fixture(scope="module")
def told() -> Tables:
    return study_tables()


# ---- P1 -------------------------------------------------------------------------------------------------------------


def test_one_scheme_with_cross_attention_apart_is_a_condition(told: Tables) -> None:
    found = verdict("P1", told)
    assert found.outcome == "conditional"
    assert found.reason.startswith(
        "schemes of blocks: decoder_only 1, encoder_decoder 2; sublayers of both sides that are cut differently: none; "
        "sublayers of the decoder alone: cross_attention; "
    )


def test_schemes_are_separate_when_the_sides_cut_a_common_sublayer_differently(told: Tables) -> None:
    encoder_ffn = is_own(told.plan) & told.plan["module"].str.match(r"encoder\.block\.\d+\.ffn\.up")
    plan = with_cells(told.plan, encoder_ffn, style="rowwise")
    found = verdict("P1", told.replace(plan=plan))
    assert found.outcome == "supported"
    assert any(row.value == "1 (ffn)" for row in found.evidence)


def test_schemes_are_not_separate_when_decoder_only_needs_more_of_them(told: Tables) -> None:
    first = ~is_own(told.plan) & told.plan["module"].str.contains(r"block\.0\.ffn")
    plan = with_cells(told.plan, first, detail="otherwise")
    plan = plan[~(is_own(plan) & plan["module"].str.contains("cross_attention"))]
    events = with_cells(
        told.communication, ~is_own(told.communication) & (told.communication["block_index"] == 0), count=9
    )
    events = events[~(is_own(events) & (events["side"] == "decoder"))]
    assert outcome("P1", told.replace(plan=plan, communication=events)) == "contradicted"


def test_the_name_of_a_stream_makes_no_scheme(told: Tables) -> None:
    assert set(told.plan.loc[told.plan["module"] == "encoder.block.0.ffn.up", "detail"]) != set(
        told.plan.loc[told.plan["module"] == "decoder.block.0.ffn.up", "detail"]
    )
    assert any(row.value == "0 (none)" for row in verdict("P1", told).evidence)


def test_schemes_of_one_architecture_alone_decide_nothing(told: Tables) -> None:
    found = verdict("P1", without(told, architecture="decoder_only"))
    assert found.outcome == "undecided"
    assert found.missing == ("a run of decoder_only with tp >= 2 and a plan",)


# ---- P2 -------------------------------------------------------------------------------------------------------------


def test_more_collectives_but_fewer_bytes_is_a_condition(told: Tables) -> None:
    found = verdict("P2", told)
    assert found.outcome == "conditional"
    assert "more distinct signatures in 3 of 3 pairs" in found.reason
    assert "more bytes sent in a step in 0 of 3 pairs" in found.reason


def test_communication_is_more_complex_with_more_of_everything(told: Tables) -> None:
    events = told.communication
    events = events.assign(wire_bytes=events["wire_bytes"].where(~is_own(events), events["wire_bytes"] * 10))
    assert outcome("P2", told.replace(communication=events)) == "supported"


def test_communication_is_not_more_complex_with_less_of_everything(told: Tables) -> None:
    events = told.communication
    kept = ~is_own(events) | events["site"].isin(["decoder.block.0.ffn.up"])
    assert outcome("P2", told.replace(communication=events[kept])) == "contradicted"


def test_communication_is_judged_only_with_both_ways_to_gather_the_memory(told: Tables) -> None:
    found = verdict("P2", without(told, memory_gather="per_block"))
    assert found.missing == ("twins side by side under tp+sp per_block",)
    assert found.outcome == "undecided"


def test_twins_with_unequal_tokens_are_not_compared(told: Tables) -> None:
    runs = with_cells(told.runs, is_own(told.runs), tokens_per_step=300)
    found = verdict("P2", told.replace(runs=runs))
    assert found.outcome == "undecided"
    assert {row.value for row in found.evidence} == {"not compared: tokens per step differ, 264 and 300"}


def test_a_single_byte_decides_a_count(told: Tables) -> None:
    """Bytes of the twins made equal are no more bytes; one byte more is."""
    base = told.communication[told.communication["axis"] == "tp"]
    one = base.drop_duplicates(["machine", "experiment", "cell", "rank"])
    for extra, says in ((0, {"contradicts"}), (1, {"supports"})):
        events = one.assign(wire_bytes=[1000 + extra * int(own) for own in is_own(one)])
        found = verdict("P2", told.replace(communication=events))
        assert {row.says for row in found.evidence if row.quantity == "bytes sent in a step"} == says


# ---- P5 -------------------------------------------------------------------------------------------------------------

SP = Layout(tp=2, sp=True, microbatches=2)


def test_unequal_lengths_are_handled_apart(told: Tables) -> None:
    assert outcome("P5", told) == "supported"


def test_equal_lengths_make_one_layout() -> None:
    records = [record(config, SP, lengths=(18, 18)) for config in (ENCODER_DECODER, DECODER_ONLY)]
    found = verdict("P5", build(records))
    assert found.outcome == "conditional"
    assert "lengths that an encoder-decoder shards: 1 where source and target are equally long (1 runs)" in found.reason


def test_nothing_is_handled_apart_when_one_stack_has_more_streams(told: Tables) -> None:
    own = is_own(told.runs)
    runs = with_cells(with_cells(told.runs, own, source_length=12), ~own, source_length=8)
    is_own_event = is_own(told.communication)
    events = with_cells(told.communication, is_own_event, stream="target")
    events.loc[~is_own_event & (events["phase"] == "forward"), "stream"] = "source"
    assert outcome("P5", told.replace(runs=runs, communication=events)) == "contradicted"


def test_padding_is_asked_of_real_text(told: Tables) -> None:
    found = verdict("P5", told.replace(runs=told.runs.assign(data_source="synthetic")))
    assert found.outcome == "undecided"
    assert found.missing == ("twins side by side on real text",)


# ---- P6 -------------------------------------------------------------------------------------------------------------


def test_an_ffn_that_communicates_where_its_weights_are_cut_is_a_condition(told: Tables) -> None:
    found = verdict("P6", told)
    assert found.outcome == "conditional"
    assert "ffn communicates too: only where tensor parallelism cuts the weights" in found.reason


def test_attention_alone_mixes_positions_when_nothing_else_communicates(told: Tables) -> None:
    events = told.communication[told.communication["part"] != "ffn"]
    assert outcome("P6", told.replace(communication=events)) == "supported"


def test_a_module_with_whole_weights_that_communicates_mixes_positions(told: Tables) -> None:
    ffn = told.plan["module"].str.contains("ffn")
    found = verdict("P6", told.replace(plan=with_cells(told.plan, ffn, style="sequence_replicated")))
    assert found.outcome == "contradicted"
    assert all("ffn.down, ffn.up" in row.value for row in found.evidence if row.says == "contradicts")


def test_whole_sequences_show_nothing_of_mixing(told: Tables) -> None:
    assert outcome("P6", without(told, sp=True)) == "undecided"


def test_exceptions_outside_the_blocks_are_listed(told: Tables) -> None:
    listed = [row.value for row in verdict("P6", told).evidence if row.says == "context"]
    assert "embedding 16, head 12, loss 4, memory 8" in listed


# ---- P7 -------------------------------------------------------------------------------------------------------------


def test_a_shared_embedding_is_a_second_link(told: Tables) -> None:
    found = verdict("P7", told)
    assert found.outcome == "conditional"
    assert found.reason.startswith(
        "only the memory crosses on 4 of 4 kinds of edges, but 3 runs sum the gradient of a shared embedding"
    )


@pytest.mark.parametrize("tying", ["none", "head"])
def test_the_memory_is_the_only_link_when_the_sides_share_no_embedding(tying: Tying) -> None:
    config = ENCODER_DECODER.replace(tying=tying)
    records = [record(config, Layout(pp=pp, microbatches=4)) for pp in (2, 3, 4)]
    assert outcome("P7", build(records)) == "supported"


def test_another_tensor_across_the_boundary_is_another_link(told: Tables) -> None:
    edges = with_cells(told.edges, told.edges["tensor"] == "memory", tensor="source")
    assert outcome("P7", told.replace(edges=edges)) == "contradicted"


def test_a_tensor_beside_the_memory_is_another_link() -> None:
    whole = record(ENCODER_DECODER.replace(tying="none"), Layout(pp=2, microbatches=4))
    beside = dataclasses.replace(whole.edges[0], tensor="source")
    found = verdict("P7", build([dataclasses.replace(whole, edges=[*whole.edges, beside])]))
    assert [row.says for row in found.evidence if row.quantity == "tensors across the boundary"] == ["contradicts"]


def test_a_stage_of_both_sides_hides_what_crosses() -> None:
    found = verdict("P7", build([record(ENCODER_DECODER, Layout(pp=2, cut=(1,), microbatches=4))]))
    assert found.outcome == "undecided"
    assert found.missing == ("an encoder-decoder run with a stage boundary between its sides",)


def test_the_relay_is_worked_out_by_hand() -> None:
    """Four stages of a block each: memory crosses 3 edges both ways, 2 of them relayed, and the target 1 of them."""
    found = verdict("P7", build([record(ENCODER_DECODER, Layout(pp=4, microbatches=4))]))
    (relay,) = [row.value for row in found.evidence if row.quantity == "the memory relayed through decoder stages"]
    source, target = 8 * 24 * 32 * 4, 8 * 12 * 32 * 4
    total = 2 * (source + source + source + target)  # 0>1 source, 1>2 memory, 2>3 memory and target
    assert relay == f"{2 * source:,} of {total:,} bytes on edges, {2 * source / total:.1%}"


# ---- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("claim", ["P1", "P2", "P3", "P4", "P5", "P6", "P7"])
def test_failed_runs_decide_nothing(claim: str) -> None:
    tables = build([dataclasses.replace(entry, status="failed") for entry in study()])
    assert measured(tables.runs).empty
    assert outcome(claim, tables) == "undecided"


@pytest.mark.parametrize("claim", ["P1", "P2", "P3", "P4", "P5", "P6", "P7"])
def test_evidence_names_rows_that_stand_in_its_table(told: Tables, claim: str) -> None:
    for row in verdict(claim, told).evidence:
        table = getattr(told, row.table)
        names = set(table["point"] if "point" in table else table["experiment"] + "/" + table["cell"])
        assert set(row.cells) <= names or row.says == "context"
        assert row.cells
