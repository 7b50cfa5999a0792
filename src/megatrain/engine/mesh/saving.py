"""Saves of all ranks' state, written while training continues.

[Note: a mesh save]
Between two steps every rank copies what it sends ([Note: who sends what] in state.py) to host memory, and training continues.
A thread on each rank then sends the copies to the ranks that write: [Note: a shared save] in checkpoint/shared_write.py.

Memory for copies is bounded. Units for which some rank has no room are sent from the live state first, while training waits.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatrain.checkpoint.async_save import SaveSource
from megatrain.checkpoint.manager import CheckpointPolicy, SaveOptions
from megatrain.checkpoint.shared_write import SharedWrite, by_size, first_of_hosts, plan_together
from megatrain.checkpoint.writer import SavePlan, UnitsPlan, plan_save, plan_units
from megatrain.engine.mesh.data_parallel import Devices
from megatrain.engine.mesh.state import MeshState
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.store import UnitPlanes
from megatrain.models.structure import Structure
from megatrain.optim.spec import OptimizerSpec


class ShardedState(SaveSource):
    """The state of all ranks, gathered unit by unit on the ranks that write.

    Construction is collective and copies the units for which there is room. Training must not change the state until
    `wait_until_copied` returns.

    Args:
        plan: The whole save on rank 0; elsewhere, how its units are written.
        directory: The folder to make.
        writers: The ranks that write, rank 0 among them.
        state: The live state.
        devices: The mesh; its `save_group` carries all messages.
        buffer_bytes: Bound on copies on this rank; None: half of this host's available memory, divided among its ranks.
    """

    cancel_timeout_s = 10.0
    """The other ranks, without which the thread cannot end, may be gone."""

    def __init__(
        self,
        plan: UnitsPlan,
        directory: Path,
        writers: Sequence[int],
        state: MeshState,
        devices: Devices,
        buffer_bytes: int | None,
    ):
        super().__init__(directory, plan.total_bytes if isinstance(plan, SavePlan) else 0)
        self._state = state
        self._group, self._device = devices.save_group, devices.device
        self._shared = SharedWrite(self, plan, writers, devices.save_group)
        self._planes = 1 if plan.weights_only else 1 + len(plan.optim.states)
        self._names = by_size(self._shared.sizes)
        self._copies: dict[str, torch.Tensor] = {}
        self._read_error: BaseException | None = None
        self._live_sent = threading.Event()
        self._first_copied = self._find_first_copied(buffer_bytes)
        for unit in self._names[self._first_copied :]:
            for name in self._state.sent_names(unit):
                self._copies[name] = self._state.part(name, self._planes)
        self.copied_bytes = sum(copy.nbytes for copy in self._copies.values())
        if self._first_copied == 0:
            self._live_sent.set()

    def wait_until_copied(self) -> None:
        self._live_sent.wait()
        self.waited_s = time.perf_counter() - self.started

    def written_by_all(self, ended: bool) -> int:
        return self._shared.written_by_all(ended)

    def count(self, size: int) -> None:
        super().count(size)
        self._shared.count()

    # ---------------------------------------------------------------- copies

    def _find_first_copied(self, buffer_bytes: int | None) -> int:
        """Index of the first unit that is copied: from there on, every rank has room. The units before it are sent live."""
        if buffer_bytes is None:
            buffer_bytes = available_host_bytes() // (2 * _ranks_here())
        first = len(self._names)
        while first > 0:
            size = self._state.sent_bytes(self._names[first - 1], self._planes)
            if size > buffer_bytes:
                break
            buffer_bytes -= size
            first -= 1
        word = torch.tensor([first])
        dist.all_reduce(word, op=dist.ReduceOp.MAX, group=self._group)
        return int(word.item())

    def _read(self, name: str) -> torch.Tensor:
        """What this rank sends of a parameter; the copy, if there is one, is released. After an error zeros are sent, and
        `_room` ends the save."""
        copy = self._copies.pop(name, None)
        if copy is not None:
            return copy
        try:
            return self._state.part(name, self._planes)
        except Exception as error:  # noqa: BLE001  `_room` raises it
            self._read_error = error
            return self._state.zeros(name, self._planes)

    # ---------------------------------------------------------------- the save's thread

    def write(self) -> None:
        """See [Note: a mesh save]. Collective."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        live = set(self._names[: self._first_copied])

        def gather(units: Mapping[int, str], whole: UnitPlanes | None) -> None:
            self._state.gather(units, whole, self._read, self._group, self._planes)
            live.difference_update(units.values())
            if not live:
                self._live_sent.set()

        self._shared.run(self._room, gather)

    def close(self) -> None:
        self._copies.clear()
        self._live_sent.set()

    def _room(self, units: Mapping[int, str]) -> UnitPlanes | None:
        """Memory for the unit that this rank receives in a round. Raises an error of `_read`."""
        if self._read_error is not None:
            raise self._read_error
        name = units.get(dist.get_rank())
        return None if name is None else self._state.empty_planes(name, self._planes)


def _ranks_here() -> int:
    """Number of ranks on this host, by torchrun's LOCAL_WORLD_SIZE; all ranks without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


class MeshCheckpoints(CheckpointPolicy):
    """Saves the state of all ranks; every save ends the same way, at the same step, on each of them.

    Args:
        structure: The model.
        state: Its state on all ranks.
        optim: The optimizer.
        buffers: The model's persistent buffers by full name.
        source_folder: The folder that the model came from.
        devices: The mesh.
        shipped: As for `plan_save`; read at each save.
    """

    def __init__(
        self,
        structure: Structure,
        state: MeshState,
        optim: OptimizerSpec,
        buffers: Mapping[str, torch.Tensor],
        source_folder: Path | None,
        devices: Devices,
        shipped: Mapping[str, bytes | None],
    ):
        self._shipped = shipped
        self._structure, self._state, self._buffers, self._source_folder = structure, state, buffers, source_folder
        self._devices, self._optim = devices, optim
        self.writers = first_of_hosts(devices.save_group)
        """The ranks that write, rank 0 among them."""

    def open_source(self, directory: Path, state: Mapping[str, Any], options: SaveOptions) -> ShardedState:
        """Rank 0 decides; every rank learns whether it can be done. Collective."""
        group = self._devices.save_group
        plan = plan_together(lambda: self._plan(directory, state, options.weights_only), directory, group)
        return ShardedState(plan, directory, self.writers, self._state, self._devices, options.buffer_bytes)

    def _plan(self, directory: Path, state: Mapping[str, Any], weights_only: bool) -> UnitsPlan:
        units = plan_units(self._structure, self._buffers, self._optim, weights_only)
        if dist.get_rank() != 0:
            return units
        return plan_save(directory, self._structure, units, state, self._source_folder, shipped=self._shipped)

    def agree(self, ended: bool, failed: bool) -> tuple[bool, bool]:
        words = torch.tensor([int(ended), int(not failed)])
        dist.all_reduce(words, op=dist.ReduceOp.MIN)
        all_ended, all_well = words.tolist()
        return bool(all_ended), not all_well
