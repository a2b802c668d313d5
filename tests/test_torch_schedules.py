"""Are torch's schedules those of the names, and are their backwards in two pieces equal to one process?

Traps of torch 2.13 that are made right here (`parallel/engines/torch_anchor.py`): weights that join the way of the
gradients at several places, a memory handed on, results that are views.
"""

import itertools
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import parallel.engines.torch
from launch.case import Case
from launch.parity import LARGEST_ERROR, Parity, case_batch
from models.blocks import DecoderBlock
from models.config import Architecture, ModelConfig, Stream
from models.slicing import part_of
from parallel.engines.choice import EngineChoice
from parallel.engines.torch_anchor import Anchor
from parallel.engines.torch_pipeline import ONE_STAGE, SEVERAL_STAGES
from parallel.layouts import Layout
from parallel.placement import Placement, stage_ranks
from parallel.schedule import Action, Table, grid, parse
from parallel.schedules import BUILDERS
from tests.engine_steps import engine_of, proved
from tests.rank import Worker
from tests.small_models import ARCHITECTURES, small_batch, small_config, small_model
from tests.spawn import Ranks
from tests.tolerances import EXACT_RTOL

LOOPED = {"schedule": "gpipe", "placement": "interleaved", "chunks": 2}
FOLDED = {"schedule": "gpipe", "placement": "folded", "chunks": 2}
H1 = {"schedule": "zb_h1"}
V = {"schedule": "zb_v", "placement": "v", "chunks": 2}
TWO: tuple[Architecture, ...] = ("encoder_decoder", "decoder_only")


def deep(architecture: Architecture, **changes: object) -> ModelConfig:
    """Four blocks a side, tied over all that can be, and one bias for all scores, unless it is changed."""
    fields: dict[str, object] = {
        "tying": "all" if architecture == "encoder_decoder" else "head",
        "positions": "relative",
        "num_encoder_blocks": 0 if architecture == "decoder_only" else 4,
        "num_decoder_blocks": 0 if architecture == "encoder_only" else 4,
    }
    return small_config(architecture, **{**fields, **changes})


def case_of(config: ModelConfig, fields: dict[str, Any], *, source_length: int = 7, target_length: int = 9) -> Case:
    """A case whose last microbatch is ragged where there are several."""
    layout = Layout.from_dict(fields)
    num_sequences = layout.dp * (2 * layout.microbatches - (layout.microbatches > 1))
    return Case(
        name=f"{config.architecture} {layout.label} {config.tying} {config.positions}",
        config=config,
        layout=layout,
        engine=EngineChoice("torch"),
        num_sequences=num_sequences,
        source_length=source_length,
        target_length=target_length,
    )


def parities(worker: Worker, cases: list[Case]) -> list[Parity]:
    return [proved(worker, case) for case in cases]


def assert_equal(ranks: Ranks, cases: list[Case]) -> None:
    for case, parity in zip(cases, ranks.run(parities, cases)[0], strict=True):
        assert parity.failures == (), case.name
        assert parity.worst_error <= LARGEST_ERROR


# ---- what the names mean --------------------------------------------------------------------------------------------


def torch_table(kind: Any, pp: int, chunks: int, microbatches: int) -> Table:
    """What torch's class tells its ranks to do."""
    stage = types.SimpleNamespace(num_stages=pp * chunks, group_size=pp, group_rank=0, submod=nn.Identity())
    order = kind([stage] * chunks, microbatches).pipeline_order
    return parse(*(" ".join(str(action) for action in order[rank] if action is not None) for rank in range(pp)))


