"""What does each piece of a model cost, counted or measured: the numbers that cuts and schedules are balanced by.

    encoder_embedding | encoder_block x n | decoder_embedding | decoder_block x n | head

A piece costs a forward, the input's half of its backward and the weights' half, for one microbatch on one rank:

    unit "flops"      matrix products and attention as executed (`parallel/flops.py`); weights: one product for each
                      of the forward's, input: everything else, recomputation too. A lookup costs nothing
    unit "seconds"    busy seconds measured on one machine (`twinshard profile`)

`head` is the last norm, the head and the loss. What a stage pays once for all its blocks of a side (masks, relative
bias) is `encoder_stage` and `decoder_stage`; no FLOPs are counted there. Where keys and values are shipped
(`parallel/edges.py`), the stage that makes the memory pays `keys_values` for every decoder block elsewhere, and those
blocks pay it no more, nor its recomputation; a measured profile does not tell it. A message over an edge costs
`transfer_cost` and `byte_cost` for each of its bytes, in the same unit. All blocks of a side cost the same.

A profile fits one model, one pair of lengths, one size of microbatch and the options that change what a rank computes.
Left out: files (`parallel/profile_file.py`), which cut is best (`parallel/cuts.py`), collectives of tp.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal, Self, get_args

from models.config import ModelConfig
from models.costs import Side, block_flops
from parallel.balance import Balance
from parallel.edges import Edge, carried_size
from parallel.figures import PhaseFlops, StepShape
from parallel.flops import keys_values_flops
from parallel.layouts import AttentionKernel, Layout, Recompute, Transport, Vocabulary, microbatch_sizes
from parallel.partition import Carried, Stage
from parallel.slices import Slices
from parallel.work import NO_WORK, Work

Unit = Literal["flops", "seconds"]
GRAINS: dict[Unit, float] = {"flops": 1.0, "seconds": 1e15}
"""Cuts are compared in whole FLOPs or femtoseconds."""


PIECES = (
    "encoder_embedding",
    "encoder_stage",
    "encoder_block",
    "decoder_embedding",
    "decoder_stage",
    "decoder_block",
    "head",
)
"""Names of a profile's pieces, in the order of the model."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Costs of the pieces of one model. Sides that it lacks cost nothing.

    Attributes:
        unit: of all costs.
        config: the model.
        tp, sp, vocabulary, recompute, attention: what of a layout changes a rank's own work.
        transport: `kv` where keys and values are shipped; the others cost a rank the same.
        source_length, target_length: positions of a sequence, 0 for a stream that the model lacks.
        num_sequences: of one microbatch.
        dtype_bytes: of an element.
        keys_values: of a decoder block, what makes its keys and values, once: part of `decoder_block`.
        memory_entry: what a stage pays for the memory to enter: part of `decoder_stage`. As parts of pieces, these two
            stand in no file and tell no profiles apart.
        transfer_cost: of a message, whatever its size; 0 where it is not known.
        byte_cost: of each byte of a message; 0 where it is not known.
        machine: where it was measured, for readers only.

    Raises ValueError for numbers below their least.
    """

    unit: Unit
    config: ModelConfig
    tp: int = 1
    sp: bool = False
    vocabulary: Vocabulary = "sharded"
    recompute: Recompute = "none"
    attention: AttentionKernel = "fused"
    transport: Transport = "relay"
    source_length: int
    target_length: int
    num_sequences: int
    dtype_bytes: int = 4
    encoder_embedding: Work = NO_WORK
    encoder_stage: Work = NO_WORK
    encoder_block: Work = NO_WORK
    decoder_embedding: Work = NO_WORK
    decoder_stage: Work = NO_WORK
    decoder_block: Work = NO_WORK
    head: Work = NO_WORK
    keys_values: Work = dataclasses.field(default=NO_WORK, compare=False)
    memory_entry: Work = dataclasses.field(default=NO_WORK, compare=False)
    transfer_cost: float = 0.0
    byte_cost: float = 0.0
    machine: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        words = {"unit": Unit, "vocabulary": Vocabulary, "recompute": Recompute, "attention": AttentionKernel}
        for field, choices in words.items():
            if getattr(self, field) not in get_args(choices):
                raise ValueError(f"{field} = {getattr(self, field)!r}; choose one of {', '.join(get_args(choices))}")
        for field in ("transfer_cost", "byte_cost"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field} = {getattr(self, field)}; a cost is a number, 0 or more")
        if self.tp < 1:
            raise ValueError(f"tp = {self.tp}; it must be at least 1")
        self.shape.check(self.config)
        for side, has_side in (("encoder", self.config.has_encoder), ("decoder", self.config.has_decoder)):
            cost = getattr(self, f"{side}_block").total
            if has_side and not cost:
                raise ValueError(f"{side}_block costs nothing; a block of {self.config.name} has work to do")

    # ---- what it is for -----------------------------------------------------------------------------------------

    @property
    def shape(self) -> StepShape:
        """One microbatch."""
        return StepShape(
            num_sequences=self.num_sequences,
            source_length=self.source_length,
            target_length=self.target_length,
            dtype_bytes=self.dtype_bytes,
        )

    def check(self, config: ModelConfig, layout: Layout | None = None, shape: StepShape | None = None) -> None:
        """Raises ValueError, with the first thing that differs, unless this profile is of a model, layout and step.

        Args:
            config: the model; its name is not compared.
            layout: whose tp, sp, vocabulary, recompute and attention are compared.
            shape: of a step of `layout`: its lengths, dtype and sequences of a microbatch are compared.
        """
        for field in dataclasses.fields(ModelConfig):
            ours, theirs = getattr(self.config, field.name), getattr(config, field.name)
            if ours != theirs and field.name != "name":
                self._refuse(f"{field.name} = {ours!r}, and {config.name} has {theirs!r}")
        if layout is not None:
            for name in ("tp", "sp", *(("vocabulary",) if layout.tp > 1 else ()), "recompute", "attention"):
                ours, theirs = getattr(self, name), getattr(layout, name)
                if ours != theirs:
                    self._refuse(f"{name} = {ours!r}, and the layout has {theirs!r}")
            if layout.transport == "kv" != self.transport and layout.pp > 1 and config.has_cross_attention:
                raise ValueError(
                    f"the profile of {self.config.name} does not tell what keys and values cost, and transport = 'kv' "
                    "moves them to another stage: try transport = 'direct', or cut = 'flops' without a profile"
                )
        if shape is None:
            return
        for name in ("source_length", "target_length", "dtype_bytes"):
            ours, theirs = getattr(self, name), getattr(shape, name)
            if ours != theirs:
                self._refuse(f"{name} = {ours}, and the step has {theirs}")
        size = shape.num_sequences if layout is None else _microbatch(layout, shape)
        if self.num_sequences != size:
            self._refuse(f"{self.num_sequences} sequences a microbatch, and the step has {size}")

    def _refuse(self, difference: str) -> None:
        raise ValueError(
            f"the profile of {self.config.name} is another's: it has {difference}; make one with twinshard profile"
        )

    # ---- what things cost ---------------------------------------------------------------------------------------

    def stage(self, stage: Stage) -> Work:
        """Cost of a stage: its blocks, and the ends that live with them."""
        return self.slice(stage.first, stage.last)

    def slice(self, first: int, last: int) -> Work:
        """Cost of blocks [first, last) of the flat block list."""
        num_encoder, num_blocks = self.config.num_encoder_blocks, self.config.num_blocks
        here = NO_WORK
        for side, before, end in (("encoder", 0, num_encoder), ("decoder", num_encoder, num_blocks)):
            count = min(last, end) - max(first, before)
            if count > 0:
                here += getattr(self, f"{side}_stage") + count * getattr(self, f"{side}_block")
                here += getattr(self, f"{side}_embedding") if first <= before else NO_WORK
        here += self.head if last == num_blocks else NO_WORK
        return self._shipped(here, first, last) if self.transport == "kv" else here

    def _shipped(self, here: Work, first: int, last: int) -> Work:
        """Cost of blocks, with keys and values of all decoder blocks made where the memory is."""
        middle = self.config.num_encoder_blocks
        num_readers = max(0, last - max(first, middle))
        if first < middle <= last:
            here += (self.config.num_decoder_blocks - num_readers) * self.keys_values
            return here if num_readers else here + self.memory_entry
        if not num_readers:
            return here
        return here - num_readers * self.keys_values_spared - self.memory_entry

    @property
    def keys_values_spared(self) -> Work:
        """What a decoder block has not to do that is sent its keys and values: to make them, nor to recompute them."""
        return self.keys_values + Work(0.0, self.keys_values.forward * (self.recompute == "full"), 0.0)

    @property
    def model(self) -> Work:
        """Cost of the whole model on one rank."""
        return self.slice(0, self.config.num_blocks)

    def carried_bytes(self, name: Carried) -> int:
        """Bytes of one tensor that crosses an edge."""
        positions, width = carried_size(
            self.config,
            name,
            source_length=self.source_length,
            target_length=self.target_length,
            tp=self.tp,
            sp=self.sp,
        )
        return positions * width * self.num_sequences * self.dtype_bytes

    def edge_bytes(self, edge: Edge) -> int:
        """Bytes of one microbatch's message over an edge, all its tensors together."""
        return sum(map(self.carried_bytes, edge.carries))

    def message(self, names: tuple[Carried, ...]) -> float:
        """Cost of sending tensors over an edge together, one way."""
        if not names:
            return 0.0
        return self.transfer_cost + self.byte_cost * sum(map(self.carried_bytes, names))

    # ---- closed forms -------------------------------------------------------------------------------------------

    @classmethod
    def of_flops(cls, config: ModelConfig, layout: Layout, shape: StepShape) -> Self:
        """Costs in FLOPs, in closed form.

        Args:
            config: the model.
            layout: its tp, sp, vocabulary, recompute, attention, transport and microbatches are read.
            shape: of a data-parallel rank's step.

        Raises:
            ValueError: lengths that the model cannot read, or sequences that do not fill the microbatches.
        """
        shape.check(config)
        one = dataclasses.replace(shape, num_sequences=_microbatch(layout, shape), is_ragged=False)
        slices = Slices(config=config, layout=layout.replace(transport="relay"), shape=one)
        num_blocks = config.num_blocks
        first = slices.flops(0, 1)
        ends = slices.flops(num_blocks - 1, num_blocks)
        head, making = ends["head"], 0
        if config.has_cross_attention:
            making = keys_values_flops(slices.share(num_blocks - 1, num_blocks), one, one.num_sequences)
        return cls(
            unit="flops",
            config=config,
            tp=layout.tp,
            sp=layout.sp,
            vocabulary=layout.vocabulary,
            recompute=layout.recompute,
            attention=layout.attention,
            transport=layout.transport,
            source_length=one.source_length if config.has_encoder else 0,
            target_length=one.target_length if config.has_decoder else 0,
            num_sequences=one.num_sequences,
            dtype_bytes=one.dtype_bytes,
            # Features are no one's output: their products have no input gradient.
            encoder_embedding=_work(first["embedding"], weight=first["embedding"].forward),
            encoder_block=_block_work(slices, "encoder", 0) if config.has_encoder else NO_WORK,
            decoder_block=_block_work(slices, "decoder", config.num_encoder_blocks) if config.has_decoder else NO_WORK,
            head=_work(head, weight=head.forward),
            keys_values=Work(float(making), float(making), float(making)),
        )

    @classmethod
    def counted_for(cls, config: ModelConfig, layout: Layout, shape: StepShape) -> Self | None:
        """Costs in FLOPs where a layout's cut or schedule asks for costs, None where it does not.

        Raises ValueError as `of_flops` does.
        """
        return cls.of_flops(config, layout, shape) if layout.needs_profile else None

    # ---- cuts ---------------------------------------------------------------------------------------------------

    def first_blocks(self, config: ModelConfig, layout: Layout) -> tuple[int, ...]:
        """First blocks of stages 1, 2, ... of a layout's cut, balanced as the cut says (`parallel/balance.py`).

        Raises:
            ValueError: a profile of another model or layout, or one in FLOPs for a cut by times.
        """
        self.check(config, layout)
        if layout.cut == "times" and self.unit != "seconds":
            raise ValueError("cut = 'times' needs measured seconds, the profile has FLOPs: try cut = 'flops'")
        costs = self
        if layout.cut == "flops" and self.unit != "flops":
            one = layout.replace(microbatches=1)
            costs = self.of_flops(config, one, self.shape)
        grain = GRAINS[costs.unit]
        return Balance(
            config=config,
            layout=layout,
            shape=self.shape,
            work=lambda first, last: round(costs.slice(first, last).total * grain),
            message=lambda names: round(costs.message(names) * grain),
        ).first_blocks()


def _microbatch(layout: Layout, shape: StepShape) -> int:
    """Sequences of a whole microbatch; only the last may have fewer."""
    return microbatch_sizes(shape.num_sequences, layout.microbatches)[0]


def _block_work(slices: Slices, side: Side, block: int) -> Work:
    parts = slices.flops(block, block + 1)
    flops = sum((parts[name] for name in ("self_attention", "cross_attention", "ffn")), start=PhaseFlops())
    share, shape = slices.share(block, block + 1), slices.shape
    source, target = (share.plan.sharded_length(length) for length in (shape.source_length, shape.target_length))
    whole = block_flops(slices.config, side, source, target, shape.num_sequences)
    # Heads divide over tp, and so do the products between them; every other product has a weight.
    core = (whole.self_core + whole.cross_core) // slices.layout.tp
    return _work(flops, weight=flops.forward - core)


def _work(flops: PhaseFlops, *, weight: int) -> Work:
    return Work(float(flops.forward), float(flops.recompute + flops.backward - weight), float(weight))
