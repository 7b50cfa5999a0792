"""`Shards`: this process among the ranks that share a model's state, and everything that they exchange during a step.

Each rank drives one device and owns one shard of every unit: of its planes and of its gradient. With one rank all methods are
the identity: no process group exists, nothing is padded, cut or exchanged.

[Note: replicas of the state]
The ranks may form several equal groups of consecutive ranks, usually the hosts of a job. Each group holds the whole state once,
cut into shards among its ranks. Then weights are gathered inside a group, and a gradient is summed inside the group first; the
ranks with the same shard add up what is left, 1 / (ranks of a group) of the bytes. The sum has the same bits on all of them, so
the replicas apply the same update and stay equal. Every rank still computes its own rows.

[Note: collectives of a step]
    all-gather      a load of a unit: own shard into the slot, then gather         on h2d       group `weights`
    reduce-scatter  a unit's gradient: summed over the ranks, own shard out        on d2h       group `gradients`
    all-reduce      that shard, over the groups of ranks, if there are several     on d2h       group `replicas`
    all-reduce      loss, metrics, squared norm: once, at the end of the step      on compute   group `scalars`
NCCL asks two things: the operations of a group must be queued in the same order on all ranks, and by one thread at a time. So
each stream has its own group, and nothing that decides which unit is loaded or sent next may depend on time
([Note: all ranks load alike] in engine/host/weights.py). The ranks' streams may be as far apart as they like. No call here waits
for the device: NCCL orders an operation behind the current stream, and the current stream behind the operation.

Buffers of the collectives live as long as the engine (slots, staging buffers), or are recorded on the stream by their owner.

On a CPU (gloo) each call blocks until all ranks have arrived, which keeps the same order.
"""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatrain.errors import UserError
from megatrain.host_memory.layout import WHOLE, Shard

