"""What travels between which stages: the edges of a partitioning, and how the memory gets to those who read it.

    relay     E0 -source-> E1 -memory-> D0 -target, memory-> D1 -target, memory-> D2
    direct    E0 -source-> E1 -memory-> D0 -target-> D1 -target-> D2
                              -memory------------------> D1
                              -memory--------------------------------> D2

Which is better is a matter of numbers (`twinshard transports`). Over 48 pipelines of T5-large and T5-11B, 4 to 16 ranks
of A100 and H100, source/target 1/4 to 4, direct ones were at most 0.3 % faster, while the rank that sends most sent 0.9
to 2.5 times as much, and up to 3.2 times as many bytes waited to be used. So the memory is relayed by default.

Forward an edge carries the tensors that it names, backward their gradients the other way. An edge between two stages of
one rank sends nothing: the tensors are handed over. Left out: bytes (`parallel/events.py`) and time
(`parallel/simulate.py`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from models.config import ModelConfig
from parallel.partition import Carried, Stage

Transport = Literal["relay", "direct"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """A link from one stage to a later one."""

    first: int
    last: int
    carries: tuple[Carried, ...]

    @property
    def name(self) -> str:
        """Its site: `edge.0-1`."""
        return f"edge.{self.first}-{self.last}"


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Edges of a model with one stack."""
    return tuple(Edge(first=stage, last=stage + 1, carries=("target",)) for stage in range(num_stages - 1))


def edges(config: ModelConfig, cut: Sequence[Stage], transport: Transport) -> tuple[Edge, ...]:
    """All edges of a cut, by their first stage and then by their last."""
    is_direct = transport == "direct" and config.has_cross_attention
    # The stage with the encoder's last block makes the memory.
    maker = next((stage.index for stage in cut if stage.last >= config.num_encoder_blocks), 0)
    made = []
    for stage in cut[:-1]:
        carries = stage.outputs
        if is_direct and stage.index > maker:
            carries = tuple(name for name in carries if name != "memory")
        made.append(Edge(first=stage.index, last=stage.index + 1, carries=carries))
        if is_direct and stage.index == maker:
            made += [Edge(first=maker, last=later, carries=("memory",)) for later in range(maker + 2, len(cut))]
    return tuple(made)
