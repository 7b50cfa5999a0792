"""A save of all ranks that goes on while training does, of one consistent step.

[Note: a mesh save]
Between two steps every rank copies what it sends (see [Note: who sends what] in state.py) to host memory, and training goes on.
A thread on each rank then hands the copies, unit by unit, to rank 0 over a gloo group of the saves' own, where nothing that
training sends can come between. Rank 0 writes each unit as the host engine does, and holds one gathered unit at a time. Only when
every file was fsynced, read back and compared, and the folder has its name, do the other ranks hear that the save has ended.

The copies are bounded: units for which some rank has no room are sent from the live state first, while training waits.

Rank 0 names every unit before it is gathered, so that an error there (a full disk) ends the waiting everywhere.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatrain.checkpoint.background import SaveCancelled, SaveProgress, explain
from megatrain.checkpoint.desk import OnError, SaveOptions
from megatrain.checkpoint.writer import SavePlan, plan_save, write_planned
from megatrain.errors import UserError
from megatrain.host.available import available_host_bytes
from megatrain.host.store import UnitPlanes
from megatrain.mesh.devices import Devices
from megatrain.mesh.state import MeshState, agree
from megatrain.models.structure import Structure, Unit

logger = logging.getLogger(__name__)


FINISHED, FAILED = -1, -2
"""Words of rank 0 beside the numbers of units."""


@dataclass(frozen=True)
class SaveJob:
    """What is saved.

    Attributes:
        directory: The folder to make.
        plan: On rank 0; None elsewhere.
        weights_only: Masters alone are gathered.
        then: Called on every rank when the checkpoint is whole and was read back; its errors are the save's.
    """

    directory: Path
    plan: SavePlan | None
    weights_only: bool
    then: Callable[[], object]


class MeshSave:
    """One save, in a thread of its own on every rank. Construction is collective, and waits for what finds no room.

    Args:
        job: The same on every rank, but for the plan.
        state: The live state; at rest until this returns.
        group: A gloo group of all ranks that nothing else uses.
        device: Of this rank.
        buffer_bytes: For copies on this rank; None: half of what this host has available, shared by its ranks.
    """

    def __init__(
        self,
        job: SaveJob,
        state: MeshState,
        group: dist.ProcessGroup,
        device: torch.device,
        buffer_bytes: int | None,
    ):
        self._job, self._state, self._group, self._device = job, state, group, device
        self._planes = 1 if job.weights_only else 3
        self._names = list(state.units)
        self._copies: dict[str, torch.Tensor] = {}
        self._error: BaseException | None = None
        self._cancelled = False
        self._written_bytes = 0
        self._read_back_s = self._seconds = 0.0
        self._started = time.perf_counter()
        self.waited_s = 0.0
        """How long training has waited: for the copies, and for units that found no room."""
        self._live_sent = threading.Event()
        self._first_copied = self._room_begins(buffer_bytes)
        self._copy_units()
        self.copied_bytes = sum(copy.nbytes for copy in self._copies.values())
        if self._first_copied == 0:
            self._live_sent.set()
        self._thread = threading.Thread(target=self._run, name="mesh-save", daemon=True)
        self._thread.start()
        self._live_sent.wait()
        self.waited_s = time.perf_counter() - self._started

    # ---------------------------------------------------------------- the owner's side

    def done(self) -> bool:
        """Whether the save has ended on this rank, either way."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join()

    def error(self) -> UserError | None:
        """Why it failed, if it has: on rank 0 the reason, elsewhere that rank 0 has one. None too if it was cancelled."""
        if not self.done() or self._error is None or isinstance(self._error, SaveCancelled):
            return None
        return explain(self._error)

    @property
    def failed(self) -> bool:
        return self.done() and self._error is not None

    def result(self, timeout_s: float | None = None) -> SaveProgress:
        """Wait for the end. Raises UserError if it failed, TimeoutError if it did not end in time."""
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._job.directory} is still being written after {timeout_s} s")
        if self._error is not None:
            raise explain(self._error) from self._error
        return self.progress()

    def cancel(self, timeout_s: float = 10.0) -> None:
        """Give the save up at rank 0's next piece. Does not wait for ever: the other ranks may be gone."""
        self._cancelled = True
        self._thread.join(timeout_s)

    def progress(self) -> SaveProgress:
        seconds = self._seconds if self.done() else time.perf_counter() - self._started
        total = self._job.plan.total_bytes if self._job.plan is not None else 0
        return SaveProgress(self._written_bytes, total, seconds, self.waited_s, self.copied_bytes, self._read_back_s)

    # ---------------------------------------------------------------- copies

    def _room_begins(self, buffer_bytes: int | None) -> int:
        """The first unit from which on every rank has room for copies; the ones before it are sent from the live state."""
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

    def _copy_units(self) -> None:
        for unit in self._names[self._first_copied :]:
            for name in self._state.sent_names(unit):
                self._copies[name] = self._state.part(name, self._planes)

    def _read(self, name: str) -> torch.Tensor:
        """What this rank sends of a parameter; a copy is given once."""
        copy = self._copies.pop(name, None)
        return copy if copy is not None else self._state.part(name, self._planes)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            if self._job.plan is not None:
                self._write(self._job.plan)
            else:
                self._follow()
            self._job.then()
        except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it, whatever it is
            self._error = error
        self._copies.clear()
        self._seconds = time.perf_counter() - self._started
        self._live_sent.set()

    def _write(self, plan: SavePlan) -> None:
        """On rank 0."""
        written = False
        try:
            self._read_back_s = write_planned(plan, self._units(plan), self._count)
            written = True
        finally:
            self._say(FINISHED if written else FAILED)

    def _units(self, plan: SavePlan) -> Iterator[tuple[Unit, UnitPlanes]]:
        wanted = {unit.name: unit for unit in plan.units}
        for number, name in enumerate(self._names):
            if name in wanted:
                self._say(number)
                yield wanted[name], self._gathered(number)
        self._live_sent.set()

    def _follow(self) -> None:
        """On the other ranks: send what rank 0 asks for."""
        while (word := self._say(0)) >= 0:
            self._gathered(word)
        if word == FAILED:
            raise _rank_0_failed(self._job.directory)

    def _gathered(self, number: int) -> UnitPlanes:
        planes = self._state.gather(self._names[number], self._read, self._group, self._planes)
        if number >= self._first_copied - 1:
            self._live_sent.set()
        return planes

    def _say(self, word: int) -> int:
        said = torch.tensor([word])
        dist.broadcast(said, src=0, group=self._group)
        return int(said.item())

    def _count(self, count: int) -> None:
        self._written_bytes += count
        if self._cancelled:
            raise SaveCancelled(f"{self._job.directory}: given up")


