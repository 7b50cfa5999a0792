"""Facts that the operating system knows about the machine: cores, NUMA nodes, the GPU's link, limits. Measures nothing."""

from __future__ import annotations

import math
import os
import resource
from dataclasses import dataclass
from pathlib import Path

SYS = Path("/sys")
GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Transfer rate of a PCIe lane [GT/s] -> PCIe generation."""
USABLE_GBPS = {1: 0.2, 2: 0.4, 3: 0.8, 4: 1.6, 5: 3.3, 6: 6.5}
"""Rate of one lane in large pinned copies, protocol overhead deducted [GB/s], by generation."""


@dataclass(frozen=True)
class Link:
    """A GPU's PCIe link: the lanes in use, and the most that the card supports."""

    generation: int
    lanes: int
    most_lanes: int

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.lanes}"

    @property
    def usable_gbps(self) -> float:
        """Rate of large pinned copies in one direction."""
        return USABLE_GBPS.get(self.generation, 0.0) * self.lanes


def usable_cores(*, cgroup: Path = SYS / "fs/cgroup") -> int:
    """Cores that this process may use, by its affinity and its container's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(cgroup: Path = SYS / "fs/cgroup") -> float | None:
    """CPU quota of the container in cores, None without a limit."""
    words = _read(cgroup / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    period, quota = _read(cgroup / "cpu/cpu.cfs_period_us").strip(), _read(cgroup / "cpu/cpu.cfs_quota_us").strip()
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def node_cpus(*, root: Path = SYS) -> dict[int, set[int]]:
    """NUMA node -> its cores. A single node with all cores if the system does not tell."""
    nodes: dict[int, set[int]] = {}
    for folder in sorted((root / "devices/system/node").glob("node[0-9]*")):
        cpus = cpu_list(_read(folder / "cpulist"))
        if cpus:
            nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes or {0: set(range(os.cpu_count() or 1))}


def cpu_list(text: str) -> set[int]:
    """Parse the kernel's notation of a CPU set: `0-3,8` is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def pci_folder(bus_id: str, *, root: Path = SYS) -> Path | None:
    """Sysfs folder of a device by bus id, `0000:17:00.0` or in CUDA's form `00000000:17:00.0`; None if unknown."""
    domain, _, rest = bus_id.lower().partition(":")
    folder = root / "bus/pci/devices" / f"{domain[-4:]}:{rest}"
    return folder if folder.is_dir() else None


def device_node(bus_id: str, *, root: Path = SYS) -> int | None:
    """NUMA node of a PCI device, None if unknown."""
    folder = pci_folder(bus_id, root=root)
    text = _read(folder / "numa_node").strip() if folder else ""
    return int(text) if text.isdigit() else None


def device_link(bus_id: str, *, root: Path = SYS) -> Link | None:
    """PCIe link of a device, None if unknown.

    An idle link may run at a lower rate than under load, so the generation is the highest that device and port both support.
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
    """Bytes that the process may lock (`ulimit -l`), None without a limit. CUDA's pinned memory is exempt on most systems."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def is_wsl(*, version: Path = Path("/proc/version")) -> bool:
    """Whether this is WSL, which can pin only part of its memory."""
    return "microsoft" in _read(version).lower()


def _read(path: Path) -> str:
    """Text of a kernel file, empty if this system does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
