"""Does PyTorch's own parallelism, put together by the torch engine, equal one process, traps included?

Known traps of torch 2.13 that are made right, so that a layout here compares gradients (others are refused in one line,
see `tests/test_torch_limits.py`): a ragged last microbatch; gradients divided by the microbatches; means over
dp ranks with unequal labels; tied weights on two stages; gradients that DTensor places unlike their parameters.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from launch.case import Case
from launch.parity import LARGEST_ERROR, Parity, case_batch, check_parity
from models.batch import IGNORED, Batch, synthetic_batch
from models.config import Architecture, ModelConfig
from parallel.comm import Comm
from parallel.engines.choice import NATIVE, EngineChoice, EngineName
from parallel.engines.engine import StepFacts, build
from parallel.engines.settings import EngineSettings
from parallel.engines.torch_pipeline import equal_microbatches
from parallel.layouts import Layout
from parallel.ledger import Event
from parallel.plans import plan
from parallel.recorder import Observed, Recorder
from parallel.sequence import deal, microbatches
from tests.one_rank import CPU, rank_of
from tests.rank import Worker
from tests.small_ledgers import FLOAT, M_D, M_E, SEQUENCES, SOURCE, TARGET, config_of, ledger_of
from tests.small_models import ARCHITECTURES, small_batch, small_config, small_model
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

INTERLEAVED = {"schedule": "interleaved", "placement": "interleaved", "chunks": 2}
LAYOUTS = [
    Layout(tp=2, sp=True, memory_gather="per_block"),
    Layout(tp=2, recompute="selective", attention="materialised"),
    Layout(pp=2, microbatches=3, schedule="gpipe"),
    Layout(pp=2, microbatches=3),
    Layout.from_dict({"pp": 2, "microbatches": 4, **INTERLEAVED}),
    Layout(dp=2, microbatches=2),
    Layout(dp=2, microbatches=2, zero=1),
    Layout(dp=2, microbatches=2, zero=2),
    Layout(dp=2, microbatches=2, zero=3),
]
"""Every way that two ranks can be used; the last microbatch is ragged wherever there are several."""
OF_ALL_ARCHITECTURES = (LAYOUTS[0], LAYOUTS[3], LAYOUTS[-1])


def tied(architecture: Architecture) -> ModelConfig:
    """All that is awkward: weights tied over stages, an odd vocabulary, biases of scores, four blocks or more."""
    return small_config(
        architecture,
        tying="all" if architecture == "encoder_decoder" else "head",
        positions="relative",
        num_decoder_blocks=0 if architecture == "encoder_only" else 4,
        num_encoder_blocks=0 if architecture == "decoder_only" else 4,
    )


def case_of(config: ModelConfig, layout: Layout) -> Case:
    num_sequences = 2 * layout.microbatches - (layout.microbatches > 1)
    return Case(
        name=layout.label,
        config=config,
        layout=layout,
        engine=EngineChoice("torch"),
        num_sequences=num_sequences * layout.dp,
        source_length=7,
        target_length=9,
    )


def parities(worker: Worker, cases: list[Case]) -> list[Parity]:
    return [check_parity(case, groups=worker.groups, rank=worker.rank, device=CPU) for case in cases]


def test_what_llama_is_made_of_equals_one_process(two_ranks: Ranks) -> None:
    llama = small_config("decoder_only", norm="rmsnorm", positions="rope", activation="swiglu")
    layouts = [Layout(tp=2, sp=True), Layout(dp=2, zero=3)]
    for parity in two_ranks.run(parities, [case_of(llama, layout) for layout in layouts])[0]:
        assert parity.failures == ()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
def test_a_step_equals_one_process(layout: Layout, two_ranks: Ranks) -> None:
    architectures = ARCHITECTURES if layout in OF_ALL_ARCHITECTURES else ("encoder_decoder",)
    cases = [case_of(tied(architecture), layout) for architecture in architectures]
    for case, parity in zip(cases, two_ranks.run(parities, cases)[0], strict=True):
        assert parity.failures == (), case.config.architecture
        assert parity.worst_error <= LARGEST_ERROR


def test_four_stages_equal_one_process(four_ranks: Ranks) -> None:
    """Four stages too: under torch's checks their sends, unlike in number, must not count as collectives."""
    layouts = (Layout(pp=4, microbatches=4),)
    cases = [case_of(tied("encoder_decoder"), layout) for layout in layouts]
    for case, parity in zip(cases, four_ranks.run(parities, cases)[0], strict=True):
        assert parity.failures == (), case.name


# ---- traps ----------------------------------------------------------------------------------------------------------


