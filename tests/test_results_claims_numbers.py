"""Does the verdict on each claim about numbers change when its rows do, and with them alone?"""

from pathlib import Path

import pandas as pd
import pytest

from launch.structure import table
from results import model_counts
from results.claims import CLAIMS
from results.claims.printed import is_printed_as
from results.tables import CLOSED_FORMS, Tables, without_records
from tests.judging import outcome, verdict, with_cells

CLOSED = [claim.id for claim in CLAIMS if not claim.needs_records]


@pytest.fixture(scope="module")
def told() -> Tables:
    return without_records()


def counted(tables: Tables, point: str, **values: object) -> Tables:
    """The tables with other counts of one model."""
    return tables.replace(counts=with_cells(tables.counts, tables.counts["point"] == point, **values))


def facts(tables: Tables, point: str, **values: str) -> Tables:
    """The tables with other facts of one built model; a fact's dots are written as two underscores."""
    structure = tables.structure
    for name, value in values.items():
        where = (structure["point"] == point) & (structure["fact"] == name.replace("__", "."))
        assert where.any()
        structure = with_cells(structure, where, value=value)
    return tables.replace(structure=structure)


# ---- all ------------------------------------------------------------------------------------------------------------


def test_closed_forms_decide_what_needs_no_record(told: Tables) -> None:
    assert {name: outcome(name, told) for name in CLOSED} == {
        "P8": "conditional",
        "P11": "supported",
        "C1": "supported",
        "C2": "supported",
        "C3": "supported",
        "C4": "supported",
        "C9": "conditional",
        "C10": "conditional",
        "N1": "conditional",
        "N2": "conditional",
        "N3": "conditional",
        "N4": "conditional",
        "N5": "conditional",
        "N6": "conditional",
        "N7": "conditional",
        "N8": "supported",
        "N9": "supported",
        "N10": "supported",
    }


@pytest.mark.parametrize("claim", CLOSED)
def test_without_rows_nothing_is_decided(claim: str, told: Tables) -> None:
    empty = told.replace(**{name: getattr(told, name).iloc[:0] for name in CLOSED_FORMS})
    found = verdict(claim, empty)
    assert found.outcome == "undecided"
    assert found.missing


@pytest.mark.parametrize("claim", CLOSED)
def test_evidence_names_rows_that_stand_in_its_table(claim: str, told: Tables) -> None:
    for row in verdict(claim, told).evidence:
        assert row.cells
        assert set(row.cells) <= set(getattr(told, row.table)["point"])


def test_a_number_is_met_when_it_rounds_to_the_printed_digits() -> None:
    assert is_printed_as(95.45, "95.5")
    assert is_printed_as(95.55, "95.5")
    assert not is_printed_as(96.1, "95.5")
    assert is_printed_as(69.5, "70")
    assert not is_printed_as(68.98, "70")


# ---- N --------------------------------------------------------------------------------------------------------------


def test_the_rest_of_transformer_base_is_far_too_small_to_reach_the_papers_number(told: Tables) -> None:
    found = verdict("N1", told)
    assert found.reason.startswith(
        "met: embedding, encoder block, decoder block, encoder blocks, decoder blocks, all; not met: norms and "
        "positions make up the difference to 65 M (norms 30,720, positions 0; all that the sum leaves out 61,440"
    )
    # With positions of two million parameters the article would be right.
    larger = counted(told, "transformer-base", parameters=64_600_000)
    assert [row.says for row in verdict("N1", larger).evidence][-1] == "supports"


def test_llama_is_as_the_article_prints_it_only_if_its_blocks_are(told: Tables) -> None:
    assert "not met: block (202,383,360, printed as 201 M: 202.4 M)" in verdict("N2", told).reason
    block = 201_000_000
    printed = counted(told, "llama-2-7b", decoder_block=block, block_parameters=32 * block, parameters=6_737_600_000)
    assert outcome("N2", printed) == "supported"


