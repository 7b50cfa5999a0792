"""A save that goes on while training does, of one consistent step.

[Note: a unit while a save runs]
The save is of the state behind the updates of step n. From then on each unit is in one state, and only its owner touches what
it names:
    PENDING   its planes hold step n, or will when its update of step n ends; an update of step n + 1 must not begin
    COPYING   an update came first and there was room: threads of the updater copy the planes; the update comes behind
    COPIED    a buffer holds step n; updates go on
    WRITING   the writer reads the planes; an update waits
    DONE      on its way to the disk, or the save has ended: updates go on
An update that finds its unit PENDING and no room for a copy waits: for room, or for the writer. Where the system
refuses memory for a copy, there is no room for any more. The writer takes copies first, because each frees room. A
thread of its own copies ahead, as far as there is room: units on the device first, then the others, in the order in
which the next updates will come. The next forward and backward only read the planes meanwhile, and the link to the
host has room. A unit on the device is always copied before it is written: where that thread has not reached it, the
writer does it, or the thread that launches the unit's next update.

Nothing waits in a circle: the writer waits only for updates of step n, which were all submitted before the save began, and
updates wait only for the writer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch

from megatrain.checkpoint.copies import LEFT_BYTES, CopyMemory
from megatrain.checkpoint.writer import SavePlan, write_planned
from megatrain.device.copier import HostReader
from megatrain.errors import Aftermath, MegatrainError, PlanRefused, UserError
from megatrain.host_memory.available import available_host_bytes
from megatrain.host_memory.store import HostStore, UnitPlanes
from megatrain.models.structure import Unit

logger = logging.getLogger(__name__)


class SaveCancelled(MegatrainError):
    """The save was given up on purpose; nothing of it is left."""


class UnitState(Enum):
    """See [Note: a unit while a save runs]."""

    PENDING = "not yet written, the planes must not change"
    COPYING = "being copied into a buffer"
    COPIED = "a buffer holds it"
    WRITING = "being written from the planes"
    DONE = "written, or the save has ended"


class UnitJobs(Protocol):
    """The updater: runs the pieces of a job on its threads, after `after`, in order with the unit's other jobs."""

    threads: int

    def submit(
        self,
        unit: str,
        pieces: Any,
        run_piece: Callable[[int, int], object],
        *,
        finish: Callable[[], Any],
        after: Callable[[], object] | None,
    ) -> Future[Any]: ...


@dataclass(frozen=True)
class SaveProgress:
    """How far a save is.

    Attributes:
        written_bytes, total_bytes: Of the estimate that the disk was checked for.
        seconds: Since the save began.
        waited_s: How long updates of the next step have waited for the writer: the save's cost to training.
        copied_bytes: What was copied because an update came first.
        read_back_s: The part of `seconds` that reading back took, known at the end.
    """

    written_bytes: int
    total_bytes: int
    seconds: float
    waited_s: float
    copied_bytes: int
    read_back_s: float

    @property
    def bytes_per_s(self) -> float:
        """Of the writing alone."""
        return self.written_bytes / max(self.seconds - self.read_back_s, 1e-9)

    @property
    def left_s(self) -> float:
        """Remaining time of the writing at this speed."""
        return max(0, self.total_bytes - self.written_bytes) / max(self.bytes_per_s, 1e-9)