def test_microbatches_and_ranks_differ_in_labels_so_that_means_of_means_would_show() -> None:
    for layout in (Layout(dp=2, microbatches=2), Layout(pp=2, microbatches=3)):
        case = case_of(tied("encoder_decoder"), layout)
        shares = [deal(case_batch(case, seed=0), layout, rank) for rank in range(layout.dp)]
        counts = [[one.num_loss_tokens() for one in microbatches(share, layout)] for share in shares]
        assert len({sum(row) for row in counts}) == layout.dp
        assert all(len(set(row)) > 1 for row in counts)


def test_a_ragged_last_microbatch_is_filled_up_with_sequences_without_labels() -> None:
    planned = plan(tied("encoder_decoder"), Layout(pp=2, microbatches=3))
    batch = small_batch(planned.config, num_sequences=7)
    cut, filled = microbatches(batch, planned.layout), equal_microbatches(batch, planned)
    assert [one.num_sequences for one in cut] == [3, 3, 1]
    assert [one.num_sequences for one in filled] == [3, 3, 3]
    assert [one.num_loss_tokens() for one in filled] == [one.num_loss_tokens() for one in cut]
    assert (filled[-1].labels[1:] == IGNORED).all()
    assert torch.equal(filled[-1].stream("source")[0], cut[-1].stream("source")[0])


def gradients(worker: Worker, config: ModelConfig, layout: Layout) -> dict[str, Tensor]:
    """Whole gradients of one step, on rank 0."""
    planned = plan(config, layout)
    comm = Comm.create(plan=planned, rank=worker.rank, groups=worker.groups, device=CPU)
    settings = EngineSettings(seed=0, dtype=torch.float64, device=CPU)
    engine = build(EngineChoice("torch"), plan=planned, comm=comm, settings=settings)
    engine.step(deal(small_batch(config, num_sequences=5), layout, comm.coordinate.dp), update=False)
    told = engine.gather("gradient")
    return {} if told is None else told.tensors


def test_a_block_that_is_computed_again_drops_out_what_it_did_before(two_ranks: Ranks) -> None:
    """Also when other microbatches ran forward in between."""
    config = tied("encoder_decoder").replace(dropout=0.3, attention_dropout=0.2, ffn_dropout=0.1)
    layout = Layout(pp=2, microbatches=3, schedule="gpipe")
    kept = two_ranks.run(gradients, config, layout)[0]
    for recompute in ("selective", "full"):
        again = two_ranks.run(gradients, config, layout.replace(recompute=recompute))[0]
        for name, gradient in kept.items():
            torch.testing.assert_close(again[name], gradient, rtol=EXACT_RTOL, atol=1e-15)


# ---- optimizers and what ranks hold ---------------------------------------------------------------------------------


def trained(worker: Worker, config: ModelConfig, layout: Layout) -> tuple[list[StepFacts], float, tuple[int, ...]]:
    """Three steps of AdamW, how far copies are apart after them, and what the rank holds."""
    planned = plan(config, layout)
    comm = Comm.create(plan=planned, rank=worker.rank, groups=worker.groups, device=CPU)
    settings = EngineSettings(seed=2, dtype=torch.float64, device=CPU, optimizer="adamw", learning_rate=0.02)
    engine = build(EngineChoice("torch"), plan=planned, comm=comm, settings=settings)
    batch = deal(small_batch(config, num_sequences=6), layout, comm.coordinate.dp)
    facts = [engine.step(batch) for _ in range(3)]
    gathered = engine.gather("weight")
    held = (engine.num_parameters, engine.parameter_bytes, engine.gradient_bytes, engine.optimizer_bytes)
    return facts, gathered.replica_error if gathered is not None else 0.0, held


def trained_alone(config: ModelConfig) -> list[StepFacts]:
    planned = plan(config, Layout())
    with rank_of(planned, 0) as comm:
        settings = EngineSettings(seed=2, dtype=torch.float64, device=CPU, optimizer="adamw", learning_rate=0.02)
        engine = build(NATIVE, plan=planned, comm=comm, settings=settings)
        return [engine.step(small_batch(config, num_sequences=6)) for _ in range(3)]


@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, sp=True), Layout(dp=2, zero=1), Layout(dp=2, zero=3)],
    ids=lambda layout: layout.label,
)
def test_adamw_follows_one_process_and_keeps_copies_equal(layout: Layout, two_ranks: Ranks) -> None:
    config = tied("encoder_decoder")
    expected = trained_alone(config)
    for found, replica_error, _ in two_ranks.run(trained, config, layout):
        assert replica_error == 0.0
        for one, other in zip(found, expected, strict=True):
            assert one.loss_tokens == other.loss_tokens
            assert one.loss == pytest.approx(other.loss, rel=EXACT_RTOL)
            assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=EXACT_RTOL)


