"""Does the native engine learn, in every precision and with either optimizer, and tell what it holds?"""

import pytest
import torch

from models.config import Architecture, ModelConfig
from models.costs import parameter_counts
from models.initial import draw
from parallel.comm import Comm
from parallel.engines.choice import NATIVE
from parallel.engines.engine import OptimizerName, StepFacts, unsupported
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout
from parallel.plans import plan
from parallel.sequence import deal, microbatches, pad
from tests.one_rank import CPU, rank_of
from tests.rank import Worker
from tests.small_models import ARCHITECTURES, small_batch, small_config
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

LAYOUTS = [
    Layout(tp=2),
    Layout(tp=2, vocabulary="whole"),
    Layout(tp=2, sp=True, recompute="full"),
    Layout(pp=2, microbatches=3),
    Layout(dp=2),
]


def tied(architecture: Architecture) -> ModelConfig:
    return small_config(architecture, tying="all" if architecture == "encoder_decoder" else "head")


def train(
    comm: Comm, config: ModelConfig, layout: Layout, optimizer: OptimizerName, dtype: torch.dtype, num_steps: int
) -> tuple[list[StepFacts], NativeEngine]:
    settings = EngineSettings(
        seed=2, dtype=dtype, device=CPU, optimizer=optimizer, learning_rate=0.02 if optimizer == "adamw" else 0.5
    )
    engine = NativeEngine(plan=plan(config, layout), comm=comm, settings=settings)
    batch = deal(small_batch(config, num_sequences=6), layout, comm.coordinate.dp)
    return [engine.step(batch) for _ in range(num_steps)], engine


def trained(
    worker: Worker, config: ModelConfig, layout: Layout, optimizer: OptimizerName, dtype: torch.dtype, num_steps: int
) -> tuple[list[StepFacts], float]:
    """What each step told, and how far copies of the same weights are apart (on rank 0)."""
    comm = Comm.create(plan=plan(config, layout), rank=worker.rank, groups=worker.groups, device=CPU)
    facts, engine = train(comm, config, layout, optimizer, dtype, num_steps)
    gathered = engine.gather("weight")
    return facts, gathered.replica_error if gathered is not None else 0.0


def trained_alone(config: ModelConfig, optimizer: OptimizerName, dtype: torch.dtype, num_steps: int) -> list[StepFacts]:
    with rank_of(plan(config, Layout()), 0) as comm:
        return train(comm, config, Layout(), optimizer, dtype, num_steps)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_loss_falls(architecture: Architecture, optimizer: OptimizerName, dtype: torch.dtype) -> None:
    losses = [facts.loss for facts in trained_alone(tied(architecture), optimizer, dtype, 12)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_adamw_on_ranks_follows_one_process_and_keeps_copies_equal(
    architecture: Architecture, layout: Layout, two_ranks: Ranks
) -> None:
    config = tied(architecture)
    expected = trained_alone(config, "adamw", torch.float64, 3)
    for found, replica_error in two_ranks.run(trained, config, layout, "adamw", torch.float64, 3):
        assert replica_error == 0.0
        for one, other in zip(found, expected, strict=True):
            assert one.loss_tokens == other.loss_tokens
            assert one.loss == pytest.approx(other.loss, rel=EXACT_RTOL)
            assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=EXACT_RTOL)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layouts_agree_to_the_precision_of_the_dtype(dtype: torch.dtype, layout: Layout, two_ranks: Ranks) -> None:
    config = small_config("encoder_decoder")
    (exact,), (alone,) = (trained_alone(config, "sgd", of, 1) for of in (torch.float64, dtype))
    ((first,), _), ((second,), _) = two_ranks.run(trained, config, layout, "sgd", dtype, 1)
    assert first == second
    for quantity in ("loss", "gradient_norm"):
        close = pytest.approx(getattr(exact, quantity), rel=8 * torch.finfo(dtype).eps)
        assert getattr(alone, quantity) == close
        assert getattr(first, quantity) == close


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=2, pp=2, sp=True, cut=(2,))], ids=lambda layout: layout.label
)
@pytest.mark.parametrize(("dtype", "size_bytes"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)])
def test_bytes_are_those_of_the_parameters_a_rank_holds(dtype: torch.dtype, size_bytes: int, layout: Layout) -> None:
    config = tied("encoder_decoder")
    with rank_of(plan(config, layout), 1) as comm:
        _, engine = train(comm, config, layout, "adamw", dtype, 0)
        assert engine.optimizer_bytes == 0
        _, engine = train(comm, config, layout, "adamw", dtype, 1)
        assert engine.parameter_bytes == engine.gradient_bytes == engine.num_parameters * size_bytes
        # Two moments of each parameter, and the number of steps as one float32 a tensor.
        num_tensors = len(list(engine.model.parameters()))
        assert engine.optimizer_bytes == 2 * engine.parameter_bytes + 4 * num_tensors
        _, engine = train(comm, config, layout, "sgd", dtype, 1)
        assert engine.optimizer_bytes == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_rank_holds_the_whole_model(architecture: Architecture) -> None:
    config = tied(architecture)
    with rank_of(plan(config, Layout()), 0) as comm:
        _, engine = train(comm, config, Layout(), "sgd", torch.float32, 0)
        assert engine.num_parameters == parameter_counts(config).total


