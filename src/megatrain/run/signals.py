"""Requests to a run from outside: to stop (signals, RUN/stop, low host memory, alerts) and to save (RUN/save, alerts).

The first signal asks: the step in progress is finished, a checkpoint is written, the exit code is 0. The second insists:
KeyboardInterrupt is raised where the program is. The third ends the process at once, for code that hangs.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatrain.run.coordinator import Coordinator
    from megatrain.run.folder import RunFolder

INTERRUPTED = 130  # exit code


class StopSignals:
    """While open, SIGINT and SIGTERM set `requested` instead of ending the process. Does nothing outside the main thread."""

    def __init__(self) -> None:
        self.requested: str | None = None  # name of the first signal
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        name = signal.Signals(number).name
        if self._count == 1:
            self.requested = name
            # a handler runs between two bytecodes of the main thread: logging would deadlock on a lock that it holds
            _write(f"\n{name}: finishing the step, then saving; signal again to stop now\n")
        elif self._count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(INTERRUPTED)


class Requests:
    """Requests to stop or to save a run, from any rank; every rank sees the same ones.

    Args:
        signals: Signals to this process.
        folder: The run's folder, where the files `stop` and `save` are looked for.
        coordinator: The ranks that agree.

    Attributes:
        stop: What asked the run to end, as of the latest `poll`; None if nothing has.
    """

    def __init__(self, signals: StopSignals, folder: RunFolder, coordinator: Coordinator):
        self._signals, self._folder, self._coordinator = signals, folder, coordinator
        self.stop: str | None = None
        self._save = False
        self._stop_here: str | None = None
        self._save_here = False

    def request_stop(self, by: str) -> None:
        """Ask for the run to end as the first signal does. From any thread; ranks agree at the next `poll`."""
        self._stop_here = self._stop_here or by

    def request_save(self) -> None:
        """Ask for a checkpoint; ranks agree at the next `poll`."""
        self._save_here = True

    def poll(self, *, files: bool = True) -> bool:
        """Collect the requests of all ranks; returns whether the run is to end. Collective.

        Args:
            files: False before the folder is opened: files of an earlier process do not count.
        """
        if files and self._folder.taken("stop"):
            self.request_stop(f"the file {self._folder.path / 'stop'}")
        if files and self._folder.taken("save"):
            self.request_save()
        here = self._signals.requested or self._stop_here
        stop, save = self._coordinator.any(here is not None, self._save_here)
        self._save, self._save_here = self._save or save, False
        if stop and self.stop is None:
            self.stop = here or "a request to another rank"
        return self.stop is not None

    def take_save(self) -> bool:
        """Whether a checkpoint was asked for; the answer is given once."""
        found, self._save = self._save, False
        return found

    @property
    def stopped_by_signal(self) -> bool:
        """Whether a signal to this process asked for the end: then one more insists."""
        return self.stop is not None and self.stop == self._signals.requested


def _write(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        pass  # nobody reads standard error any more; the run still ends in order
