"""All GPUs of a host: their links alone and at once, what they receive from each other, and the cores near each of them.

[Note: the cores of a rank]
A rank stays on the cores of its GPU's NUMA node: threads that it starts later inherit them, and the system places memory on the
node of the core that touches it first. That helps only if no core is left over, because AdamW needs the cores and the memory
bandwidth of all nodes. So ranks stay near their GPUs if the nodes of the host's ranks have all cores that the process may use;
otherwise, and where the system does not tell (many containers), nothing is changed.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from megatrain.host_memory.arena import PinRefused, two_pinned
from megatrain.host_memory.available import read_kernel_file
from megatrain.machine.system import SYS, bus_id, cpu_list, device_node, pci_folder
from megatrain.machine.timing import seconds_of

logger = logging.getLogger(__name__)

PEER_SHARE = 0.6
"""Rate at which a GPU receives in collectives, relative to a plain copy from another GPU (two H200: 230 of 380 GB/s)."""
COPIES = 4
"""Copies in each direction that are timed together."""


class Copies(Protocol):
    """Copies between one GPU and the host."""

    def begin(self) -> None:
        """Queue copies in both directions. Asynchronous."""

    def wait(self) -> None:
        """Block until they have ended."""


def equal_gpus(gpu: torch.device) -> list[torch.device]:
    """The GPUs of this host that are like `gpu`, itself included."""
    name = torch.cuda.get_device_name(gpu)
    same = (i for i in range(torch.cuda.device_count()) if torch.cuda.get_device_name(i) == name)
    return [torch.device("cuda", i) for i in same]


def facts_of_gpus(gpu: torch.device, nbytes: int) -> dict[str, object]:
    """Figures of a `Machine` about the GPUs like this one; none where it is alone."""
    gpus = equal_gpus(gpu)
    if len(gpus) == 1:
        return {}
    other = next(each for each in gpus if each != gpu)
    peer = nbytes / 1e9 / _copy_seconds(gpu, other, nbytes)
    facts: dict[str, object] = {"gpus": len(gpus), "peer_gbps": round(PEER_SHARE * peer, 1)}
    try:
        with contextlib.ExitStack() as stack:
            links = {each.index: stack.enter_context(_pinned_copies(each, nbytes)) for each in gpus}
            facts["gpu_link_gbps"], facts["all_gpus_gbps"] = link_rates(links, COPIES * nbytes)
    except PinRefused as refusal:
        logger.warning("the links of all GPUs at once were not measured: %s", refusal)
    for each in gpus:
        with torch.cuda.device(each):
            torch.cuda.empty_cache()
    return facts


def link_rates(links: Mapping[int, Copies], nbytes: int) -> tuple[dict[int, float], float]:
    """(rate of each link alone, by GPU; rate of the slowest one while all are in use), in each direction [GB/s].

    Args:
        links: Copies by GPU index.
        nbytes: Bytes that they move in each direction.
    """
    alone = {index: round(nbytes / 1e9 / _seconds([link]), 2) for index, link in links.items()}
    return alone, round(nbytes / 1e9 / _seconds(list(links.values())), 2)


def _seconds(links: Sequence[Copies]) -> float:
    """Median seconds until all links have ended copies that begin together, after one warm-up."""

    def copy() -> None:
        for link in links:
            link.begin()
        for link in links:
            link.wait()

    return seconds_of(copy)


class _PinnedCopies:
    def __init__(self, gpu: torch.device, source: torch.Tensor, sink: torch.Tensor):
        self._gpu, self._source, self._sink = gpu, source, sink
        self._first, self._second = (torch.empty(source.numel(), dtype=torch.uint8, device=gpu) for _ in range(2))
        self._into, self._out = torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)
        torch.cuda.synchronize(gpu)

    def begin(self) -> None:
        for _ in range(COPIES):
            with torch.cuda.stream(self._into):
                self._first.copy_(self._source, non_blocking=True)
            with torch.cuda.stream(self._out):
                self._sink.copy_(self._second, non_blocking=True)

    def wait(self) -> None:
        torch.cuda.synchronize(self._gpu)


@contextlib.contextmanager
def _pinned_copies(gpu: torch.device, nbytes: int) -> Iterator[Copies]:
    """Copies of a GPU from and to pinned memory on its NUMA node."""
    with on_cpus(local_cpus(bus_id(gpu)) & os.sched_getaffinity(0)):
        arenas = two_pinned(nbytes)
        source, sink = (arena.tensor(0, nbytes, torch.uint8).zero_() for arena in arenas)
    try:
        yield _PinnedCopies(gpu, source, sink)
    finally:
        torch.cuda.synchronize(gpu)
        for arena in arenas:
            arena.close()


def _copy_seconds(target: torch.device, source: torch.device, nbytes: int) -> float:
    """Median seconds of a copy from one GPU to another, after a warm-up."""
    to = torch.empty(nbytes, dtype=torch.uint8, device=target)
    from_ = torch.ones(nbytes, dtype=torch.uint8, device=source)

    def copy() -> None:
        to.copy_(from_)
        torch.cuda.synchronize(source)
        torch.cuda.synchronize(target)

    return seconds_of(copy)


def pairs_without_peer_access(gpus: Sequence[torch.device]) -> list[tuple[int, int]]:
    """Pairs of GPU indices of which one cannot read the other's memory: copies between them pass through the host."""
    return [
        (one.index, other.index)
        for number, one in enumerate(gpus)
        for other in gpus[number + 1 :]
        if not (
            torch.cuda.can_device_access_peer(one.index, other.index)
            and torch.cuda.can_device_access_peer(other.index, one.index)
        )
    ]


