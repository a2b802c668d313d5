"""Is a step taken apart without a rest, and is its floor made of just its products and its messages?"""

import dataclasses
from collections import Counter

import pytest
import torch

from launch.alone import Floor
from launch.parts import part_of, timed_parts
from models.batch import synthetic_batch
from models.config import Architecture
from parallel.layouts import Layout
from parallel.operators import Operators
from parallel.plans import plan
from parallel.recorder import Recorder
from results.schema import PartFacts
from results.step_parts import step_parts
from tests.one_rank import rank_of, step_of
from tests.records import record
from tests.small_ledgers import config_of
from tests.small_models import ARCHITECTURES


@pytest.mark.parametrize(
    ("part", "names"),
    [
        ("products", "mm addmm bmm baddbmm addmm_ _scaled_dot_product_flash_attention_for_cpu"),
        ("copies", "copy_ cat zero_ fill_"),
        ("others", "add mul native_layer_norm gelu _softmax _fused_adamw_ nll_loss_forward mean index_select"),
        ("dispatch", "linear matmul view transpose expand split empty clone contiguous scaled_dot_product_attention"),
    ],
)
def test_an_operator_counts_as_what_its_own_kernel_does(part: str, names: str) -> None:
    assert {name: part_of(f"aten::{name}") for name in names.split()} == dict.fromkeys(names.split(), part)


def test_what_is_no_operator_is_dispatch() -> None:
    for name in (
        "Optimizer.step#AdamW.step",
        "autograd::engine::evaluate_function: AddBackward0",
        "c10d::send",
        "gloo",
    ):
        assert part_of(name) == "dispatch"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    key: str
    self_cpu_time_total: float


def test_microseconds_of_a_profile_add_up_by_part() -> None:
    names = ("aten::mm", "aten::bmm", "aten::cat", "aten::add", "aten::view", "gloo:all_reduce")
    parts = timed_parts([Event(key=name, self_cpu_time_total=10.0**index) for index, name in enumerate(names)])
    assert (parts.products, parts.copies, parts.others) == pytest.approx((11e-6, 100e-6, 1e-3))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, sp=True, dp=2, recompute="selective", attention="materialised"),
        Layout(tp=2, pp=2, microbatches=3, cut=(1,)),
        Layout(pp=2, microbatches=2, schedule="zb_h1"),
    ],
    ids=lambda layout: layout.label,
)
def test_the_floor_repeats_every_product_and_every_message_of_a_step_and_nothing_else(
    architecture: Architecture, layout: Layout
) -> None:
    planned = plan(config_of(architecture, 2), layout)
    batch = synthetic_batch(planned.config, num_sequences=6, source_length=6, target_length=4, seed=3)
    with rank_of(planned, layout.world_size - 1) as comm:
        with Recorder() as recorder, Operators() as operators, Floor() as floor:
            engine = step_of(planned, comm, batch)
        with Recorder() as sent, Operators() as computed:
            floor.time_messages()
            floor.time_products()
    repeated = {
        tensor.untyped_storage().data_ptr()
        for _, arguments, _ in (*floor.messages, *floor.products)
        for leaf in arguments
        for tensor in (leaf if isinstance(leaf, list) else [leaf])
        if isinstance(tensor, torch.Tensor)
    }
    assert engine.gradients.flat.untyped_storage().data_ptr() not in repeated
    assert len(recorder.events) > 4
    assert sent.events == recorder.events
    assert computed.flops.total() == operators.flops.total() > 0
    of_step = Counter[tuple[str, str]]()
    for (name, shapes, _), count in operators.counts.items():
        of_step[name, shapes] += count
    assert all(of_step[name, shapes] >= count for (name, shapes, _), count in computed.counts.items())


def facts(rank: int, *, floor: list[float]) -> PartFacts:
    return PartFacts(
        rank=rank,
        products_seconds=[1.0, 2.0, 9.0],
        copies_seconds=[0.5, 0.5, 0.5],
        other_operators_seconds=[0.25 + rank] * 3,
        products_alone_seconds=floor,
        messages_alone_seconds=floor,
    )


def test_parts_are_means_over_ranks_of_medians_and_make_up_the_step() -> None:
    told = record(layout=Layout(tp=2), noise=0.0)
    ranks = [
        dataclasses.replace(rank, busy_seconds=[5.0 + rank.rank] * 3, wait_seconds=[3.0 - rank.rank] * 3)
        for rank in told.ranks
    ]
    parts = [facts(rank.rank, floor=[1.0, 3.0, 2.0]) for rank in ranks]
    row = step_parts(dataclasses.replace(told, ranks=ranks, parts=parts, step_seconds=[8.0] * 3))
    measured = [row[f"{name}_seconds"] for name in ("products", "copies", "other_operators")]
    derived = [row[f"{name}_seconds"] for name in ("dispatch", "waiting")]
    assert (measured, derived) == ([2.0, 0.5, 0.75], [5.5 - 3.25, 2.5])
    assert sum(part or 0.0 for part in (*measured, *derived)) == 8.0
    assert row["floor_ratio"] == 2.0


@pytest.mark.parametrize("without", ["parts", "floor"])
def test_what_was_not_measured_is_blank(without: str) -> None:
    told = record(layout=Layout(tp=2))
    parts = [facts(rank.rank, floor=[]) for rank in told.ranks] if without == "floor" else []
    row = step_parts(dataclasses.replace(told, parts=parts))
    assert row["floor_ratio"] is row["products_alone_seconds"] is None
    assert (row["products_seconds"] is None) == (without == "parts")
