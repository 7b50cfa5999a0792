"""Requests to a run from outside: to stop (signals, RUN/stop, low host memory, alerts) and to save (signals, RUN/save, alerts).

[Note: signals of a run]
SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGXCPU ask: the step in progress is finished, a checkpoint is written, the exit code is 0.
SIGHUP comes when a terminal closes, SIGUSR1 and SIGXCPU some minutes before a batch system ends a job. SIGUSR2 saves and training
continues. Only SIGINT and SIGTERM insist: the second of them raises KeyboardInterrupt where the program is; the third ends the
process at once, for code that hangs. A SIGTERM after a SIGUSR1 is the batch system's usual second word, and aborts no save.
A SIGHUP that is ignored (nohup) stays ignored.

Until the first step of a process has been taken there is nothing to save. Then the first signal ends the run at once, by raising
`Stopped` where the program is: it may be tokenizing, reading weights or compiling, which can take many minutes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from megatrain.run.coordinator import Coordinator
    from megatrain.run.folder import RunFolder

INTERRUPTED = 130  # exit code
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
SAVING = (signal.SIGUSR2,)
INSISTING = (signal.SIGINT, signal.SIGTERM)
AGAIN_S = 0.02


class Interrupter:
    """Raises an exception out of a signal handler, where the main thread is, and again if Python drops it.

    A handler that runs inside a finalizer or a weak reference's callback raises in vain: Python reports the exception and goes
    on. It happens to about one signal in ten while data is tokenized. Only for the main thread.
    """

    def __init__(self) -> None:
        self._raised: BaseException | None = None
        self._before: tuple[Any, Any] | None = None
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Interrupter:
        self._before = sys.unraisablehook, signal.signal(signal.SIGVTALRM, self._again)
        sys.unraisablehook = self._dropped
        return self

    def __exit__(self, *_: object) -> None:
        assert self._before is not None
        self._raised = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        sys.unraisablehook, alarm = self._before
        signal.signal(signal.SIGVTALRM, alarm)

    def interrupt(self, error: BaseException) -> NoReturn:
        """Raise `error`."""
        self._raised = error
        raise error

    def _dropped(self, dropped: sys.UnraisableHookArgs) -> None:
        if dropped.exc_value is None or dropped.exc_value is not self._raised:
            assert self._before is not None
            self._before[0](dropped)
            return
        # Not now, because this is still inside the callback; and not by one of the process's timers, which others may use.
        self._timer = threading.Timer(AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGVTALRM))
        self._timer.daemon = True
        self._timer.start()

    def _again(self, _number: int, _frame: FrameType | None) -> None:
        if self._raised is not None:
            raise self._raised


class Stopped(BaseException):
    """The run was asked to end before there was anything to save. Its text is the signal's name."""


class StopSignals:
    """While open, the signals of [Note: signals of a run] are requests. Does nothing outside the main thread.

    Args:
        echo_s: A signal that comes again within this time does not insist. torchrun passes on what its ranks got already from
            the terminal, or from the batch system.

    Attributes:
        requested: Name of the first signal that asked for the end; None if none did.
        nothing_to_save: Let the first signal raise `Stopped`.
    """

    def __init__(self, echo_s: float = 0.0) -> None:
        self.requested: str | None = None
        self.nothing_to_save = False
        self._echo_s, self._latest_s = echo_s, -1e9
        self._insisting = 0  # of the signals received
        self._save = False
        self._before: dict[signal.Signals, Any] = {}
        self._interrupter = Interrupter()

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._interrupter.__enter__()
            for number in (*STOPPING, *SAVING):
                if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._interrupter.__exit__()
        self._before = {}

    def take_save(self) -> bool:
        """Whether a signal has asked for a checkpoint; the answer is given once."""
        found, self._save = self._save, False
        return found

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number in SAVING:
            self._save = True
            return
        before_s, self._latest_s = self._latest_s, time.monotonic()
        insists = number in INSISTING and self._latest_s - before_s >= self._echo_s
        self._insisting += insists
        name = signal.Signals(number).name
        if self.requested is None:
            self.requested = name
            # a handler runs between two bytecodes of the main thread: logging would deadlock on a lock that it holds
            if self.nothing_to_save:
                _write(f"\n{name}: ending; there is nothing to save yet\n")
                self._interrupter.interrupt(Stopped(name))
            _write(f"\n{name}: finishing the step, then saving; {_how_to_insist(self._insisting)} to stop now\n")
        elif insists and self._insisting == 1:
            _write(f"\n{name}: ending already, by {self.requested}; {_how_to_insist(1)} to stop now\n")
        elif insists and self._insisting == 2:
            self._interrupter.interrupt(KeyboardInterrupt())
        elif insists:
            os._exit(INTERRUPTED)


def _how_to_insist(insisting: int) -> str:
    return "signal again" if insisting else "SIGTERM twice"


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """While open, SIGTERM and SIGHUP raise KeyboardInterrupt, as SIGINT does, so that a command cleans up before it ends.

    Does nothing outside the main thread. A signal that is ignored, or handled by somebody else, stays as it is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with Interrupter() as interrupter:

        def end(number: int, _frame: FrameType | None) -> None:
            interrupter.interrupt(KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}"))

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        ours = [n for n in numbers if signal.getsignal(n) in (signal.SIG_DFL, signal.default_int_handler)]
        before = {number: signal.signal(number, end) for number in ours}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


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
        if (files and self._folder.taken("save")) or self._signals.take_save():
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

    def something_to_save(self) -> None:
        """Tell the signals that a step has been taken: from now on they ask."""
        self._signals.nothing_to_save = False

    @property
    def stopped_by_signal(self) -> bool:
        """Whether SIGINT or SIGTERM to this process asked for the end: then one more insists."""
        names = [number.name for number in INSISTING]
        return self.stop in names and self.stop == self._signals.requested


def _write(text: str) -> None:
    try:
        os.write(2, text.encode())
    except OSError:
        pass  # nobody reads standard error any more; the run still ends in order
