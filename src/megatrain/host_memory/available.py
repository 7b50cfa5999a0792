"""How much host memory this process may still take.

[Note: control groups]
Batch systems and containers limit memory by control groups, which are nested: the job's, the step's, the user's slice. The
limit that ends a process with signal 9 is that of *any* group above it, so every one of them is asked. Both versions exist:
version 2 has one tree, version 1 a tree per controller; a process's places in them are the lines of /proc/self/cgroup. Inside
a container these may name groups of the host's tree, which are not mounted: then the root of the mount is the own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class _Tree:
    """Where a tree of control groups is mounted, and how it names limit and usage (bytes)."""

    root: Path
    limit: str
    usage: str


def available_host_bytes(*, cgroup_root: Path = CGROUP_ROOT, membership: Path = MEMBERSHIP) -> int:
    """The least of what the system has available and what each control group above this process leaves.

    Args:
        cgroup_root, membership: Where the kernel tells of control groups; other places in tests.
    """
    return min([int(psutil.virtual_memory().available), *_left_in_groups(cgroup_root, _read(membership))])


def _left_in_groups(root: Path, membership: str) -> Iterator[int]:
    """Bytes that each limited group leaves. See [Note: control groups]."""
    for line in membership.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            tree = _Tree(root, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            tree = _Tree(root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = tree.root.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
        for folder in (group, *group.parents):
            left = _left_in_group(folder, tree)
            if left is not None:
                yield left
            if folder == tree.root:
                break


def _left_in_group(folder: Path, tree: _Tree) -> int | None:
    """What the limit of one group leaves, None where it has none. Page cache that the kernel would give back is free."""
    limit, usage = _read(folder / tree.limit).strip(), _read(folder / tree.usage).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None  # `max`, or no such group here
    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    # Usage counts the groups below too. So does `inactive_file` in version 2; version 1 has a total for it.
    cache = statistics.get("total_inactive_file", statistics.get("inactive_file", "0"))
    return max(0, int(limit) - int(usage) + int(cache))


def _read(path: Path) -> str:
    """A file of the kernel's; empty where this system does not have it."""
    try:
        return path.read_text()
    except OSError:
        return ""