def shapes(*, in_rounds: bool) -> Iterator[tuple[int, int]]:
    """Ranks and microbatches, fewer than ranks too."""
    for pp, microbatches in itertools.product((2, 3, 4), range(1, 10)):
        if not in_rounds or microbatches % max(1, microbatches // pp) == 0:
            yield pp, microbatches


@pytest.mark.parametrize(
    ("name", "kind", "placement", "chunks"),
    [
        ("zb_h1", ONE_STAGE["zb_h1"], "linear", 1),
        ("zb_v", SEVERAL_STAGES["zb_v"], "v", 2),
        ("interleaved", SEVERAL_STAGES["interleaved"], "interleaved", 2),
        ("interleaved", SEVERAL_STAGES["interleaved"], "interleaved", 3),
    ],
)
def test_torchs_tables_are_those_of_the_names_action_for_action(
    name: str, kind: Any, placement: Placement, chunks: int
) -> None:
    for pp, microbatches in shapes(in_rounds=name != "zb_v"):
        ours = BUILDERS[name](stage_ranks(placement, pp, chunks), microbatches)
        assert torch_table(kind, pp, chunks, microbatches) == ours


def test_torchs_breadth_first_gpipe_only_goes_back_from_the_last_microbatch() -> None:
    for pp, microbatches in shapes(in_rounds=False):
        ours = BUILDERS["gpipe"](stage_ranks("interleaved", pp, 2), microbatches)
        theirs = torch_table(SEVERAL_STAGES["gpipe"], pp, 2, microbatches)

        def turned(action: Action, last: int = microbatches - 1) -> Action:
            index = action.microbatch if action.kind == "forward" else last - action.microbatch
            return Action(kind=action.kind, stage=action.stage, microbatch=index)

        assert theirs == tuple(tuple(turned(action) for action in row) for row in ours)
        # And ends when the other does.
        assert [len(line) for line in grid(theirs).splitlines()] == [len(line) for line in grid(ours).splitlines()]


# ---- equal to one process -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_backwards_in_two_pieces_equal_one_process(architecture: Architecture, two_ranks: Ranks) -> None:
    """With fewer microbatches than the pattern needs too."""
    config, plain = deep(architecture), deep(architecture, tying="none", positions="sinusoidal")
    cases = [case_of(config, {"pp": 2, "microbatches": microbatches, **H1}) for microbatches in (1, 3, 4)]
    cases += [case_of(config, {"pp": 2, "microbatches": microbatches, **V}) for microbatches in (1, 2, 5)]
    cases += [case_of(plain, {"pp": 2, "microbatches": 4, **schedule}) for schedule in (H1, V)]
    assert_equal(two_ranks, cases)


@pytest.mark.parametrize("architecture", TWO)
def test_a_breadth_first_gpipe_equals_one_process(architecture: Architecture, two_ranks: Ranks) -> None:
    placements = (LOOPED, FOLDED) if architecture == "encoder_decoder" else (LOOPED,)
    assert_equal(
        two_ranks,
        [case_of(deep(architecture), {"pp": 2, "microbatches": 3, **schedule}) for schedule in placements],
    )


@pytest.mark.parametrize("architecture", TWO)
def test_functions_of_ours_are_taken_apart_as_torchs_are(architecture: Architecture, two_ranks: Ranks) -> None:
    changes: tuple[dict[str, object], ...] = (
        {"norm": "rmsnorm", "positions": "rope", "activation": "swiglu"},
        {"positions": "learned", "norm_position": "post", "num_token_types": 2, "embedding_norm": True},
        {"head_bias": True, "head_transform": True},
    )
    assert_equal(
        two_ranks,
        [
            case_of(deep(architecture, **change), {"pp": 2, "microbatches": 2, **schedule})
            for change in changes
            for schedule in (H1, V)
        ],
    )


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_what_is_computed_again_equals_one_process_where_a_memory_is_handed_on(
    recompute: str, two_ranks: Ranks
) -> None:
    fields = {"pp": 2, "microbatches": 3, "recompute": recompute}
    assert_equal(two_ranks, [case_of(deep(one), {**fields, **schedule}) for one in TWO for schedule in (H1, V)])


def test_any_cut_and_any_lengths_equal_one_process(two_ranks: Ranks) -> None:
    config = deep("encoder_decoder")
    cuts: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        *((H1, cut) for cut in ((1,), (3,), (6,))),
        *((V, cut) for cut in ((1, 2, 3), (3, 5, 6), (5, 6, 7))),
    ]
    cases = [case_of(config, {"pp": 2, "microbatches": 2, "cut": cut, **schedule}) for schedule, cut in cuts]
    for source, target in ((11, 3), (3, 11)):
        lengths = {"source_length": source, "target_length": target}
        cases += [case_of(config, {"pp": 2, "microbatches": 2, **schedule}, **lengths) for schedule in (H1, V)]
    assert_equal(two_ranks, cases)


def test_four_ranks_equal_one_process(four_ranks: Ranks) -> None:
    config = deep("encoder_decoder")
    fields: list[dict[str, Any]] = [
        {"pp": 4, "microbatches": 4, **H1},
        {"pp": 4, "microbatches": 3, **V},
        {"pp": 4, "microbatches": 3, "recompute": "full", **V},
    ]
    wide = deep("encoder_decoder", num_encoder_blocks=8, num_decoder_blocks=8)
    assert_equal(four_ranks, [case_of(wide, one) for one in fields])
    fields = [{"pp": 2, "dp": 2, "zero": zero, "microbatches": 3, **H1} for zero in (0, 2)]
    assert_equal(four_ranks, [case_of(config, one) for one in fields])
    small = deep("encoder_decoder", num_encoder_blocks=2, num_decoder_blocks=2)
    # Under sp the encoder's norm gives a view, which torch cannot detach.
    assert_equal(four_ranks, [case_of(small, {"pp": 2, "tp": 2, "sp": True, "microbatches": 2, **V})])


