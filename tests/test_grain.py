"""What do cuts inside of blocks gain at best?"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import ModelConfig
from parallel.figures import StepShape
from parallel.grain import grain, sublayer_costs
from parallel.layouts import Layout
from parallel.partition import first_blocks, stages_of
from parallel.profile import Profile
from tests.small_models import small_config


def model(num_encoder_blocks: int, num_decoder_blocks: int) -> ModelConfig:
    return small_config("encoder_decoder", num_encoder_blocks=num_encoder_blocks, num_decoder_blocks=num_decoder_blocks)


def profile_of(config: ModelConfig, target_length: int = 5) -> Profile:
    shape = StepShape(num_sequences=2, source_length=7, target_length=target_length)
    return Profile.of_flops(config, Layout(), shape)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 12), st.data())
def test_sublayers_are_cut_at_least_as_well_as_blocks(
    num_encoder_blocks: int, num_decoder_blocks: int, target_length: int, data: st.DataObject
) -> None:
    config = model(num_encoder_blocks, num_decoder_blocks)
    profile = profile_of(config, target_length)
    num_stages = data.draw(st.integers(1, config.num_blocks))
    found = grain(profile, num_stages)
    assert found.ideal <= found.sublayers * (1 + 1e-9)
    assert found.sublayers <= found.blocks * (1 + 1e-9)
    costs = sublayer_costs(profile)
    assert len(costs) == 2 * num_encoder_blocks + 3 * num_decoder_blocks + 3
    assert sum(costs) == pytest.approx(profile.model.total)
    layout = Layout(pp=num_stages, cut="flops")
    cut = stages_of(config, first_blocks(config, layout, profile))
    assert max(profile.stage(stage).total for stage in cut) == pytest.approx(found.blocks)


def test_more_stages_than_blocks_have_no_grain() -> None:
    with pytest.raises(ValueError, match=r"^10 stages over 9 blocks: every stage needs a block; try 1 to 9$"):
        grain(profile_of(model(5, 4)), 10)
