"""Which layouts of a model can take N devices, the sequences of a step held fixed?

    frame      tp x sp x pp x dp x ZeRO x recompute x memory gather x microbatches         tp pp dp = N
    pipeline   placement and chunks x schedule x cut x transport                           of each frame

A step is `num_sequences` over all devices, dealt evenly: dp ranks, microbatches, b sequences each. tp stays within a
node. What cannot matter is left at its default, so that no layout is tried twice: one stage a pipeline has one schedule
and cut, a model without memory gathers and sends none, and ships keys and values with one stage a rank alone. Any
field of a layout can be given; then only its value is tried. Left out: context parallelism, explicit cuts, whole
vocabularies unless they are given, schedules `list` and inputs kept whole (`saved_input`), which cost too much to be
tried everywhere (`parallel/search.py` makes some), and who runs what: ZeRO 2 and 3 need another engine than the native
one.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from models.config import ModelConfig
from parallel.edges import not_run, run_transports
from parallel.figures import Optimizer, StepShape
from parallel.layouts import PLACEMENTS, Layout, MemoryGather, NamedCut, Recompute, Schedule, Transport
from parallel.machine import Machine
from parallel.placement import Placement

CHUNKS = (1, 2, 3, 4, 8)
"""Stages of a pipeline rank."""
PIPELINE_FIELDS = ("placement", "chunks", "schedule", "cut", "transport")
"""What a frame leaves open."""
NAMED_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved", "zb_h1", "zb_h2", "zb_v", "gpipe")
CUTS: tuple[NamedCut, ...] = ("even", "aligned", "times", "flops", "parameters")
CHUNKED_CUTS: tuple[NamedCut, ...] = ("even", "aligned", "times")
"""Of pipelines with several stages a rank, whose cuts take long: those that others have, and the one made for time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What is searched for.

    Attributes:
        config: the model.
        machine: the cluster.
        num_devices: all of them are used.
        num_sequences: of a step, over all devices.
        source_length, target_length: positions of a sequence, 0 for a stream that the model lacks.
        dtype_bytes: of an element.
        optimizer: whose states are held.
        master_weights: whether it updates a float32 copy.
        microbatch: sequences of a microbatch; None for any number.
        fixed: fields of layouts that are given.

    Raises ValueError for numbers below 1, lengths that the model cannot read, sequences that cannot be dealt, a cut
    that is not searched, or stages of which no engine ships keys and values.
    """

    config: ModelConfig
    machine: Machine
    num_devices: int
    num_sequences: int
    source_length: int = 0
    target_length: int = 0
    dtype_bytes: int = 2
    optimizer: Optimizer = "adamw"
    master_weights: bool = False
    microbatch: int | None = None
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, value in (
            ("devices", self.num_devices),
            ("sequences", self.num_sequences),
            ("microbatch", self.microbatch),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}; it must be at least 1")
        self.shape(1).check(self.config)
        if self._has_whole_vocabulary and self.fixed.get("sp"):
            # Refused by any layout with both.
            Layout(tp=2, sp=True, vocabulary="whole")
        cut = self.fixed.get("cut", "even")
        if not isinstance(cut, str) or cut == "memory":
            told = list(cut) if isinstance(cut, tuple) else cut
            raise ValueError(
                f"cut = {told} is not searched; choose one of {', '.join(CUTS)}, or plan without a machine"
            )
        if self.fixed.get("gradient_bucket_bytes"):
            raise ValueError(
                f"gradient_bucket_bytes = {self.fixed['gradient_bucket_bytes']} is not searched: every layout sums its "
                "gradients once a step; leave it out, or plan without a machine"
            )
        if "transport" in self.fixed:
            chunks = self.fixed.get("chunks", 1)
            placement: Placement = "interleaved" if chunks > 1 else "linear"
            asked = Layout(
                pp=2, chunks=chunks, placement=placement, schedule="gpipe", transport=self.fixed["transport"]
            )
            reason = not_run(asked)
            if reason is not None:
                raise ValueError(reason)
        if next(self.degrees(), None) is None:
            raise ValueError(self._why_none())

    def shape(self, dp: int) -> StepShape:
        """The step of a data-parallel rank."""
        return StepShape(
            num_sequences=self.num_sequences // dp,
            source_length=self.source_length,
            target_length=self.target_length,
            dtype_bytes=self.dtype_bytes,
        )

    def size(self, layout: Layout) -> int:
        """Sequences of a microbatch."""
        return self.num_sequences // (layout.dp * layout.microbatches)

    # ---- frames -------------------------------------------------------------------------------------------------

    def degrees(self) -> Iterator[Layout]:
        """Every tp x pp x dp x microbatches; all else at its default."""
        for tp, pp in self._model_degrees():
            dp, rest = divmod(self.num_devices, tp * pp)
            if rest or self.num_sequences % dp or not self._is_open("dp", dp):
                continue
            for microbatches in _divisors(self.num_sequences // dp):
                size = self.num_sequences // (dp * microbatches)
                if self._is_open("microbatches", microbatches) and self.microbatch in (None, size):
                    yield Layout(tp=tp, pp=pp, dp=dp, microbatches=microbatches)

    def frames(self) -> Iterator[Layout]:
        """Every frame: linear, 1f1b, cut evenly."""
        has_memory = self.config.has_cross_attention
        fixed = {name: self.fixed[name] for name in ("attention",) if name in self.fixed}
        for degrees in self.degrees():
            is_sharded = degrees.tp > 1
            fixed["vocabulary"] = "whole" if is_sharded and self._has_whole_vocabulary else "sharded"
            for sp, gather, recompute, zero in itertools.product(
                self._choices("sp", (False, True)),
                self._choices("memory_gather", get_args(MemoryGather)[::-1], only=not (has_memory and is_sharded)),
                self._choices("recompute", get_args(Recompute)),
                self._choices("zero", range(4)),
            ):
                if (sp and (not is_sharded or self._has_whole_vocabulary)) or (zero and degrees.dp == 1):
                    continue
                saved_input = self.fixed.get("saved_input", "shard") if sp else "shard"
                yield degrees.replace(
                    sp=sp, memory_gather=gather, saved_input=saved_input, recompute=recompute, zero=zero, **fixed
                )

    # ---- pipelines ----------------------------------------------------------------------------------------------

    def pipelines(self, frame: Layout) -> Iterator[Layout]:
        """Every placement, cut and transport of a frame, with one schedule; `schedules` tells the others."""
        if frame.pp == 1:
            if self._is_open("chunks", 1) and self._is_open("placement", "linear") and self.schedules(frame):
                yield frame
            return
        has_memory = self.config.has_cross_attention
        for placement, chunks in itertools.product(get_args(Placement), CHUNKS):
            if not self._is_open("placement", placement) or not self._is_open("chunks", chunks):
                continue
            base = {"placement": placement, "chunks": chunks, "schedule": "gpipe"}
            try:
                layout = frame.replace(**base)
                layout.check_model(self.config)
            except ValueError:
                # A placement that cannot have so many chunks, or more of them than blocks.
                continue
            if not self.schedules(layout):
                continue
            # What is asked for is tried everywhere.
            ways = self.transports(layout)
            for cut in self._choices("cut", CUTS if chunks == 1 or "cut" in self.fixed else CHUNKED_CUTS):
                if cut == "aligned" and not has_memory:
                    continue
                for transport in ways:
                    yield layout.replace(cut=cut, transport=transport)

    def transports(self, layout: Layout) -> tuple[Transport, ...]:
        """Ways of the memory that differ, and that an engine runs."""
        if not self.config.has_cross_attention or layout.num_stages == 1:
            return ("relay",)
        ways = self._choices("transport", run_transports(layout.chunks))
        if layout.num_stages == 2:
            # The second stage is next to the first: what is sent directly is relayed.
            ways = tuple(dict.fromkeys("relay" if way == "direct" else way for way in ways))
        return ways

    def schedules(self, layout: Layout) -> tuple[Schedule, ...]:
        """Named schedules that a placement can run; 1f1b for a lone stage."""
        wanted = self.fixed.get("schedule")
        able = [name for name in NAMED_SCHEDULES if layout.placement in PLACEMENTS[name]]
        if layout.pp == 1 and wanted in (None, "list"):
            return ("1f1b",)
        # A list schedule is made of the best of the named ones.
        return tuple(name for name in able if wanted in (None, "list", name))

    # ---- what is given ------------------------------------------------------------------------------------------

    @property
    def _has_whole_vocabulary(self) -> bool:
        return bool(self.fixed.get("vocabulary") == "whole")

    def _is_open(self, field: str, value: object) -> bool:
        return bool(self.fixed.get(field, value) == value)

    def _choices(self, field: str, values: Any, *, only: bool = False) -> tuple[Any, ...]:
        """Values of a field that are tried; the first only, whatever is given, where it cannot matter."""
        return tuple(values)[:1] if only else tuple(value for value in values if self._is_open(field, value))

    def _model_degrees(self) -> Iterator[tuple[int, int]]:
        for tp in _divisors(self.num_devices):
            if tp > self.machine.devices_per_node or not self._is_open("tp", tp):
                continue
            for pp in _divisors(self.num_devices // tp):
                if not self._is_open("pp", pp):
                    continue
                try:
                    Layout(tp=tp, pp=pp, vocabulary=self.fixed.get("vocabulary", "sharded")).check_model(self.config)
                except ValueError:
                    continue
                yield tp, pp

    def _why_none(self) -> str:
        dealt = {self.num_devices // (tp * pp) for tp, pp in self._model_degrees() if self.num_devices % (tp * pp) == 0}
        degrees = sorted(dp for dp in dealt if self._is_open("dp", dp))
        given = ", ".join(f"{name} = {value}" for name, value in self.fixed.items())
        told = f" with {given}" if given else ""
        if not degrees:
            return (
                f"{self.num_devices} devices{told}: no tp x pp x dp makes that many for {self.config.name}; tp is at "
                f"most {self.machine.devices_per_node}, divides {self.config.num_heads} heads, pp is at most "
                f"{self.config.num_blocks} blocks; try another number of devices"
            )
        least = degrees[0] * (self.microbatch or 1) * self.fixed.get("microbatches", 1)
        return (
            f"{self.num_sequences} sequences over {self.num_devices} devices{told}: none of dp = "
            f"{', '.join(map(str, degrees))} deals them evenly in microbatches"
            f"{f' of {self.microbatch}' if self.microbatch else ''}; try {-(-self.num_sequences // least) * least}"
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