def test_zero_halves_what_it_says_it_shards(two_ranks: Ranks) -> None:
    config = tied("encoder_decoder")
    held = {
        zero: [told[2] for told in two_ranks.run(trained, config, Layout(dp=2, zero=zero))] for zero in (0, 1, 2, 3)
    }
    whole = held[0][0]
    assert held[0][1] == whole
    assert [row[:3] for row in held[1]] == [whole[:3]] * 2
    for zero in (1, 2, 3):
        # Each AdamW state has a counter of its own, and an odd tensor is cut unevenly.
        assert sum(row[3] for row in held[zero]) == pytest.approx(whole[3], rel=0.02)
        assert max(row[3] for row in held[zero]) < 0.6 * whole[3]
    for zero in (2, 3):
        for kind in range(3):
            assert sum(row[kind] for row in held[zero]) == whole[kind]
            assert max(row[kind] for row in held[zero]) < 0.6 * whole[kind]


# ---- what the recorder sees -----------------------------------------------------------------------------------------


def recorded(
    worker: Worker, config: ModelConfig, layout: Layout, engine_name: EngineName = "torch"
) -> tuple[list[Observed], str | None]:
    """What the third of three steps sends: the first finds partners and shapes, the second settles DDP's buckets."""
    planned = plan(config, layout)
    comm = Comm.create(plan=planned, rank=worker.rank, groups=worker.groups, device=CPU)
    settings = EngineSettings(seed=0, dtype=torch.float32, device=CPU)
    engine = build(EngineChoice(engine_name), plan=planned, comm=comm, settings=settings)
    batch = deal(full_batch(config), layout, comm.coordinate.dp)
    engine.step(batch)
    engine.step(batch)
    with Recorder() as recorder:
        engine.step(batch)
    return recorder.events, recorder.first_unknown()


def full_batch(config: ModelConfig) -> Batch:
    """The batch that `ledger_of` takes."""
    return synthetic_batch(config, num_sequences=SEQUENCES, source_length=SOURCE, target_length=TARGET, seed=3)


def hidden_sized(events: Iterable[Observed | Event]) -> Counter[tuple[str, int]]:
    """Collectives whose payload is a whole hidden state, by operation and bytes."""
    return Counter((event.operation, event.payload_bytes) for event in events if event.payload_bytes in (M_E, M_D))


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=2, sp=True, saved_input="whole")], ids=lambda layout: layout.label
)
def test_the_recorder_sees_that_dtensor_sends_what_the_native_engine_does_that_keeps_inputs_whole(
    layout: Layout, two_ranks: Ranks
) -> None:
    config = config_of("encoder_decoder", 2)
    native = hidden_sized(ledger_of(config, layout))
    assert sum(native.values()) > 20
    for events, unknown in two_ranks.run(recorded, config, layout):
        assert unknown is None
        assert {event.group_size for event in events} == {2}
        assert hidden_sized(events) == native


def test_the_recorder_sees_both_directions_of_a_pipeline_and_the_reductions_of_dp(two_ranks: Ranks) -> None:
    config = config_of()
    for rank, (events, unknown) in enumerate(two_ranks.run(recorded, config, Layout(pp=2, microbatches=2))):
        moved = [(event.operation, event.payload_bytes) for event in events if event.operation in ("send", "receive")]
        first, second = ("send", "receive") if rank == 0 else ("receive", "send")
        assert unknown is None
        assert Counter(moved) == {(first, M_E // 2): 2, (second, M_E // 2): 2}
    whole = 4 * sum(parameter.numel() for parameter in small_model(config).parameters())
    for events, unknown in two_ranks.run(recorded, config, Layout(dp=2)):
        assert unknown is None
        assert sum(event.payload_bytes for event in events if event.payload_bytes > FLOAT * 2) == whole


@pytest.mark.parametrize("engine_name", ["torch", "fairscale"])
def test_replicas_sum_as_many_bytes_in_smaller_buckets_where_these_are_asked_for(
    engine_name: EngineName, two_ranks: Ranks
) -> None:
    if importlib.util.find_spec(engine_name) is None:
        pytest.skip(f"needs {engine_name}: pip install 'twinshard[engines]'")
    layout, config = Layout(dp=2), config_of()
    sent = []
    for least_bytes in (0, 1000):
        events, _ = two_ranks.run(recorded, config, layout.replace(gradient_bucket_bytes=least_bytes), engine_name)[0]
        sent.append([event.payload_bytes for event in events if event.payload_bytes > FLOAT * 2])
    assert sum(sent[0]) == sum(sent[1])
    assert len(sent[1]) > 2 * len(sent[0])
