"""Is a machine checked key by key, and do its links take as long as a ring on paper?"""

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from launch.machine_files import load_machine, machine_names
from parallel.ledger import Operation, wire_bytes
from parallel.machine import Device, Link, Machine
from parallel.mesh import Mesh

FIELDS: dict[str, Any] = {
    "name": "paper",
    "devices_per_node": 4,
    "device": {
        "capacity_bytes": 8e9,
        "bytes_per_second": 1e12,
        "bytes_efficiency": 0.5,
        "bytes_efficiency_reason": "made up",
        "bfloat16_flops_per_second": 4e12,
        "float32_flops_per_second": 2e12,
        "float64_flops_per_second": 1e12,
        "flops_efficiency": 0.25,
        "flops_efficiency_reason": "made up",
    },
    "node_link": {"latency_seconds": 1.0, "bytes_per_second": 200, "efficiency": 0.5, "efficiency_reason": "made up"},
    "cluster_link": {
        "latency_seconds": 10.0,
        "bytes_per_second": 20,
        "efficiency": 0.5,
        "efficiency_reason": "made up",
    },
}
PAPER = Machine.from_dict(FIELDS)


def changed(part: str, key: str, value: Any) -> dict[str, Any]:
    """The fields with one value changed, or taken away where it is None."""
    fields = copy.deepcopy(FIELDS)
    table = fields[part] if part else fields
    if value is None:
        del table[key]
    else:
        table[key] = value
    return fields


# ---- files ----------------------------------------------------------------------------------------------------------


def test_machines_of_the_project_can_be_called_by_name() -> None:
    assert {"a100", "h100", "h200", "b200"} <= set(machine_names())
    for name in machine_names():
        machine = load_machine(name)
        assert machine.devices_per_node == 8
        # Faster within a node than between nodes, in both respects.
        assert machine.node_link.achieved_bytes_per_second > machine.cluster_link.achieved_bytes_per_second
        assert machine.node_link.latency_seconds < machine.cluster_link.latency_seconds


@pytest.mark.parametrize(
    ("name", "bfloat16", "capacity", "bandwidth", "node_link", "cluster_link"),
    [
        ("a100", 312e12, 80e9, 2039e9, 300e9, 25e9),
        ("h100", 989.5e12, 80e9, 3.35e12, 450e9, 50e9),
        ("h200", 989.5e12, 141e9, 4.8e12, 450e9, 50e9),
        ("b200", 2250e12, 180e9, 8e12, 900e9, 50e9),
    ],
)
def test_numbers_are_those_of_data_sheets(
    name: str, bfloat16: float, capacity: float, bandwidth: float, node_link: float, cluster_link: float
) -> None:
    machine = load_machine(name)
    assert machine.peak_flops_per_second(2) == bfloat16
    assert (machine.device.capacity_bytes, machine.device.bytes_per_second) == (capacity, bandwidth)
    assert (machine.node_link.bytes_per_second, machine.cluster_link.bytes_per_second) == (node_link, cluster_link)


