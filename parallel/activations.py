"""How many bytes does a rank keep for the backward: of one microbatch, and at most over the schedule?

A stage's forward is walked through in the order of the computation. What it keeps adds up; the backward lets go in the
reverse order, so at any point of it as much is kept as at the same point of the forward. Recomputation changes two
things:

    none        every module keeps what `parallel/keeps.py` and `parallel/cores.py` say
    selective   a core attention keeps q, k, v and the mask; while it runs again, its own storages are kept on top
    full        a block keeps its input, the masks' tensors and the memory; while it runs again, all of its own on top

    peak of a microbatch = max(kept at the end of the forward, max over regions (kept at the region + on top))

The input's half of a split backward leaves behind what products wait for (`parallel/halves.py`): at any point of it
there is besides all that later products have left, which may be more than what was let go.

Kept once for all blocks of a stack: the memory (what a block gathers and keeps whole is its own), tensors of masks.
Kept once for all microbatches too: the sines and cosines of rope. Keys and values that another stage makes are kept as
those that are made here; full recomputation keeps them as a block's input, instead of the memory. What is received over
an edge is the input of the stage's first block; what is sent is kept by nobody here.

The peak of a step plays the rank's row of the schedule: every forward adds a microbatch, every backward takes one
away, and may stand on top of the others by what its recomputation needs.

Compare Korthikanti et al. 2022 (arXiv 2205.05198), section 4; their 34 s b h and 5 a s^2 b are the half-precision sums
of the lines used here, without what they leave out (statistics, labels, the copies of keys and values). Left out:
gradients under way, parameters, what is held outside of autograd.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Self

from models.costs import Side
from parallel import keeps
from parallel.cores import Core
from parallel.figures import StepShape
from parallel.halves import Product, waiting_bytes
from parallel.keeps import Microbatch
from parallel.schedule import Key, Row
from parallel.share import Share


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """Bytes that one stage keeps of one microbatch.

    Attributes:
        by_part: at the end of the forward: embedding, relative_bias, self_attention, cross_attention, ffn, norms,
            memory, head, loss.
        shared: of these, kept once however many microbatches and stages of the rank are in flight, by table.
        on_top: most by which a whole backward exceeds what is kept at its start.
        on_top_split: the same of the input's half of a split one.
        deferred: kept after the input's half of a split backward, for the weights' half.
    """

    by_part: dict[str, int]
    shared: dict[str, int]
    on_top: int
    on_top_split: int = 0
    deferred: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_part.values())


def saved_bytes(share: Share, shape: StepShape, size: int) -> Saved:
    """What a rank keeps of a microbatch of `size` sequences."""
    tape = _Tape()
    _stage(tape, Microbatch(share=share, shape=shape, size=size))
    return Saved(
        by_part=dict(tape.by_part),
        shared=dict(tape.shared),
        on_top=max(0, tape.peak - tape.now),
        on_top_split=max(0, tape.split_peak + tape.owed - tape.now),
        deferred=tape.owed,
    )


def peak_over(row: Row, saved: Mapping[Key, Saved]) -> int:
    """Most that a rank keeps at any moment of a step.

    Args:
        row: its row of the schedule.
        saved: what it keeps, by stage and microbatch.
    """
    now = most = 0
    users: Counter[str] = Counter()
    for action in row:
        held = saved[action.stage, action.microbatch]
        if action.kind == "forward":
            now += held.total - sum(size for table, size in held.shared.items() if users[table])
            users.update(held.shared.keys())
            most = max(most, now)
        elif action.kind == "backward_weight":
            now -= held.deferred
        else:
            is_split = action.kind == "backward_input"
            most = max(most, now + (held.on_top_split if is_split else held.on_top))
            users.subtract(held.shared.keys())
            now -= held.total - sum(size for table, size in held.shared.items() if users[table])
            now += held.deferred * is_split
    return most


_ENTERING: dict[str, tuple[Product, ...]] = {
    "self_attention": ("qkv",),
    "cross_attention": ("query", "kv"),
    "ffn": ("up",),
}
"""Products that a sublayer begins with."""


class _Tape:
    """A walk through a forward: what is kept now, and the most that the backward will have kept.

    `owed` is what the products so far leave of a split backward; `split_peak` is the most that is kept then, less what
    all products of the walk leave.
    """

    def __init__(self) -> None:
        self.by_part: Counter[str] = Counter()
        self.shared: Counter[str] = Counter()
        self.now = self.peak = 0
        self.owed = self.split_peak = 0

    def keep(self, part: str, size_bytes: int) -> None:
        self.by_part[part] += size_bytes
        self.now += size_bytes
        self.peak = max(self.peak, self.now)
        self.split_peak = max(self.split_peak, self.now - self.owed)

    def owe(self, size_bytes: int) -> None:
        """A product comes, whose weight's gradient waits for so much; where the backward is here, it has begun to."""
        self.owed += size_bytes

    def keep_shared(self, part: str, table: str, size_bytes: int) -> None:
        """Kept once for all microbatches and stages."""
        self.shared[table] += size_bytes
        self.keep(part, size_bytes)

    def recompute(self, size_bytes: int) -> None:
        """When the backward comes here, this is kept on top for a moment."""
        self.peak = max(self.peak, self.now + size_bytes)
        self.split_peak = max(self.split_peak, self.now + size_bytes - self.owed)

    def repeat_region(self, other: Self, size_bytes: int) -> None:
        """When the backward comes here, another walk is kept on top for a moment, and so much that it does not know."""
        self.peak = max(self.peak, self.now + other.now + size_bytes)
        self.split_peak = max(self.split_peak, self.now - self.owed + other.split_peak + size_bytes)
        self.owed += other.owed

    def repeat(self, other: Self, times: int) -> None:
        """Appends another walk several times over. Its highest peak is the last; of a split backward, first or last."""
        if times < 1:
            return
        for part, size_bytes in other.by_part.items():
            self.by_part[part] += times * size_bytes
        self.peak = max(self.peak, self.now + (times - 1) * other.now + other.peak)
        for index in (0, times - 1):
            before = self.now - self.owed + index * (other.now - other.owed)
            self.split_peak = max(self.split_peak, before + other.split_peak)
        self.now += times * other.now
        self.owed += times * other.owed


