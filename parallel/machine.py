"""What is a cluster of equal nodes, in the numbers that a time is predicted from?

    node 0   0 1 2 3 4 5 6 7    within a node: `node_link` (NVLink), for each device and direction
    node 1   8 9 ...            between nodes: `cluster_link` (a network card a device), likewise

Ranks fill nodes in order, so tp, the innermost axis of a mesh, stays within a node while it divides one. Peaks are
those of data sheets; what a kernel or a link achieves of them is a field of its own, with the reason for its value.

A ring of n ranks passes a message n - 1 times on, 2 (n - 1) times for an all-reduce. Where it leaves a node, it does so
over the network cards of all its k ranks there, one ring each, as NCCL lays them:

    seconds = hops x latency + wire bytes / min(node bandwidth, k x cluster bandwidth)

Left out: files (`launch/machine_files.py`), switches that several nodes share, rates that depend on a product's shape.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, get_type_hints

from parallel.ledger import Operation, wire_bytes
from parallel.mesh import Coordinate, Mesh

Reach = Literal["node", "cluster"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One device.

    Attributes:
        capacity_bytes: what it holds.
        bytes_per_second: of these that it reads or writes, at its peak.
        bytes_efficiency: share of that which an optimizer's update achieves, and why so much.
        bfloat16_flops_per_second, float32_flops_per_second, float64_flops_per_second: dense peaks of matrix products,
            as torch computes them by default.
        flops_efficiency: share of the peak that blocks of a model achieve, and why so much.
    """

    capacity_bytes: float
    bytes_per_second: float
    bytes_efficiency: float
    bytes_efficiency_reason: str
    bfloat16_flops_per_second: float
    float32_flops_per_second: float
    float64_flops_per_second: float
    flops_efficiency: float
    flops_efficiency_reason: str

    def __post_init__(self) -> None:
        _check_numbers(self)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What messages leave a device by.

    Attributes:
        latency_seconds: of a message without bytes.
        bytes_per_second: of one device in one direction, at its peak.
        efficiency: share of that which long messages achieve, and why so much.
    """

    latency_seconds: float
    bytes_per_second: float
    efficiency: float
    efficiency_reason: str

    def __post_init__(self) -> None:
        _check_numbers(self, may_be_zero=("latency_seconds",))

    @property
    def achieved_bytes_per_second(self) -> float:
        return self.bytes_per_second * self.efficiency

    def occupancy_seconds(self, num_bytes: float) -> float:
        """How long a message of so many bytes keeps the link."""
        return num_bytes / self.achieved_bytes_per_second


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Nodes of equal devices. Raises ValueError, in one line, for numbers that no machine has."""

    name: str
    devices_per_node: int
    device: Device
    node_link: Link
    cluster_link: Link

    _PARTS: ClassVar[dict[str, type]] = {"device": Device, "node_link": Link, "cluster_link": Link}

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name is empty; give the machine one")
        if self.devices_per_node < 1:
            raise ValueError(f"devices_per_node = {self.devices_per_node}; a node has at least 1 device, often 8")

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        """A machine of the tables of a file, every key checked.

        Raises:
            ValueError: a missing, unknown, negative or otherwise impossible value: which key, the rule, what works.
        """
        _check_keys(fields, cls, "machine")
        if not _is_text(fields["name"]):
            raise ValueError(f"name = {fields['name']!r}; it must be text, such as 'A100'")
        if type(fields["devices_per_node"]) is not int:
            raise ValueError(f"devices_per_node = {fields['devices_per_node']!r}; it must be a whole number, often 8")
        parts = {key: _part(fields[key], part, key) for key, part in cls._PARTS.items()}
        return cls(name=fields["name"], devices_per_node=fields["devices_per_node"], **parts)

    # ---- computing ----------------------------------------------------------------------------------------------

    def peak_flops_per_second(self, dtype_bytes: int) -> float:
        """Of one device's matrix products with elements of 2, 4 or 8 bytes."""
        peaks = {
            2: self.device.bfloat16_flops_per_second,
            4: self.device.float32_flops_per_second,
            8: self.device.float64_flops_per_second,
        }
        return peaks[dtype_bytes]

    def flops_seconds(self, flops: float, dtype_bytes: int) -> float:
        """How long a device takes for so many FLOPs of a model."""
        return flops / (self.peak_flops_per_second(dtype_bytes) * self.device.flops_efficiency)

    def traffic_seconds(self, num_bytes: float) -> float:
        """How long a device takes to read or write so many bytes of its own."""
        return num_bytes / (self.device.bytes_per_second * self.device.bytes_efficiency)

    # ---- communicating ------------------------------------------------------------------------------------------

    def node(self, rank: int) -> int:
        """Which node a rank of the world stands on."""
        return rank // self.devices_per_node

    def reach(self, first: int, second: int) -> Reach:
        """Whether a message between two ranks of the world stays in a node; it leaves by the link of that name."""
        return "node" if self.node(first) == self.node(second) else "cluster"

    def reach_over(self, mesh: Mesh, first: int, second: int) -> Reach:
        """The same of two pipeline coordinates: over the cluster, if that is so for any two ranks that talk."""
        # Where replicas begin within a node repeats after so many.
        replicas = itertools.product(range(min(mesh.dp, self.devices_per_node)), range(mesh.cp), range(mesh.tp))
        for dp, cp, tp in replicas:
            ranks = (mesh.rank(Coordinate(dp=dp, pp=pp, cp=cp, tp=tp)) for pp in (first, second))
            if self.reach(*ranks) == "cluster":
                return "cluster"
        return "node"

    def link(self, reach: Reach) -> Link:
        """What messages of a reach leave by."""
        return self.node_link if reach == "node" else self.cluster_link

    def collective_seconds(self, operation: Operation, payload_bytes: int, ranks: Sequence[int]) -> float:
        """How long a ring of ranks of the world takes for a collective.

        Args:
            operation: not a send or receive.
            payload_bytes: as events tell them (`parallel/ledger.py`).
            ranks: of the group, in ascending order.
        """
        num_ranks = len(ranks)
        if num_ranks < 2:
            return 0.0
        per_node = Counter(map(self.node, ranks))
        bandwidth = self.node_link.achieved_bytes_per_second
        # Hops of the longest way through the ring; a chunk stops one hop before it would be home.
        num_crossings = min(len(per_node), num_ranks - 1) if len(per_node) > 1 else 0
        latency = (num_ranks - 1 - num_crossings) * self.node_link.latency_seconds
        latency += num_crossings * self.cluster_link.latency_seconds
        if num_crossings:
            crossing = min(per_node.values()) * self.cluster_link.achieved_bytes_per_second
            bandwidth = min(bandwidth, crossing) if max(per_node.values()) > 1 else crossing
        num_laps = 2 if operation == "all_reduce" else 1
        return num_laps * latency + wire_bytes(operation, payload_bytes, num_ranks) / bandwidth


