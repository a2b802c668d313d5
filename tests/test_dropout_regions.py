"""Do ranks drop out the same elements of what they hold twice, and different ones of what they hold in parts?

Which masks a rank draws is asked of every rank alone; that equal masks keep copies equal is asked of real ranks.
"""

import collections

import pytest
import torch
from torch import Tensor

from models.config import Architecture, ModelConfig
from models.dropout import Dropout
from parallel.comm import Comm
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout, Schedule
from parallel.plans import plan
from parallel.sequence import deal
from tests.one_rank import CPU, rank_of
from tests.rank import Worker
from tests.small_models import ARCHITECTURES, small_batch, small_config
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

Masks = dict[str, list[int]]
"""Seeds of the masks that were drawn, by site, in order."""

SHARDED = ("core_dropout", "inner_dropout")
"""Heads and ffn columns are dealt out over tp."""


def dropping(architecture: Architecture, **changes: object) -> ModelConfig:
    fields: dict[str, object] = {"dropout": 0.2, "attention_dropout": 0.2, "ffn_dropout": 0.2}
    return small_config(architecture, **(fields | changes))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Masks:
    """Every mask that is drawn while the test runs."""
    masks: Masks = collections.defaultdict(list)
    mask_seed = Dropout.mask_seed

    def remembered(self: Dropout) -> int:
        seed = mask_seed(self)
        masks[self.site].append(seed)
        return seed

    monkeypatch.setattr(Dropout, "mask_seed", remembered)
    return masks


def masks_of(drawn: Masks, config: ModelConfig, layout: Layout, rank: int, *, num_steps: int = 1) -> Masks:
    """What one rank draws in steps of six sequences for each data-parallel rank."""
    drawn.clear()
    planned = plan(config, layout)
    batch = small_batch(config, num_sequences=6 * layout.dp)
    with rank_of(planned, rank) as comm:
        engine = NativeEngine(plan=planned, comm=comm, settings=EngineSettings(seed=5, dtype=torch.float64, device=CPU))
        for _ in range(num_steps):
            engine.step(deal(batch, layout, comm.coordinate.dp))
    return dict(drawn)


def joined(*masks: Masks) -> Masks:
    together: Masks = collections.defaultdict(list)
    for each in masks:
        for site, seeds in each.items():
            together[site] += seeds
    return {site: sorted(seeds) for site, seeds in together.items()}


# ---- which masks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tp_ranks_draw_one_mask_for_what_is_whole_and_their_own_for_heads_and_columns(
    architecture: Architecture, drawn: Masks
) -> None:
    ranks = [masks_of(drawn, dropping(architecture), Layout(tp=4), rank) for rank in range(4)]
    assert all(set(masks) == set(ranks[0]) for masks in ranks)
    for site in ranks[0]:
        different = len({tuple(masks[site]) for masks in ranks})
        assert different == (4 if site.endswith(SHARDED) else 1), site


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_sequence_parallel_ranks_draw_their_own_mask_everywhere(architecture: Architecture, drawn: Masks) -> None:
    ranks = [masks_of(drawn, dropping(architecture), Layout(tp=4, sp=True), rank) for rank in range(4)]
    for site in ranks[0]:
        assert len({seed for masks in ranks for seed in masks[site]}) == 4, site


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_dropout_of_the_model_draws(architecture: Architecture, drawn: Masks) -> None:
    config = dropping(architecture)
    masks = masks_of(drawn, config, Layout(tp=2), 0)
    num_attentions = config.num_blocks + (config.num_decoder_blocks if config.has_cross_attention else 0)
    num_stacks = config.has_encoder + config.has_decoder
    assert len(masks) == num_stacks + 2 * num_attentions + 2 * config.num_blocks
    assert {len(seeds) for seeds in masks.values()} == {1}


def test_data_parallel_ranks_and_microbatches_draw_different_masks(drawn: Masks) -> None:
    layout = Layout(dp=2, microbatches=3)
    masks = joined(*(masks_of(drawn, dropping("encoder_decoder"), layout, rank) for rank in range(2)))
    for site, seeds in masks.items():
        assert len(set(seeds)) == len(seeds) == 6, site


def test_data_parallel_ranks_draw_what_one_process_draws_for_as_many_microbatches(drawn: Masks) -> None:
    config = dropping("encoder_decoder")
    ranks = [masks_of(drawn, config, Layout(dp=2, microbatches=3), rank) for rank in range(2)]
    assert joined(*ranks) == joined(masks_of(drawn, config, Layout(microbatches=6), 0))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stages_draw_what_one_process_draws(architecture: Architecture, schedule: Schedule, drawn: Masks) -> None:
    config = dropping(architecture, num_encoder_blocks=0 if architecture == "decoder_only" else 3)
    layout = Layout(pp=2, microbatches=3, schedule=schedule)
    stages = [masks_of(drawn, config, layout, rank) for rank in range(2)]
    assert joined(*stages) == joined(masks_of(drawn, config, Layout(microbatches=3), 0))