# ---------------------------------------------------------------- cores near a GPU


def local_cpus(bus: str, *, root: Path = SYS) -> set[int]:
    """The cores of a PCI device's NUMA node; empty if the system does not tell."""
    if device_node(bus, root=root) is None:
        return set()
    return cpu_list(read_kernel_file(pci_folder(bus, root) / "local_cpulist"))


@contextlib.contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """Run this thread on these cores; with none, where it is."""
    before = os.sched_getaffinity(0)
    if cpus:
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def cpus_of_rank(near: Sequence[set[int]], rank: int, allowed: set[int]) -> set[int] | None:
    """The cores for a rank of this host, None to leave it where it is. See [Note: the cores of a rank].

    Args:
        near: The cores near each rank's GPU, by local rank; empty if unknown.
        rank: The local rank.
        allowed: Cores that the process may use.
    """
    mine = near[rank] & allowed
    left_over = allowed - set[int]().union(*near)
    return mine if mine and not left_over and mine != allowed else None


def stay_near_gpu(device: torch.device, local_ranks: int, *, root: Path = SYS) -> None:
    """Keep this thread, and those that it starts from now on, on the cores near `device`. [Note: the cores of a rank]

    Args:
        device: Of this rank; GPU i of a host is driven by local rank i.
        local_ranks: Ranks of this host.
        root: Of the system's files.
    """
    if device.type != "cuda" or local_ranks > torch.cuda.device_count():
        return
    near = [local_cpus(bus_id(torch.device("cuda", i)), root=root) for i in range(local_ranks)]
    stay_on(near, device.index, device)


def stay_on(near: Sequence[set[int]], rank: int, device: torch.device) -> None:
    """Move this thread to the cores of `cpus_of_rank`, if it is to move."""
    cpus = cpus_of_rank(near, rank, os.sched_getaffinity(0))
    if cpus is None:
        logger.debug("%s: cores unchanged, %d may be used", device, len(os.sched_getaffinity(0)))
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:  # a container may forbid it
        logger.debug("%s: cores unchanged: %s", device, error)
        return
    logger.debug("%s: on the %d cores of its NUMA node", device, len(cpus))
