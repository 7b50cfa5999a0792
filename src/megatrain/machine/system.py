"""What the operating system says about the machine: cores, memory nodes, the GPU's link, limits. Measures nothing."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Transfer rate of a PCIe lane [GT/s] -> generation."""
USABLE_GBPS = {1: 0.2, 2: 0.4, 3: 0.8, 4: 1.6, 5: 3.3, 6: 6.5}
"""What a lane of each generation moves in large pinned copies [GB/s], protocol taken off."""


@dataclass(frozen=True)
class Link:
    """A GPU's PCIe link as it is, and as card and slot could have it."""

    generation: int
    lanes: int
    most_lanes: int

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.lanes}"

    @property
    def usable_gbps(self) -> float:
        """One way, in large pinned copies."""
        return USABLE_GBPS.get(self.generation, 0.0) * self.lanes


def usable_cores(*, cgroup: Path = SYS / "fs/cgroup") -> int:
    """Cores that this process may use: its affinity, and the quota of its container."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def all_cores() -> int:
    """Cores of the machine, whoever may use them."""
    return os.cpu_count() or 1


def cpu_quota(cgroup: Path = SYS / "fs/cgroup") -> float | None:
    """Cores' worth of time that the container gives, None without a limit."""
    words = _read(cgroup / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    period, quota = _read(cgroup / "cpu/cpu.cfs_period_us").strip(), _read(cgroup / "cpu/cpu.cfs_quota_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def node_cpus(*, root: Path = SYS) -> dict[int, set[int]]:
    """Memory node -> its cores. One node with all cores where the system does not say."""
    nodes: dict[int, set[int]] = {}
    for folder in sorted((root / "devices/system/node").glob("node[0-9]*")):
        cpus = cpu_list(_read(folder / "cpulist"))
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes or {0: set(range(all_cores()))}


def cpu_list(text: str) -> set[int]:
    """The kernel's way to write sets: `0-3,8` is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def pci_folder(bus_id: str, *, root: Path = SYS) -> Path | None:
    """The device's folder, for a bus id such as `0000:17:00.0` or CUDA's `00000000:17:00.0`."""
    domain, _, rest = bus_id.lower().partition(":")
    folder = root / "bus/pci/devices" / f"{domain[-4:]}:{rest}"
    return folder if folder.is_dir() else None


def device_node(bus_id: str, *, root: Path = SYS) -> int | None:
    """The memory node that a PCI device hangs on, None where the system does not say."""
    folder = pci_folder(bus_id, root=root)
    text = _read(folder / "numa_node").strip() if folder else ""
    return int(text) if text.isdigit() else None


def device_link(bus_id: str, *, root: Path = SYS) -> Link | None:
    """The PCIe link of a device, None where the system does not say.

    An idle link may run at a lower rate than it will under load, so the generation is the one that device and port agree on.
    """
    folder = pci_folder(bus_id, root=root)
    if folder is None:
        return None
    rates = [_read(place / "max_link_speed").split() for place in (folder, folder.resolve().parent)]
    known = [GENERATIONS[float(words[0])] for words in rates if words and _is_rate(words[0])]
    lanes, most = _read(folder / "current_link_width").strip(), _read(folder / "max_link_width").strip()
    if not known or not lanes.isdigit() or not most.isdigit():
        return None
    return Link(min(known), int(lanes), int(most))


def _is_rate(word: str) -> bool:
    try:
        return float(word) in GENERATIONS
    except ValueError:
        return False


def locked_memory_limit() -> int | None:
    """Bytes that the process may lock (`ulimit -l`), None without a limit. CUDA's pins do not count on most systems."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def is_wsl(*, version: Path = Path("/proc/version")) -> bool:
    """Whether this is Linux inside Windows, which pins only part of its memory."""
    return "microsoft" in _read(version).lower()


def _read(path: Path) -> str:
    """A file of the kernel's; empty where this system does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
