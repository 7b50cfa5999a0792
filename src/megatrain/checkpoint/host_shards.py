"""A save of the planes of several ranks, each of which holds a shard of every unit.

Each rank protects its shards from its own updates ([Note: a unit while a save runs]); the ranks' threads gather unit after unit
on the ranks that write ([Note: a shared save]). Units are taken in the order of the rounds on all ranks, copied or not. Where
hosts hold replicas of the state, each writer gathers its units from the ranks of its own host, and other hosts let go of them.

There is no deadlock: a thread that takes a shard waits for an update of the saved step alone, or for a copy in progress, and
both end without any save.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatrain.checkpoint.host_planes import HostPlanes, UnitState
from megatrain.checkpoint.shared_write import SharedWrite
from megatrain.device.shards import Shards
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
            name, own.layout, {kind: torch.empty(size, dtype=plane.dtype) for kind, plane in self._saved(own).items()}
        )

    def _gather(self, units: Mapping[int, str], whole: UnitPlanes | None) -> None:
        """Send the shards of a round's units to their writers, and fill the unit that this rank receives."""
        me, count = self._shards.rank, self._shards.shard.count
        for writer, name in units.items():
            if not self._shards.holds_copy_with(writer):  # the writer gets it from the ranks of its own host
                self._let_go(name)
                continue
            for kind, plane in self._saved(self._take(name)).items():
                parts = None
                if writer == me:
                    assert whole is not None
                    parts = list(_bytes(self._saved(whole)[kind]).chunk(count))
                dist.gather(_bytes(plane), parts, dst=writer, group=self._shards.saves_inside)
            self._written(name)

    def _let_go(self, name: str) -> None:
        """A unit that other ranks write: its updates may run."""
        with self._changed:
            self._changed.wait_for(lambda: self._states[name] is not UnitState.COPYING)
        self._written(name)

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
            nothing = {kind: torch.zeros(own.numel, dtype=plane.dtype) for kind, plane in self._saved(own).items()}
            return UnitPlanes.of(name, own.layout, nothing, start=own.start)


def _bytes(plane: torch.Tensor) -> torch.Tensor:
    """A plane as bytes: gloo does not know all dtypes."""
    return plane.contiguous().view(torch.uint8)
