"""A save that runs in a thread while training continues, and writes the state of one step.

`AsyncSave` is the same for both engines: the thread, its progress, cancellation and result. A `SaveSource` says what is
written: `HostPlanes` (host_planes.py) the planes of a host store; `HostShards` (host_shards.py) and `ShardedState`
(engine/mesh/saving.py) units that are gathered from all ranks. `CheckpointManager` (manager.py) starts saves and reports their
errors.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatrain.errors import Aftermath, MegatrainError, UserError


class SaveCancelled(MegatrainError):
    """The save was cancelled; nothing of it is left."""


@dataclass(frozen=True)
class SaveProgress:
    """How far a save is.

    Attributes:
        written_bytes: Bytes written so far, by all processes.
        total_bytes: Upper bound of the checkpoint's size, which the disk was checked for.
        seconds: Time since the save began.
        waited_s: Time for which the save has held up training: updates waited for the writer, or steps for copies.
        copied_bytes: Bytes copied to staging buffers so that training could change the state before it was written.
        read_back_s: The part of `seconds` spent on reading the files back; 0 until the end.
    """

    written_bytes: int
    total_bytes: int
    seconds: float
    waited_s: float
    copied_bytes: int
    read_back_s: float

    @property
    def bytes_per_s(self) -> float:
        """Write rate, without reading back."""
        return self.written_bytes / max(self.seconds - self.read_back_s, 1e-9)

    @property
    def left_s(self) -> float:
        """Estimated time until everything is written, at the rate so far."""
        return max(0, self.total_bytes - self.written_bytes) / max(self.bytes_per_s, 1e-9)


class SaveHandle(Protocol):
    """A save as its caller sees it.

    `done` says whether it has ended, successfully or not. `wait` blocks until then; so does `result`, which raises UserError
    if the save failed (nothing of it is left, older checkpoints are untouched), SaveCancelled, or TimeoutError. `cancel`
    returns when the save's files are removed.
    """

    def done(self) -> bool: ...

    def wait(self) -> None: ...

    def progress(self) -> SaveProgress: ...

    def result(self, timeout_s: float | None = None) -> SaveProgress: ...

    def cancel(self) -> None: ...


class SaveSource(ABC):
    """What one save writes. Used for that save alone.

    Args:
        directory: The folder to make.
        total_bytes: Upper bound of the checkpoint's size; 0 if this process does not know it.

    Attributes:
        cancelled: Whether `cancel` was called.
        written_bytes: Bytes written by this process.
        waited_s, copied_bytes, read_back_s: See `SaveProgress`.
    """

    cancel_timeout_s: float | None = None
    """The longest that a caller of `AsyncSave.cancel` waits for the thread; None: until it has ended."""

    def __init__(self, directory: Path, total_bytes: int):
        self.directory, self.total_bytes = directory, total_bytes
        self.started = time.perf_counter()
        self.cancelled = False
        self.written_bytes = self.copied_bytes = 0
        self.waited_s = self.read_back_s = 0.0

    @abstractmethod
    def write(self) -> None:
        """Write the checkpoint. Returns when it is synced to disk, was read back and has its name. Runs in the save's thread."""

    def close(self) -> None:  # noqa: B027  optional
        """Free what the save held and release its waiters. Called after `write` in the save's thread, even if it failed."""

    def wait_until_copied(self) -> None:  # noqa: B027  optional
        """Block until training may change the live state."""

    def cancel(self) -> None:
        """Make `write` raise SaveCancelled soon. Does not block."""
        self.cancelled = True

    def check_cancelled(self) -> None:
        if self.cancelled:
            raise SaveCancelled(f"{self.directory}: cancelled")

    def count(self, size: int) -> None:
        """Note that `size` more bytes were written. Raises SaveCancelled if the save was cancelled."""
        self.written_bytes += size
        self.check_cancelled()

    def written_by_all(self, ended: bool) -> int:
        """Bytes written by all processes; an estimate until the save has ended."""
        return self.written_bytes


class AsyncSave:
    """Writes a source in a thread. Implements `SaveHandle`.

    Construction returns when training may change the live state.

    Args:
        source: What to write.
        then: Called in the thread when the checkpoint is complete and was read back; its errors are the save's.
    """

    def __init__(self, source: SaveSource, then: Callable[[SaveProgress], object] = lambda progress: None):
        self._source, self._then = source, then
        self._error: BaseException | None = None
        self._reported = False  # whether `result` has raised the error
        self._seconds = 0.0
        # A daemon, so that a process that must end does not wait for a disk that hangs. `result` and the engine's close wait.
        self._thread = threading.Thread(target=self._run, name="checkpoint-save", daemon=True)
        self._thread.start()
        source.wait_until_copied()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def progress(self) -> SaveProgress:
        source, ended = self._source, self.done()
        return SaveProgress(
            source.written_by_all(ended),
            source.total_bytes,
            self._seconds if ended else time.perf_counter() - source.started,
            source.waited_s,
            source.copied_bytes,
            source.read_back_s,
        )

    def result(self, timeout_s: float | None = None) -> SaveProgress:
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._source.directory} is still being written after {timeout_s} s")
        self._reported = True
        if isinstance(self._error, SaveCancelled):
            raise self._error
        if self._error is not None:
            raise explain(self._error)
        return self.progress()

    def wait(self) -> None:
        self._thread.join()

    def cancel(self) -> None:
        self._source.cancel()
        self._thread.join(self._source.cancel_timeout_s)

    def unreported_failure(self) -> UserError | None:
        """Why the save failed, if it has ended so and `result` has not raised it. A cancelled save has not failed."""
        if not self.done() or self._reported or self._error is None or isinstance(self._error, SaveCancelled):
            return None
        return explain(self._error)

    def _run(self) -> None:
        try:
            self._source.write()
            self._then(self.progress())
        except BaseException as error:  # noqa: BLE001  `result` or the manager raises it
            self._error = error
        self._seconds = time.perf_counter() - self._source.started
        self._source.close()


def explain(error: BaseException) -> UserError:
    """The error of a save as a UserError; one that nobody foresaw becomes its cause."""
    if isinstance(error, UserError):
        return error
    explained = Aftermath(f"the checkpoint could not be saved: {type(error).__name__}: {error}")
    explained.__cause__ = error
    return explained