# ---- why ------------------------------------------------------------------------------------------------------------


def check_two_pieces(config: ModelConfig, first: int, *, anchored: bool) -> None:
    """Whether the last stage of a model, anchored or as it is, has its gradients after torch's two pieces."""
    whole = small_model(config)
    plain, part = (part_of(whole, config, first, config.num_blocks) for _ in range(2))
    run = Anchor(part).run if anchored else part
    batch = small_batch(config)
    name: Stream = "source" if config.has_encoder else "target"
    length = batch.stream_length(name)
    entered = torch.linspace(-1, 1, length * 3 * config.width, dtype=torch.float64).view(length, 3, config.width)
    entered.requires_grad_()
    hidden = {"memory" if config.has_encoder else "target": entered}
    assert part.loss is not None
    weights = list(plain.parameters())
    expected = torch.autograd.grad(part.loss(plain(batch, hidden)["logits"], batch.labels), [entered, *weights])
    loss = part.loss(run(batch, hidden)["logits"], batch.labels)
    (found,), groups = stage_backward_input([loss], None, [entered], part.parameters())
    stage_backward_weight(part.parameters(), groups)
    for one, gradient in zip([found, *(weight.grad for weight in weights)], expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one, gradient, rtol=EXACT_RTOL, atol=1e-14)


BEGINS_INSIDE = [
    pytest.param(deep("encoder_decoder", tying="none", positions="rope"), 4, id="a decoder that begins inside"),
    pytest.param(deep("encoder_decoder", tying="head", positions="rope"), 4, id="a head tied to an embedding here"),
    pytest.param(deep("decoder_only", tying="none"), 2, id="a bias that two attentions read"),
]


@pytest.mark.parametrize(("config", "first"), BEGINS_INSIDE)
def test_every_weight_of_an_anchored_stage_gets_its_gradient(config: ModelConfig, first: int) -> None:
    check_two_pieces(config, first, anchored=True)


@pytest.mark.parametrize(("config", "first"), BEGINS_INSIDE)
def test_torch_still_frees_what_lies_between_places_of_one_weight(config: ModelConfig, first: int) -> None:
    """When it does not any more, anchors can go."""
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        check_two_pieces(config, first, anchored=False)


def test_torchs_backward_in_two_pieces_accumulates_nothing_that_hooks_could_see() -> None:
    """DistributedDataParallel waits for such hooks."""
    module, x = nn.Linear(3, 3), torch.ones(2, 3, requires_grad=True)
    seen: list[Tensor] = []
    module.weight.register_post_accumulate_grad_hook(seen.append)
    _, groups = stage_backward_input([module(x).sum()], None, [x], module.parameters())
    stage_backward_weight(module.parameters(), groups)
    assert module.weight.grad is not None
    assert not seen


def unlimited(worker: Worker, case: Case) -> Parity:
    with mock.patch.object(parallel.engines.torch, "unsupported", return_value=None):
        return proved(worker, case)


@pytest.mark.parametrize("zero", [1, 3])
def test_torch_still_gives_wrong_gradients_where_it_is_refused(zero: int, four_ranks: Ranks) -> None:
    """When it does not any more, the engine should not refuse it either."""
    config = deep("decoder_only", tying="none", positions="sinusoidal")
    case = case_of(config, {"pp": 2, "dp": 2, "zero": zero, "microbatches": 2, **H1})
    parity = four_ranks.run(unlimited, case)[0]
    assert parity.gradient.error > 0.1


def computed(worker: Worker, case: Case) -> int:
    """How often this rank computes a block in a step."""
    count = 0
    forward = DecoderBlock.forward

    def counted(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        return forward(*arguments)

    with mock.patch.object(DecoderBlock, "forward", counted):
        engine_of(worker, case).step(case_batch(case, seed=0), update=False)
    return count


def test_torch_computes_a_checkpointed_block_again_for_every_weight_of_it(two_ranks: Ranks) -> None:
    """One process would do so once; a first stage does, because its backward is whole."""
    config = deep("decoder_only", tying="none", positions="rope", num_decoder_blocks=2)
    fields = {"pp": 2, "microbatches": 1, "recompute": "full"}
    first, last = two_ranks.run(computed, case_of(config, fields | H1))
    assert first == 2
    # Two norms, and four products with their biases: forward, gradient of the input, and each of these.
    assert last == 2 + 2 + 4
    assert two_ranks.run(computed, case_of(config, fields | {"microbatches": 2})) == [4, 4]
