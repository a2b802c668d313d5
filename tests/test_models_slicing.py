"""Do the slices of a model, run one after the other, equal the whole bit for bit, wherever it is cut?"""

import copy
import itertools

import pytest
import torch

from models.architectures import build
from models.batch import Batch
from models.config import Architecture, ModelConfig, Positions, Tying
from models.initial import initialise
from models.model import Hidden, Model
from models.slicing import slice_model, tie
from tests.small_models import ARCHITECTURES, POSITIONS, small_batch, small_config, small_model


def sliced(model: Model, config: ModelConfig, cuts: tuple[int, ...]) -> list[Model]:
    """Copies of a model, cut before these blocks."""
    return [slice_model(copy.deepcopy(model), config, (first, last)) for first, last in itertools.pairwise(cuts)]


def run(parts: list[Model], batch: Batch) -> Hidden:
    hidden: Hidden = {}
    for part in parts:
        hidden = part(batch, hidden)
    return hidden


def all_cuts(num_blocks: int) -> list[tuple[int, ...]]:
    inner = range(1, num_blocks)
    chosen = itertools.chain.from_iterable(itertools.combinations(inner, count) for count in range(num_blocks))
    return [(0, *cuts, num_blocks) for cuts in chosen]


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slices_compose_to_the_whole_at_every_cut(architecture: Architecture, positions: Positions) -> None:
    config = small_config(architecture, positions=positions, norm="rmsnorm")
    model, batch = small_model(config), small_batch(config)
    whole = model(batch, {})
    assert set(whole) == {"logits"}
    for cuts in all_cuts(config.num_blocks):
        assert torch.equal(run(sliced(model, config, cuts), batch)["logits"], whole["logits"]), cuts


def test_slices_that_ship_keys_and_values_compose_to_the_whole_at_every_cut() -> None:
    config = small_config("encoder_decoder", positions="relative")
    model, batch = small_model(config), small_batch(config)
    whole = model(batch, {})
    for cuts in all_cuts(config.num_blocks):
        hidden: Hidden = {}
        for ends in itertools.pairwise(cuts):
            part = slice_model(copy.deepcopy(model), config, ends, ships_keys_values=True)
            # Only what makes the memory may read it.
            hidden.pop("memory", None)
            hidden |= part(batch, hidden)
        assert torch.equal(hidden["logits"], whole["logits"]), cuts


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slices_draw_the_dropout_masks_of_the_whole(architecture: Architecture) -> None:
    config = small_config(
        architecture, dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1, norm_position="post", final_norm=False
    )
    model, batch = small_model(config).train(), small_batch(config)
    model.mask_key.seed = 5
    whole = model(batch, {})["logits"]
    assert not torch.equal(whole, model.eval()(batch, {})["logits"])
    model.train()
    for cuts in all_cuts(config.num_blocks):
        assert torch.equal(run(sliced(model, config, cuts), batch)["logits"], whole), cuts


def test_what_leaves_is_named_by_where_the_cut_falls() -> None:
    config = small_config("encoder_decoder")
    parts = sliced(small_model(config), config, (0, 1, 3, 4, 5))
    batch, names = small_batch(config), []
    hidden: Hidden = {}
    for part in parts:
        hidden = part(batch, hidden)
        names.append(set(hidden))
    assert names == [{"source"}, {"memory"}, {"target", "memory"}, {"logits"}]


def test_the_memory_that_leaves_is_the_one_that_entered() -> None:
    config = small_config("encoder_decoder")
    encoder, first, _ = sliced(small_model(config), config, (0, 3, 4, 5))
    assert first.decoder is not None
    first.decoder.memory = torch.nn.Hardtanh()
    batch = small_batch(config)
    entered = encoder(batch, {})
    left = first(batch, entered)
    assert left["memory"] is entered["memory"]


def test_the_memory_passes_its_entrance_once_a_stage() -> None:
    config = small_config("encoder_decoder")
    for part in sliced(small_model(config), config, (0, 4, 5)):
        assert part.decoder is not None
        assert isinstance(part.decoder.memory, torch.nn.Identity)
    model, passages = small_model(config), []
    assert model.decoder is not None
    assert model.decoder.memory is not None
    model.decoder.memory.register_forward_hook(lambda *_: passages.append(1))
    model(small_batch(config), {})
    assert len(passages) == 1


def test_blocks_read_what_the_entrance_of_the_memory_gives() -> None:
    config = small_config("encoder_decoder")
    model, batch = small_model(config), small_batch(config)
    assert model.decoder is not None
    before = model(batch, {})["logits"]
    model.decoder.memory = torch.nn.Hardtanh(-0.1, 0.1)
    assert not torch.equal(model(batch, {})["logits"], before)


@pytest.mark.parametrize("tying", ["none", "head", "source_target", "all"])
def test_parameters_of_slices_make_up_the_model(tying: Tying) -> None:
    config = small_config("encoder_decoder", tying=tying, positions="relative")
    model = small_model(config)
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for cuts in all_cuts(config.num_blocks):
        kept = [[name for name, _ in p.named_parameters(remove_duplicate=False)] for p in sliced(model, config, cuts)]
        assert set().union(*kept) == names
        repeated = {name for name in names if sum(name in part for part in kept) > 1}
        assert all(name.endswith("relative_bias.weight") for name in repeated), repeated


def test_tied_parameters_within_a_slice_are_one() -> None:
    config = small_config("encoder_decoder", tying="all")
    whole = build(config)
    assert whole.encoder.embedding.token.weight is whole.decoder.embedding.token.weight is whole.head.weight  # type: ignore[union-attr]
    decoder = slice_model(build(config), config, (3, 5))
    initialise(decoder, config, seed=1, dtype=torch.float64, device="cpu")
    assert decoder.decoder.embedding.token.weight is decoder.head.weight  # type: ignore[union-attr]
    first, last = slice_model(build(config), config, (0, 4)), slice_model(build(config), config, (4, 5))
    assert first.encoder.embedding.token.weight is first.decoder.embedding.token.weight  # type: ignore[union-attr]
    for part in (first, last):
        initialise(part, config, seed=1, dtype=torch.float64, device="cpu")
    assert torch.equal(first.encoder.embedding.token.weight, last.head.weight)  # type: ignore[union-attr, arg-type]


def test_tying_keeps_the_canonical_tensor() -> None:
    config = small_config("decoder_only")
    model = small_model(config)
    canonical = model.decoder.embedding.token.weight  # type: ignore[union-attr]
    tie(model, config.replace(tying="head"))
    assert model.head.weight is canonical  # type: ignore[union-attr]


@pytest.mark.parametrize(("first", "last"), [(0, 0), (2, 1), (-1, 2), (0, 6), (5, 6)])
def test_a_slice_out_of_range_is_refused(first: int, last: int) -> None:
    config: ModelConfig = small_config("encoder_decoder")
    with pytest.raises(ValueError, match=r"of a model of 5: need 0 <= first < last <= 5"):
        slice_model(build(config), config, (first, last))
