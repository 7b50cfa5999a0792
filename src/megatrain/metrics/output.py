"""Standard output and standard error that may die: a pipe's reader ends, a disk behind a redirect is full, a terminal closes.

Training goes on without them, because log.txt has every line: `lasting_output`. The result of any other command is its
standard output: `checked_output` ends it with an error. In both cases what could not be written leaves Python's buffer, or its
flush at the end of the process would fail again. After an error that no later write can heal (the reader is gone) the
descriptor leads to /dev/null, for everything else that writes there. A full disk may have room again: the next line is tried.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Literal

from megatrain.errors import MegatrainError, WriteFailed

logger = logging.getLogger(__name__)

PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
"""Errors after which a later write may succeed."""
Name = Literal["stdout", "stderr"]
NAMES: dict[Name, str] = {"stdout": "standard output", "stderr": "standard error"}


class NoReader(MegatrainError):
    """The reader of standard output has ended, as in `megatrain data run.yaml | head`. Nobody needs to be told."""

    exit_code = 141  # as a shell reports SIGPIPE


class _Guarded(ABC):
    """A text stream whose errors are handled here."""

    def __init__(self, stream: Any, name: str):
        self.stream = stream.stream if isinstance(stream, _Guarded) else stream
        self._name = name

    def write(self, text: str) -> int:
        try:
            self.stream.write(text)
        except (OSError, ValueError) as error:  # ValueError: somebody has closed it
            self._drain(error)
            self.failed(error)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except (OSError, ValueError) as error:
            self._drain(error)
            self.failed(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @abstractmethod
    def failed(self, error: OSError | ValueError) -> None:
        """What could not be written is gone."""

    def _drain(self, error: OSError | ValueError) -> None:
        with suppress(OSError, ValueError):  # some streams have no descriptor
            descriptor = self.stream.fileno()
            kept, null = os.dup(descriptor), os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(null, descriptor)
                with suppress(OSError, ValueError):
                    self.stream.flush()
                if isinstance(error, OSError) and error.errno in PASSING:
                    os.dup2(kept, descriptor)
            finally:
                os.close(kept)
                os.close(null)


class LastingStream(_Guarded):
    """Its writes never fail. The first error is logged, as a warning."""

    _told = False

    def failed(self, error: OSError | ValueError) -> None:
        if self._told:
            return
        self._told = True
        text = "%s cannot be written (%s): training continues without it, log.txt has every line"
        # Not from here: the caller may hold the locks of the console or of the log, in an order that is not the logger's.
        threading.Thread(target=logger.warning, args=(text, self._name, _reason(error)), name="lost-output").start()


class CheckedStream(_Guarded):
    """Its errors are ours.

    Raises:
        NoReader: From every write, when the reader has ended.
        WriteFailed: It cannot be written for another reason.
    """

    def failed(self, error: OSError | ValueError) -> None:
        if isinstance(error, BrokenPipeError):
            raise NoReader from None
        raise WriteFailed(f"cannot be written: {_reason(error)}", self._name, "make room, or write elsewhere") from None


def _reason(error: OSError | ValueError) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


@contextmanager
def lasting_output(*names: Name) -> Iterator[None]:
    """While open, these of `sys.stdout` and `sys.stderr` (by default both) are `LastingStream`s."""
    with ExitStack() as stack:
        for name in names or tuple(NAMES):
            stack.enter_context(_replaced(name, LastingStream))
        yield


def checked_output() -> AbstractContextManager[None]:
    """While open, `sys.stdout` is a `CheckedStream`."""
    return _replaced("stdout", CheckedStream)


@contextmanager
def _replaced(name: Name, kind: type[_Guarded]) -> Iterator[None]:
    stream = getattr(sys, name)
    if stream is None or isinstance(stream, kind):
        yield
        return
    guarded = kind(stream, NAMES[name])
    setattr(sys, name, guarded)
    try:
        yield
        guarded.flush()
    except SystemExit:  # of --help, for example
        guarded.flush()
        raise
    finally:
        if getattr(sys, name) is guarded:
            setattr(sys, name, stream)


def open_standard_descriptors() -> None:
    """Open /dev/null where descriptor 0, 1 or 2 is closed (`2>&-`): a file of the run would get the number, and its messages."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
