"""Are the bytes that wait for the backward the ones a hand would count?

One decoder block with materialised attention, 4 bytes a number: L positions, S of the memory, B sequences, width D,
N heads, F ffn columns. What every function keeps is written out term by term:

    norm              its input; two numbers a position
    qkv, query, up    their input            kv              the memory
    q k^T             q times the scale; a copy of k, which was a slice of what `qkv` or `kv` gave
    softmax           its output             product with v  a copy of v
    output, down      their input            gelu            its input

A rank with a single head makes no copies of k and v and keeps all of `qkv` and `kv`: there are enough heads here.
"""

import pytest
import torch
from torch import Tensor, nn

from models.attention import attention_mask
from models.batch import synthetic_batch
from models.blocks import DecoderBlock
from models.config import Architecture, ModelConfig
from parallel.comm import Comm
from parallel.engines.native import NativeEngine
from parallel.engines.settings import EngineSettings
from parallel.layouts import Layout, Recompute, Schedule
from parallel.parallelize import materialise
from parallel.plan import Plan
from parallel.plans import plan
from parallel.saved import SavedBytes
from parallel.schedule import max_in_flight
from tests.one_rank import CPU, part_of, rank_of
from tests.small_models import ARCHITECTURES, small_config

FLOAT = 4
B, L, S, D, F, N = 2, 8, 12, 16, 24, 8
HIDDEN = L * B * D * FLOAT
MEMORY = S * B * D * FLOAT
INNER = L * B * F * FLOAT
ROW = L * B * FLOAT
"""One number a position."""
SELF_SCORES = B * N * L * L * FLOAT
CROSS_SCORES = B * N * L * S * FLOAT
CAUSAL = L * L
"""Which keys lie in the future, a byte each."""
MATERIALISED = Layout(attention="materialised")


def config_of(architecture: Architecture = "encoder_decoder", blocks: int = 1, **changes: object) -> ModelConfig:
    fields: dict[str, object] = {
        "num_encoder_blocks": 0 if architecture == "decoder_only" else blocks,
        "num_decoder_blocks": 0 if architecture == "encoder_only" else blocks,
        "width": D,
        "num_heads": N,
        "num_kv_heads": N,
        "ffn_width": F,
        "activation": "gelu",
    }
    return small_config(architecture, **(fields | changes))


def model_of(planned: Plan, comm: Comm) -> nn.Module:
    model = part_of(planned, comm)
    materialise(model, planned, comm, seed=0, dtype=torch.float32, device=CPU)
    return model.train()


