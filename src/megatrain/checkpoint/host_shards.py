"""A save of the planes of several ranks, each of which holds a shard of every unit.

Each rank protects its shards from its own updates ([Note: a unit while a save runs]); the ranks' threads gather unit after unit
on the ranks that write ([Note: a shared save]). Units are taken in the order of the rounds on all ranks, copied or not. Where
hosts hold replicas of the state, each writer gathers its units from the ranks of its own host.

[Note: replicas are compared]
Replicas start equal and apply equal updates, so they stay equal, unless the processors of two hosts round differently or a bit
flips in memory. Nothing in training would show it: every step adds up gradients of slightly different models. So each save
compares all of its bytes: ranks that hold the same shard exchange checksums of its planes, round by round. Where they differ,
the save fails and the run ends; the newest checkpoint is from before.

There is no deadlock: a thread that takes a shard waits for an update of the saved step alone, or for a copy in progress, and
both end without any save.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatrain.checkpoint.host_planes import HostPlanes, UnitState
from megatrain.checkpoint.shared_write import SharedWrite
from megatrain.device.shards import Shards
from megatrain.errors import ReplicasDiffer
from megatrain.host_memory.layout import elements_per_value
from megatrain.host_memory.store import UnitPlanes


class HostShards(HostPlanes):
    """The units of a host store of which this rank holds a shard, gathered on the ranks that write.

    Args:
        shards: The ranks.
        writers: Those that write, rank 0 among them.
        planes: See `HostPlanes`. The plan is a `SavePlan` on rank 0 alone.
    """

    cancel_timeout_s = 10.0
    """The other ranks, without which the thread cannot end, may be gone."""

    def __init__(self, shards: Shards, writers: Sequence[int], *planes: Any):
        super().__init__(*planes)
        self._shards = shards
        self._shared = SharedWrite(self, self._plan, writers, shards.saves)
        self._take_error: BaseException | None = None

    def count(self, size: int) -> None:
        super().count(size)
        self._shared.count()

    def written_by_all(self, ended: bool) -> int:
        return self._shared.written_by_all(ended)

    def _write(self) -> None:
        self._shared.run(self._room, self._gather)

    def _room(self, units: Mapping[int, str]) -> UnitPlanes | None:
        """Memory for the unit that this rank receives. Raises why this rank cannot continue."""
        error = self._take_error or self._copy_error
        if error is not None:
            raise error
        name = units.get(self._shards.rank)
        if name is None:
            return None
        own, size = self._store.units[name], self._store.units[name].layout.numel
        return UnitPlanes.of(
            name,
            own.layout,
            {
                kind: torch.empty(-(-size // elements_per_value(kind)), dtype=plane.dtype)
                for kind, plane in self._saved(own).items()
            },
        )

    def _gather(self, units: Mapping[int, str], whole: UnitPlanes | None) -> None:
        """Send the shards of a round's units to their writers, and fill the unit that this rank receives."""
        me, count = self._shards.rank, self._shards.shard.count
        sums: dict[str, list[int]] = {}
        for writer, name in units.items():
            planes = self._saved(self._take(name))
            if self._shards.replicas > 1:
                sums[name] = [checksum(plane) for plane in planes.values()]
            for kind, plane in planes.items() if self._shards.holds_copy_with(writer) else ():
                parts = None
                if writer == me:
                    assert whole is not None
                    parts = list(_bytes(self._saved(whole)[kind]).chunk(count))
                values = -(
                    -self._store.units[name].numel // elements_per_value(kind)
                )  # equal shards, zeros where frozen
                whole_shard = torch.nn.functional.pad(plane, (0, values - plane.numel()))
                dist.gather(_bytes(whole_shard), parts, dst=writer, group=self._shards.saves_inside)
            self._written(name)
        if sums:
            self._compare(sums)

    def _compare(self, sums: Mapping[str, Sequence[int]]) -> None:
        """Compare a round's checksums with those of the ranks that hold the same shards. `_room` raises the error. Collective."""
        failed = self.cancelled or self._take_error is not None or self._copy_error is not None  # sums are of anything
        own = torch.tensor([int(failed), *itertools.chain.from_iterable(sums.values())])
        found = [torch.empty_like(own) for _ in range(self._shards.world)]
        dist.all_gather(found, own, group=self._shards.saves)
        if any(int(each[0]) for each in found):
            return
        names, count = [name for name, each in sums.items() for _ in each], self._shards.shard.count
        for rank, each in enumerate(found):
            for name, first, other in zip(names, found[rank % count][1:].tolist(), each[1:].tolist(), strict=True):
                if first != other:
                    self._take_error = ReplicasDiffer(
                        f"ranks {rank % count} and {rank} hold different values of the same part of {name}",
                        str(self.directory),
                        "resume from the newest checkpoint; if it happens again, use run.replicate_hosts: false",
                    )
                    return

    def _take(self, name: str) -> UnitPlanes:
        """This rank's shard of a unit as the saved step left it; it does not change until `_written`.

        After an error anything is sent, and `_room` ends the save.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._states[name] is not UnitState.COPYING)
            if self._states[name] is UnitState.COPIED:
                return self._copies[name]
            if self._states[name] is UnitState.PENDING:
                self._states[name] = UnitState.WRITING
        try:
            return self._at_rest(name)
        except BaseException as error:  # noqa: BLE001  `_room` raises it
            self._take_error = error
            own = self._store.units[name]
            nothing = {kind: torch.zeros(plane.shape, dtype=plane.dtype) for kind, plane in self._saved(own).items()}
            return UnitPlanes.of(name, own.layout, nothing, start=own.start)


def checksum(plane: torch.Tensor) -> int:
    """The sum of the bit patterns of a plane (n,)."""
    return int(plane.view(_INTEGERS[plane.itemsize]).sum(dtype=torch.int64))


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def _bytes(plane: torch.Tensor) -> torch.Tensor:
    """A plane as bytes: gloo does not know all dtypes."""
    return plane.contiguous().view(torch.uint8)