# torch 2.13 renamed them.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Shards:
    """The ranks that share a model's state; by default this process alone.

    Construction is collective: it makes the groups of [Note: collectives of a step] and connects them.

    Args:
        group: The default process group of torch.distributed, if several ranks share the state.
        device: This rank's device.
        timeout: A collective that takes longer fails; None: as the default group's.
        replicas: Groups of ranks, each of which holds the whole state; see [Note: replicas of the state].

    Attributes:
        shard: The part of every unit that this rank owns.
        rank, world: This rank, and the number of all ranks.
        replicas: As given.
        here: Number of ranks on this host.
        cores: Cores for this rank: those that it may use, each divided among the ranks that may use it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | None = None,
        timeout: datetime.timedelta | None = None,
        replicas: int = 1,
    ):
        self.shard, self.rank, self.world, self.replicas = WHOLE, 0, 1, 1
        self._device = device or torch.device("cpu")
        self._groups: list[dist.ProcessGroup] = []
        self.here, self.cores = 1, len(os.sched_getaffinity(0))
        if group is None or dist.get_world_size(group) == 1:
            return
        assert dist.get_world_size(group) == dist.get_world_size(), "all processes of the job share one model"
        self.rank, self.world, self.replicas = dist.get_rank(group), dist.get_world_size(group), replicas
        if self.world % replicas:
            raise UserError(
                f"{self.world} ranks do not form {replicas} equal groups",
                "replicas",
                "start the same number on each host",
            )
        size = self.world // replicas
        self.shard = Shard(self.rank % size, size)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        all_ranks = [range(self.world)]
        inside = [range(first, first + size) for first in range(0, self.world, size)]
        across = [range(index, self.world, size) for index in range(size)]

        def new_group(kind: str, ranks: Sequence[range]) -> dist.ProcessGroup:
            return _new_group(kind, timeout, ranks, self.rank)

        self._weights, self._gradients = (new_group(backend, inside) for _ in range(2))
        self._scalars = new_group(backend, all_ranks)
        self._replicas = new_group(backend, across) if replicas > 1 else None
        self._host, self._saves = (new_group("gloo", all_ranks) for _ in range(2))
        self._host_inside, self._saves_inside = self._host, self._saves
        if replicas > 1:
            self._host_inside, self._saves_inside = (new_group("gloo", inside) for _ in range(2))
        on_device = [self._weights, self._gradients, self._scalars, *([self._replicas] if self._replicas else [])]
        self._groups = [*on_device, self._host, self._saves]
        self._groups += [self._host_inside, self._saves_inside] if replicas > 1 else []
        for each in on_device:  # NCCL connects at the first collective, which blocks the host
            dist.all_reduce(torch.zeros(1, device=self._device), group=each)
        self._count_neighbours()

    def _count_neighbours(self) -> None:
        mine = (socket.gethostname(), sorted(os.sched_getaffinity(0)))
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, mine, group=self._host)
        neighbours = [set(cores) for host, cores in found if host == mine[0]]
        self.here = len(neighbours)
        self.cores = int(sum(1 / sum(core in others for others in neighbours) for core in mine[1]) + 0.5)

    @property
    def many(self) -> bool:
        """Whether there are several ranks."""
        return self.world > 1

    # ---------------------------------------------------------------- during a step, on the current stream

    def fill(self, buffer: torch.Tensor, plane: torch.Tensor) -> None:
        """Fill the start of a device buffer with a unit: `plane` (n,) is the unit, or this rank's shard of it.

        Asynchronous on the current stream, if `plane` is pinned or on the device.
        """
        numel = plane.numel()
        if not self.many:
            buffer[:numel].copy_(plane, non_blocking=True)
            return
        whole, start = buffer[: self.shard.count * numel], self.shard.index * numel
        own = whole[start : start + numel]
        own.copy_(plane, non_blocking=True)
        _all_gather(whole, own, group=self._weights)  # in place: NCCL and gloo know this case

    def reduce(self, out: torch.Tensor, buffer: torch.Tensor) -> None:
        """Sum the start of `buffer`, a unit's gradient, over the ranks: own shard to `out` (n,). Same dtype, fixed order.

        Asynchronous on the current stream. gloo leaves `buffer` undefined.
        """
        assert self.many and out.dtype == buffer.dtype, (self.shard, out.dtype, buffer.dtype)
        _reduce_scatter(out, buffer[: self.shard.count * out.numel()], group=self._gradients)
        if self._replicas is not None:
            dist.all_reduce(out, group=self._replicas)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of a small device tensor over the ranks. Asynchronous on the current stream."""
        if self.many:
            dist.all_reduce(values, group=self._scalars)
        return values

    # ---------------------------------------------------------------- on the host, blocking

    def total_of(self, value: float) -> float:
        """The sum of a number over the ranks, the same bits on each."""
        if not self.many:
            return value
        word = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(word, group=self._host)
        return float(word.item())

    def each(self, values: Sequence[float]) -> list[tuple[float, ...]]:
        """These numbers of every rank, by rank."""
        if not self.many:
            return [tuple(values)]
        own = torch.tensor(values, dtype=torch.float64)
        found = torch.empty(self.world * len(own), dtype=torch.float64)
        _all_gather(found, own, group=self._host)
        return [tuple(row) for row in found.view(self.world, -1).tolist()]

    def all_of(self, flag: bool) -> bool:
        """Whether the flag is set on all ranks."""
        return self.total_of(float(not flag)) == 0.0

    @property
    def saves(self) -> dist.ProcessGroup:
        """A gloo group of all ranks that the threads of saves have to themselves."""
        assert self.many
        return self._saves

    @property
    def saves_inside(self) -> dist.ProcessGroup:
        """The same, of the ranks that hold one copy of the state with this one."""
        assert self.many
        return self._saves_inside

    def holds_copy_with(self, rank: int) -> bool:
        """Whether a rank and this one hold shards of the same copy of the state."""
        return rank // self.shard.count == self.rank // self.shard.count

    def names(self, own: Iterable[str]) -> list[str]:
        """All names that any rank has, in an order equal on all ranks."""
        if not self.many:
            return list(own)
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, list(own), group=self._host)
        return list(dict.fromkeys(name for names in found for name in names))

    def whole(self, plane: torch.Tensor) -> torch.Tensor:
        """The whole of a plane (n,) of which each rank holds its shard, on the CPU; with one rank the plane itself."""
        if not self.many:
            return plane
        own = plane.cpu().contiguous().view(torch.uint8)  # gloo does not know all dtypes
        found = torch.empty(self.shard.count * own.numel(), dtype=torch.uint8)
        _all_gather(found, own, group=self._host_inside)
        return found.view(plane.dtype)

    def close(self) -> None:
        """Release the groups. Nothing may be queued on them any more."""
        groups, self._groups = self._groups, []
        for group in groups:
            dist.destroy_process_group(group)


def _new_group(
    backend: str, timeout: datetime.timedelta | None, groups: Sequence[range], rank: int
) -> dist.ProcessGroup:
    """Make groups of these ranks, and return the one of `rank`. Collective over all ranks."""
    options = None
    if backend == "nccl":  # where torch runs NCCL on streams of its own, these get priority, too
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    made: Any = None
    for ranks in groups:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout, pg_options=options)
        made = group if rank in ranks else made
    return made


ALONE = Shards()
"""A process that shares its state with nobody."""
