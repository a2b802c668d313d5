"""Does a pipeline that ships keys and values instead of a memory equal one process, and is it told beforehand?"""

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from launch.case import Case
from launch.facts import stage_facts
from launch.parity import LARGEST_ERROR, Parity
from models.costs import parameter_counts
from models.initial import canonical_name
from parallel.account import account
from parallel.edges import Edge, edges
from parallel.engines.choice import NATIVE
from parallel.engines.engine import unsupported
from parallel.figures import StepShape, differences
from parallel.held import Held
from parallel.layouts import Layout
from parallel.mesh import Coordinate
from parallel.partition import stages_of
from parallel.plan import WHOLE
from parallel.plans import plan
from parallel.predict import predict
from parallel.profile import Profile
from parallel.schedule import Product
from parallel.trace import trace
from parallel.work import Work
from tests.engine_steps import engine_case, proved
from tests.one_rank import part_of, rank_of
from tests.rank import Worker
from tests.sampled_layouts import samples
from tests.small_models import small_config
from tests.spawn import Ranks

BLOCKS = {"num_encoder_blocks": 3, "num_decoder_blocks": 3}
CONFIG = small_config("encoder_decoder", **BLOCKS)
TIED = {"tying": "all", "positions": "relative", "num_kv_heads": 1}
"""Copies of embeddings and tables on several stages, and a KV head on several ranks."""


def shipping(**fields: Any) -> Layout:
    return Layout(**{"microbatches": 3, "transport": "kv", **fields})


ALIGNED = shipping(pp=2, cut=(3,))
MIXED = shipping(pp=4, cut=(1, 4, 5), schedule="zb_h1")
"""Stage 1 makes the memory and holds a decoder block of its own."""


def case_of(layout: Layout, **changes: object) -> Case:
    return engine_case("native", "encoder_decoder", layout, changes={**BLOCKS, **changes})


# ---- what is sent ---------------------------------------------------------------------------------------------------


def test_each_decoder_stage_gets_keys_and_values_of_its_own_blocks_from_the_maker() -> None:
    assert edges(CONFIG, stages_of(CONFIG, (1, 3, 4)), "kv") == (
        Edge(first=0, last=1, carries=("source",)),
        Edge(first=1, last=2, carries=("kv.0",)),
        Edge(first=1, last=3, carries=("kv.1", "kv.2")),
        Edge(first=2, last=3, carries=("target",)),
    )


def test_blocks_of_the_maker_read_the_memory_and_get_nothing() -> None:
    assert edges(CONFIG, stages_of(CONFIG, (4,)), "kv") == (Edge(first=0, last=1, carries=("target", "kv.1", "kv.2")),)
    assert edges(CONFIG, stages_of(CONFIG, ()), "kv") == ()


@pytest.mark.parametrize(("tp", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_an_edge_carries_all_positions_of_a_rank_s_own_heads(tp: int, heads: int) -> None:
    layout = shipping(pp=2, cut=(5,), tp=tp, sp=tp > 1, microbatches=1)
    shape = StepShape(num_sequences=3, source_length=7, target_length=5)
    sent = [
        total.event
        for total in predict(plan(CONFIG, layout), shape)[0].figures.events
        if total.event.stream == "kv.2" and total.event.operation == "send"
    ]
    positions = 8 if tp > 1 else 7
    assert [event.payload_bytes for event in sent] == [positions * 3 * 2 * heads * 4 * 4]


# ---- who holds what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [(3,), (2, 4), (1, 3, 4)])
def test_the_maker_holds_what_makes_keys_and_values_of_all_blocks(cut: tuple[int, ...]) -> None:
    layout = shipping(pp=len(cut) + 1, cut=cut)
    planned = plan(CONFIG, layout)
    holders: Counter[str] = Counter()
    maker = next(stage.index for stage in planned.stages if stage.last >= 3)
    for rank, told in enumerate(predict(planned, StepShape(num_sequences=3, source_length=7, target_length=5))):
        with rank_of(planned, rank) as comm:
            parameters = dict(part_of(planned, comm).named_parameters())
        assert sum(map(Tensor.numel, parameters.values())) == told.figures.parameters.total
        names = {name for name in parameters if ".kv." in name}
        weights = {
            f"decoder.block.{block}.cross_attention.kv.{leaf}" for block in range(3) for leaf in ("weight", "bias")
        }
        assert names == (weights if rank == maker else set())
        holders.update({canonical_name(CONFIG, name): parameter.numel() for name, parameter in parameters.items()})
    assert holders.total() == parameter_counts(CONFIG).total


# ---- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "changes"),
    [(ALIGNED, {}), (shipping(pp=2, cut="flops", recompute="full"), TIED)],
    ids=lambda given: given.label if isinstance(given, Layout) else "",
)
def test_two_stages_equal_one_process(layout: Layout, changes: dict[str, object], two_ranks: Ranks) -> None:
    assert two_ranks.run(proved, case_of(layout, **changes))[0].failures == ()


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (MIXED, TIED),
        (shipping(pp=2, cut=(3,), tp=2, microbatches=2), TIED),
        (
            shipping(pp=2, cut=(4,), tp=2, sp=True, recompute="selective", memory_gather="per_block", microbatches=2),
            {},
        ),
    ],
    ids=lambda given: given.label if isinstance(given, Layout) else "",
)
def test_four_ranks_equal_one_process(layout: Layout, changes: dict[str, object], four_ranks: Ranks) -> None:
    assert four_ranks.run(proved, case_of(layout, **changes))[0].failures == ()


