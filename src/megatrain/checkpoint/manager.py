"""The checkpoint desk of an engine: at most one save and one load in progress, and who must be told of their errors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from megatrain.checkpoint.async_save import (
    RunningSave,
    SaveCancelled,
    SaveProgress,
    default_buffer_bytes,
    explain,
    sizes_of_copies,
)
from megatrain.checkpoint.copies import CopyMemory
from megatrain.checkpoint.reader import OpenCheckpoint, RunningLoad
from megatrain.checkpoint.writer import plan_save
from megatrain.device.copier import HostReader
from megatrain.errors import UserError
from megatrain.host_memory.store import HostStore
from megatrain.models.conversion import unit_of_names
from megatrain.models.structure import Structure, Unit
from megatrain.optim.spec import OptimizerSpec

logger = logging.getLogger(__name__)

OnError = Literal["stop", "warn"]


@dataclass(frozen=True)
class SaveOptions:
    """How a save goes.

    Attributes:
        wait: Whether its owner waits for it.
        weights_only: bf16 weights without training state.
        on_error: What its owner's next step does if it fails in the background: raise its error, or log a warning.
        buffer_bytes: Most memory for copies of what changes before its turn; None: what there is room for.
        then: Called when the checkpoint is whole and was read back, in the thread that writes, with how it went.
    """

    wait: bool
    weights_only: bool
    on_error: OnError
    buffer_bytes: int | None
    then: Callable[[SaveProgress], object]


class CheckpointManager:
    """Starts saves and loads of one engine's state, and remembers them.

    Args:
        structure: The model.
        store: Its planes.
        optim: The optimizer, whose states are among them.
        buffers: Its buffers by full name, on the CPU.
        mirrors: The same buffers on the device; on a CPU the very same tensors.
        source_folder: Where the model came from.
        trust_remote_code: Whether the source folder's Python files go into checkpoints.
        device: Where units that live on the device, and the mirrors, are.
        empty: The planes hold no weights yet: a load must come first.
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
        empty: bool = False,
    ):
        self._structure, self._store, self._buffers, self._mirrors = structure, store, buffers, mirrors
        self._source_folder, self._trust_remote_code = source_folder, trust_remote_code
        self._optim = optim
        self._empty = empty
        self._device = device
        self._twin: Structure | None = None
        self._owners: dict[str, str] = {}  # full name -> unit, of parameters and persistent buffers
        self._on_error: OnError = "stop"
        self._reader: HostReader | None = None  # made by the first save
        self._memory = CopyMemory()
        self.saving: RunningSave | None = None
        self.loading: RunningLoad | None = None

    # ---------------------------------------------------------------- saves

    def start_save(
        self,
        directory: Path,
        state: Mapping[str, Any],
        updates: Mapping[str, Future[None]],
        options: SaveOptions,
    ) -> RunningSave:
        """Begin a save, behind the one that may still run. See `HostEngine.save`; nobody trains meanwhile if it waits."""
        self.wait_saved()
        twin = self._checkpoint_structure()
        assert isinstance(twin.model, PreTrainedModel)
        plan = plan_save(
            directory,
            structure=self._structure,
            store=self._store,
            optim=self._optim,
            buffers=self._buffers,
            state=state,
            source_folder=self._source_folder,
            trust_remote_code=self._trust_remote_code,
            weights_only=options.weights_only,
            model=twin.model,
        )
        buffer_bytes = options.buffer_bytes
        if buffer_bytes is None:  # with nobody training, one unit's copy at a time is as fast
            buffer_bytes = 0 if options.wait else default_buffer_bytes(self._store, self._memory.ready_bytes)
        self._on_error = options.on_error
        if self._reader is None:
            self._reader = HostReader(self._device if self._store.resident_bytes else torch.device("cpu"))
        self.saving = RunningSave(plan, self._store, updates, buffer_bytes, options.then, self._reader, self._memory)
        return self.saving

    def prepare_save(self, buffer_bytes: int | None) -> None:
        """A save in the background is near: see [Note: memory that nobody has touched]. Nothing is done while one runs."""
        if self.saving is None or self.saving.done():
            room = default_buffer_bytes(self._store, self._memory.ready_bytes) if buffer_bytes is None else buffer_bytes
            self._memory.prepare(sizes_of_copies(self._store, room))

    def look_at_save(self) -> None:
        """Forget a save that has ended. If it failed and nobody knows yet: raise its error, or warn, as was asked for."""
        if self.saving is None or not self.saving.done():
            return
        ended, self.saving = self.saving, None
        error = ended.unseen_error()
        if error is None or isinstance(error, SaveCancelled):
            return
        ended.take_error()
        if self._on_error == "stop":
            raise explain(error) from error
        logger.warning("the checkpoint was not saved, training goes on: %s", explain(error))

    def wait_saved(self) -> None:
        """Wait for the save in progress, if there is one; its error as by `look_at_save`."""
        if self.saving is not None:
            self.saving.wait()
            self.look_at_save()

    # ---------------------------------------------------------------- loads

    def start_load(self, directory: Path) -> tuple[RunningLoad, dict[str, Any]]:
        """Begin to restore the planes; nothing reads or writes them. The state comes with it.

        Raises:
            UserError: The checkpoint cannot be used; nothing was changed.
        """
        opened = OpenCheckpoint(directory, self._checkpoint_structure(), self._optim)
        # Units on the device first: their weights pass no gate, so whoever loads waits for them.
        units = sorted(self._structure.units, key=lambda unit: not self._store.units[unit.name].resident)
        self._empty = False
        self.loading = RunningLoad(opened, units, self._store, self._buffers, self._mirror_buffers)
        return self.loading, opened.state

    def cancel_load(self) -> dict[str, Future[None]]:
        """End the latest load, in progress or failed, so that another can begin; the futures of its units, all done."""
        if self.loading is None:
            return {}
        self.loading.cancel()
        ended, self.loading = self.loading, None
        self._empty = ended.error() is not None
        return ended.futures

    def refuse_mixture(self) -> None:
        """Raise unless the planes hold one consistent state, or are about to.

        Raises:
            UserError: No weights were loaded yet; or the latest load failed.
        """
        if self._empty:
            raise UserError("the engine holds no weights", remedy="load a checkpoint first")
        if self.loading is None:
            return
        error = self.loading.error()
        if error is not None:
            raise UserError(
                f"the load of {self.loading.directory} has failed, the weights are a mixture: {error}",
                remedy=None if isinstance(error, UserError) else "load a checkpoint again",
            ) from error
        if self.loading.done():
            self.loading = None

    def close(self) -> None:
        """Give a load up; let a save end, because what it writes is worth having. Its error is logged, not raised."""
        if self.loading is not None:
            self.loading.cancel()
        if self.saving is not None:
            self.saving.wait()
            error = self.saving.unseen_error()
            if error is not None and not isinstance(error, SaveCancelled):
                logger.error("the checkpoint was not saved: %s", explain(error))
            self.saving = None
        self._memory.give_back()
        if self._reader is not None:
            self._reader.close()

    # ---------------------------------------------------------------- small parts

    def _checkpoint_structure(self) -> Structure:
        """The structure with a model of its own, on meta: conversions bind tensors to modules, and so does a running step."""
        if self._twin is None:
            self._twin = replace(self._structure, model=copy.deepcopy(self._structure.model))
            self._owners = unit_of_names(self._twin)
        return self._twin

    def _mirror_buffers(self, unit: Unit) -> None:
        """Refresh the device's copies of a unit's persistent buffers. Returns when they are there."""
        named = {name for name, owner in self._owners.items() if owner == unit.name} & self._mirrors.keys()
        stale = [name for name in named if self._mirrors[name] is not self._buffers[name]]
        stream = torch.cuda.Stream(self._device) if stale and self._device.type == "cuda" else None
        with torch.cuda.stream(stream):  # of its own: kernels in the queue read other units' buffers only
            for name in stale:
                self._mirrors[name].copy_(self._buffers[name])
        if stream is not None:
            stream.synchronize()
