"""A save of all ranks that goes on while training does, of one consistent step.

[Note: a mesh save]
Between two steps every rank copies what it sends (see [Note: who sends what] in state.py) to host memory, and training goes on.
A thread on each rank then hands the copies to the ranks that write, one of each host, over a gloo group of the saves' own, where
nothing that training sends can come between. Units are gathered in rounds ([Note: rounds] in writers.py), and written as the host
engine does it, into one folder ([Note: several writers] in checkpoint/files.py) that rank 0 has made. A writer holds two gathered
units at most: one that is being written, and one that is being gathered. Only when every file was fsynced, read back and
compared, and the folder has its name, do the ranks hear that the save has ended.

The copies are bounded: units for which some rank has no room are sent from the live state first, while training waits.

Before every round, and before every step of the end, all ranks say whether they go on: an error anywhere (a full disk, a failed
read) ends the save everywhere. What fails in the midst of a round is said at its end, so that nobody waits for a message in vain.
Rank 0 removes the folder when the other writers have closed their files.

Where a writer does not see the folder, because the hosts do not share a file system, rank 0 writes all of it, with a warning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatrain.checkpoint.async_save import SaveCancelled, SaveProgress, explain
from megatrain.checkpoint.files import MARKER_FILE, FileRecord, FilesWriter, FolderWriter
from megatrain.checkpoint.manager import OnError, SaveOptions
from megatrain.checkpoint.writer import (
    SavePlan,
    UnitFiles,
    UnitsPlan,
    plan_save,
    plan_units,
    write_begin,
    write_end,
)
from megatrain.engine.mesh.data_parallel import Devices
from megatrain.engine.mesh.state import MeshState
from megatrain.engine.mesh.writers import UnitWriter, by_size, first_of_hosts, rounds, shares
from megatrain.errors import Aftermath, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.store import UnitPlanes
from megatrain.models.structure import Structure
from megatrain.optim.spec import OptimizerSpec

logger = logging.getLogger(__name__)

T = TypeVar("T")
Share = tuple[dict[str, FileRecord], dict[str, UnitFiles]]
"""What a writer tells rank 0 about: its files, and its units."""


@dataclass(frozen=True)
class SaveJob:
    """What is saved.

    Attributes:
        directory: The folder to make.
        units: How units are written.
        plan: The whole of it, on rank 0; None elsewhere.
        then: Called on every rank when the checkpoint is whole and was read back; its errors are the save's.
    """

    directory: Path
    units: UnitsPlan
    plan: SavePlan | None
    then: Callable[[SaveProgress], object]


class MeshSave:
    """One save, in a thread of its own on every rank. Construction is collective, and waits for what finds no room.

    Args:
        job: The same on every rank, but for the plan.
        writers: The ranks that write, rank 0 among them.
        state: The live state; at rest until this returns.
        group: A gloo group of all ranks that nothing else uses.
        device: Of this rank.
        buffer_bytes: For copies on this rank; None: half of what this host has available, shared by its ranks.
    """

    def __init__(
        self,
        job: SaveJob,
        writers: Sequence[int],
        state: MeshState,
        group: dist.ProcessGroup,
        device: torch.device,
        buffer_bytes: int | None,
    ):
        self._job, self._state, self._group, self._device = job, state, group, device
        self.writers = list(writers)
        """The ranks that write: rank 0 alone once it was found that one of them does not see the folder."""
        self._planes = 1 if job.units.weights_only else 1 + len(job.units.optim.states)
        self._units = {unit.name: unit for unit in job.units.units}
        self._names = by_size(self._sizes)
        self._copies: dict[str, torch.Tensor] = {}
        self._error: BaseException | None = None
        self._read_error: BaseException | None = None
        self._cancelled = self._ended = False
        self._writer: UnitWriter | None = None
        self._written_bytes = self._written_elsewhere = 0
        self._own_share = 1.0
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
        """Why it failed, if it has: the reason, or which rank has it. None too if it was cancelled here."""
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
        """Give the save up, here at the next piece, elsewhere at the next round. Does not wait for ever: the other ranks may
        be gone."""
        self._cancelled = True
        self._thread.join(timeout_s)

    def progress(self) -> SaveProgress:
        """How far it is. Until it has ended, the other writers are taken to be as far with their shares as this one is.

        The total is known on rank 0 alone.
        """
        seconds = self._seconds if self.done() else time.perf_counter() - self._started
        total = self._job.plan.total_bytes if self._job.plan is not None else 0
        written = self._written_bytes + self._written_elsewhere
        if not self.done():
            written = min(total, int(self._written_bytes / self._own_share))
        return SaveProgress(written, total, seconds, self.waited_s, self.copied_bytes, self._read_back_s)

    @property
    def _sizes(self) -> dict[str, int]:
        return {name: unit.layout.numel for name, unit in self._units.items()}

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
        """What this rank sends of a parameter; a copy is given once. Where that fails zeros are sent, and the save will end."""
        copy = self._copies.pop(name, None)
        if copy is not None:
            return copy
        try:
            return self._state.part(name, self._planes)
        except Exception as error:  # noqa: BLE001  `_check` raises it
            self._read_error = error
            return self._state.zeros(name, self._planes)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with contextlib.ExitStack() as stack:
                self._save(stack)
            self._job.then(self.progress())
        except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it, whatever it is
            self._error = error
        self._copies.clear()
        self._seconds = time.perf_counter() - self._started
        self._live_sent.set()

    def _save(self, stack: contextlib.ExitStack) -> None:
        """See [Note: a mesh save]. On the stack is what must be closed, whatever happens."""
        folder = self._together(lambda: self._begin(stack))
        part = self._join(folder, stack)
        self._own_share = self._share_of(dist.get_rank()) or 1.0
        stack.callback(self._stop_writing)
        if part is not None:
            self._writer = UnitWriter(part, self._job.units)
        live = set(self._names[: self._first_copied])
        for units in rounds(self._sizes, self.writers):
            whole = self._together(lambda units=units: self._room(units))
            self._state.gather(units, whole, self._read, self._group, self._planes)
            live.difference_update(units.values())
            if not live:
                self._live_sent.set()
            if self._writer is not None and whole is not None:
                self._writer.put(self._units[whole.name], whole)
        self._together(self._settle)
        told = self._gathered_shares()
        self._together(lambda: self._end(folder, told))

    def _begin(self, stack: contextlib.ExitStack) -> FolderWriter | None:
        """Make the folder, on rank 0."""
        if self._job.plan is None:
            return None
        folder = stack.enter_context(FolderWriter(self._job.directory, self._count))
        write_begin(folder, self._job.plan)
        return folder

    def _join(self, folder: FolderWriter | None, stack: contextlib.ExitStack) -> FilesWriter | None:
        """Agree on who writes: the writers if all of them see rank 0's folder, else rank 0. Returns where this rank writes."""
        said: list[Any] = [None]
        if folder is not None:
            said = [(folder.temp.name, (folder.temp / MARKER_FILE).read_text(encoding="utf-8"))]
        dist.broadcast_object_list(said, src=0, group=self._group)
        temp = self._job.directory.with_name(said[0][0])
        me = dist.get_rank()
        blind = first_rank(me in self.writers and not _is_marked(temp, said[0][1]), self._group)
        if blind is not None:
            self.writers = [0]
            if folder is not None:
                logger.warning(
                    "rank %d does not see %s: the hosts share no file system there, and rank 0 alone writes the checkpoint",
                    blind, temp,
                )  # fmt: skip
        if folder is not None or me not in self.writers:
            return folder
        return stack.enter_context(FilesWriter(temp, self._job.directory, self._count))

    def _share_of(self, rank: int) -> float:
        """Of all bytes, what a rank writes."""
        own = shares(self._sizes, self.writers).get(rank, [])
        return sum(self._sizes[name] for name in own) / max(1, sum(self._sizes.values()))

    def _check(self) -> None:
        """Raise why this rank cannot go on."""
        if self._cancelled:
            raise SaveCancelled(f"{self._job.directory}: given up")
        if self._read_error is not None:
            raise self._read_error
        if self._writer is not None:
            self._writer.check()

    def _room(self, units: Mapping[int, str]) -> UnitPlanes | None:
        """Memory for the unit that this rank gets in a round."""
        self._check()
        name = units.get(dist.get_rank())
        return None if name is None else self._state.empty_planes(name, self._planes)

    def _settle(self) -> None:
        self._check()
        if self._writer is not None:
            self._writer.settle()

    def _gathered_shares(self) -> list[Share | None]:
        """On rank 0, what each rank has written."""
        me = dist.get_rank()
        mine: Share | None = None
        if self._writer is not None:
            mine = self._writer.part.records, self._writer.written
        found: list[Share | None] = [None] * dist.get_world_size()
        dist.gather_object(mine, found if me == 0 else None, dst=0, group=self._group)
        return found

    def _end(self, folder: FolderWriter | None, told: Sequence[Share | None]) -> None:
        """Finish the folder, on rank 0."""
        if folder is None or self._job.plan is None:
            return
        written: dict[str, UnitFiles] = {}
        for rank, share in enumerate(told):
            if share is not None:
                records, units = share
                written |= units
                if rank != 0:
                    folder.take_over(records)
        write_end(folder, self._job.plan, written)
        self._read_back_s = folder.read_back_s

    def _together(self, work: Callable[[], T]) -> T:
        """Do something on every rank, and go on if it succeeded on all of them. Collective.

        Raises:
            The error of this rank, or a UserError that names the first rank that has one. Nothing is being written then.
        """
        done: list[T] = []
        error: BaseException | None = None
        try:
            done.append(work())
        except BaseException as problem:  # noqa: BLE001  raised below, when all ranks know
            error = problem
        written = self._written_bytes
        words = torch.tensor([int(error is not None), written])
        dist.all_reduce(words, group=self._group)
        failed, written_by_all = words.tolist()
        self._written_elsewhere = written_by_all - written
        if failed:
            self._stop_writing()
            first = first_rank(error is not None, self._group)
            assert first is not None
            raise error or _failed_on(first, self._job.directory)
        return done[0]

    def _stop_writing(self) -> None:
        self._ended = True
        if self._writer is not None:
            self._writer.end()

    def _count(self, count: int) -> None:
        self._written_bytes += count
        if self._cancelled or self._ended:
            raise SaveCancelled(f"{self._job.directory}: given up")