def _ranks_here() -> int:
    """Ranks on this host, as torchrun says; all of them without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def agreed_end(save: MeshSave) -> tuple[bool, bool]:
    """(ended, failed) of a save on all ranks. Collective."""
    words = torch.tensor([int(save.done()), 1 - int(save.failed)])
    dist.all_reduce(words, op=dist.ReduceOp.MIN)
    ended, well = words.tolist()
    return bool(ended), not well


class SaveDesk:
    """The saves of one engine: at most one at a time, and the same end at the same step on every rank.

    Args:
        structure: The model.
        state: Its state on all ranks.
        buffers: The model's persistent buffers by full name.
        source_folder: Where the model came from.
        devices: The mesh.
    """

    def __init__(
        self,
        structure: Structure,
        state: MeshState,
        buffers: Mapping[str, torch.Tensor],
        source_folder: Path | None,
        devices: Devices,
    ):
        self._structure, self._state, self._buffers, self._source_folder = structure, state, buffers, source_folder
        self._devices = devices
        self._on_error: OnError = "stop"
        self.saving: MeshSave | None = None

    def start(self, directory: Path, kept: Mapping[str, Any], options: SaveOptions) -> MeshSave:
        """Begin a save, behind the one that may still run. Collective. See `MeshEngine.save`."""
        self.end()
        plan = self._planned(directory, kept, options.weights_only)
        job = SaveJob(directory, plan, options.weights_only, options.then)
        save = MeshSave(job, self._state, self._devices.save_group, self._devices.device, options.buffer_bytes)
        self.saving, self._on_error = save, "stop" if options.wait else options.on_error
        if options.wait:
            self.end()
        return save

    def _planned(self, directory: Path, kept: Mapping[str, Any], weights_only: bool) -> SavePlan | None:
        """On rank 0; every rank learns whether there is a plan."""
        if dist.get_rank() != 0:
            if not agree(True, self._devices.device):
                raise _rank_0_failed(directory)
            return None
        plan: SavePlan | None = None
        try:
            plan = plan_save(
                directory,
                structure=self._structure,
                store=self._state,  # type: ignore[arg-type]
                buffers=self._buffers,
                state=kept,
                source_folder=self._source_folder,
                weights_only=weights_only,
            )
        finally:
            agree(plan is not None, self._devices.device)
        return plan

    def look(self) -> None:
        """Between two steps: what became of the save in the background. Collective."""
        if self.saving is not None and agreed_end(self.saving)[0]:
            self.end()

    def end(self) -> None:
        """Wait for the save in progress on all ranks. Its failure is raised, or a warning, as was asked for. Collective."""
        if self.saving is None:
            return
        ended, self.saving = self.saving, None
        ended.wait()
        _, failed = agreed_end(ended)
        if not failed:
            return
        error = ended.error() or UserError("another rank could not save the checkpoint", "MeshEngine.save")
        if self._on_error == "stop":
            raise error
        logger.warning("the checkpoint was not saved, training goes on: %s", error)

    def cancel(self) -> None:
        """Give the save up. Not collective."""
        if self.saving is not None:
            self.saving.cancel()
            self.saving = None

    def close(self) -> None:
        """Let a save end: what it writes is worth having, and the other ranks are in it too. Its error is logged."""
        if self.saving is None:
            return
        self.saving.wait()
        error, self.saving = self.saving.error(), None
        if error is not None:
            logger.error("the checkpoint was not saved: %s", error)


def _rank_0_failed(directory: Path) -> UserError:
    return UserError("rank 0 could not write the checkpoint", str(directory), "see rank 0's error")
