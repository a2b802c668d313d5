"""Which layouts of a model fit on a device, on how few devices, and why not on fewer?

    tp <= devices of a node   x   pp <= blocks   x   sp   x   recompute   x   ZeRO 0 to 3   x   dp <= devices / (tp pp)

A rank needs its states and the peak of its activations; a layout fits when its fullest rank does. The space has
hundreds of thousands of layouts, but few different numbers:

    dp           changes states under ZeRO only, and never adds to them: whatever dp fits, every larger one does
    stages       with as many blocks and the same ends keep the same; of these the first decides, which has the most
                 microbatches in flight
    tp ranks     differ in vocabulary rows alone
    depth        block counts of even stages repeat from one pp to the next

So a family (tp, pp, sp, recompute, ZeRO) is decided by a bisection over dp, over cached numbers of few stages. Every
number is that of `parallel.predict`. Left out: time, so what is best; what ZeRO 3 gathers; context parallelism.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from models.config import ModelConfig
from parallel.figures import Optimizer, StepShape
from parallel.layouts import PLAIN_SCHEDULES, Layout, Recompute
from parallel.loads import Load, Loads

AXES = ("tp", "pp", "zero")
"""Axes over which states are shared out."""
RECOMPUTES: tuple[Recompute, ...] = get_args(Recompute)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Layouts that differ in dp alone and fit from some dp on.

    Attributes:
        fullest: of the layout with the smallest dp that fits.
        max_dp: the largest dp; every dp up to it fits.
    """

    fullest: Load
    max_dp: int

    @property
    def layout(self) -> Layout:
        return self.fullest.layout

    @property
    def num_devices(self) -> int:
        return self.layout.world_size

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes that share states out."""
        return tuple(axis for axis in AXES if getattr(self.layout, axis) > (axis != "zero"))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fits:
    """The answer.

    Attributes:
        families: that fit, fewest devices first; then least recomputed, least sharded.
        closest: of all layouts on fewer devices than the first family, the one whose fullest rank needs least; of all
            layouts if nothing fits; None where a single device is enough.
        num_layouts, num_fitting: layouts decided, and those of them that fit.
    """

    families: tuple[Family, ...]
    closest: Load | None
    num_layouts: int
    num_fitting: int

    def by_axes(self) -> dict[tuple[str, ...], Family]:
        """The smallest family for each set of axes that share states out."""
        smallest: dict[tuple[str, ...], Family] = {}
        for family in self.families:
            smallest.setdefault(family.axes, family)
        return smallest


def fit(
    config: ModelConfig,
    shape: StepShape,
    base: Layout,
    *,
    device_bytes: int,
    num_devices: int,
    devices_per_node: int = 8,
    optimizer: Optimizer = "adamw",
    master_weights: bool = False,
    observe: Callable[[int, int], None] | None = None,
) -> Fits:
    """Every layout on at most `num_devices` devices whose ranks all fit in `device_bytes`.

    Args:
        config: the model.
        shape: sequences of a data-parallel rank, lengths, dtype.
        base: microbatches, schedule, cut, memory gather and attention of all layouts; its degrees are not read.
        device_bytes: what one device holds.
        num_devices: the most devices.
        devices_per_node: the largest tp.
        optimizer: whose states are held.
        master_weights: whether it updates a float32 copy.
        observe: called with how many depths are decided, and of how many.

    Raises:
        ValueError: numbers below 1, lengths that the model cannot read, an explicit cut, a schedule that is not plain
            (`PLAIN_SCHEDULES`), sequences that do not fill the microbatches.
    """
    for name, value in (
        ("device_bytes", device_bytes),
        ("devices", num_devices),
        ("devices_per_node", devices_per_node),
    ):
        if value < 1:
            raise ValueError(f"{name} = {value}; it must be at least 1")
    if base.cut not in ("even", "aligned"):
        cut = base.cut if isinstance(base.cut, str) else list(base.cut)
        raise ValueError(f"cut = {cut} belongs to one number of stages; choose even or aligned")
    if base.schedule not in PLAIN_SCHEDULES:
        raise ValueError(f"schedule = {base.schedule!r}; layouts are searched for {' and '.join(PLAIN_SCHEDULES)}")
    shape.check(config)
    search = Loads(
        config=config,
        shape=shape,
        base=base,
        optimizer=optimizer,
        master_weights=master_weights,
    )
    depths = [
        (tp, pp)
        for tp in _tensor_degrees(config, min(devices_per_node, num_devices))
        for pp in _depths(config, base, num_devices // tp)
    ]
    decided, families = [], []
    for done, (tp, pp) in enumerate(depths, start=1):
        for frame in _frames(base, tp, pp):
            max_dp = num_devices // (tp * pp)
            if frame.zero and max_dp < 2:
                continue
            decided.append((frame, max_dp))
            found = _smallest_dp(search, frame, max_dp, device_bytes)
            if found is not None:
                families.append(Family(fullest=search.fullest(_with_dp(frame, found)), max_dp=max_dp))
        if observe is not None:
            observe(done, len(depths))
    families.sort(key=_order)
    fewest = families[0].num_devices if families else num_devices + 1
    return Fits(
        families=tuple(families),
        closest=_closest(search, decided, fewest),
        num_layouts=sum(_num_degrees(frame, max_dp) for frame, max_dp in decided),
        num_fitting=sum(family.max_dp - family.layout.dp + 1 for family in families),
    )


# ---- the space ------------------------------------------------------------------------------------------------------


def _tensor_degrees(config: ModelConfig, most: int) -> Iterator[int]:
    for tp in range(1, most + 1):
        try:
            Layout(tp=tp).check_model(config)
        except ValueError:
            continue
        yield tp


def _depths(config: ModelConfig, base: Layout, most: int) -> range:
    """Numbers of stages; an aligned cut has a stage a side at least."""
    fewest = 2 if base.cut == "aligned" and config.has_cross_attention else 1
    return range(fewest, min(config.num_blocks, most) + 1)


def _frames(base: Layout, tp: int, pp: int) -> Iterator[Layout]:
    """All families of a tensor degree and a depth, each at its smallest dp."""
    for sp in (False, True)[: 1 + (tp > 1)]:
        for recompute in RECOMPUTES:
            for zero in range(4):
                dp = 2 if zero else 1
                yield base.replace(tp=tp, pp=pp, dp=dp, cp=1, sp=sp, recompute=recompute, zero=zero)


def _with_dp(frame: Layout, dp: int) -> Layout:
    return frame if dp == frame.dp else frame.replace(dp=dp)


def _num_degrees(frame: Layout, max_dp: int) -> int:
    return max_dp - frame.dp + 1


def _order(family: Family) -> tuple[int, int, int, bool, int, int]:
    layout = family.layout
    return (
        family.num_devices,
        RECOMPUTES.index(layout.recompute),
        layout.zero,
        layout.sp,
        layout.pp,
        layout.tp,
    )


def _closest(search: Loads, decided: Iterable[tuple[Layout, int]], fewest: int) -> Load | None:
    """Of the layouts on fewer than so many devices, the one whose fullest rank needs least."""
    loads = []
    for frame, max_dp in decided:
        ranks = frame.tp * frame.pp
        dp = min(max_dp, (fewest - 1) // ranks)
        if dp < frame.dp:
            continue
        # Without ZeRO more replicas change nothing: the fewest devices are told.
        loads.append(search.fullest(_with_dp(frame, dp if frame.zero else 1)))
    return min(loads, key=lambda load: (load.total_bytes, load.layout.world_size), default=None)


def _smallest_dp(search: Loads, frame: Layout, max_dp: int, device_bytes: int) -> int | None:
    """The least dp from the frame's to `max_dp` at which every rank fits; None where there is none."""

    def fits(dp: int) -> bool:
        return search.fullest(_with_dp(frame, dp)).total_bytes <= device_bytes

    if fits(frame.dp):
        return frame.dp
    if frame.zero == 0 or not fits(max_dp):
        return None
    too_few, enough = frame.dp, max_dp
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if fits(middle) else (middle, enough)
    return enough