@contextlib.contextmanager
def lost_gradient(lost: str) -> Iterator[None]:
    """What comes back for one block's keys and values counts for nothing."""
    enter = Held.enter

    def entering(held: Held, product: Product, name: str, tensor: Tensor) -> None:
        is_lost = product[0] == "backward" and name == lost
        enter(held, product, name, torch.zeros_like(tensor) if is_lost else tensor)

    with mock.patch.object(Held, "enter", entering):
        yield


def proved_without(worker: Worker, case: Case, lost: str) -> Parity:
    with lost_gradient(lost):
        return proved(worker, case)


def test_the_lost_gradient_of_one_block_is_noticed(two_ranks: Ranks) -> None:
    parity = two_ranks.run(proved_without, case_of(ALIGNED), "kv.1")[0]
    assert min(parity.gradient.error, parity.weight.error) > LARGEST_ERROR
    assert parity.loss.error <= LARGEST_ERROR


# ---- told beforehand ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (shipping(pp=2, cut=(4,), recompute="full", attention="materialised", microbatches=1), {"final_norm": False}),
        (shipping(pp=2, cut=(3,), tp=4, sp=True, memory_gather="per_block", schedule="zb_h2", microbatches=2), TIED),
    ],
    ids=lambda given: given.label if isinstance(given, Layout) else "",
)
def test_predicted_ranks_equal_traced_ones(layout: Layout, changes: dict[str, object]) -> None:
    made = plan(small_config("encoder_decoder", **BLOCKS, **changes), layout)
    shape = StepShape(num_sequences=3, source_length=7, target_length=5, is_ragged=True)
    for predicted, traced in zip(predict(made, shape), trace(made, shape), strict=True):
        assert differences(predicted.figures, traced.figures) == []


def test_stages_cost_what_their_ranks_execute() -> None:
    num_layouts = 0
    for sample in samples(60, seed=11):
        config, layout = sample.plan.config, sample.plan.layout.replace(transport="kv")
        if layout.pp == 1 or not config.has_cross_attention:
            continue
        shape = dataclasses.replace(sample.shape, num_sequences=2 * layout.microbatches)
        profile, made = Profile.of_flops(config, layout, shape), plan(config, layout)
        flops = [told.figures for told in predict(made, shape)]
        for stage in made.stages:
            most = max(figures.flops.total for figures in flops if figures.coordinate.pp == stage.index)
            assert profile.stage(stage).total * layout.microbatches == most
        num_layouts += 1
    assert num_layouts >= 10


def test_shipping_moves_work_and_adds_none() -> None:
    shape = StepShape(num_sequences=3, source_length=7, target_length=5)
    kept, moved = (Profile.of_flops(CONFIG, shipping(transport=way), shape) for way in ("direct", "kv"))
    for cut in itertools.combinations(range(1, 6), 2):
        stages = stages_of(CONFIG, cut)
        assert sum((moved.stage(stage) for stage in stages), start=Work()) == kept.model


def test_the_memory_enters_where_keys_and_values_are_made_and_nowhere_else() -> None:
    config = small_config("encoder_decoder", num_encoder_blocks=2, num_decoder_blocks=3)
    layout = Layout(pp=3, cut=(2, 3), transport="kv")
    shape = StepShape(num_sequences=1, source_length=6, target_length=4, dtype_bytes=4)
    counted = Profile.of_flops(config, layout, shape)
    entry = Work(3.0, 2.0, 1.0)
    entering = dataclasses.replace(counted, decoder_stage=entry, memory_entry=entry)
    stages = [(0, 2), (2, 3), (3, 5)]
    more = [entering.slice(*ends).forward - counted.slice(*ends).forward for ends in stages]
    assert more == [entry.forward, 0.0, 0.0]


def test_a_measured_profile_does_not_tell_what_moves() -> None:
    shape = StepShape(num_sequences=3, source_length=7, target_length=5)
    measured = dataclasses.replace(Profile.of_flops(CONFIG, Layout(microbatches=3), shape), unit="seconds")
    with pytest.raises(ValueError, match=r"does not tell what keys and values cost, and transport = 'kv' moves them"):
        plan(CONFIG, shipping(pp=2, cut="times"), measured)


def test_what_a_rank_s_part_needs_moves_with_the_work() -> None:
    """Without padding, recomputation and a fused kernel, hardware executes what the mathematics needs."""
    shape = StepShape(num_sequences=3, source_length=7, target_length=5)
    for cut in itertools.combinations(range(1, 6), 2):
        for told in account(plan(CONFIG, shipping(pp=3, cut=cut, attention="materialised")), shape):
            assert told.prediction.figures.flops.total == 3 * told.model_forward_flops


def test_a_record_counts_what_makes_them_under_the_maker() -> None:
    planned, reports = plan(CONFIG, ALIGNED), []
    for rank in range(2):
        with rank_of(planned, rank) as comm:
            shapes = {name: (WHOLE, tuple(one.shape)) for name, one in part_of(planned, comm).named_parameters()}
        untimed: Any = SimpleNamespace(
            coordinate=Coordinate(dp=0, pp=rank, cp=0, tp=0),
            shards=shapes,
            counted=SimpleNamespace(forward_flops={}),
            facts=SimpleNamespace(peak_saved_bytes=0),
            steps=(),
        )
        reports.append(untimed)
    shape = StepShape(num_sequences=3, source_length=7, target_length=5)
    expected = [told.figures.parameters.total for told in predict(planned, shape)]
    assert [row.parameters for row in stage_facts(planned, reports)] == expected


def test_chunks_are_refused_before_any_process_starts() -> None:
    layout = shipping(pp=2, chunks=2, placement="interleaved", schedule="interleaved")
    assert (
        unsupported(NATIVE, CONFIG, layout)
        == "transport = 'kv' wants one stage a rank: chunks = 2; use chunks = 1 or 'direct'"
    )
