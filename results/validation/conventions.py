"""By which conventions were published figures made, where they differ from ours?

A source that counts 18 bytes a parameter, or one norm for another, is recomputed as it counts, so that a difference
that is left is a mistake of somebody's. A convention changes a formula by a term that its source names; it is never a
factor found by trying. Left out: which formula a figure asks for (the other modules of this package).
"""

import dataclasses
from typing import Any, Literal

from parallel.published_costs import RecomputedCore

Ends = Literal["head", "pooler", "none"]
ParameterRule = Literal["exact", "square_blocks", "gpt"]
Norm = Literal["own", "layernorm"]
Rounding = Literal["rounded", "rounded_or_cut_off"]

MIB, GIB = 2**20, 2**30
GB = 10**9


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Convention:
    """How one source counts. The defaults are this project's own way."""

    name: str
    parameters: ParameterRule = "exact"
    """exact: every parameter once. square_blocks: 12 L D^2. gpt: 12 L D^2 (1 + 13 / (12 D) + (V + s) / (12 L D))."""
    ends: Ends = "head"
    """What stands on the last block: the head that predicts tokens, BERT's pooler (D^2 + D) instead, or nothing."""
    norm: Norm = "own"
    """layernorm: a norm counts 2 D parameters though the model's rmsnorm has D."""
    gradient_bytes: int = 2
    """Of an element of a gradient beside half-precision parameters: 2, or 4 where they are accumulated in float32."""
    unit_bytes: int = 1
    """Bytes of the printed unit, whatever it is called: 2^30 or 2^20 where GiB or MiB are printed as GB or MB."""
    recomputed_core: RecomputedCore = "forward"
    """What selective recomputation adds to hardware FLOPs, see `parallel.published_costs`."""
    rounding: Rounding = "rounded"
    """Whether a printed figure is always rounded, or digits are sometimes cut off (2,218.75 printed as 2218)."""

    @property
    def told(self) -> str:
        """The options that differ from this project's own way, for a reader."""
        options = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if field.name not in ("name", "unit_bytes") and getattr(self, field.name) != field.default
        ]
        units = {MIB: "MiB", GIB: "GiB", GB: "GB"}
        options += [units[self.unit_bytes]] if self.unit_bytes in units else []
        return f"{self.name} ({', '.join(options)})" if options else self.name

    def replace(self, **changes: Any) -> "Convention":
        return dataclasses.replace(self, **changes)


CHECKPOINT = Convention(name="checkpoint")
"""A tied tensor counts once; buffers do not count."""

KORTHIKANTI = Convention(
    name="Korthikanti et al. 2022",
    parameters="square_blocks",
    gradient_bytes=4,
    unit_bytes=GIB,
    recomputed_core="forward_and_backward",
)
"""18 bytes a parameter: 2 + 4 of gradients + 12. Activations as in `parallel.published_costs`: no embedding, final
norm, head or logits; the first stage, which 1F1B makes hold L blocks, or L (1 + (p - 1) / (p v)) with v chunks a
rank."""

ZERO = Convention(name="Rajbhandari et al. 2019", unit_bytes=GB, rounding="rounded_or_cut_off")
"""16 bytes a parameter: 2 + 2 + 12. GB are decimal; large models' figures are cut off to whole GB, others rounded."""

MEGATRON = Convention(name="Narayanan et al. 2021", parameters="gpt")
"""Biases, norms and learned positions count, the final norm does not."""

MEGATRON_LOG = Convention(name="Megatron-LM's log", norm="layernorm", gradient_bytes=4, unit_bytes=MIB)
"""What Megatron-LM prints before it trains: 18 bytes a parameter, or 6 + 12 / dp with its distributed optimizer;
LayerNorm is counted for RMSNorm; MiB are printed as MB."""

MEGATRON_ALLOCATED = MEGATRON_LOG.replace(name="allocated under Megatron-LM", norm="own")
"""What the allocator holds: the norms that are there."""

ZERO_BUBBLE = Convention(name="Qi et al. 2023")
"""A rank's extent from its first start to its last end, the longest of them; a message is pure latency."""
