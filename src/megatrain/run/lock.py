"""One process trains in a run's folder at a time: the lock that says so.

[Note: the lock of a run]
The lock is the system's (flock) on the file `lock` in the folder, so it ends with its process however that ends. The file says
for people who holds it. It is removed at an orderly end; one that a killed process left is nobody's, and the next start takes it.
Its name may be removed between opening and locking it, by the process that held it: what counts is the file that still has
the name. Commands that only read a run do not look at it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from datetime import datetime
from pathlib import Path

from megatrain.errors import UserError

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
_POLL_S = 0.2
_WITHOUT_LOCKS = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EINVAL, errno.EIO})
"""How file systems without locks, or whose lock service is away, answer."""


class RunLock:
    """Holds the lock of a run's folder while it is open. See [Note: the lock of a run].

    Folders that it had to make are removed at the end if nothing came into them.

    Args:
        folder: The run's folder; it need not exist.
        wait_s: How long a holder may take to end [s].
    """

    def __init__(self, folder: Path, wait_s: float = 0.0):
        self._folder, self._path, self._wait_s = folder, folder / LOCK_NAME, wait_s
        self._made: list[Path] = []
        self._file: int | None = None  # open, and locked, from `__enter__` to `__exit__`

    def __enter__(self) -> RunLock:
        """Take the lock. Where the file system has none, a warning.

        Raises:
            UserError: Another process holds it.
        """
        missing = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return self  # a path that cannot be a folder: the checks of the run say so, among all other problems
        self._made = missing
        try:
            self._file = self._locked()
        except UserError:
            self._remove_made()
            raise
        except OSError as error:
            logger.warning(
                "%s: cannot be locked (%s): nothing would stop a second process from training in this folder",
                self._path, error.strerror,
            )  # fmt: skip
        else:
            self._sign(self._file)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._path.unlink(missing_ok=True)  # while it is locked: nobody else can have taken it yet
            os.close(self._file)
            self._file = None
        self._remove_made()

    def _locked(self) -> int:
        deadline = time.monotonic() + self._wait_s
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_its_name(file):
                    return file
            except OSError as error:
                holder = _holder(file)
                if error.errno in _WITHOUT_LOCKS:
                    self._path.unlink(missing_ok=True)
                    os.close(file)
                    raise
                if time.monotonic() >= deadline:
                    os.close(file)
                    raise UserError(
                        f"is being trained by {holder}",
                        str(self._folder),
                        "let it go on, or end it first (touch RUN/stop saves and ends it); `megatrain monitor RUN` shows it",
                    ) from None
                time.sleep(_POLL_S)
            os.close(file)

    def _is_at_its_name(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), self._path.stat())
        except FileNotFoundError:
            return False

    def _sign(self, file: int) -> None:
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        words = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since})
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, words.encode() + b"\n", 0)
        except OSError as error:  # of a full disk: the lock holds all the same
            logger.warning("%s: cannot be written: %s", self._path, error.strerror)

    def _remove_made(self) -> None:
        for path in self._made:
            try:
                path.rmdir()
            except OSError:  # there is something in it: the run has begun
                break
        self._made = []


def _holder(file: int) -> str:
    try:
        found = json.loads(os.pread(file, 4096, 0))
        return f"process {found['process']} on {found['host']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"  # between locking and signing, or on a disk that was full