def test_every_number_of_a_file_has_its_source_beside_it() -> None:
    for path in Path(load_machine.__code__.co_filename).parent.glob("machines/*.toml"):
        for line in path.read_text(encoding="utf-8").splitlines():
            key = line.partition(" =")[0]
            if key.endswith(("_bytes", "_per_second", "_seconds")):
                assert "#" in line, f"{path.name}: {key} names no source"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a10", "no machine 'a10'; did you mean a100?"),
        ("tpu", "no machine 'tpu'; known are a100, b200, h100, h200, or give the path of a .toml file"),
        ("nothing.toml", "cannot read nothing.toml: No such file or directory"),
    ],
)
def test_a_machine_that_is_not_there_is_told(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        load_machine(name)


def test_a_broken_file_is_told_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("name = ", encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.toml: Invalid value"):
        load_machine(str(file))
    file.write_text('name = "mine"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"mine\.toml: machine lacks devices_per_node, device, node_link"):
        load_machine(str(file))


@pytest.mark.parametrize(
    ("part", "key", "value", "message"),
    [
        ("", "device", None, "machine lacks device; every key must be given, none has a default"),
        ("", "devices", 8, "machine: unknown key devices; known are name, devices_per_node, device"),
        ("", "name", 3, "name = 3; it must be text, such as 'A100'"),
        ("", "devices_per_node", 8.0, "devices_per_node = 8.0; it must be a whole number, often 8"),
        ("", "devices_per_node", 0, "devices_per_node = 0; a node has at least 1 device, often 8"),
        ("", "node_link", 3, "node_link = 3; it must be a table, [node_link]"),
        ("device", "capacity_bytes", -1.0, "device: capacity_bytes = -1; it must be above 0, such as 1e12"),
        ("device", "capacity_bytes", True, "device: capacity_bytes = True; it must be a number, such as 1e9"),
        ("device", "capacity_bytes", float("nan"), "device: capacity_bytes = nan; it must be above 0"),
        (
            "device",
            "bfloat16_flops_per_second",
            None,
            "device lacks bfloat16_flops_per_second; every key must be given",
        ),
        (
            "device",
            "flops_efficiency",
            1.5,
            "device: flops_efficiency = 1.5; a share of the peak is above 0 and at most 1",
        ),
        ("device", "flops_efficiency_reason", " ", "device: flops_efficiency_reason = ' '; say in a few words where"),
        (
            "node_link",
            "latency_seconds",
            -1e-6,
            "node_link: latency_seconds = -1e-06; it must be 0 or more, such as 5e-6",
        ),
        ("cluster_link", "bytes_per_second", 0, "cluster_link: bytes_per_second = 0; it must be above 0"),
        ("cluster_link", "bandwidth", 1, "cluster_link: unknown key bandwidth; known are latency_seconds"),
    ],
)
def test_every_key_is_checked(part: str, key: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}") as caught:
        Machine.from_dict(changed(part, key, value))
    assert "\n" not in str(caught.value)


def test_a_link_may_have_no_latency() -> None:
    assert Machine.from_dict(changed("node_link", "latency_seconds", 0)).node_link.latency_seconds == 0


# ---- computing and sending ------------------------------------------------------------------------------------------


def test_seconds_are_work_over_what_is_achieved() -> None:
    assert PAPER.flops_seconds(3e12, 2) == 3
    assert PAPER.flops_seconds(3e12, 4) == 6
    assert PAPER.flops_seconds(3e12, 8) == 12
    assert PAPER.traffic_seconds(1e12) == 2
    assert PAPER.node_link.occupancy_seconds(300) == 3


def test_ranks_fill_nodes_in_order() -> None:
    assert [PAPER.node(rank) for rank in range(9)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert PAPER.reach(0, 3) == "node"
    assert PAPER.reach(3, 4) == "cluster"
    assert PAPER.link("node") is PAPER.node_link
    assert PAPER.link("cluster") is PAPER.cluster_link


def test_one_replica_over_the_cluster_is_enough() -> None:
    """Three pipeline ranks on nodes of four: 0 1 2, 3 | 4 5, 6 7 | 8, so that each edge crosses in some replica."""
    mesh = Mesh(dp=3, pp=3)
    assert PAPER.reach_over(Mesh(dp=1, pp=3), 0, 1) == "node"
    assert PAPER.reach_over(mesh, 0, 1) == "cluster"
    assert PAPER.reach_over(mesh, 1, 2) == "cluster"
    assert PAPER.reach_over(Mesh(dp=8, pp=2), 0, 1) == "node"
    assert PAPER.reach_over(Mesh(dp=2, pp=2, tp=2), 0, 1) == "node"
    assert PAPER.reach_over(Mesh(dp=2, pp=2, tp=4), 0, 1) == "cluster"


@pytest.mark.parametrize(
    ("operation", "ranks", "seconds"),
    [
        # n - 1 hops of latency 1, (n - 1) / n of 400 bytes at 100 a second; twice for an all-reduce.
        ("all_gather", (0, 1, 2, 3), 3 + 3.0),
        ("reduce_scatter", (0, 1, 2, 3), 3 + 3.0),
        ("all_reduce", (0, 1, 2, 3), 6 + 6.0),
        ("all_gather", (0, 2), 1 + 2.0),
        # Two nodes: 2 hops of 10 and 5 of 1; four cards of 10 bytes a second are slower than the node's 100.
        ("all_gather", tuple(range(8)), 2 * 10 + 5 * 1 + 350 / 40),
        # One rank a node: its own card, and every hop crosses.
        ("all_gather", (0, 4, 8, 12), 3 * 10 + 300 / 10),
        ("all_reduce", (0, 4), 2 * 10 + 400 / 10),
        # Two ranks on the one node, one on the other: one card is the neck.
        ("all_gather", (2, 3, 4), 2 * 10 + 268 / 10),
        ("all_reduce", (5,), 0.0),
    ],
)
def test_a_ring_takes_its_hops_and_its_bytes(operation: Operation, ranks: tuple[int, ...], seconds: float) -> None:
    assert PAPER.collective_seconds(operation, 400, ranks) == pytest.approx(seconds)


def test_cards_of_a_node_serve_no_faster_than_the_node_itself() -> None:
    slow = Link(latency_seconds=0, bytes_per_second=30, efficiency=1.0, efficiency_reason="made up")
    machine = dataclasses.replace(PAPER, node_link=slow)
    sent = wire_bytes("all_gather", 800, 8)
    assert machine.collective_seconds("all_gather", 800, range(8)) == pytest.approx(20 + sent / 30)


def test_a_part_can_be_made_without_a_file() -> None:
    device = dataclasses.replace(PAPER.device, flops_efficiency=1.0)
    assert isinstance(device, Device)
    with pytest.raises(ValueError, match="flops_efficiency = 0; a share"):
        dataclasses.replace(PAPER.device, flops_efficiency=0.0)
