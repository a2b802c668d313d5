"""The plan builders, one for each architecture, next to each other: their difference is itself a result.

Everything that tells the architectures apart under tensor and sequence parallelism stands in this file; the code that
carries a plan out never asks which architecture it has. Read the three builders at the end first.
"""

import functools
from collections.abc import Sequence

from models.config import ModelConfig
from parallel.edges import edges
from parallel.layouts import Layout
from parallel.list_schedule import list_schedule
from parallel.partition import Stage, shared_parameters, stages
from parallel.placement import stage_ranks
from parallel.plan import Builder, Entering, Entry, Leaving, Part, Plan, StreamName
from parallel.profile import Profile
from parallel.schedule import Table
from parallel.schedules import BUILDERS
from parallel.slices import Slices
from parallel.stage_costs import message_seconds, stage_seconds
from parallel.transfers import check


def plan(config: ModelConfig, layout: Layout, profile: Profile | None = None) -> Plan:
    """The plan of a layout for a model.

    Args:
        config: the model.
        layout: its degrees and options.
        profile: what blocks cost, for cuts and schedules that depend on it (`layout.needs_profile`).

    Raises:
        ValueError: the layout cannot partition the model, or wants a profile that is not there or does not fit.
    """
    layout.check_model(config)
    cut = stages(config, layout, profile)
    ranks = stage_ranks(layout.placement, layout.pp, layout.chunks)
    return Plan(
        config=config,
        layout=layout,
        stages=cut,
        shared=shared_parameters(config, cut, ranks),
        entries=_BUILDERS[config.architecture](config, layout) if layout.tp > 1 else (),
        edges=edges(config, cut, layout.transport),
        table=table(config, layout, cut, profile),
    )


def table(config: ModelConfig, layout: Layout, cut: Sequence[Stage], profile: Profile | None = None) -> Table:
    """The schedule of a layout for stages of a model. Raises ValueError for `list` without a profile.

    A list is made for what stages and messages cost, and its fullest rank keeps no more bytes of microbatches than that
    of the named tables, gpipe aside: stages of unequal cost keep unequal bytes, so that counts would not tell.
    """
    ranks = stage_ranks(layout.placement, layout.pp, layout.chunks)
    if layout.schedule != "list":
        return BUILDERS[layout.schedule](ranks, layout.microbatches)
    if profile is None:
        raise ValueError(
            "schedule = 'list' orders actions by what stages cost, and there is no profile that tells it: "
            "run and account count one from their lengths; here name another schedule"
        )
    return _listed(config, layout, tuple(cut), profile)


@functools.lru_cache(maxsize=256)
def _listed(config: ModelConfig, layout: Layout, cut: tuple[Stage, ...], profile: Profile) -> Table:
    """A search of seconds, whose answer is asked for again and again while a cell is proved, traced and run."""
    ranks = stage_ranks(layout.placement, layout.pp, layout.chunks)
    links = edges(config, cut, layout.transport)
    slices = Slices(config=config, layout=layout, shape=profile.shape)
    saved = [slices.saved(stage.first, stage.last) for stage in cut]
    listed = list_schedule(
        ranks,
        layout.microbatches,
        stage_seconds(profile, cut),
        edges=links,
        transfer_seconds=message_seconds(profile) if profile.transfer_cost or profile.byte_cost else None,
        kept=[one.total - sum(one.shared.values()) for one in saved],
        kept_for_weights=[one.deferred for one in saved],
    )
    check(listed, layout.microbatches, links)
    return listed


def _entering(layout: Layout) -> Entering:
    """How a product's input enters."""
    if layout.keeps_whole_inputs:
        return "gather_once"
    return "gather" if layout.sp else "copy"


def _leaving(layout: Layout) -> Leaving:
    return "scatter" if layout.sp else "reduce"


def _embedding(config: ModelConfig, layout: Layout, stack: str, stream: StreamName) -> list[Entry]:
    name = f"{stack}.embedding"
    entries = []
    if stack == "encoder" and config.feature_width:
        entries += [Entry(module=f"{name}.features", style="sequence_slice", stream=stream)] if layout.sp else []
    elif layout.shards_vocabulary:
        vocabulary = config.source_vocabulary if stack == "encoder" else config.vocabulary
        rows = (Part(count=vocabulary, width=1),)
        entries.append(
            Entry(
                module=f"{name}.token",
                style="vocabulary_embedding",
                stream=stream,
                leaving=_leaving(layout),
                parts=rows,
            )
        )
    if layout.sp:
        if config.positions in ("learned", "sinusoidal"):
            entries.append(Entry(module=f"{name}.position", style="sequence_slice", stream=stream))
        if config.num_token_types and not (stack == "decoder" and config.has_cross_attention):
            entries.append(Entry(module=f"{name}.token_type", style="sequence_slice", stream=stream))
        if config.embedding_norm:
            entries.append(Entry(module=f"{name}.norm", style="sequence_replicated", stream=stream))
        entries.append(Entry(module=f"{name}.dropout", style="sharded_dropout", stream=stream))
    return entries


def _sublayer_ends(layout: Layout, sublayer: str, stream: StreamName) -> list[Entry]:
    """Under sp the norm and the residual dropout see a shard of the sequence."""
    if not layout.sp:
        return []
    return [
        Entry(module=f"{sublayer}.norm", style="sequence_replicated", stream=stream),
        Entry(module=f"{sublayer}.dropout", style="sharded_dropout", stream=stream),
    ]