@pytest.mark.parametrize("layout", [Layout(microbatches=2), Layout(tp=2, sp=True, microbatches=2)], ids=["one", "sp"])
def test_recomputation_draws_every_mask_of_a_block_again(layout: Layout, drawn: Masks) -> None:
    config = dropping("encoder_decoder")
    once = masks_of(drawn, config, layout, 0)
    twice = masks_of(drawn, config, layout.replace(recompute="full"), 0)
    for site, seeds in once.items():
        assert sorted(twice[site]) == sorted(seeds * (2 if ".block." in site else 1)), site


def test_the_next_step_draws_other_masks(drawn: Masks) -> None:
    masks = masks_of(drawn, dropping("decoder_only"), Layout(), 0, num_steps=2)
    for site, seeds in masks.items():
        assert len(set(seeds)) == 2, site


# ---- what they do -------------------------------------------------------------------------------------------------


def facts_of(comm: Comm, config: ModelConfig, layout: Layout) -> tuple[float, float]:
    """Loss and gradient norm of a second step of twelve sequences."""
    settings = EngineSettings(seed=5, dtype=torch.float64, device=CPU)
    engine = NativeEngine(plan=plan(config, layout), comm=comm, settings=settings)
    batch = deal(small_batch(config, num_sequences=12), layout, comm.coordinate.dp)
    engine.step(batch)
    facts = engine.step(batch)
    return facts.loss, facts.gradient_norm


def together(worker: Worker, config: ModelConfig, layout: Layout) -> tuple[float, float]:
    comm = Comm.create(plan=plan(config, layout), rank=worker.rank, groups=worker.groups, device=CPU)
    return facts_of(comm, config, layout)


def alone(config: ModelConfig, layout: Layout) -> tuple[float, float]:
    with rank_of(plan(config, layout), 0) as comm:
        return facts_of(comm, config, layout)


@pytest.mark.parametrize(
    ("layout", "single", "changes"),
    [
        (Layout(pp=2, microbatches=3), Layout(microbatches=3), {}),
        (Layout(pp=2, microbatches=3, schedule="gpipe", recompute="full"), Layout(microbatches=3), {}),
        (Layout(pp=2, cut="aligned", microbatches=4), Layout(microbatches=4), {}),
        (Layout(dp=2, microbatches=2), Layout(microbatches=4), {}),
        (Layout(tp=2), Layout(), {"attention_dropout": 0.0, "ffn_dropout": 0.0}),
        (Layout(tp=2, recompute="full"), Layout(), {"attention_dropout": 0.0, "ffn_dropout": 0.0}),
    ],
    ids=lambda value: value.label if isinstance(value, Layout) else "",
)
def test_with_dropout_on_ranks_that_draw_the_same_masks_give_the_same_loss(
    layout: Layout, single: Layout, changes: dict[str, object], two_ranks: Ranks
) -> None:
    config = dropping("encoder_decoder", **changes)
    expected = alone(config, single)
    for found in two_ranks.run(together, config, layout):
        assert found == pytest.approx(expected, rel=EXACT_RTOL)
    without = alone(config.replace(dropout=0.0), single)
    assert without[0] != pytest.approx(expected[0], rel=1e-3)


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, sp=True)], ids=["tp", "sp"])
def test_recomputation_under_tensor_parallelism_gives_the_same_loss(layout: Layout, two_ranks: Ranks) -> None:
    config = dropping("encoder_decoder")
    plain = two_ranks.run(together, config, layout.replace(microbatches=2))
    assert plain[0] == plain[1]
    for changes in ({"recompute": "selective"}, {"recompute": "full", "memory_gather": "per_block"}):
        again = two_ranks.run(together, config, layout.replace(microbatches=2, **changes))
        for one, other in zip(plain, again, strict=True):
            assert other == pytest.approx(one, rel=EXACT_RTOL)


def hidden_states(worker: Worker, config: ModelConfig, layout: Layout) -> list[list[list[float]]]:
    """What every block of this rank gave, flattened, in order."""
    comm = Comm.create(plan=plan(config, layout), rank=worker.rank, groups=worker.groups, device=CPU)
    settings = EngineSettings(seed=5, dtype=torch.float64, device=CPU)
    engine = NativeEngine(plan=plan(config, layout), comm=comm, settings=settings)
    given: list[Tensor] = []
    for name, module in engine.model.named_modules():
        if name.rpartition(".")[0].endswith(".block"):
            module.register_forward_hook(lambda _module, _inputs, out: given.append(out.detach()))
    engine.step(small_batch(config))
    return [tensor.flatten(1).tolist() for tensor in given]


def test_copies_of_the_hidden_states_stay_equal_under_tensor_parallelism(two_ranks: Ranks) -> None:
    config = dropping("encoder_decoder")
    first, second = two_ranks.run(hidden_states, config, Layout(tp=2))
    assert len(first) == config.num_blocks
    assert first == second
