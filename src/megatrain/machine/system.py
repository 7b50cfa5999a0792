"""Facts that the operating system knows: cores, NUMA nodes, PCIe links."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from megatrain.host_memory.available import read_kernel_file

SYS = Path("/sys")
START_CPUS = frozenset(os.sched_getaffinity(0))
"""Cores of this process before `stay_near_gpu` in gpus.py: figures of the machine are those of all of them."""
GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""Transfer rate of a PCIe lane [GT/s] -> PCIe generation."""
USABLE_GBPS = {1: 0.2, 2: 0.4, 3: 0.8, 4: 1.6, 5: 3.3, 6: 6.5}
"""Rate of one lane in large pinned copies, protocol overhead deducted [GB/s], by generation."""


def bus_id(gpu: torch.device) -> str:
    """PCI address of a CUDA device in the system's spelling."""
    properties = torch.cuda.get_device_properties(gpu)
    domain = getattr(properties, "pci_domain_id", 0)
    return f"{domain:04x}:{getattr(properties, 'pci_bus_id', 0):02x}:{getattr(properties, 'pci_device_id', 0):02x}.0"


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
    """Cores that this process may use, by its affinity at the start and its container's quota."""
    cores = len(START_CPUS)
    quota = cpu_quota(cgroup)
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def cpu_quota(cgroup: Path = SYS / "fs/cgroup") -> float | None:
    """CPU quota of the container in cores, None without a limit."""
    words = read_kernel_file(cgroup / "cpu.max").split()
    if len(words) == 2 and words[0].isdigit():
        return int(words[0]) / int(words[1])
    quota, period = (read_kernel_file(cgroup / f"cpu/cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def node_cpus(*, root: Path = SYS) -> dict[int, set[int]]:
    """NUMA node -> its cores. A single node with all cores if the system does not tell."""
    folders = sorted((root / "devices/system/node").glob("node[0-9]*"))
    nodes = {int(f.name.removeprefix("node")): cpu_list(read_kernel_file(f / "cpulist")) for f in folders}
    return {node: cpus for node, cpus in nodes.items() if cpus} or {0: set(range(os.cpu_count() or 1))}


def cpu_list(text: str) -> set[int]:
    """Parse the kernel's notation of a CPU set: `0-3,8` is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def pci_folder(bus_id: str, root: Path) -> Path:
    """Sysfs folder of a device by bus id, `0000:17:00.0` or in CUDA's form `00000000:17:00.0`. It may not exist."""
    domain, _, rest = bus_id.lower().partition(":")
    return root / "bus/pci/devices" / f"{domain[-4:]}:{rest}"


def device_node(bus_id: str, *, root: Path = SYS) -> int | None:
    """NUMA node of a PCI device, None if unknown."""
    text = read_kernel_file(pci_folder(bus_id, root) / "numa_node").strip()
    return int(text) if text.isdigit() else None


def device_link(bus_id: str, *, root: Path = SYS) -> Link | None:
    """PCIe link of a device, None if unknown.

    An idle link may run at a lower rate than under load, so the generation is the highest that device and port both support.
    """
    folder = pci_folder(bus_id, root)
    speeds = [read_kernel_file(place / "max_link_speed").split(" ") for place in (folder, folder.resolve().parent)]
    known = [GENERATIONS[rate] for words in speeds if (rate := words[0].removesuffix(".0")) in GENERATIONS]
    lanes, most = (read_kernel_file(folder / f"{which}_link_width").strip() for which in ("current", "max"))
    if not known or not lanes.isdigit() or not most.isdigit():
        return None
    return Link(min(known), int(lanes), int(most))


def is_wsl(*, version: Path = Path("/proc/version")) -> bool:
    """Whether this is WSL, which can pin only part of its memory."""
    return "microsoft" in read_kernel_file(version).lower()
