"""Host memory that this process can still allocate.

[Note: control groups]
Batch systems and containers limit memory by nested control groups: the job's, the step's, the user's slice. Exceeding the limit
of *any* group above a process kills it with signal 9, so all of them are read. Version 2 has one tree, version 1 a tree per
controller; the lines of /proc/self/cgroup are the process's places in them. Inside a container these may name groups of the
host's tree, which are not mounted: the root of the mount is then the process's group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def available_host_bytes(*, cgroup_root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """Minimum of the system's available memory and the headroom of every control group above this process."""
    return min([int(psutil.virtual_memory().available), *_left_in_groups(cgroup_root, read_kernel_file(membership))])


def _left_in_groups(root: Path, membership: str) -> Iterator[int]:
    """Headroom in bytes of each limited group. See [Note: control groups]."""
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            top, files = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, files = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = top.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
        for folder in (group, *group.parents):
            limit, usage = (read_kernel_file(folder / file).strip() for file in files)
            if limit.isdigit() and usage.isdigit():  # else `max`, or the group does not exist here
                statistics = dict(line.split() for line in read_kernel_file(folder / "memory.stat").splitlines())
                # Page cache that the kernel would reclaim counts as free. Usage includes the groups below. So does
                # `inactive_file` in version 2; version 1 has a separate total.
                cache = statistics.get("total_inactive_file", statistics.get("inactive_file", "0"))
                yield max(0, int(limit) - int(usage) + int(cache))
            if folder == top:
                break


def read_kernel_file(path: Path) -> str:
    """A kernel file's text; empty if it does not exist."""
    try:
        return path.read_text()
    except OSError:
        return ""
