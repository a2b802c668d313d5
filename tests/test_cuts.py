"""Is the chosen cut the best of all contiguous ones, found here by trying every one?"""

import itertools
import random

import pytest

from models.config import ModelConfig
from parallel.cuts import Cutting, Starts, best, order
from parallel.figures import StepShape
from parallel.layouts import Layout, NamedCut
from parallel.partition import stages
from parallel.placement import stage_ranks
from parallel.profile import Profile
from tests.small_models import small_config


def random_cutting(generator: random.Random, ranks: tuple[int, ...], num_blocks: int) -> Cutting:
    """Blocks and ends of any cost, costs that depend on the stage, and edges of any cost."""
    blocks = [generator.randint(0, 6) for _ in range(num_blocks)]
    edges = [generator.randint(0, 3) for _ in range(num_blocks + 1)]
    factors = [generator.randint(1, 3) for _ in ranks]
    return Cutting(
        num_blocks=num_blocks,
        ranks=ranks,
        held=lambda stage, first, last: factors[stage] * sum(blocks[first:last]),
        sent=lambda _stage, first, last: edges[first] * (first > 0) + edges[last] * (last < num_blocks),
    )


def every_cut(num_blocks: int, num_stages: int) -> list[Starts]:
    return [(0, *cut, num_blocks) for cut in itertools.combinations(range(1, num_blocks), num_stages - 1)]


@pytest.mark.parametrize("placement", ["linear", "interleaved", "v"])
def test_the_best_cut_is_the_best_of_all(placement: str) -> None:
    generator = random.Random(7)
    for _ in range(150):
        pp = generator.randint(2, 4)
        ranks = stage_ranks(placement, pp, 1 if placement == "linear" else 2)  # type: ignore[arg-type]
        num_blocks = len(ranks) + generator.randint(0, 3)
        cutting = random_cutting(generator, ranks, num_blocks)
        found = (0, *best(cutting), num_blocks)
        wanted = min(every_cut(num_blocks, len(ranks)), key=lambda starts: order(cutting, starts))
        assert order(cutting, found) == order(cutting, wanted)


def flops_of(config: ModelConfig, layout: Layout, source: int, target: int) -> list[float]:
    """Work of every stage of a layout's cut."""
    shape = StepShape(num_sequences=layout.microbatches, source_length=source, target_length=target)
    profile = Profile.of_flops(config, layout, shape)
    return [profile.stage(stage).total for stage in stages(config, layout, profile)]


@pytest.mark.parametrize(("source", "target"), [(64, 16), (32, 32), (16, 64)])
def test_a_cut_by_flops_is_at_most_as_unbalanced_as_even_and_aligned_ones(source: int, target: int) -> None:
    config = small_config("encoder_decoder", num_encoder_blocks=6, num_decoder_blocks=6, max_length=64)
    for pp in (2, 3, 4):
        cuts: tuple[NamedCut, ...] = ("flops", "even", "aligned")
        worst = {cut: max(flops_of(config, Layout(pp=pp, cut=cut), source, target)) for cut in cuts}
        assert worst["flops"] <= min(worst.values())


def test_folded_stages_keep_the_boundary() -> None:
    config = small_config("encoder_decoder", num_encoder_blocks=5, num_decoder_blocks=4, max_length=64)
    layout = Layout(pp=2, chunks=2, placement="folded", schedule="interleaved", cut="flops", microbatches=2)
    shape = StepShape(num_sequences=2, source_length=64, target_length=16)
    made = stages(config, layout, Profile.of_flops(config, layout, shape))
    assert made[2].first == config.num_encoder_blocks


def test_a_cut_that_needs_costs_is_refused_without_them() -> None:
    with pytest.raises(ValueError, match=r"^cut = 'flops' balances what blocks cost, and there is no profile"):
        stages(small_config("encoder_decoder"), Layout(pp=2, cut="flops"))


def test_a_profile_of_another_model_is_refused() -> None:
    config = small_config("decoder_only")
    layout, shape = Layout(pp=2, cut="flops"), StepShape(num_sequences=1, target_length=5)
    profile = Profile.of_flops(config, layout, shape)
    with pytest.raises(ValueError, match=r"is another's: it has "):
        stages(config.replace(ffn_width=2 * config.ffn_width), layout, profile)