def test_totals_and_ratios_follow_from_the_counts(told: Tables) -> None:
    rounder = counted(told, "llama-2-70b", parameters=70_300_000_000)
    assert outcome("N3", rounder) == outcome("N5", rounder) == "supported"
    wrong = told.replace(counts=told.counts.assign(parameters=10**12 * (told.counts.index + 1.0) ** 3))
    assert outcome("N3", wrong) == "contradicted"
    assert outcome("N5", wrong) == "contradicted"


def test_the_rough_formula_is_judged_on_every_model(told: Tables) -> None:
    counts = told.counts
    rough = (counts["num_encoder_blocks"] + counts["num_decoder_blocks"]) * 12 * counts["width"] ** 2
    exact = told.replace(counts=counts.assign(parameters=rough + counts["vocabulary"] * counts["width"]))
    assert outcome("N4", exact) == "supported"
    assert outcome("N4", told.replace(counts=counts.assign(parameters=1))) == "contradicted"


def test_the_small_model_is_twice_what_the_article_says(told: Tables) -> None:
    assert "parameters (70,378,496, told as 30-odd million" in verdict("N6", told).reason
    assert outcome("N6", counted(told, "gpt-classic", parameters=35_000_000)) == "supported"
    wrong = facts(told, "gpt-classic", logits="2 10 512")
    assert outcome("N6", wrong) == "contradicted"


def test_the_published_total_tells_whether_a_head_is_tied(told: Tables) -> None:
    reason = verdict("N7", told).reason
    assert "they are not in llama-2-7b, llama-2-13b, llama-2-70b" in reason
    llama = told.counts["point"].str.startswith("llama")
    tied = with_cells(told.counts, llama, published_parameters=told.counts["parameters_tying_head"])
    found = verdict("N7", told.replace(counts=tied))
    says = {row.says for row in found.evidence if row.quantity == "A: LLaMA ties the head to the embedding"}
    assert says == {"supports"}
    only = told.counts[llama]
    assert outcome("N7", told.replace(counts=only.assign(published_parameters=only["parameters_tying_head"]))) != (
        outcome("N7", told.replace(counts=only.assign(published_parameters=1)))
    )


def test_shapes_and_steps_are_those_of_the_built_model(told: Tables) -> None:
    assert outcome("N8", facts(told, "speech", decoder__cross_attention__read="16 50 50")) == "conditional"
    assert outcome("N9", facts(told, "transformer-base", decoder__steps="self_attention add norm")) == "conditional"
    assert outcome("C2", facts(told, "speech", decoder__cross_attention__read_causal="True")) == "conditional"
    structure = told.structure.assign(value="other")
    assert outcome("C2", told.replace(structure=structure)) == "contradicted"
    assert outcome("N8", told.replace(structure=structure)) == "contradicted"
    assert outcome("N9", told.replace(structure=structure)) == "contradicted"


def test_the_facts_of_built_models_are_the_stored_ones() -> None:
    """After a wanted change: `python -m launch.structure`."""
    stored = Path(model_counts.__file__).with_name("structure.csv")
    assert table() == stored.read_text(encoding="utf-8")


def test_the_way_to_share_is_the_one_whose_count_is_closest(told: Tables) -> None:
    both = told.counts["point"].isin(["transformer-base", "transformer-big"])
    moved = with_cells(told.counts, both, parameters_tying_all=10**9)
    assert outcome("N10", told.replace(counts=moved)) == "contradicted"
    assert outcome("N10", counted(told, "transformer-big", parameters_tying_all=10**9)) == "conditional"


# ---- C --------------------------------------------------------------------------------------------------------------


def test_exponents_are_fitted(told: Tables) -> None:
    lengths = told.lengths
    linear = lengths.assign(cross_flops=lengths["source_length"] + lengths["target_length"])
    found = verdict("C1", told.replace(lengths=linear))
    assert found.outcome == "conditional"
    assert "cross over source positions" in found.reason
    cubic = (lengths["source_length"] + lengths["target_length"] + 1.0) ** 3
    other = lengths.assign(encoder_self_flops=cubic, cross_flops=cubic, decoder_self_flops=cubic)
    assert outcome("C1", told.replace(lengths=other)) == "contradicted"