def _self_attention(config: ModelConfig, layout: Layout, block: str, stream: StreamName) -> list[Entry]:
    heads = Part(count=config.num_heads, width=config.head_width)
    kv_heads = Part(count=config.num_kv_heads, width=config.head_width)
    name = f"{block}.self_attention"
    return [
        Entry(
            module=f"{name}.qkv",
            style="colwise",
            stream=stream,
            entering=_entering(layout),
            parts=(heads, kv_heads, kv_heads),
        ),
        Entry(module=f"{name}.core_dropout", style="sharded_dropout", stream=stream),
        Entry(module=f"{name}.output", style="rowwise", stream=stream, leaving=_leaving(layout), parts=(heads,)),
        *_sublayer_ends(layout, name, stream),
    ]


def _cross_attention(config: ModelConfig, layout: Layout, block: str) -> list[Entry]:
    """Queries come from the target, keys and values from the memory: two streams enter one sublayer."""
    heads = Part(count=config.num_heads, width=config.head_width)
    kv_heads = Part(count=config.num_kv_heads, width=config.head_width)
    name = f"{block}.cross_attention"
    memory_entering = _entering(layout) if layout.memory_gather == "per_block" else "none"
    return [
        Entry(module=f"{name}.query", style="colwise", stream="target", entering=_entering(layout), parts=(heads,)),
        Entry(
            module=f"{name}.kv",
            style="colwise",
            stream="memory",
            entering=memory_entering,
            parts=(kv_heads, kv_heads),
        ),
        Entry(module=f"{name}.core_dropout", style="sharded_dropout", stream="target"),
        Entry(module=f"{name}.output", style="rowwise", stream="target", leaving=_leaving(layout), parts=(heads,)),
        *_sublayer_ends(layout, name, "target"),
    ]


def _ffn(config: ModelConfig, layout: Layout, block: str, stream: StreamName) -> list[Entry]:
    columns = Part(count=config.ffn_width, width=1)
    name = f"{block}.ffn"
    return [
        Entry(
            module=f"{name}.up",
            style="colwise",
            stream=stream,
            entering=_entering(layout),
            parts=(columns, columns) if config.is_gated else (columns,),
        ),
        Entry(module=f"{name}.inner_dropout", style="sharded_dropout", stream=stream),
        Entry(module=f"{name}.down", style="rowwise", stream=stream, leaving=_leaving(layout), parts=(columns,)),
        *_sublayer_ends(layout, name, stream),
    ]


def _stack_ends(config: ModelConfig, layout: Layout, stack: str, stream: StreamName) -> list[Entry]:
    entries = []
    if config.positions == "relative":
        heads = Part(count=config.num_heads, width=1)
        entries.append(Entry(module=f"{stack}.relative_bias", style="head_bias_table", stream=stream, parts=(heads,)))
    if layout.sp and config.final_norm:
        entries.append(Entry(module=f"{stack}.norm", style="sequence_replicated", stream=stream))
    return entries


def _head(config: ModelConfig, layout: Layout, stream: StreamName) -> list[Entry]:
    """With a whole vocabulary nothing: what enters is the same on every rank, and so are logits, loss and gradients."""
    if not layout.shards_vocabulary:
        return []
    rows = (Part(count=config.vocabulary, width=1),)
    return [
        Entry(module="head", style="vocabulary_head", stream=stream, entering=_entering(layout), parts=rows),
        Entry(module="loss", style="vocabulary_loss", stream=stream, parts=rows),
    ]


def decoder_only(config: ModelConfig, layout: Layout) -> tuple[Entry, ...]:
    """One stack, one stream, one kind of block."""
    entries = _embedding(config, layout, "decoder", "target")
    for index in range(config.num_decoder_blocks):
        block = f"decoder.block.{index}"
        entries += _self_attention(config, layout, block, "target")
        entries += _ffn(config, layout, block, "target")
    entries += _stack_ends(config, layout, "decoder", "target")
    return (*entries, *_head(config, layout, "target"))


def encoder_only(config: ModelConfig, layout: Layout) -> tuple[Entry, ...]:
    """One stack, one stream, one kind of block."""
    entries = _embedding(config, layout, "encoder", "source")
    for index in range(config.num_encoder_blocks):
        block = f"encoder.block.{index}"
        entries += _self_attention(config, layout, block, "source")
        entries += _ffn(config, layout, block, "source")
    entries += _stack_ends(config, layout, "encoder", "source")
    return (*entries, *_head(config, layout, "source"))


def encoder_decoder(config: ModelConfig, layout: Layout) -> tuple[Entry, ...]:
    """Two stacks, three streams (the memory is one), two kinds of block, and the place where the memory enters."""
    entries = _embedding(config, layout, "encoder", "source")
    for index in range(config.num_encoder_blocks):
        block = f"encoder.block.{index}"
        entries += _self_attention(config, layout, block, "source")
        entries += _ffn(config, layout, block, "source")
    entries += _stack_ends(config, layout, "encoder", "source")
    entries += _embedding(config, layout, "decoder", "target")
    if layout.memory_gather == "per_stage":
        entries.append(
            # No product: it keeps nothing, and is gathered once whatever products keep.
            Entry(
                module="decoder.memory",
                style="memory_entry",
                stream="memory",
                entering="gather" if layout.sp else "copy",
            )
        )
    for index in range(config.num_decoder_blocks):
        block = f"decoder.block.{index}"
        entries += _self_attention(config, layout, block, "target")
        entries += _cross_attention(config, layout, block)
        entries += _ffn(config, layout, block, "target")
    entries += _stack_ends(config, layout, "decoder", "target")
    return (*entries, *_head(config, layout, "target"))


_BUILDERS: dict[str, Builder] = {
    "decoder_only": decoder_only,
    "encoder_only": encoder_only,
    "encoder_decoder": encoder_decoder,
}
