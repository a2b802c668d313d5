"""Is what is told in closed form what real ranks do? Predicted = traced = measured, and laws of conservation."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from models.batch import synthetic_batch
from models.config import ModelConfig
from models.costs import ParameterCounts, parameter_counts
from models.named import named_model
from parallel.comm import Comm
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.events import step_events
from parallel.figures import PhaseFlops, RankFigures, StepShape, differences
from parallel.layouts import Layout
from parallel.ledger import Event, Total
from parallel.mesh import Coordinate
from parallel.meter import Meter
from parallel.operators import Operator
from parallel.parameters import parameter_counts as counts_of_rank
from parallel.parameters import replicated_parameters, state_bytes, whole_parameters
from parallel.plan import Plan
from parallel.plans import plan
from parallel.predict import predict, predict_rank
from parallel.sequence import deal
from parallel.share import share_of, shares
from parallel.trace import trace
from tests.rank import Worker
from tests.sampled_layouts import samples
from tests.small_models import ARCHITECTURES, small_config
from tests.spawn import Ranks

SOURCE_LENGTH, TARGET_LENGTH = 7, 6
DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}

# ---- predicted = traced = measured ----------------------------------------------------------------------------------

LAYOUTS: tuple[tuple[Layout, dict[str, Any], int], ...] = (
    (Layout(tp=4, microbatches=2), {}, 4),
    (Layout(tp=4, sp=True, recompute="full", memory_gather="per_block", saved_input="whole"), {"dropout": 0.1}, 8),
    (Layout(tp=2, pp=2, sp=True, microbatches=3), {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"}, 2),
    (Layout(tp=2, dp=2, vocabulary="whole", recompute="selective"), {"head_bias": True, "tying": "none"}, 2),
    (Layout(tp=2, pp=2, vocabulary="whole", microbatches=3), {"dropout": 0.1, "source_vocabulary": 0}, 4),
    (
        Layout(tp=2, dp=2, recompute="selective", gradient_bucket_bytes=2000),
        {"positions": "relative", "relative_buckets": 8, "tying": "head"},
        4,
    ),
    (Layout(pp=2, dp=2, microbatches=2, schedule="gpipe"), {"attention_dropout": 0.1, "norm_position": "post"}, 4),
    (Layout(pp=4, microbatches=5, recompute="selective", attention="materialised"), {"tying": "head"}, 4),
)


def _model(architecture: str, changes: dict[str, Any]) -> ModelConfig:
    blocks = {"encoder_only": (5, 0), "decoder_only": (0, 5), "encoder_decoder": (3, 2)}[architecture]
    named = {"num_encoder_blocks": blocks[0], "num_decoder_blocks": blocks[1]}
    return small_config(architecture, **named, **changes)  # type: ignore[arg-type]


def _shape(config: ModelConfig, layout: Layout, dtype_bytes: int) -> StepShape:
    return StepShape(
        num_sequences=2 * layout.microbatches - (layout.microbatches > 1),
        source_length=SOURCE_LENGTH if config.has_encoder else 0,
        target_length=TARGET_LENGTH if config.has_decoder else 0,
        dtype_bytes=dtype_bytes,
        is_ragged=config.has_encoder and layout.schedule == "gpipe",
    )


def _computing(operators: Iterable[Operator]) -> frozenset[Operator]:
    """Without the end of the step, and without what gloo does: to gather into one tensor it gathers many and copies.

    Autograd copies a gradient that gloo's thread happens to hold still, instead of taking it.
    """
    of_gloo = ("aten.split.Tensor", "aten.copy_.default", "aten.new_empty_strided.default")
    return frozenset(operator for operator in operators if operator[2] != "step" and operator[0] not in of_gloo)


def _measure(worker: Worker, made: Plan, shape: StepShape) -> tuple[RankFigures, frozenset[Operator]]:
    comm = Comm.create(plan=made, rank=worker.rank, groups=worker.groups, device=torch.device("cpu"))
    settings = EngineSettings(seed=1, dtype=DTYPES[shape.dtype_bytes], device=torch.device("cpu"))
    engine = NativeEngine(plan=made, comm=comm, settings=settings)
    batch = synthetic_batch(
        made.config,
        num_sequences=shape.num_sequences * made.layout.dp,
        source_length=shape.source_length,
        target_length=shape.target_length,
        seed=2,
    )
    if shape.is_ragged:
        lengths = (shape.source_length - 1,) * batch.num_sequences
        batch = dataclasses.replace(batch, source_lengths=lengths)
    with Meter(engine) as meter:
        engine.step(deal(batch, made.layout, comm.coordinate.dp), update=False, observer=meter)
    return meter.figures(), _computing(meter.operators.counts)


@pytest.mark.parametrize(
    ("index", "architecture"),
    [
        (index, name)
        for index in range(len(LAYOUTS))
        for name in dict.fromkeys(("encoder_decoder", ARCHITECTURES[index % 3]))
    ],
)
def test_predicted_traced_and_measured_ranks_are_equal(four_ranks: Ranks, architecture: str, index: int) -> None:
    layout, changes, dtype_bytes = LAYOUTS[index]
    config = _model(architecture, changes)
    made, shape = plan(config, layout), _shape(config, layout, dtype_bytes)
    measured = four_ranks.run(_measure, made, shape)
    ranks = [share_of(made, layout.mesh.coordinate(rank)) for rank in range(4)]
    traced = trace(made, shape, ranks=ranks)
    for rank, dry, (figures, operators) in zip(ranks, traced, measured, strict=True):
        predicted = predict_rank(rank, shape)
        assert differences(predicted.figures, figures) == []
        assert differences(dry.figures, figures) == []
        assert _computing(dry.operators) == operators


def _adamw_bytes(worker: Worker, made: Plan, shape: StepShape) -> int:
    comm = Comm.create(plan=made, rank=worker.rank, groups=worker.groups, device=torch.device("cpu"))
    settings = EngineSettings(seed=1, dtype=torch.float32, device=torch.device("cpu"), optimizer="adamw")
    engine = NativeEngine(plan=made, comm=comm, settings=settings)
    engine.step(
        synthetic_batch(
            made.config,
            num_sequences=1,
            source_length=shape.source_length,
            target_length=shape.target_length,
            seed=2,
        )
    )
    return engine.optimizer_bytes


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_optimizer_states_are_told_to_the_byte(two_ranks: Ranks, architecture: str) -> None:
    config = _model(architecture, {"num_token_types": 2, "head_bias": True, "head_transform": True, "tying": "head"})
    for layout in (Layout(tp=2, sp=True), Layout(pp=2)):
        made = plan(config, layout)
        measured = two_ranks.run(_adamw_bytes, made, _shape(config, layout, 4))
        ranks = [share_of(made, layout.mesh.coordinate(rank)) for rank in range(2)]
        assert [state_bytes(rank, 4, "adamw").optimizer for rank in ranks] == measured


# ---- laws of conservation -------------------------------------------------------------------------------------------


def test_stages_and_tensor_parallel_ranks_add_up_to_the_model() -> None:
    for sample in samples(100, seed=3):
        made = sample.plan
        tp, kv_heads = made.layout.tp, made.config.num_kv_heads
        ranks = [
            share_of(made, Coordinate(dp=0, pp=stage, cp=0, tp=coordinate))
            for stage in range(made.layout.pp)
            for coordinate in range(tp)
        ]
        held = sum(counts_of_rank(rank).total for rank in ranks)
        # What every tp rank holds whole and KV heads that several hold count once, as do copies on other stages.
        held -= sum(whole_parameters(rank) for rank in ranks) * (tp - 1) // tp
        held -= sum(replicated_parameters(rank) for rank in ranks) * max(0, tp - kv_heads) // tp
        for shared in made.shared:
            width = made.config.num_heads if "relative_bias" in shared.name else made.config.width
            rows = made.config.relative_buckets if "relative_bias" in shared.name else made.config.vocabulary
            held -= (len(shared.holders) - 1) * rows * width
        assert held == parameter_counts(made.config).total, str(sample)


def test_one_rank_holds_the_whole_model_by_component() -> None:
    for name in ("t5-base", "gpt2", "llama-2-7b", "bert-base", "bart-base", "transformer-base"):
        config = named_model(name)
        (rank,) = shares(plan(config, Layout()))
        assert counts_of_rank(rank) == parameter_counts(config)


def test_what_one_stage_sends_its_neighbour_receives() -> None:
    for sample in samples(50, seed=4):
        crossed: dict[str, list[Total]] = {"send": [], "receive": []}
        for rank in shares(sample.plan):
            if rank.coordinate.tp == 0:
                for total in step_events(rank, sample.shape):
                    crossed.get(total.event.operation, []).append(total)

        def by_tensor(totals: list[Total]) -> list[tuple[str, str, str, int, int]]:
            return sorted((t.event.site, t.event.stream, t.event.phase, t.event.payload_bytes, t.count) for t in totals)

        assert by_tensor(crossed["send"]) == by_tensor(crossed["receive"])


def test_zero_deals_out_one_kind_of_state_after_the_other() -> None:
    config = small_config("decoder_only")
    totals = []
    for zero in range(4):
        (rank,) = {share.coordinate.pp: share for share in shares(plan(config, Layout(dp=4, zero=zero)))}.values()
        count = counts_of_rank(rank).total
        dealt = -(-count // 4)
        states = state_bytes(rank, 2, "adamw", master_weights=True)
        assert states.master_weights == 4 * (dealt if zero >= 1 else count)
        assert states.gradients == 2 * (dealt if zero >= 2 else count)
        assert states.parameters == 2 * (dealt if zero == 3 else count)
        totals.append(states.total)
    assert totals == sorted(totals, reverse=True)


def test_zero_changes_traffic_over_dp_only() -> None:
    config, shape = small_config("decoder_only"), StepShape(num_sequences=6, target_length=5)
    told = {}
    for zero in range(4):
        made = plan(config, Layout(tp=2, dp=2, zero=zero, microbatches=3))
        events = step_events(shares(made)[0], shape)
        kept = [total for total in events if not total.event.site.endswith(".dp")]
        told[zero] = {total.event.operation: total.count for total in events if total.event.site.endswith(".dp")}
        assert kept == [total for total in step_events(shares(made)[0], shape) if total in kept]
    assert told == {
        0: {"all_reduce": 1},
        1: {"reduce_scatter": 1, "all_gather": 1},
        2: {"reduce_scatter": 3, "all_gather": 1},
        3: {"reduce_scatter": 3, "all_gather": 6},
    }


# ---- mistakes -------------------------------------------------------------------------------------------------------


def test_mistakes_are_told_before_anything_is_computed() -> None:
    config = small_config("encoder_decoder")
    made = plan(config, Layout())
    with pytest.raises(ValueError, match=r"target_length = 13: unnamed reads 1 to 12 target positions"):
        predict(made, StepShape(num_sequences=1, source_length=5, target_length=13))
    with pytest.raises(ValueError, match="source_length = 0"):
        predict(made, StepShape(num_sequences=1, target_length=5))
    with pytest.raises(ValueError, match="do not fill 4 microbatches"):
        predict(plan(config, Layout(microbatches=4)), StepShape(num_sequences=3, source_length=5, target_length=5))
    with pytest.raises(ValueError, match="cp = 2"):
        predict(plan(config, Layout(cp=2)), StepShape(num_sequences=1, source_length=5, target_length=5))
    with pytest.raises(ValueError, match="dtype_bytes = 3"):
        StepShape(num_sequences=1, dtype_bytes=3)
    with pytest.raises(ValueError, match="num_sequences = 0"):
        StepShape(num_sequences=0)


def test_a_difference_names_quantity_and_site() -> None:
    event = Event(
        operation="all_reduce",
        axis="tp",
        group_size=2,
        payload_bytes=8,
        site="decoder.block.0.ffn.down",
        stream="target",
        phase="forward",
    )
    nothing = ParameterCounts(embedding=0, relative_bias=0, self_attention=0, cross_attention=0, ffn=0, norms=0, head=0)
    figures = RankFigures(
        coordinate=Coordinate(dp=0, pp=1, cp=0, tp=0),
        parameters=nothing,
        parameter_bytes=0,
        gradient_bytes=0,
        events=(Total(event=event, count=2),),
        flops=PhaseFlops(forward=1),
        saved_bytes=5,
        peak_saved_bytes=5,
    )
    other = dataclasses.replace(figures, events=(), saved_bytes=6)
    told = differences(figures, other)
    assert told == [
        "all_reduce tp at decoder.block.0.ffn.down (target, forward), 8 bytes over 2 ranks: 0 times, expected 2",
        "dp=0 pp=1 cp=0 tp=0: saved_bytes is 6, expected 5",
    ]
    assert differences(figures, figures) == []