def test_caches_are_counted_by_architecture(told: Tables) -> None:
    caches = told.caches
    one = with_cells(caches, caches["architecture"] == "encoder_decoder", num_caches=1)
    found = verdict("C3", told.replace(caches=one))
    assert found.outcome == "conditional"
    assert "t5-small tp1 has 1, told as 2" in found.reason
    assert outcome("C3", told.replace(caches=caches.assign(num_caches=7))) == "contradicted"


def test_grouping_cuts_the_cache_by_the_ratio_of_heads(told: Tables) -> None:
    found = verdict("C4", told)
    values = {row.note: row.value for row in found.evidence if row.note}
    assert values["one rank of tp = 1"].endswith(" = 8")
    assert values["one rank of tp = 64"].endswith(" = 1")
    caches = told.caches
    grown = with_cells(caches, caches["model"] == "llama-2-70b", request_bytes=9 * 10**9)
    assert outcome("C4", told.replace(caches=grown)) == "conditional"


def test_the_share_of_blocks_has_a_threshold(told: Tables) -> None:
    assert "LLaMA-2-7B 96.1%" in verdict("C9", told).reason
    counts = told.counts
    full = counts.assign(block_parameters=counts["parameters"], block_flops=counts["forward_flops"])
    assert outcome("C9", told.replace(counts=full)) == "supported"
    assert outcome("C9", told.replace(counts=counts.assign(block_parameters=0, block_flops=0))) == "contradicted"


def test_the_share_of_the_ffn_depends_on_cross_attention(told: Tables) -> None:
    assert "decoder block with cross-attention 0 of 17" in verdict("C10", told).reason
    counts = told.counts
    none = counts.assign(ffn=0, encoder_block_ffn=0, decoder_block_ffn=0)
    assert outcome("C10", told.replace(counts=none)) == "contradicted"
    encoders = counts[counts["architecture"] == "encoder_only"]
    even = encoders.assign(ffn=encoders["parameters"] * 2 / 3)
    assert outcome("C10", told.replace(counts=even)) == "supported"


# ---- P8 -------------------------------------------------------------------------------------------------------------


def test_both_axes_are_needed_where_neither_fits_alone(told: Tables) -> None:
    reason = verdict("P8", told).reason
    assert "only both fit for llama-2-70b on 24 GB, llama-3.1-405b on 24 GB" in reason
    fits = told.fits
    alone = fits["way"].isin(["none", "tp", "pp"])
    assert outcome("P8", told.replace(fits=with_cells(fits, alone, num_devices=float("nan")))) == "supported"
    easy = told.replace(
        counts=told.counts.assign(encoder_block_doubled=1, decoder_block_doubled=1),
        fits=with_cells(fits, fits["way"] == "pp", num_devices=2.0),
    )
    assert outcome("P8", easy) == "contradicted"


def test_one_device_for_all_decides_nothing(told: Tables) -> None:
    found = verdict("P8", told.replace(fits=told.fits.assign(num_devices=1.0, block_state_bytes=0)))
    assert found.outcome == "undecided"
    assert found.missing == ("a model that one device cannot train", "a block that one device cannot train")


def test_fewer_bytes_never_need_fewer_devices(told: Tables) -> None:
    table = told.fits.assign(num_devices=told.fits["num_devices"].fillna(10**6))
    for _, rows in table.groupby(["model", "way"]):
        assert rows.sort_values("device_bytes")["num_devices"].is_monotonic_decreasing


def test_counts_are_made_once_and_hold_every_model() -> None:
    assert model_counts.counts() is model_counts.counts()
    assert not model_counts.counts()["point"].str.startswith("tiny").any()
    assert isinstance(model_counts.lengths(), pd.DataFrame)