def test_weights_are_those_drawn_by_name_whatever_the_layout(four_ranks: Ranks) -> None:
    for layout in (Layout(tp=4), Layout(tp=2, pp=2, cut=(2,))):
        assert four_ranks.run(differing_weights, tied("encoder_decoder"), layout)[0] == []


def differing_weights(worker: Worker, config: ModelConfig, layout: Layout) -> list[str] | None:
    """Names of the weights that are not what `draw` gives; on rank 0."""
    comm = Comm.create(plan=plan(config, layout), rank=worker.rank, groups=worker.groups, device=CPU)
    _, engine = train(comm, config, layout, "sgd", torch.float64, 0)
    gathered = engine.gather("weight")
    if gathered is None:
        return None
    assert gathered.replica_error == 0.0
    return [
        name
        for name, weight in gathered.tensors.items()
        if not torch.equal(weight, draw(config, name, tuple(weight.shape), seed=2).double())
    ]


def test_a_step_without_update_changes_no_weight_and_repeats() -> None:
    config = small_config("encoder_decoder", dropout=0.2)
    with rank_of(plan(config, Layout()), 0) as comm:
        _, engine = train(comm, config, Layout(), "adamw", torch.float64, 1)
        before = {name: parameter.clone() for name, parameter in engine.model.named_parameters()}
        first, second = (engine.step(small_batch(config), update=False) for _ in range(2))
        assert first == second
        for name, parameter in engine.model.named_parameters():
            assert torch.equal(parameter, before[name]), name


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(cp=2), "the native engine does not run context parallelism yet: cp = 2; use cp = 1"),
        (Layout(dp=2, zero=2), "the native engine deals optimizer states, nothing else: zero = 2; use zero <= 1"),
    ],
)
def test_a_layout_that_the_engine_cannot_run_is_refused(layout: Layout, message: str) -> None:
    config = small_config("decoder_only")
    planned = plan(config, layout)
    assert unsupported(NATIVE, config, layout) == message
    with rank_of(planned, 0) as comm, pytest.raises(ValueError, match=f"^{message}$"):
        NativeEngine(plan=planned, comm=comm, settings=EngineSettings(seed=0, dtype=torch.float32, device=CPU))
    assert unsupported(NATIVE, config, Layout(tp=2, dp=2, pp=2)) is None


# ---- how sequences reach a rank -----------------------------------------------------------------------------------


def test_every_sequence_is_dealt_to_one_rank_and_one_microbatch() -> None:
    layout = Layout(dp=3, microbatches=3)
    batch = small_batch(small_config("encoder_decoder"), num_sequences=15)
    dealt = [part for rank in range(3) for part in microbatches(deal(batch, layout, rank), layout)]
    assert [part.num_sequences for part in dealt] == [2, 2, 1] * 3
    assert torch.equal(torch.cat([part.labels for part in dealt]), batch.labels)
    assert tuple(length for part in dealt for length in part.source_lengths) == batch.source_lengths


def test_each_stream_is_padded_on_its_own_with_positions_that_count_nowhere() -> None:
    config = small_config("encoder_decoder", num_token_types=2)
    batch = small_batch(config)
    padded = pad(batch, plan(config, Layout(tp=4, sp=True)))
    assert (batch.stream_length("source"), batch.stream_length("target")) == (7, 5)
    assert (padded.stream_length("source"), padded.stream_length("target")) == (8, 8)
    assert padded.num_loss_tokens() == batch.num_loss_tokens()
    assert (padded.source_lengths, padded.target_lengths) == (batch.source_lengths, batch.target_lengths)
    assert padded.source is not None
    assert batch.source is not None
    assert torch.equal(padded.source[:, :7], batch.source)
    assert not padded.source[:, 7:].any()


def test_features_are_padded_along_the_sequence() -> None:
    config = small_config("encoder_decoder", feature_width=3)
    padded = pad(small_batch(config), plan(config, Layout(tp=2, sp=True)))
    assert padded.source is not None
    assert tuple(padded.source.shape) == (3, 8, 3)
    assert not padded.source[:, 7:].any()