def kept_by_blocks(layout: Layout, config: ModelConfig) -> int:
    """Bytes that all decoder blocks keep on rank 0 after their forward; none may be left after their backward."""
    planned = plan(config, layout)
    with rank_of(planned, 0) as comm:
        model = model_of(planned, comm)
        shards = layout.tp if layout.sp else 1
        is_memory_whole = layout.memory_gather == "per_stage"
        hidden = torch.randn(L // shards, B, D, requires_grad=True)
        memory = torch.randn(S if is_memory_whole else S // shards, B, D, requires_grad=True)
        self_mask = attention_mask(is_causal=True, key_lengths=(L,) * B, key_length=L, like=hidden)
        memory_mask = attention_mask(is_causal=False, key_lengths=(S,) * B, key_length=S, like=hidden)
        with SavedBytes(model) as saved:
            out: Tensor = hidden
            for index in range(config.num_decoder_blocks):
                block = model.get_submodule(f"decoder.block.{index}")
                assert isinstance(block, DecoderBlock)
                out = block(out, self_mask, memory, memory_mask)
            kept = saved.now_bytes
            out.sum().backward()
            del out
        assert saved.now_bytes == 0
        return kept


def kept_by_block(layout: Layout, config: ModelConfig | None = None) -> int:
    return kept_by_blocks(layout, config or config_of())


NORM = HIDDEN + 2 * ROW
SELF_ATTENTION = NORM + HIDDEN + 3 * HIDDEN + CAUSAL + SELF_SCORES + HIDDEN
CROSS_ATTENTION = NORM + HIDDEN + HIDDEN + 2 * MEMORY + CROSS_SCORES + HIDDEN
FFN = NORM + HIDDEN + INNER + INNER


def test_a_decoder_block_keeps_what_a_hand_counts() -> None:
    assert kept_by_block(MATERIALISED) == SELF_ATTENTION + CROSS_ATTENTION + FFN + MEMORY


@pytest.mark.parametrize("layout", [MATERIALISED, MATERIALISED.replace(tp=2, sp=True)], ids=["one", "sp"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_share_the_memory_they_read(layout: Layout, recompute: Recompute) -> None:
    layout = layout.replace(recompute=recompute)
    one, three = (kept_by_blocks(layout, config_of(blocks=blocks)) for blocks in (1, 3))
    assert three == MEMORY + 3 * (one - MEMORY)


def test_a_dropout_keeps_one_byte_an_element() -> None:
    residual = kept_by_block(MATERIALISED, config_of(dropout=0.1))
    assert residual - kept_by_block(MATERIALISED) == 3 * HIDDEN // FLOAT
    scores = kept_by_block(MATERIALISED, config_of(attention_dropout=0.1))
    # The probabilities and what is left of them after dropout are two tensors.
    both = SELF_SCORES + CROSS_SCORES
    assert scores - kept_by_block(MATERIALISED) == both + both // FLOAT


def test_tensor_parallelism_divides_what_lies_between_entering_and_leaving() -> None:
    whole = 3 * (NORM + HIDDEN) + MEMORY + CAUSAL
    between = 3 * HIDDEN + SELF_SCORES + HIDDEN  # self-attention
    between += HIDDEN + 2 * MEMORY + CROSS_SCORES + HIDDEN  # cross-attention
    between += INNER + INNER  # ffn
    assert whole + between == SELF_ATTENTION + CROSS_ATTENTION + FFN + MEMORY
    for tp in (2, 4):
        assert kept_by_block(MATERIALISED.replace(tp=tp)) == whole + between // tp


def test_sequence_parallelism_divides_everything_but_the_mask_and_a_memory_gathered_once() -> None:
    block = SELF_ATTENTION + CROSS_ATTENTION + FFN
    for tp in (2, 4):
        layout = MATERIALISED.replace(tp=tp, sp=True)
        per_block = kept_by_block(layout.replace(memory_gather="per_block"))
        assert per_block == (block - CAUSAL + MEMORY) // tp + CAUSAL
        assert kept_by_block(layout) == (block - CAUSAL) // tp + CAUSAL + MEMORY


def test_inputs_that_are_kept_whole_are_kept_by_every_product_that_gathers_them() -> None:
    blocks = config_of(blocks=2)
    for tp in (2, 4):
        layout = MATERIALISED.replace(tp=tp, sp=True)
        for gather, num_memories in (("per_stage", 0), ("per_block", 2)):
            shard = layout.replace(memory_gather=gather)
            more = 2 * 3 * (HIDDEN - HIDDEN // tp)
            if num_memories:
                # Blocks shared the shard; now each keeps a whole of its own.
                more += num_memories * MEMORY - MEMORY // tp
            assert kept_by_blocks(shard.replace(saved_input="whole"), blocks) == kept_by_blocks(shard, blocks) + more


def test_selective_recomputation_keeps_everything_but_the_scores_and_their_mask() -> None:
    # q, k and v are kept as they came instead of as the core's own copies of them.
    expected = SELF_ATTENTION + CROSS_ATTENTION + FFN + MEMORY - CAUSAL - SELF_SCORES - CROSS_SCORES
    assert kept_by_block(MATERIALISED.replace(recompute="selective")) == expected


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2), MATERIALISED], ids=lambda layout: layout.label)
def test_full_recomputation_keeps_what_enters_a_block(layout: Layout) -> None:
    assert kept_by_block(layout.replace(recompute="full")) == HIDDEN + MEMORY


def test_full_recomputation_keeps_a_shard_of_what_enters_under_sequence_parallelism() -> None:
    layout = Layout(tp=2, sp=True, recompute="full")
    assert kept_by_block(layout) == HIDDEN // 2 + MEMORY
    per_block = layout.replace(memory_gather="per_block")
    assert kept_by_block(per_block) == (HIDDEN + MEMORY) // 2
    # What products keep is made again.
    assert kept_by_block(per_block.replace(saved_input="whole")) == (HIDDEN + MEMORY) // 2


def test_a_fused_kernel_keeps_no_scores() -> None:
    kept = kept_by_block(Layout())
    assert kept < SELF_ATTENTION + CROSS_ATTENTION + FFN + MEMORY - SELF_SCORES


def test_parameters_are_not_counted_and_a_storage_counts_once() -> None:
    weight = nn.Linear(D, D, bias=False)
    x = torch.randn(L, D, requires_grad=True)
    with SavedBytes(weight) as saved:
        out = weight(x).square() + x.square() + x[:1].exp().sum()
        # x once, however many keep it or a row of it; the product; the exponentials of one row.
        assert saved.now_bytes == (L * D + L * D + D) * FLOAT
        peak = saved.peak_bytes
        out.sum().backward()
        assert saved.peak_bytes == peak
        del out
    assert saved.now_bytes == 0


# ---- over a step --------------------------------------------------------------------------------------------------


def peak_of_step(config: ModelConfig, layout: Layout, *, rank: int, num_sequences: int) -> int:
    planned = plan(config, layout)
    batch = synthetic_batch(config, num_sequences=num_sequences, source_length=S, target_length=L, seed=1)
    with rank_of(planned, rank) as comm:
        engine = NativeEngine(plan=planned, comm=comm, settings=EngineSettings(seed=0, dtype=torch.float32, device=CPU))
        with SavedBytes(engine.model) as saved:
            engine.step(batch)
        assert saved.now_bytes == 0
        return saved.peak_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_stage_keeps_the_bytes_of_as_many_microbatches_as_are_in_flight(
    architecture: Architecture, schedule: Schedule
) -> None:
    config = config_of(architecture, blocks=4)
    layout = Layout(pp=4, microbatches=6, schedule=schedule)
    for rank in (1, 2):
        one = peak_of_step(config, layout.replace(microbatches=1), rank=rank, num_sequences=B)
        in_flight = max_in_flight(plan(config, layout).table[rank])
        assert peak_of_step(config, layout, rank=rank, num_sequences=6 * B) == in_flight * one


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_more_recomputation_keeps_less(architecture: Architecture) -> None:
    config = config_of(architecture, blocks=3)
    choices: tuple[Recompute, ...] = ("none", "selective", "full")
    layouts = [MATERIALISED.replace(recompute=recompute) for recompute in choices]
    none, selective, full = (peak_of_step(config, layout, rank=0, num_sequences=B) for layout in layouts)
    assert none > selective > full