def _stage(tape: _Tape, micro: Microbatch) -> None:
    share, config = micro.share, micro.config
    for side in share.sides:
        if share.has_embedding(side):
            if side == "encoder" and config.feature_width:
                tape.owe(waiting_bytes(micro, side, "features"))
            tape.keep("embedding", keeps.embedding_bytes(micro, side))
            tape.keep("norms", keeps.norm_bytes(micro, side) * config.embedding_norm)
            tape.keep("embedding", keeps.dropout_bytes(micro, side))
            if side == "encoder" and _is_embedded_kept(micro):
                tape.keep("embedding", keeps.whole_features_bytes(micro))
        if side == "decoder":
            _make_keys_values(tape, micro)
        tape.keep("relative_bias", keeps.relative_bias_bytes(micro, side))
        _block(tape, micro, side, is_first=True)
        another = _Tape()
        _block(another, micro, side, is_first=False)
        tape.repeat(another, len(share.blocks(side)) - 1)
        if share.has_end(side):
            tape.keep("norms", keeps.norm_bytes(micro, side) * config.final_norm)
    if "decoder" not in share.sides:
        _make_keys_values(tape, micro)
    if share.has_head:
        side = share.sides[-1]
        tape.owe(waiting_bytes(micro, side, "head"))
        tape.keep("head", keeps.head_bytes(micro, side))
        tape.keep("head", keeps.norm_bytes(micro, side) * config.head_transform)
        tape.keep("loss", keeps.loss_bytes(micro, side))


def _block(tape: _Tape, micro: Microbatch, side: Side, *, is_first: bool) -> None:
    has_cross_attention = side == "decoder" and micro.config.has_cross_attention
    if micro.share.layout.recompute != "full":
        _sublayers(tape, micro, side, is_first=is_first)
        return
    tape.keep("self_attention", micro.hidden_bytes(side))
    if is_first:
        tape.keep("self_attention", keeps.mask_bytes(micro, side))
        if has_cross_attention:
            tape.keep("cross_attention", keeps.memory_mask_bytes(micro))
            _read_memory(tape, micro)
    again = _Tape()
    _sublayers(again, micro, side, is_first=False)
    # The input is there already.
    known = micro.hidden_bytes(side) * _is_input_kept(micro)
    if has_cross_attention and not micro.share.kv_blocks:
        core = Core(micro=micro, attention="cross", side=side)
        tape.keep("cross_attention", core.keys_values_bytes)
        known += core.keys_values_bytes * core.is_projection_kept
    tape.repeat_region(again, _rope_bytes(micro, side) - known)


