"""How much host memory this process may still take."""

from __future__ import annotations

from pathlib import Path

import psutil

CGROUPS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""(folder, limit, usage, statistic of page cache that the kernel gives back under pressure), version 2 and version 1."""


def available_host_bytes() -> int:
    """The smaller of what the system has available and what the control group leaves."""
    available = int(psutil.virtual_memory().available)
    for folder, limit_name, usage_name, cache_name in CGROUPS:
        left = _left_in_group(Path(folder), limit_name, usage_name, cache_name)
        if left is not None:
            available = min(available, left)
    return available


def _left_in_group(folder: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        if limit == "max":
            return None
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(limit) - int((folder / usage_name).read_text()) + int(statistics.get(cache_name, 0))
    except (OSError, ValueError):
        return None  # no such control group here: the system's figure stands
