"""Stopping a run from outside: SIGINT and SIGTERM, or a request by name.

The first signal asks: the step in progress is finished, a checkpoint is written, the exit code is 0. The second insists:
KeyboardInterrupt is raised where the program is. The third ends the process at once, for code that hangs.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

INTERRUPTED = 130  # exit code


class StopSignals:
    """While open, signals set `requested` instead of ending the process. Outside the main thread it does nothing."""

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

    def request(self, name: str) -> None:
        """Ask as the first signal does, unless somebody has asked already."""
        self.requested = self.requested or name

    def __bool__(self) -> bool:
        return self.requested is not None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._count += 1
        name = signal.Signals(number).name
        if self._count == 1:
            self.requested = name
            # a handler runs between two bytecodes of the main thread: logging would deadlock on a lock that it holds
            _write(f"\n{name}: the step is finished and saved before the run ends; once more to stop now\n")
        elif self._count == 2:
            raise KeyboardInterrupt
        else:
            os._exit(INTERRUPTED)


def is_signal(name: str | None) -> bool:
    """Whether what asked for the end was a signal to this process: then one more insists."""
    return name in (signal.SIGINT.name, signal.SIGTERM.name)


def _write(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        pass  # nobody reads standard error any more; the run still ends in order
