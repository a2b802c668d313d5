"""What travels between which stages: the edges of a partitioning, and how the memory gets to those who read it.

    relay     E0 -source-> E1 -memory-> D0 -target, memory-> D1 -target, memory-> D2
    direct    E0 -source-> E1 -memory-> D0 -target-> D1 -target-> D2
                              -memory------------------> D1
                              -memory--------------------------------> D2
    kv        as direct, but E1 makes keys and values for the blocks of D0, D1 and D2, and sends these

With kv the projections of cross-attention live on the stage that makes the memory, all of them; of the decoder blocks
of its own it reads the memory as ever. Which way is better is a matter of numbers (`twinshard transports`). Over 48
pipelines of T5-large and T5-11B, 4 to 16 ranks of A100 and H100, source/target 1/4 to 4, direct ones were at most 0.3 %
faster, while the rank that sends most sent 0.9 to 2.5 times as much, and up to 3.2 times as many bytes waited to be
used. Keys and values of T5-large, 512 + 512 positions on 4 to 16 A100, were 4 % faster on even cuts, which leave the
encoder's ranks less to do, but 0.5 to 56 % slower on cuts balanced by time, and the rank that sends most sent 10 to 16
times as much. So the memory is relayed by default.

Forward an edge carries the tensors that it names, backward their gradients the other way. For source and target length
S and L, width D, K KV heads of width H, t = tp:

    source, memory     S x D, S / t x D under sp
    target             L x D, L / t x D under sp
    kv.3               S x 2 max(1, K / t) H        every position of a rank's own heads, whatever sp is

An edge between two stages of one rank sends nothing: the tensors are handed over. Left out: bytes of a step
(`parallel/events.py`) and time (`parallel/simulate.py`).
"""

import dataclasses
import itertools
from collections.abc import Sequence

from models.config import ModelConfig, keys_values_name
from parallel.layouts import TRANSPORTS, Layout, Transport
from parallel.partition import Carried, Stage


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
    is_relayed = transport == "relay" or not config.has_cross_attention
    # The stage with the encoder's last block makes the memory.
    maker = next((stage.index for stage in cut if stage.last >= config.num_encoder_blocks), 0)
    made = []
    for stage, following in itertools.pairwise(cut):
        carries = stage.outputs
        if not is_relayed and stage.index >= maker:
            carries = tuple(name for name in carries if name != "memory")
        if not is_relayed and stage.index == maker:
            carries += read_by(config, following, transport)
        made.append(Edge(first=stage.index, last=following.index, carries=carries))
        if not is_relayed and stage.index == maker:
            made += [
                Edge(first=maker, last=later.index, carries=read_by(config, later, transport))
                for later in cut[maker + 2 :]
            ]
    return tuple(made)


def read_by(config: ModelConfig, stage: Stage, transport: Transport) -> tuple[Carried, ...]:
    """What a stage behind the one that makes the memory gets of it."""
    if transport != "kv":
        return ("memory",)
    first = max(stage.first, config.num_encoder_blocks)
    return tuple(keys_values_name(block - config.num_encoder_blocks) for block in range(first, stage.last))


def carried_size(
    config: ModelConfig, name: Carried, *, source_length: int, target_length: int, tp: int, sp: bool
) -> tuple[int, int]:
    """Positions of one sequence, padded to what divides, and width of a tensor that a rank sends or receives."""
    multiple = tp if sp else 1
    num_shares = -(-(target_length if name == "target" else source_length) // multiple)
    if name in ("source", "memory", "target"):
        return num_shares, config.width
    return num_shares * multiple, 2 * max(1, config.num_kv_heads // tp) * config.head_width


def run_transports(chunks: int) -> tuple[Transport, ...]:
    """Those that an engine runs with so many stages a rank."""
    return TRANSPORTS if chunks == 1 else ("relay", "direct")


def not_run(layout: Layout) -> str | None:
    """Why no engine runs a layout's transport, as one line; None where one does."""
    if layout.transport not in run_transports(layout.chunks):
        return f"transport = 'kv' wants one stage a rank: chunks = {layout.chunks}; use chunks = 1 or 'direct'"
    return None
