"""The checkpoints of a host engine: what its saves write, and how its planes are restored."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from megatrain.checkpoint.host_planes import HostPlanes, HostReader, StagingMemory
from megatrain.checkpoint.host_shards import HostShards
from megatrain.checkpoint.manager import CheckpointPolicy, SaveOptions
from megatrain.checkpoint.reader import OpenCheckpoint, RunningLoad
from megatrain.checkpoint.shared_write import first_of_hosts, plan_together
from megatrain.checkpoint.writer import UnitsPlan, plan_save, plan_units
from megatrain.device.shards import ALONE, Shards
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.store import HostStore
from megatrain.models.conversion import unit_of_names
from megatrain.models.structure import Structure, Unit
from megatrain.optim.spec import OptimizerSpec


class HostCheckpoints(CheckpointPolicy):
    """Saves and loads the state of one process, or of the ranks that share one; then saves are collective.

    Args:
        structure, store, optim: The model, its planes, and the optimizer whose states are among them.
        buffers: The model's buffers by full name, on the CPU.
        mirrors: The same buffers on the device; on a CPU the same tensors.
        source_folder: The folder that the model came from.
        trust_remote_code: Whether its Python files are copied into checkpoints.
        device: The device of resident units and mirrors.
        updates: Returns unit name -> its latest update, if that may still run.
        shards: The ranks that share the state.
        shipped: As for `plan_save`; read at each save.
    """

    def __init__(
        self,
        structure: Structure,
        store: HostStore,
        optim: OptimizerSpec,
        buffers: Mapping[str, torch.Tensor],
        mirrors: Mapping[str, torch.Tensor],
        source_folder: Path | None,
        trust_remote_code: bool,
        device: torch.device,
        updates: Callable[[], Mapping[str, Future[None]]],
        shards: Shards = ALONE,
        shipped: Mapping[str, bytes | None] | None = None,
    ):
        self._shipped = shipped
        self._shards = shards
        self._structure, self._store, self._buffers, self._mirrors = structure, store, buffers, mirrors
        self._source_folder, self._trust_remote_code = source_folder, trust_remote_code
        self._device, self._updates, self._optim = device, updates, optim
        self._twin: Structure | None = None
        self._owners: dict[str, str] = {}  # full name -> unit, of parameters and persistent buffers
        self._reader: HostReader | None = None  # made by the first save
        self._memory = StagingMemory()
        self.source: HostPlanes | None = None
        """The latest save's."""

    def open_source(self, directory: Path, state: Mapping[str, Any], options: SaveOptions) -> HostPlanes:
        buffer_bytes = options.buffer_bytes
        if buffer_bytes is None:  # if nobody trains meanwhile, copying one unit at a time is as fast
            buffer_bytes = self._default_buffer_bytes() if options.background else 0
        if self._reader is None:
            self._reader = HostReader(self._device if self._store.resident_bytes else torch.device("cpu"))
        if self._shards.many:
            group = self._shards.saves
            plan = plan_together(lambda: self._plan(directory, state, options), directory, group)
            kind: Callable[..., HostPlanes] = functools.partial(HostShards, self._shards, first_of_hosts(group))
        else:
            plan, kind = self._plan(directory, state, options), HostPlanes
        self.source = kind(plan, directory, self._store, self._updates(), buffer_bytes, self._reader, self._memory)
        return self.source

    def _plan(self, directory: Path, state: Mapping[str, Any], options: SaveOptions) -> UnitsPlan:
        """The whole save; on ranks other than 0, how its units are written."""
        twin = self._checkpoint_structure()
        assert isinstance(twin.model, PreTrainedModel)
        units = plan_units(self._structure, self._buffers, self._optim, options.weights_only, twin.model)
        if self._shards.rank != 0:
            return units
        source, trusted = self._source_folder, self._trust_remote_code
        return plan_save(directory, self._structure, units, state, source, trusted, self._shipped)

    def agree(self, ended: bool, failed: bool) -> tuple[bool, bool]:
        """See `CheckpointPolicy.agree`. Collective where ranks share the state."""
        return self._shards.all_of(ended), not self._shards.all_of(not failed)

    def prepare(self, buffer_bytes: int | None) -> None:
        """Map and touch staging memory for the units that a save will copy first."""
        room = self._default_buffer_bytes() if buffer_bytes is None else buffer_bytes
        sizes: list[int] = []
        for planes in sorted(self._store.units.values(), key=lambda planes: not planes.resident):
            of_unit = [plane.nbytes for plane in planes.state().values()]
            if sum(sizes) + sum(of_unit) > room:
                break
            sizes += of_unit
        self._memory.prepare(sizes)

    def _default_buffer_bytes(self) -> int:
        """The whole state's size, at most half of the free host memory, and at least two of the largest units.

        Staging memory that is ready counts as free.
        """
        sizes = [sum(plane.nbytes for plane in planes.state().values()) for planes in self._store.units.values()]
        free_bytes = available_host_bytes() // self._shards.here + self._memory.ready_bytes
        return max(2 * max(sizes), min(sum(sizes), free_bytes // 2))

    def start_load(self, directory: Path, convert_states: bool = False) -> tuple[RunningLoad, dict[str, Any]]:
        """Start to restore the planes, which nobody may use meanwhile. Returns the load and the engine's saved state.

        Raises:
            UserError: The checkpoint cannot be used; nothing was changed.
        """
        opened = OpenCheckpoint(directory, self._checkpoint_structure(), self._optim, convert_states)
        # Resident units first: nothing makes a forward wait for them unit by unit, so the engine waits for all of them.
        units = sorted(self._structure.units, key=lambda unit: not self._store.units[unit.name].resident)
        return RunningLoad(opened, units, self._store, self._buffers, self._mirror_buffers), opened.state

    def close(self) -> None:
        self._memory.free()
        if self._reader is not None:
            self._reader.close()

    def _checkpoint_structure(self) -> Structure:
        """The structure with a copy of the model, on meta: conversions bind tensors to its modules, as a running step does."""
        if self._twin is None:
            self._twin = replace(self._structure, model=deepcopy(self._structure.model))
            self._owners = unit_of_names(self._twin)
        return self._twin

    def _mirror_buffers(self, unit: Unit) -> None:
        """Copy a unit's persistent buffers to the device. Returns when they are there."""
        named = {name for name, owner in self._owners.items() if owner == unit.name} & self._mirrors.keys()
        stale = [name for name in named if self._mirrors[name] is not self._buffers[name]]
        # A stream beside the compute stream: kernels queued there read other units' buffers only.
        stream = torch.cuda.Stream(self._device) if stale and self._device.type == "cuda" else None
        with torch.cuda.stream(stream):
            for name in stale:
                self._mirrors[name].copy_(self._buffers[name])
        if stream is not None:
            stream.synchronize()