def _part(fields: Any, part: type, where: str) -> Any:
    is_table = isinstance(fields, Mapping)
    if not is_table:
        raise ValueError(f"{where} = {fields!r}; it must be a table, [{where}]")
    _check_keys(fields, part, where)
    hints = get_type_hints(part)
    values: dict[str, str | float] = {}
    for key, value in fields.items():
        if hints[key] is str:
            if not _is_text(value):
                raise ValueError(f"{where}: {key} = {value!r}; say in a few words where the efficiency comes from")
            values[key] = value
        else:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number:
                raise ValueError(f"{where}: {key} = {value!r}; it must be a number, such as 1e9")
            values[key] = float(value)
    try:
        return part(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _check_keys(fields: Mapping[str, Any], part: type, where: str) -> None:
    known = [field.name for field in dataclasses.fields(part)]
    unknown = [key for key in fields if key not in known]
    if unknown:
        raise ValueError(f"{where}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
    missing = [key for key in known if key not in fields]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; every key must be given, none has a default")


def _check_numbers(part: Device | Link, may_be_zero: Sequence[str] = ()) -> None:
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, str):
            continue
        if field.name.endswith("efficiency"):
            if not 0.0 < value <= 1.0:
                raise ValueError(f"{field.name} = {value:g}; a share of the peak is above 0 and at most 1, such as 0.8")
        elif field.name in may_be_zero:
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{field.name} = {value:g}; it must be 0 or more, such as 5e-6")
        elif not 0.0 < value < float("inf"):
            raise ValueError(f"{field.name} = {value:g}; it must be above 0, such as 1e12")
