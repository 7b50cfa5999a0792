"""Available host memory: the system's, limited by every control group above the process."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from megatrain.host_memory.available import available_host_bytes

VERSION_2 = ("", "memory.max", "memory.current")
VERSION_1 = ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
UNLIMITED = 9223372036854771712
"""Version 1's value for no limit."""


class Tree:
    """A fake /sys/fs/cgroup and /proc/self/cgroup."""

    def __init__(self, folder: Path, membership: str, version: tuple[str, str, str] = VERSION_2):
        self.folder, (self.base, self.limit, self.usage) = folder, version
        (folder / "membership").write_text(membership)

    def group(self, path: str, limit: int | str, used: int = 0, statistics: str = "") -> None:
        folder = self.folder / self.base / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.limit).write_text(f"{limit}\n")
        (folder / self.usage).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(statistics)

    def available(self) -> int:
        return available_host_bytes(cgroup_root=self.folder, membership=self.folder / "membership")


@pytest.fixture(autouse=True)
def system(monkeypatch: pytest.MonkeyPatch) -> int:
    """A machine with 10,000,000 bytes available."""
    available = 10_000_000

    class Memory:
        def __init__(self) -> None:
            self.available = available

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    return available


def test_without_control_groups_the_system_decides(tmp_path: Path, system: int) -> None:
    assert available_host_bytes(cgroup_root=tmp_path, membership=tmp_path / "none") == system


@pytest.mark.parametrize(
    ("membership", "version"),
    [("0::/slice/job/step\n", VERSION_2), ("3:cpu:/\n4:memory,hugetlb:/slice/job/step\n0::/\n", VERSION_1)],
    ids=["version 2", "version 1"],
)
@pytest.mark.parametrize("tight", ["", "slice", "slice/job", "slice/job/step"])
def test_the_tightest_group_above_the_process_decides(
    tmp_path: Path, membership: str, version: tuple[str, str, str], tight: str
) -> None:
    tree = Tree(tmp_path, membership, version)
    for path in ("", "slice", "slice/job", "slice/job/step"):
        tree.group(path, "max" if version is VERSION_2 else UNLIMITED)
    tree.group("slice/other", 1)
    tree.group(tight, 2_000_000, 1_500_000)
    assert tree.available() == 500_000


def test_the_group_that_leaves_least_decides_not_the_one_with_the_lowest_limit(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/outer/inner\n")
    tree.group("outer", 5_000_000, 4_900_000)
    tree.group("outer/inner", 2_000_000, 500_000)
    assert tree.available() == 100_000


def test_reclaimable_page_cache_counts_as_free(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/job\n")
    tree.group("job", 2_000_000, 1_500_000, "active_file 7\ninactive_file 100000\n")
    assert tree.available() == 600_000


def test_page_cache_of_the_groups_below_counts_in_version_1(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "4:memory:/job\n", VERSION_1)
    tree.group("job", 2_000_000, 1_500_000, "inactive_file 5\ntotal_inactive_file 100000\n")
    assert tree.available() == 600_000


def test_the_system_decides_where_groups_leave_more(tmp_path: Path, system: int) -> None:
    tree = Tree(tmp_path, "0::/job\n")
    tree.group("job", 50_000_000)
    assert tree.available() == system


def test_a_group_above_its_limit_leaves_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path, "0::/job\n")
    tree.group("job", 1000, 5000)
    assert tree.available() == 0


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../system.slice/job"])
def test_inside_a_container_the_mounted_root_is_the_process_group(tmp_path: Path, path: str) -> None:
    tree = Tree(tmp_path, f"0::{path}\n")
    tree.group("", 3_000_000, 1_000_000)
    assert tree.available() == 2_000_000
