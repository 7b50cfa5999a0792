"""Facts read from copies of the kernel's files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatrain.machine import system


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpu.max": "200000 100000\n"}, 2.0),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container(tmp_path: Path, files: dict[str, str], cores: float | None) -> None:
    assert system.cpu_quota(write(tmp_path, files)) == cores


def test_usable_cores_are_within_affinity_and_quota(tmp_path: Path) -> None:
    assert system.usable_cores(cgroup=write(tmp_path, {"cpu.max": "50000 100000"})) == 1
    assert 1 <= system.usable_cores(cgroup=tmp_path / "nothing") <= (os.cpu_count() or 1)


def test_cpu_lists() -> None:
    assert system.cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert system.cpu_list("\n") == set()


def test_nodes_without_cores_are_left_out(tmp_path: Path) -> None:
    files = {f"devices/system/node/node{i}/cpulist": text for i, text in enumerate(["0-1", "2-3", ""])}
    assert system.node_cpus(root=write(tmp_path, files)) == {0: {0, 1}, 1: {2, 3}}
    assert list(system.node_cpus(root=tmp_path / "nothing")) == [0]


def pci(tmp_path: Path, lanes: str, node: str = "1") -> Path:
    device = tmp_path / "devices/pci0000:16/0000:16:01.0/0000:17:00.0"
    write(
        device,
        {"numa_node": node, "current_link_width": lanes, "max_link_width": "16", "max_link_speed": "32.0 GT/s PCIe"},
    )
    write(device.parent, {"max_link_speed": "16.0 GT/s PCIe"})
    (tmp_path / "bus/pci/devices").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:17:00.0").symlink_to(device)
    return tmp_path


def test_a_link_is_as_fast_as_its_slower_end(tmp_path: Path) -> None:
    link = system.device_link("00000000:17:00.0", root=pci(tmp_path, "8"))
    assert link == system.Link(generation=4, lanes=8, most_lanes=16)
    assert str(link) == "PCIe 4 x8"
    assert link.usable_gbps == pytest.approx(12.8)


def test_the_numa_node_of_a_device(tmp_path: Path) -> None:
    assert system.device_node("0000:17:00.0", root=pci(tmp_path, "16")) == 1
    assert system.device_node("0000:99:00.0", root=tmp_path) is None


def test_a_device_without_a_numa_node(tmp_path: Path) -> None:
    assert system.device_node("0000:17:00.0", root=pci(tmp_path, "16", node="-1")) is None


def test_wsl_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "version").write_text("Linux version 5.15 (root@x) Microsoft WSL2\n")
    assert system.is_wsl(version=tmp_path / "version")
    assert not system.is_wsl(version=tmp_path / "none")
