"""How a model is partitioned: the degrees and options of one layout, and which models and batches it can take.

A layout holds choices only; what they mean for each module is the plan's business (`parallel/plan.py`). All rules that
need the model or the batch are checked here, before any process starts: each error tells the numbers, the rule and
the nearest value that works.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from models.config import ModelConfig
from parallel.mesh import Mesh
from parallel.placement import Placement, check_chunks

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "list"]
Transport = Literal["relay", "direct", "kv"]
MemoryGather = Literal["per_block", "per_stage"]
SavedInput = Literal["shard", "whole"]
Vocabulary = Literal["sharded", "whole"]
Recompute = Literal["none", "selective", "full"]
AttentionKernel = Literal["fused", "materialised"]
NamedCut = Literal["even", "aligned", "parameters", "flops", "times", "memory"]
Cut = NamedCut | tuple[int, ...]

TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
_CHOICES: dict[str, tuple[str, ...]] = {
    "schedule": get_args(Schedule),
    "transport": TRANSPORTS,
    "memory_gather": get_args(MemoryGather),
    "saved_input": get_args(SavedInput),
    "vocabulary": get_args(Vocabulary),
    "recompute": get_args(Recompute),
    "attention": get_args(AttentionKernel),
}
"""Of fields that are words; a search makes hundreds of thousands of layouts."""

PLACEMENTS: dict[Schedule, tuple[Placement, ...]] = {
    "gpipe": get_args(Placement),
    "1f1b": ("linear",),
    "interleaved": ("interleaved", "folded"),
    "zb_h1": ("linear",),
    "zb_h2": ("linear",),
    "zb_v": ("v",),
    "list": get_args(Placement),
}
"""Placements that a schedule runs on."""
PLAIN_SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
"""One stage a rank, whole backwards: what closed searches know."""
SPLIT_SCHEDULES: tuple[Schedule, ...] = ("zb_h1", "zb_h2", "zb_v")
"""Named ones with backwards in two pieces."""
COSTED_CUTS = ("parameters", "flops", "times", "memory")
"""Cuts that depend on what blocks cost, and so on a profile."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The degrees and options of one partitioning.

    `cut` is `even` (block counts differ by one at most), `aligned` (every stage encoder XOR decoder), balanced by what
    blocks cost (`parameters`, `flops`, `times` as measured, `memory`) or the explicit first blocks of stages 1, 2, ...
    in the flat block list, encoder first. `chunks` stages a pipeline rank are dealt out by `placement`; `transport` is
    the way of the memory to the decoder's stages: by `relay` from stage to stage, `direct` from the one that makes it,
    or as keys and values made there (`kv`; `parallel/edges.py`). `sp` is sequence parallelism of the Megatron kind, on
    the tp axis; `cp` shards it on an axis of its own. `zero` is the ZeRO stage over dp.
    `saved_input` is what a product keeps of the input that sp made it gather: the `shard`, which its backward gathers
    again, or the `whole`, which costs bytes instead. It is the native engine's choice: DTensor keeps the whole whatever
    is said here. Without sp nothing is gathered, and either is the same.
    `gradient_bucket_bytes` is what the native engine sums over dp at least at once while the last backward still runs
    (`parallel/buckets.py`); 0 sums all gradients once, after it. Of others, DistributedDataParallel's buckets are as
    large, or as ever at 0; what else wraps a model, and DeepSpeed, take no size.
    `vocabulary` is what a tp rank holds of embeddings and head: its rows of them (`sharded`), of which partial sums are
    made whole, or the `whole`, from which it computes all logits and the loss on its own: no message, but more
    parameters, states and FLOPs. DeepSpeed's AutoTP does the latter whatever is said here. With tp = 1 either is the
    same; under sp a head sees a shard of the sequence, and its vocabulary is sharded.
    `microbatches` is their number per step and data-parallel rank. What an engine cannot run can still be accounted.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sp: bool = False
    zero: int = 0
    gradient_bucket_bytes: int = 0
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    cut: Cut = "even"
    chunks: int = 1
    placement: Placement = "linear"
    transport: Transport = "relay"
    memory_gather: MemoryGather = "per_stage"
    saved_input: SavedInput = "shard"
    vocabulary: Vocabulary = "sharded"
    recompute: Recompute = "none"
    attention: AttentionKernel = "fused"

    def __post_init__(self) -> None:
        self._check_types()
        for field in ("tp", "pp", "dp", "cp", "microbatches"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}; it must be at least 1")
        for field, choices in _CHOICES.items():
            if getattr(self, field) not in choices:
                raise ValueError(f"{field} = {getattr(self, field)!r}; choose one of {', '.join(choices)}")
        check_chunks(self.placement, self.pp, self.chunks)
        if self.placement not in PLACEMENTS[self.schedule]:
            able = ", ".join(name for name, placements in PLACEMENTS.items() if self.placement in placements)
            raise ValueError(
                f"schedule {self.schedule!r} cannot run on placement {self.placement!r}: it needs placement "
                f"{' or '.join(PLACEMENTS[self.schedule])}; schedules for {self.placement!r} are {able}"
            )
        if not isinstance(self.cut, str) and len(self.cut) != self.num_stages - 1:
            chunks = f" x chunks = {self.chunks}" if self.chunks > 1 else ""
            raise ValueError(
                f"cut {list(self.cut)} makes {len(self.cut) + 1} stages, but pp = {self.pp}{chunks}; "
                f"give {self.num_stages - 1} cuts"
            )
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero = {self.zero}; choose 0 (off), 1, 2 or 3")
        if self.zero and self.dp == 1:
            raise ValueError(f"zero = {self.zero} shards over the dp ranks: it needs dp >= 2, got dp = 1")
        self._check_buckets()
        if self.sp and self.tp == 1:
            raise ValueError("sp shards the sequence over the tp ranks: it needs tp >= 2, got tp = 1")
        if self.sp and self.vocabulary == "whole":
            raise ValueError(
                "vocabulary = 'whole' needs whole sequences at the head, and sp shards them: "
                "use sp = false, or vocabulary = 'sharded'"
            )

    def _check_buckets(self) -> None:
        """Gradients that are on their way during the backward are whole ones, over dp."""
        told = f"gradient_bucket_bytes = {self.gradient_bucket_bytes}"
        if self.gradient_bucket_bytes < 0:
            raise ValueError(f"{told}; it must be at least 0, which is one sum a step")
        if self.gradient_bucket_bytes and self.dp == 1:
            raise ValueError(f"{told} sums over the dp ranks: it needs dp >= 2, got dp = 1")
        if self.gradient_bucket_bytes and self.zero:
            raise ValueError(f"{told} sums whole gradients: it needs zero = 0, got zero = {self.zero}")

    def _check_types(self) -> None:
        """An experiment's file may hold anything."""
        for field in ("tp", "pp", "dp", "cp", "zero", "gradient_bucket_bytes", "microbatches", "chunks"):
            if type(getattr(self, field)) is not int:
                raise ValueError(f"{field} = {getattr(self, field)!r}; it must be a whole number")
        if type(self.sp) is not bool:
            raise ValueError(f"sp = {self.sp!r}; it must be true or false")
        is_explicit = isinstance(self.cut, tuple) and all(type(first) is int for first in self.cut)
        if not is_explicit and self.cut not in get_args(NamedCut):
            cut = list(self.cut) if isinstance(self.cut, tuple) else self.cut
            raise ValueError(f"cut = {cut!r}; choose one of {', '.join(get_args(NamedCut))} or a list of first blocks")

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp=self.dp, pp=self.pp, cp=self.cp, tp=self.tp)

    @property
    def world_size(self) -> int:
        return self.mesh.size

    @property
    def num_stages(self) -> int:
        return self.pp * self.chunks

    @property
    def keeps_whole_inputs(self) -> bool:
        """Whether products keep the inputs that they gather."""
        return self.sp and self.saved_input == "whole"

    @property
    def shards_vocabulary(self) -> bool:
        """Whether tp ranks hold different rows of embeddings and head."""
        return self.tp > 1 and self.vocabulary == "sharded"

    @property
    def needs_profile(self) -> bool:
        """Whether its stages or its schedule depend on what blocks cost."""
        return self.cut in COSTED_CUTS or self.schedule == "list"

    @property
    def label(self) -> str:
        """Short and unique text form, e.g. `tp2 sp pp2(aligned) dp1 m4 1f1b per_stage`; chunks `pp2x2(even) folded`."""
        cut = self.cut if isinstance(self.cut, str) else ",".join(map(str, self.cut))
        chunks = f"x{self.chunks}" if self.chunks > 1 else ""
        parts = [f"tp{self.tp}", "sp" if self.sp else ""]
        parts += [self.saved_input] if self.saved_input != "shard" else []
        parts += [f"vocabulary={self.vocabulary}"] if self.vocabulary != "sharded" else []
        parts += [f"pp{self.pp}{chunks}({cut})"]
        parts += [self.placement] if self.placement != "linear" else []
        parts += [self.transport] if self.transport != "relay" else []
        parts += [f"dp{self.dp}"]
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [f"zero{self.zero}"] if self.zero else []
        parts += [f"bucket{self.gradient_bucket_bytes}"] if self.gradient_bucket_bytes else []
        parts += [f"m{self.microbatches}", self.schedule, self.memory_gather]
        parts += [f"recompute={self.recompute}"] if self.recompute != "none" else []
        parts += [self.attention] if self.attention != "fused" else []
        return " ".join(part for part in parts if part)

    def replace(self, **changes: Any) -> "Layout":
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        if not isinstance(self.cut, str):
            fields["cut"] = list(self.cut)
        return fields

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Layout":
        """The inverse of `to_dict`. Unknown keys are errors."""
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ValueError(f"unknown layout keys {', '.join(unknown)}; known are {', '.join(known)}")
        cut = fields.get("cut", "even")
        return cls(**{**fields, "cut": tuple(cut) if isinstance(cut, list) else cut})

    # ---- rules that need the model or the batch -----------------------------------------------------------------

    def check_world(self, world_size: int) -> None:
        """Raises ValueError unless the degrees multiply to `world_size`."""
        if self.world_size != world_size:
            raise ValueError(
                f"tp {self.tp} x pp {self.pp} x dp {self.dp} x cp {self.cp} = {self.world_size} ranks, "
                f"but the world is {world_size}; start {self.world_size} processes or change a degree"
            )

    def check_model(self, config: ModelConfig) -> None:
        """Raises ValueError with one line when this layout cannot partition `config`."""
        if config.num_heads % self.tp:
            raise ValueError(
                f"{config.num_heads} heads over tp={self.tp}: tp must divide {config.num_heads}; "
                f"try {_divisors(config.num_heads)}"
            )
        larger, smaller = max(config.num_kv_heads, self.tp), min(config.num_kv_heads, self.tp)
        if larger % smaller:
            raise ValueError(
                f"{config.num_kv_heads} KV heads over tp={self.tp}: one must divide the other; "
                f"try tp = {_divisors(config.num_kv_heads)}"
            )
        if config.ffn_width % self.tp:
            raise ValueError(
                f"ffn width {config.ffn_width} over tp={self.tp}: tp must divide it; "
                f"the nearest width that works is {round(config.ffn_width / self.tp) * self.tp or self.tp}"
            )
        smallest = min(config.vocabulary, config.source_vocabulary or config.vocabulary)
        if smallest < self.tp and self.shards_vocabulary:
            raise ValueError(
                f"vocabulary {smallest} over tp={self.tp}: every rank needs a row; try tp <= {smallest}, "
                "or vocabulary = 'whole'"
            )
        if self.num_stages > config.num_blocks:
            chunks = f" x chunks = {self.chunks}" if self.chunks > 1 else ""
            nearest = f"chunks <= {config.num_blocks // self.pp}" if config.num_blocks >= self.pp else ""
            raise ValueError(
                f"pp = {self.pp}{chunks} stages over {config.num_blocks} blocks: every stage needs a block; "
                f"try {nearest or f'pp <= {config.num_blocks}'}"
            )
        if self.placement == "folded":
            self._check_folded(config)
        if self.cut == "aligned" and config.has_cross_attention and self.pp == 1:
            raise ValueError("cut = 'aligned' needs pp >= 2: an encoder stage and a decoder stage; try cut = 'even'")

    def _check_folded(self, config: ModelConfig) -> None:
        """The encoder fills the first half of the stages, the decoder the second."""
        if not config.has_cross_attention:
            raise ValueError(
                f"placement 'folded' puts encoder and decoder side by side: {config.name} is {config.architecture}; "
                "try placement = 'interleaved'"
            )
        half = self.num_stages // 2
        fewest = min(config.num_encoder_blocks, config.num_decoder_blocks)
        if half > fewest:
            raise ValueError(
                f"placement 'folded' cuts each side into {half} stages, but one has {fewest} blocks: "
                f"try pp x chunks <= {2 * fewest}"
            )
        if not isinstance(self.cut, str) and self.cut[half - 1] != config.num_encoder_blocks:
            raise ValueError(
                f"placement 'folded' has the encoder in stages 0 to {half - 1}: cut {list(self.cut)} must have "
                f"{config.num_encoder_blocks} in place {half - 1}, or be even"
            )

    def check_sequences(self, num_sequences: int) -> None:
        """Raises ValueError when a step's `num_sequences` cannot be dealt to ranks and microbatches."""
        if num_sequences % self.dp:
            raise ValueError(
                f"{num_sequences} sequences over dp={self.dp}: dp must divide them; "
                f"try {(num_sequences // self.dp + 1) * self.dp}"
            )
        microbatch_sizes(num_sequences // self.dp, self.microbatches)


def microbatch_sizes(num_sequences: int, microbatches: int) -> tuple[int, ...]:
    """Sizes of the microbatches of one rank: equal, only the last may be ragged.

    7 sequences in 3 microbatches: (3, 3, 1). Raises ValueError when that leaves one empty.
    """
    size = -(-num_sequences // microbatches)
    last = num_sequences - size * (microbatches - 1)
    if last < 1:
        raise ValueError(
            f"{num_sequences} sequences do not fill {microbatches} microbatches of {size}: "
            f"try {size * (microbatches - 1) + 1} sequences or {-(-num_sequences // size)} microbatches"
        )
    return (size,) * (microbatches - 1) + (last,)


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