def _is_input_kept(micro: Microbatch) -> bool:
    """Whether a sublayer keeps its very input: its norm does, or the projection where the norm comes later.

    Of an input that is kept whole, a projection keeps a gathered copy.
    """
    if micro.config.norm_position == "post":
        return not micro.share.layout.keeps_whole_inputs
    return keeps.norm_keeps_input(micro)


def _is_embedded_kept(micro: Microbatch) -> bool:
    """Whether what an embedding gives is kept as it is by what comes first: norm, dropout or block."""
    config = micro.config
    if config.embedding_norm:
        return keeps.norm_keeps_input(micro)
    return config.dropout == 0.0 and (micro.share.layout.recompute == "full" or _is_input_kept(micro))


def _sublayers(tape: _Tape, micro: Microbatch, side: Side, *, is_first: bool) -> None:
    """What a block keeps whose forward is not a region of its own."""
    entering = micro.input_bytes(side)
    has_cross_attention = side == "decoder" and micro.config.has_cross_attention
    is_pre_norm = micro.config.norm_position == "pre"
    for part in ("self_attention", "cross_attention", "ffn"):
        if part == "cross_attention" and not has_cross_attention:
            continue
        tape.keep("norms", keeps.norm_bytes(micro, side) * is_pre_norm)
        products = [product for product in _ENTERING[part] if product != "kv" or micro.share.kv_blocks]
        tape.owe(sum(waiting_bytes(micro, side, product) for product in products))
        tape.keep(part, entering)
        if part == "ffn":
            tape.owe(waiting_bytes(micro, side, "down"))
            tape.keep(part, keeps.ffn_bytes(micro, side))
        else:
            _attention(tape, micro, side, part, is_first=is_first)
        tape.keep(part, keeps.dropout_bytes(micro, side))
        tape.keep("norms", keeps.norm_bytes(micro, side) * (not is_pre_norm))


def _attention(tape: _Tape, micro: Microbatch, side: Side, part: str, *, is_first: bool) -> None:
    """From the projections to the output's input."""
    is_self = part == "self_attention"
    core = Core(micro=micro, attention="self" if is_self else "cross", side=side)
    is_region = micro.share.layout.recompute == "selective"
    if not is_self and micro.share.kv_blocks:
        _block_memory(tape, micro)
    if is_first:
        if is_self:
            tape.keep_shared(part, side, _rope_bytes(micro, side))
        elif not micro.block_memory_bytes:
            _read_memory(tape, micro)
        # Only the fused kernel and a region keep the mask's tensor; adding it to scores keeps nothing.
        mask = keeps.mask_bytes(micro, side) if is_self else keeps.memory_mask_bytes(micro)
        tape.keep(part, mask * (is_region or core.kernel == "fused"))
    if is_region:
        tape.keep(part, core.projected_bytes)
        tape.recompute(core.recomputed_bytes)
    else:
        tape.keep(part, core.kept_bytes)
    tape.owe(waiting_bytes(micro, side, "output"))
    tape.keep(part, core.output_bytes)


def _make_keys_values(tape: _Tape, micro: Microbatch) -> None:
    """For blocks elsewhere, before any block of the decoder runs here."""
    for _ in range(micro.share.num_shipped):
        tape.owe(waiting_bytes(micro, "decoder", "kv"))
        _block_memory(tape, micro)
    if micro.share.num_shipped > 0 and not micro.block_memory_bytes:
        _memory(tape, micro)


def _read_memory(tape: _Tape, micro: Microbatch) -> None:
    """By the first block that makes its own keys and values, unless the memory is kept for others already."""
    is_kept = micro.share.num_shipped > 0 and not micro.block_memory_bytes
    if micro.share.kv_blocks and not is_kept:
        _memory(tape, micro)


def _block_memory(tape: _Tape, micro: Microbatch) -> None:
    """What the key-value product of one block gathered and keeps for itself."""
    tape.owe(micro.block_memory_bytes)
    tape.keep("memory", micro.block_memory_bytes)


def _memory(tape: _Tape, micro: Microbatch) -> None:
    """Kept once by all blocks that read it, and for the gradients of their keys' and values' weights."""
    if not micro.block_memory_bytes:
        tape.owe(micro.memory_bytes)
    tape.keep("memory", micro.memory_bytes)


def _rope_bytes(micro: Microbatch, side: Side) -> int:
    """Cosines and sines, L H / 2 e each."""
    return micro.length(side) * micro.config.head_width * micro.element_bytes * (micro.config.positions == "rope")