class RunningSave:
    """One save in a thread of its own. `protect` is the updates' side, `result` the owner's.

    Args:
        plan: What to write.
        store: The planes.
        updates: Unit name -> its update of the step that is saved, where it may still run.
        buffer_bytes: Most bytes of copies that exist at the same time, but for one unit larger than that; less on a full host.
        then: Called in the thread when the checkpoint is whole and read back, with how it went; its errors are the save's.
        reader: Copies resident units to the host.
        memory: Where copies go; what nobody has taken of it goes back to the system at the end.
    """

    def __init__(
        self,
        plan: SavePlan,
        store: HostStore,
        updates: Mapping[str, Future[None]],
        buffer_bytes: int,
        then: Callable[[SaveProgress], object] = lambda progress: None,
        reader: HostReader | None = None,
        memory: CopyMemory | None = None,
    ):
        self.plan = plan
        self._store, self._updates, self._buffer_bytes, self._then = store, dict(updates), buffer_bytes, then
        self._reader = reader or HostReader(torch.device("cpu"))
        self._memory = memory or CopyMemory()
        self._changed = threading.Condition()
        self._states = {unit.name: UnitState.PENDING for unit in plan.units}
        self._copies: dict[str, UnitPlanes] = {}
        self._room_taken = 0
        self._refused = False  # the system has no memory for copies
        self._cancelled = False
        self._error: BaseException | None = None
        self._copy_error: BaseException | None = None
        self._seen = False  # whether the owner has been given the error
        self._written_bytes = self._copied_bytes = 0
        self._waited_s = self._read_back_s = 0.0
        self._started, self._seconds = time.perf_counter(), 0.0
        # A daemon: a process that must end does not wait for a disk that hangs. `result` and the engine's close wait.
        self._thread = threading.Thread(target=self._run, name="checkpoint-save", daemon=True)
        self._ahead = threading.Thread(target=self._copy_ahead, name="checkpoint-copy", daemon=True)
        self._ahead.start()
        self._thread.start()

    @property
    def directory(self) -> Path:
        return self.plan.directory

    # ---------------------------------------------------------------- the owner's side

    def done(self) -> bool:
        """Whether the save has ended, either way."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float | None = None) -> SaveProgress:
        """Wait for the end.

        Raises:
            UserError: The save failed; nothing of it is left, and older checkpoints are as they were.
            SaveCancelled: It was cancelled.
            TimeoutError: It did not end in time.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.directory} is still being written after {timeout_s} s")
        error = self.take_error()
        if error is not None:
            raise error
        return self.progress()

    def wait(self) -> None:
        """Wait for the end, whatever it is."""
        self._thread.join()

    def take_error(self) -> BaseException | None:
        """The error of a save that has ended, and a note that somebody knows it."""
        self._seen = True
        return self._error

    def unseen_error(self) -> BaseException | None:
        """The error of a save that has failed and whose owner has not looked yet."""
        return self._error if self.done() and not self._seen else None

    def cancel(self) -> None:
        """Give the save up at its next piece, and wait until nothing is left of it."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
        self._thread.join()

    def progress(self) -> SaveProgress:
        seconds = self._seconds if self.done() else time.perf_counter() - self._started
        return SaveProgress(
            self._written_bytes, self.plan.total_bytes, seconds, self._waited_s, self._copied_bytes, self._read_back_s
        )

    # ---------------------------------------------------------------- the updates' side

    def protect(self, unit: str, jobs: UnitJobs, pieces: Any) -> None:
        """Before an update of a host unit is submitted: put a job before it that copies the unit, or waits. Returns at once."""
        with self._changed:
            if self._states.get(unit, UnitState.DONE) in (UnitState.DONE, UnitState.COPIED):
                return
        jobs.submit(
            unit,
            pieces,
            lambda start, end: self._copy_piece(unit, start, end),
            finish=lambda: self._copy_ended(unit),
            after=lambda: self._claim(unit),
        )

    def protect_now(self, unit: str) -> None:
        """The same for a unit on the device, before its update is launched. Blocks until the copy is made."""
        if self._claim(unit):
            started = time.perf_counter()
            try:
                self._copy_ended(unit, self._copy_of(self._store.units[unit]))
            except Exception as error:  # noqa: BLE001  the save ends with it, the update goes on
                self._copy_failed(unit, error)
            self._waited_s += time.perf_counter() - started

    def _claim(self, unit: str) -> bool:
        """Wait until the unit may be changed once it is copied (True), or as it is (False)."""
        started = time.perf_counter()
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._may_pass(unit))
                claimed = self._states.get(unit) is UnitState.PENDING
                if not claimed or self._begin_copy(unit):
                    self._waited_s += time.perf_counter() - started
                    return claimed

    def _begin_copy(self, unit: str) -> bool:
        """Under the lock, for a unit that is PENDING and has room. False where the system has no memory for the copy."""
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
        self._copied_bytes += size
        return True

    def _may_pass(self, unit: str) -> bool:
        """Under the lock."""
        match self._states.get(unit, UnitState.DONE):
            case UnitState.PENDING:
                saved = self._saved(self._store.units[unit])
                size = sum(plane.nbytes for plane in saved.values())
                has_room = self._room_taken == 0 or self._room_taken + size <= self._buffer_bytes
                missing = self._memory.missing_bytes(list(saved.values()))
                return (
                    has_room and not self._refused and (not missing or missing + LEFT_BYTES <= available_host_bytes())
                )
            case UnitState.WRITING | UnitState.COPYING:
                return False
        return True

    def _copy_piece(self, unit: str, start: int, end: int) -> None:
        copy = self._copies.get(unit) if self._states.get(unit) is UnitState.COPYING else None
        if copy is not None:
            source = self._store.units[unit].state()
            for kind, plane in self._saved(copy).items():
                plane[start:end].copy_(source[kind][start:end])

    def _copy_ended(self, unit: str, copy: UnitPlanes | None = None) -> None:
        with self._changed:
            if self._states.get(unit) is UnitState.COPYING:
                if copy is not None:
                    self._copies[unit] = copy
                self._states[unit] = UnitState.COPIED
                self._changed.notify_all()

    def _copy_failed(self, unit: str, error: BaseException) -> None:
        """The save ends with the error of a copy."""
        with self._changed:
            self._copy_error, self._cancelled = error, True
            self._states[unit] = UnitState.DONE  # not to be written any more: its update goes on
            self._changed.notify_all()

    # ---------------------------------------------------------------- copying ahead

    def _copy_ahead(self) -> None:
        """Copy units while nobody has asked for them, as far as there is room. Ends when none is left."""
        while (unit := self._next_to_copy()) is not None:
            try:
                update = self._updates.get(unit)
                if update is not None:
                    update.result()
                planes = self._store.units[unit]
                if planes.resident:
                    self._copy_ended(unit, self._copy_of(planes))
                else:
                    self._copy_piece(unit, 0, planes.layout.numel)
                    self._copy_ended(unit)
            except BaseException as error:  # noqa: BLE001  the save ends with it
                self._copy_failed(unit, error)
                return

    def _next_to_copy(self) -> str | None:
        """Claim the first unit that nobody has touched, when there is room for it. None when there is none left."""
        with self._changed:
            while not self._cancelled:
                pending = [name for name, state in self._states.items() if state is UnitState.PENDING]
                if not pending:
                    return None
                name = next((n for n in pending if self._store.units[n].resident), pending[0])
                if self._may_pass(name) and self._begin_copy(name):
                    return name
                self._changed.wait()
            return None

    # ---------------------------------------------------------------- the writer's side

    def _run(self) -> None:
        try:
            self._read_back_s = write_planned(self.plan, self._units(), self._count)
            self._then(self.progress())
        except BaseException as error:  # noqa: BLE001  whoever asks for the result gets it, whatever it is
            self._error = error
        self._seconds = time.perf_counter() - self._started
        with self._changed:
            # Whatever was not written will not be: updates need not wait any more.
            self._states = dict.fromkeys(self._states, UnitState.DONE)
            self._copies.clear()
            self._changed.notify_all()
        self._ahead.join()  # it may be in the middle of a unit; whoever waits for the save may close the reader
        self._memory.give_back()
        self._error = self._copy_error or self._error

    def _count(self, count: int) -> None:
        self._written_bytes += count
        if self._cancelled:
            raise SaveCancelled(f"{self.directory}: given up")

    def _units(self) -> Iterator[tuple[Unit, UnitPlanes]]:
        """Units as they can be had, each at rest until the next one is asked for."""
        by_name = {unit.name: unit for unit in self.plan.units}
        while (name := self._next()) is not None:
            if self._states[name] is UnitState.COPIED:
                yield by_name[name], self._copies[name]
            else:
                yield by_name[name], self._at_rest(name)
            self._written(name)

    def _next(self) -> str | None:
        """Take the next unit: a copy if there is one, else the first that nobody has touched. None when all are written."""
        with self._changed:
            while True:
                if self._cancelled:
                    raise SaveCancelled(f"{self.directory}: given up")
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
        """The planes of a unit that is WRITING, behind its update of the saved step."""
        update = self._updates.get(name)
        if update is not None:
            update.result()
        planes = self._store.units[name]
        if not planes.resident:
            return planes
        copy = self._copy_of(planes)
        with self._changed:
            self._states[name] = UnitState.DONE  # what is written is the copy
            self._changed.notify_all()
        return copy

    def _copy_of(self, planes: UnitPlanes) -> UnitPlanes:
        """A copy of a resident unit on the host. Its planes must be at rest."""
        copy = self._empty_copy(planes)
        source = planes.state()
        for kind, plane in self._saved(copy).items():
            self._reader.read(plane, source[kind])
        return copy

    def _empty_copy(self, planes: UnitPlanes) -> UnitPlanes:
        """Memory for a copy of what is saved of a unit."""
        copies = {kind: self._memory.like(plane) for kind, plane in self._saved(planes).items()}
        return UnitPlanes.of(planes.name, planes.layout, copies)

    def _saved(self, planes: UnitPlanes) -> dict[str, torch.Tensor]:
        """The planes of a unit that are written, by kind."""
        left_out = planes.states if self.plan.weights_only else {}
        return {kind: plane for kind, plane in planes.state().items() if kind not in left_out}

    def _size_of(self, planes: UnitPlanes) -> int:
        return sum(plane.nbytes for plane in self._saved(planes).values())

    def _written(self, name: str) -> None:
        with self._changed:
            if self._copies.pop(name, None) is not None:
                self._room_taken -= self._size_of(self._store.units[name])
            self._states[name] = UnitState.DONE
            self._changed.notify_all()


def default_buffer_bytes(store: HostStore, ready_bytes: int = 0) -> int:
    """Room for copies where nothing is asked for: all of the state, as far as half of the host memory that nobody uses now
    goes, and two units of the largest kind at least. `ready_bytes` are in use, for copies."""
    sizes = [_state_bytes(planes) for planes in store.units.values()]
    return max(2 * max(sizes), min(sum(sizes), (available_host_bytes() + ready_bytes) // 2))


def sizes_of_copies(store: HostStore, buffer_bytes: int) -> list[int]:
    """Sizes of the planes that a save will copy within `buffer_bytes` [bytes], in the order in which it does: units on the
    device first."""
    units = sorted(store.units.values(), key=lambda planes: not planes.resident)
    sizes: list[int] = []
    for planes in units:
        of_unit = [plane.nbytes for plane in planes.state().values()]
        if sum(sizes) + sum(of_unit) > buffer_bytes:
            break
        sizes += of_unit
    return sizes


def explain(error: BaseException) -> UserError:
    """The error of a save for the person whose run it belongs to."""
    if isinstance(error, UserError):
        return error
    return Aftermath(f"the checkpoint could not be saved: {type(error).__name__}: {error}")


def _state_bytes(planes: UnitPlanes) -> int:
    return sum(plane.nbytes for plane in planes.state().values())
