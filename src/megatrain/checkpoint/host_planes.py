"""Saves and loads of the planes of a host store.

[Note: a unit while a save runs]
A save holds the state after the updates of step n. While it runs each unit is in one of these states:
    PENDING   its planes hold step n, or will once its update of step n ends; an update of step n + 1 must not start
    COPYING   its planes are being copied to staging memory; an update waits
    COPIED    staging memory holds step n; updates may run
    WRITING   the writer reads the planes; an update waits
    DONE      it is written, or the save has ended; updates may run
An update that finds its unit PENDING has it copied by the updater's threads. If there is no room for the copy, it waits for
room or for the writer; if the system refuses memory for a copy, there is no room for the rest of the save. The writer takes
copies first, because each of them frees room. A copier thread works ahead of the updates, as far as there is room: resident
units first, then the others in forward order, the order of the updates. The next forward and backward only read the planes
meanwhile, and the link to the host has bandwidth to spare. A resident unit is always copied before it is written: by the
copier, by the writer, or by the thread that launches its next update, whichever comes first.

There is no deadlock: the writer waits only for updates of step n, all submitted before the save began, and updates wait only
for the writer.

[Note: first touch of staging memory]
The system provides a page when it is first touched, and zeroes it; in a virtual machine the host below does the same again,
at a few GB/s in all. Copying into untouched memory is several times slower than copying, and the updates of the first step
after a save wait for it. So staging memory is mapped and touched before a save that is due, while nobody waits for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from pathlib import Path

import torch

from megatrain.checkpoint.async_save import SaveSource
from megatrain.checkpoint.writer import SavePlan, UnitsPlan, write_planned
from megatrain.errors import PlanRefused
from megatrain.host_memory.arena import PAGE_BYTES, Arena, two_pinned
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.layout import values_of
from megatrain.host_memory.store import HostStore, UnitPlanes
from megatrain.models.structure import Unit
from megatrain.optim.updater import CpuUpdater

logger = logging.getLogger(__name__)

RESERVED_BYTES = 1 << 30
"""Host memory that staging copies never use, whatever their bound: a save must not end a run whose state fills the host."""
TOUCHED_BYTES = 64 << 20
"""Memory that is touched between two looks at whether to stop."""


UnitState = Enum("UnitState", ["PENDING", "COPYING", "COPIED", "WRITING", "DONE"])
"""See [Note: a unit while a save runs]."""


class StagingMemory:
    """Host memory for the copies of saves: a mapping for each plane, so that the memory returns to the system with the copy.

    Heap memory used by changing threads would stay with the process. Any thread may call any method.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, list[Arena]] = {}
        self._toucher: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def ready_bytes(self) -> int:
        """Bytes mapped and touched, but not in use."""
        with self._lock:
            return sum(size * len(arenas) for size, arenas in self._ready.items())

    def prepare(self, sizes: Sequence[int]) -> None:
        """Make memory ready for planes of these sizes [bytes], in this order, as far as the host has it. Does not block.

        Memory that is ready already counts. See [Note: first touch of staging memory].
        """
        if self._toucher is not None and self._toucher.is_alive():
            return
        missing = self._missing(sizes)
        if not missing:  # called after every step while a save is near
            return
        self._stop.clear()
        self._toucher = threading.Thread(target=self._touch, args=(missing,), name="checkpoint-memory", daemon=True)
        self._toucher.start()

    def missing_bytes(self, planes: Sequence[torch.Tensor]) -> int:
        """Bytes that the system would have to provide for copies of these planes."""
        return sum(self._missing([plane.nbytes for plane in planes]))

    def like(self, plane: torch.Tensor) -> torch.Tensor:
        """Uninitialised host memory with the plane's shape (n,) and dtype.

        Raises:
            PlanRefused, OSError: The system has no memory for it.
        """
        with self._lock:
            arenas = self._ready.get(plane.nbytes)
            arena = arenas.pop() if arenas else None
        if arena is None:
            arena = Arena(plane.nbytes)
        return arena.tensor(0, plane.numel(), plane.dtype)

    def free(self) -> None:
        """Return memory that is not in use to the system."""
        self._stop.set()
        if self._toucher is not None:
            self._toucher.join()
            self._toucher = None
        with self._lock:
            self._ready.clear()

    def _missing(self, sizes: Sequence[int]) -> list[int]:
        """Those of the sizes for which no memory is ready."""
        with self._lock:
            ready = Counter({size: len(arenas) for size, arenas in self._ready.items()})
        missing = []
        for size in sizes:
            if ready[size] > 0:
                ready[size] -= 1
            else:
                missing.append(size)
        return missing

    def _touch(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            if size + RESERVED_BYTES > available_host_bytes():
                return
            try:
                arena = Arena(size)
            except PlanRefused as error:
                logger.debug("no staging memory was prepared: %s", error)
                return
            pages = arena.tensor(0, size, torch.uint8)[::PAGE_BYTES]
            for piece in pages.split(TOUCHED_BYTES // PAGE_BYTES):
                if self._stop.is_set():
                    return
                piece.zero_()
            with self._lock:
                self._ready.setdefault(size, []).append(arena)


class HostPlanes(SaveSource):
    """The units of a host store, each protected from updates until it is written or copied.

    Updates call `protect` or `protect_now`; the save's thread iterates over the units in `write`.

    Args:
        plan: What to write.
        directory: The folder to make.
        store: The planes.
        updates: Unit name -> its update of the step that is saved, if that may still run.
        buffer_bytes: Most bytes of copies at a time, except for one unit larger than that; fewer if the host's memory is full.
        reader: Copies resident units to the host.
        memory: Provides memory for copies. What is left of it at the end of the save returns to the system.
    """

    def __init__(
        self,
        plan: UnitsPlan,
        directory: Path,
        store: HostStore,
        updates: Mapping[str, Future[None]],
        buffer_bytes: int,
        reader: HostReader,
        memory: StagingMemory,
    ):
        super().__init__(directory, plan.total_bytes if isinstance(plan, SavePlan) else 0)
        self._plan, self._store, self._updates, self._buffer_bytes = plan, store, dict(updates), buffer_bytes
        self._reader, self._memory = reader, memory
        self._changed = threading.Condition()
        self._states = {unit.name: UnitState.PENDING for unit in plan.units}
        self._copies: dict[str, UnitPlanes] = {}
        self._room_taken = 0
        self._refused = False  # the system has no memory for copies
        self._copy_error: BaseException | None = None
        self._copier = threading.Thread(target=self._copy_ahead, name="checkpoint-copy", daemon=True)
        self._copier.start()

    def cancel(self) -> None:
        with self._changed:
            super().cancel()
            self._changed.notify_all()

    # ---------------------------------------------------------------- called by updates

    def protect(self, unit: str, updater: CpuUpdater, pieces: Sequence[tuple[int, int]]) -> None:
        """Before an update of a host unit is submitted: submit a job that copies the unit, or waits. Does not block."""
        with self._changed:
            if self._states.get(unit, UnitState.DONE) in (UnitState.DONE, UnitState.COPIED):
                return
        updater.submit(
            unit,
            pieces,
            lambda start, end: self._copy_piece(unit, start, end),
            finish=lambda: self._copy_ended(unit),
            after=lambda: self._claim(unit),
        )

    def protect_now(self, unit: str) -> None:
        """Before the update of a resident unit is launched: copy the unit. Blocks until the copy is made."""
        if self._claim(unit):
            started = time.perf_counter()
            try:
                self._copy_ended(unit, self._copy_of(self._store.units[unit]))
            except Exception as error:  # noqa: BLE001  the save ends with it, the update runs
                self._copy_failed(unit, error)
            self.waited_s += time.perf_counter() - started

    def _claim(self, unit: str) -> bool:
        """Wait until the caller must copy the unit before it changes (True), or may change it as it is (False)."""
        started = time.perf_counter()
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._may_pass(unit))
                claimed = self._states.get(unit) is UnitState.PENDING
                if not claimed or self._begin_copy(unit):
                    self.waited_s += time.perf_counter() - started
                    return claimed

    def _begin_copy(self, unit: str) -> bool:
        """Under the lock, for a unit that is PENDING and has room. False if the system has no memory for the copy."""
        planes = self._store.units[unit]
        size = self._size_of(planes)
        if not planes.resident:
            try:
                self._copies[unit] = self._empty_copy(planes)
            except (PlanRefused, OSError, MemoryError) as error:
                logger.warning(
                    "no memory for a copy of %s (%s): updates wait until %s is written", unit, error, self.directory
                )
                self._refused = True
                return False
        self._states[unit] = UnitState.COPYING
        self._room_taken += size
        self.copied_bytes += size
        return True

    def _may_pass(self, unit: str) -> bool:
        """Under the lock: whether an update of the unit, or a copy that is made for it, need not wait."""
        match self._states.get(unit, UnitState.DONE):
            case UnitState.PENDING:
                saved = self._saved(self._store.units[unit])
                size = sum(plane.nbytes for plane in saved.values())
                has_room = self._room_taken == 0 or self._room_taken + size <= self._buffer_bytes
                missing = self._memory.missing_bytes(list(saved.values()))
                return (
                    has_room
                    and not self._refused
                    and (not missing or missing + RESERVED_BYTES <= available_host_bytes())
                )
            case UnitState.WRITING | UnitState.COPYING:
                return False
        return True

    def _copy_piece(self, unit: str, start: int, end: int) -> None:
        copy = self._copies.get(unit) if self._states.get(unit) is UnitState.COPYING else None
        if copy is not None:
            source = self._store.units[unit].state()
            for kind, plane in self._saved(copy).items():
                part = values_of(kind, slice(start, end))
                plane[part].copy_(source[kind][part])

    def _copy_ended(self, unit: str, copy: UnitPlanes | None = None) -> None:
        with self._changed:
            if self._states.get(unit) is UnitState.COPYING:
                if copy is not None:
                    self._copies[unit] = copy
                self._states[unit] = UnitState.COPIED
                self._changed.notify_all()

    def _copy_failed(self, unit: str, error: BaseException) -> None:
        """End the save with the error of a copy."""
        with self._changed:
            self._copy_error, self.cancelled = error, True
            self._states[unit] = UnitState.DONE  # it will not be written, so its update may run
            self._changed.notify_all()

    # ---------------------------------------------------------------- the copier thread

    def _copy_ahead(self) -> None:
        """Copy units before their updates come, as far as there is room. Returns when none is left."""
        while (unit := self._next_to_copy()) is not None:
            try:
                update = self._updates.get(unit)
                if update is not None:
                    update.result()
                planes = self._store.units[unit]
                if planes.resident:
                    self._copy_ended(unit, self._copy_of(planes))
                else:
                    self._copy_piece(unit, 0, planes.numel)
                    self._copy_ended(unit)
            except BaseException as error:  # noqa: BLE001  the save ends with it
                self._copy_failed(unit, error)
                return

    def _next_to_copy(self) -> str | None:
        """Claim the first PENDING unit, once there is room for it. None if there is none left."""
        with self._changed:
            while not self.cancelled:
                pending = [name for name, state in self._states.items() if state is UnitState.PENDING]
                if not pending:
                    return None
                name = next((n for n in pending if self._store.units[n].resident), pending[0])
                if self._may_pass(name) and self._begin_copy(name):
                    return name
                self._changed.wait()
            return None

    # ---------------------------------------------------------------- the save's thread

    def write(self) -> None:
        try:
            self._write()
        except BaseException as error:
            if self._copy_error is not None:
                raise self._copy_error from error
            raise

    def _write(self) -> None:
        assert isinstance(self._plan, SavePlan)
        self.read_back_s = write_planned(self._plan, self._units(), self.count)

    def close(self) -> None:
        with self._changed:
            self._states = dict.fromkeys(self._states, UnitState.DONE)
            self._copies.clear()
            self._changed.notify_all()
        # It may be in the middle of a unit, and the engine closes the reader once the save has ended.
        self._copier.join()
        self._memory.free()

    def _units(self) -> Iterator[tuple[Unit, UnitPlanes]]:
        """The units, as they become available. The planes of each do not change until the next one is asked for."""
        by_name = {unit.name: unit for unit in self._plan.units}
        while (name := self._next()) is not None:
            if self._states[name] is UnitState.COPIED:
                yield by_name[name], self._copies[name]
            else:
                yield by_name[name], self._at_rest(name)
            self._written(name)

    def _next(self) -> str | None:
        """Take the next unit: a copy if there is one, else the first PENDING unit. None if all are written."""
        with self._changed:
            while True:
                self.check_cancelled()
                for wanted in (UnitState.COPIED, UnitState.PENDING):
                    name = next((n for n, state in self._states.items() if state is wanted), None)
                    if name is not None:
                        if wanted is UnitState.PENDING:
                            self._states[name] = UnitState.WRITING
                        return name
                if UnitState.COPYING not in self._states.values():
                    return None
                self._changed.wait()

    def _at_rest(self, name: str) -> UnitPlanes:
        """The planes of a unit that is WRITING, after its update of the saved step; a copy of them if it is resident."""
        update = self._updates.get(name)
        if update is not None:
            update.result()
        planes = self._store.units[name]
        if not planes.resident:
            return planes
        copy = self._copy_of(planes)
        with self._changed:
            self._states[name] = UnitState.DONE  # the copy is what gets written
            self._changed.notify_all()
        return copy

    def _copy_of(self, planes: UnitPlanes) -> UnitPlanes:
        """A copy of a resident unit on the host. No update of it may run."""
        copy = self._empty_copy(planes)
        source = planes.state()
        for kind, plane in self._saved(copy).items():
            self._reader.read(plane, source[kind])
        return copy

    def _empty_copy(self, planes: UnitPlanes) -> UnitPlanes:
        """Memory for a copy of the saved planes of a unit."""
        copies = {kind: self._memory.like(plane) for kind, plane in self._saved(planes).items()}
        return UnitPlanes.of(planes.name, planes.layout, copies, start=planes.start)

    def _saved(self, planes: UnitPlanes) -> dict[str, torch.Tensor]:
        """The planes of a unit that are written, by kind."""
        left_out = planes.states if self._plan.weights_only else {}
        return {kind: plane for kind, plane in planes.state().items() if kind not in left_out}

    def _size_of(self, planes: UnitPlanes) -> int:
        return sum(plane.nbytes for plane in self._saved(planes).values())

    def _written(self, name: str) -> None:
        with self._changed:
            if self._copies.pop(name, None) is not None:
                self._room_taken -= self._size_of(self._store.units[name])
            self._states[name] = UnitState.DONE
            self._changed.notify_all()


class HostReader:
    """Copies device memory to pageable host memory through two pinned buffers: a DMA fills one while CPU cores empty the other.

    This is faster than the driver's own copy to pageable memory, and it runs on a separate stream. Threads that share a reader
    take turns. On a CPU, copies are ordinary.
    """

    def __init__(self, device: torch.device, nbytes: int = 64 << 20):
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arenas = two_pinned(nbytes) if self._stream is not None else []
        self._filled = [torch.cuda.Event(blocking=True) for _ in self._arenas]

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target.copy_(source), both (n,) of one dtype; blocks until done.

        Kernels that write `source` must have ended: compute's queue is not waited for. Nothing may write to it meanwhile.
        """
        if self._stream is None:
            target.copy_(source)
            return
        piece = self._arenas[0].nbytes // source.itemsize
        starts = range(0, source.numel(), piece)
        with self._lock:
            for number, start in enumerate(starts):
                turn, part = number % 2, source[start : start + piece]
                with torch.cuda.stream(self._stream):
                    self._arenas[turn].tensor(0, part.numel(), part.dtype).copy_(part, non_blocking=True)
                self._filled[turn].record(self._stream)
                if number > 0:
                    self._empty(1 - turn, target[start - piece : start])
            if starts:
                self._empty((len(starts) - 1) % 2, target[starts[-1] :])

    def _empty(self, turn: int, target: torch.Tensor) -> None:
        self._filled[turn].synchronize()
        target.copy_(self._arenas[turn].tensor(0, target.numel(), target.dtype))

    def close(self) -> None:
        with self._lock:
            for arena in self._arenas:
                arena.close()
