"""Memory nodes: which cores and which memory a run takes on a host with several.

[Note: near or spread]
AdamW is limited by host memory. A run whose planes fit the memory of the node that the GPU hangs on, stays there: copies then
cross no socket, and half of the cores are enough where one node's bandwidth is all there is. A larger run is spread page by page
over all allowed nodes, so that every node's bandwidth is used and none fills up first.
The kernel applies a thread's policy to pages that this thread touches or pins first, and threads inherit cores and policy from
the one that starts them; so both are set before the planes are allocated and the AdamW threads start.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatrain.machine import system

logger = logging.getLogger(__name__)

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call."""
_DEFAULT, _PREFERRED, _INTERLEAVE = 0, 1, 3
NEAR_SHARE = 0.85
"""Of a node's free memory that a run may fill."""


@dataclass(frozen=True)
class Binding:
    """Cores and memory nodes of a run. `nodes` empty: nothing is bound."""

    cpus: frozenset[int]
    nodes: tuple[int, ...]

    def __str__(self) -> str:
        where = (
            "node " + str(self.nodes[0])
            if len(self.nodes) == 1
            else f"nodes {', '.join(map(str, self.nodes))}, spread by pages"
        )
        return f"memory {where}, {len(self.cpus)} cores"


def choose_binding(
    nodes: Mapping[int, set[int]],
    allowed: Collection[int],
    device_node: int | None,
    needed_bytes: int,
    free_bytes: Mapping[int, int],
) -> Binding:
    """See [Note: near or spread]. Pure.

    Args:
        nodes: Memory node -> its cores.
        allowed: Cores that the process may use.
        device_node: Where the GPU hangs.
        needed_bytes: Of the run's planes and buffers on the host.
        free_bytes: Free memory of each node.
    """
    usable = {node: cpus & set(allowed) for node, cpus in nodes.items()}
    usable = {node: cpus for node, cpus in usable.items() if cpus}
    if len(nodes) < 2 or not usable:
        return Binding(frozenset(allowed), ())
    if device_node in usable and needed_bytes <= NEAR_SHARE * free_bytes.get(device_node, 0):
        return Binding(frozenset(usable[device_node]), (device_node,))
    # where a batch job allows the cores of one node only, the memory of the others may still be needed
    return Binding(frozenset(allowed), tuple(sorted(node for node in nodes if free_bytes.get(node, 0) > 0) or usable))


def free_by_node(*, root: Path = system.SYS) -> dict[int, int]:
    """Free bytes of each memory node, page cache included."""
    free: dict[int, int] = {}
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        words = {}
        for line in _lines(folder / "meminfo"):
            parts = line.split()
            if len(parts) >= 4:
                words[parts[2].rstrip(":")] = int(parts[3]) * 1024
        free[int(folder.name.removeprefix("node"))] = words.get("MemFree", 0) + words.get("FilePages", 0)
    return free


@contextlib.contextmanager
def bound(binding: Binding) -> Iterator[None]:
    """Inside, this thread and the threads and memory that it makes are bound; afterwards this thread's memory policy is the
    default again, while its cores stay."""
    if not binding.nodes:
        yield
        return
    os.sched_setaffinity(0, binding.cpus)
    policy = _PREFERRED if len(binding.nodes) == 1 else _INTERLEAVE
    done = _set_policy(policy, binding.nodes)
    logger.info("bound to %s%s", binding, "" if done else " (the system does not let us choose the memory)")
    try:
        yield
    finally:
        _set_policy(_DEFAULT, ())


def _set_policy(policy: int, nodes: Collection[int]) -> bool:
    """set_mempolicy(2) for this thread; False where the system has no such call or refuses it."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    libc = ctypes.CDLL(None, use_errno=True)
    bits = 8 * ctypes.sizeof(mask) + 1 if nodes else 0
    return libc.syscall(number, policy, ctypes.byref(mask) if nodes else None, ctypes.c_ulong(bits)) == 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