def first_rank(says_so: bool, group: dist.ProcessGroup) -> int | None:
    """The first rank that says so. Collective."""
    world = dist.get_world_size()
    word = torch.tensor([dist.get_rank() if says_so else world])
    dist.all_reduce(word, op=dist.ReduceOp.MIN, group=group)
    return None if word.item() == world else int(word.item())


def _is_marked(temp: Path, marker: str) -> bool:
    """Whether this is the folder that rank 0 has made."""
    try:
        return (temp / MARKER_FILE).read_text(encoding="utf-8") == marker
    except OSError:
        return False


def _ranks_here() -> int:
    """Ranks on this host, as torchrun says; all of them without it."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def agreed_end(save: MeshSave) -> tuple[bool, bool]:
    """(ended, failed) of a save on all ranks. Collective."""
    words = torch.tensor([int(save.done()), 1 - int(save.failed)])
    dist.all_reduce(words, op=dist.ReduceOp.MIN)
    ended, well = words.tolist()
    return bool(ended), not well


class MeshCheckpointManager:
    """The saves of one engine: at most one at a time, and the same end at the same step on every rank.

    Args:
        structure: The model.
        state: Its state on all ranks.
        optim: The optimizer.
        buffers: The model's persistent buffers by full name.
        source_folder: Where the model came from.
        devices: The mesh.
        writers: The ranks that write, rank 0 among them; None: the first of every host.
    """

    def __init__(
        self,
        structure: Structure,
        state: MeshState,
        optim: OptimizerSpec,
        buffers: Mapping[str, torch.Tensor],
        source_folder: Path | None,
        devices: Devices,
        writers: Sequence[int] | None = None,
    ):
        self._structure, self._state, self._buffers, self._source_folder = structure, state, buffers, source_folder
        self._devices, self._optim = devices, optim
        self.writers = first_of_hosts(devices.save_group) if writers is None else list(writers)
        self._on_error: OnError = "stop"
        self.saving: MeshSave | None = None

    def start(self, directory: Path, kept: Mapping[str, Any], options: SaveOptions) -> MeshSave:
        """Begin a save, behind the one that may still run. Collective. See `MeshEngine.save`."""
        self.end()
        job = self._planned(directory, kept, options)
        group, device = self._devices.save_group, self._devices.device
        save = MeshSave(job, self.writers, self._state, group, device, options.buffer_bytes)
        self.saving, self._on_error = save, "stop" if options.wait else options.on_error
        if options.wait:
            self.end()
        return save

    def _planned(self, directory: Path, kept: Mapping[str, Any], options: SaveOptions) -> SaveJob:
        """Rank 0 decides; every rank learns whether it can be done."""
        job: SaveJob | None = None
        try:
            units = plan_units(self._structure, self._buffers, self._optim, options.weights_only)
            plan = self._whole_plan(directory, kept, options.weights_only) if dist.get_rank() == 0 else None
            job = SaveJob(directory, units, plan, options.then)
        finally:
            failed = first_rank(job is None, self._devices.save_group)
        if failed is not None or job is None:
            raise _failed_on(failed or 0, directory)
        return job

    def _whole_plan(self, directory: Path, kept: Mapping[str, Any], weights_only: bool) -> SavePlan:
        return plan_save(
            directory,
            structure=self._structure,
            store=self._state,  # type: ignore[arg-type]
            optim=self._optim,
            buffers=self._buffers,
            state=kept,
            source_folder=self._source_folder,
            weights_only=weights_only,
        )

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
        error = ended.error() or Aftermath("another rank could not save the checkpoint", "MeshEngine.save")
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


def _failed_on(rank: int, directory: Path) -> UserError:
    return Aftermath(f"rank {rank} could not write the checkpoint", str(directory), f"see rank {rank}'s error")
