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

Schedule = Literal["gpipe", "1f1b"]
MemoryGather = Literal["per_block", "per_stage"]
Recompute = Literal["none", "selective", "full"]
AttentionKernel = Literal["fused", "materialised"]
Cut = Literal["even", "aligned"] | tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The degrees and options of one partitioning.

    `cut` is `even` (block counts differ by one at most), `aligned` (every stage encoder XOR decoder) or the explicit
    first blocks of stages 1, 2, ... in the flat block list, encoder first. `sp` is sequence parallelism of the
    Megatron kind, on the tp axis; `cp` shards it on an axis of its own. `zero` is the ZeRO stage over dp.
    `microbatches` is their number per step and data-parallel rank. What an engine cannot run can still be accounted.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sp: bool = False
    zero: int = 0
    microbatches: int = 1
    schedule: Schedule = "1f1b"
    cut: Cut = "even"
    memory_gather: MemoryGather = "per_stage"
    recompute: Recompute = "none"
    attention: AttentionKernel = "fused"

    def __post_init__(self) -> None:
        self._check_types()
        for field in ("tp", "pp", "dp", "cp", "microbatches"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} = {getattr(self, field)}; it must be at least 1")
        for field, choices in (
            ("schedule", Schedule),
            ("memory_gather", MemoryGather),
            ("recompute", Recompute),
            ("attention", AttentionKernel),
        ):
            if getattr(self, field) not in get_args(choices):
                raise ValueError(f"{field} = {getattr(self, field)!r}; choose one of {', '.join(get_args(choices))}")
        if not isinstance(self.cut, str) and len(self.cut) != self.pp - 1:
            raise ValueError(
                f"cut {list(self.cut)} makes {len(self.cut) + 1} stages, but pp = {self.pp}; give {self.pp - 1} cuts"
            )
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero = {self.zero}; choose 0 (off), 1, 2 or 3")
        if self.zero and self.dp == 1:
            raise ValueError(f"zero = {self.zero} shards over the dp ranks: it needs dp >= 2, got dp = 1")
        if self.sp and self.tp == 1:
            raise ValueError("sp shards the sequence over the tp ranks: it needs tp >= 2, got tp = 1")

    def _check_types(self) -> None:
        """An experiment's file may hold anything."""
        for field in ("tp", "pp", "dp", "cp", "zero", "microbatches"):
            if type(getattr(self, field)) is not int:
                raise ValueError(f"{field} = {getattr(self, field)!r}; it must be a whole number")
        if type(self.sp) is not bool:
            raise ValueError(f"sp = {self.sp!r}; it must be true or false")
        is_explicit = isinstance(self.cut, tuple) and all(type(first) is int for first in self.cut)
        if not is_explicit and self.cut not in ("even", "aligned"):
            cut = list(self.cut) if isinstance(self.cut, tuple) else self.cut
            raise ValueError(f"cut = {cut!r}; choose even, aligned or a list of first blocks")

    @property
    def mesh(self) -> Mesh:
        return Mesh(dp=self.dp, pp=self.pp, cp=self.cp, tp=self.tp)

    @property
    def world_size(self) -> int:
        return self.mesh.size

    @property
    def label(self) -> str:
        """Short and unique text form, e.g. `tp2 sp pp2(aligned) dp1 m4 1f1b per_stage`."""
        cut = self.cut if isinstance(self.cut, str) else ",".join(map(str, self.cut))
        parts = [f"tp{self.tp}", "sp" if self.sp else "", f"pp{self.pp}({cut})", f"dp{self.dp}"]
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [f"zero{self.zero}"] if self.zero else []
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
        if smallest < self.tp:
            raise ValueError(f"vocabulary {smallest} over tp={self.tp}: every rank needs a row; try tp <= {smallest}")
        if self.pp > config.num_blocks:
            raise ValueError(
                f"pp = {self.pp} stages over {config.num_blocks} blocks: every stage needs a block; "
                f"try pp <= {config.num_blocks}"
            )
        if self.cut == "aligned" and config.has_cross_attention and self.pp == 1:
            raise ValueError("cut = 'aligned' needs pp >= 2: an encoder stage and a decoder stage; try cut = 'even'")

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
