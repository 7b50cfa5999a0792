"""A thread per rank that notices when ranks hang or die, saves the stacks of all of them, and ends the process.

[Note: a hang]
A rank that waits for another one waits in a collective, in C++, where no Python signal handler runs and no exception arrives.
So a thread watches: each section of the work (start, a step, a save) has a limit. A rank whose section expires writes the
stacks of all its threads to RUN/hangs/ATTEMPT/rank-00003.txt and creates the file `expired` beside it; every rank that finds
that file writes its stacks, too. After `GRACE_S` they all end with `EXIT_HANG`. A rank that wrote nothing (a frozen process) is
killed by its neighbours on the host, because torchrun would wait half a minute for it before it restarts all. A rank whose
neighbour on the host is gone does the same at once: NCCL would wait for the dead one.

A process that was stopped itself for a while (SIGSTOP, a suspended machine) is credited that time before it blames another.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import torch.distributed as dist

EXIT_HANG = 75
"""Exit code that means "try again". torchrun does, as long as it has restarts left."""
GRACE_S = 5.0
"""How long a rank that has written its stacks waits for those of the others."""
TICK_S = 0.25
FOLDER = "hangs"


class Section(NamedTuple):
    """A part of the main thread's work."""

    name: str  # `step 12`
    since: float  # seconds of `time.monotonic`
    limit_s: float | None  # None: only the sections around it have one
    key: str  # config key of the limit


class Watchdog:
    """Watches this rank. Construction is collective; use as a context manager.

    Args:
        folder: The run's folder, on a file system that all ranks see.
        limits: Kind of section -> seconds; None: no limit.
        end: Ends the process; tests replace it.
    """

    def __init__(
        self, folder: Path, limits: Mapping[str, float | None], end: Callable[[int], object] = os._exit
    ) -> None:
        self._limits, self._end = dict(limits), end
        self._rank = dist.get_rank()
        self._ranks: list[tuple[str, int, str]] = [("", 0, "")] * dist.get_world_size()
        dist.all_gather_object(self._ranks, (socket.gethostname(), os.getpid(), uuid.uuid4().hex[:8]))
        self.folder = folder / FOLDER / self._ranks[0][2]
        self._sections: list[Section] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()

    @contextlib.contextmanager
    def section(self, kind: str, name: str | None = None) -> Iterator[None]:
        """Watch the block as a section called `name`, with the limit of `kind` if that has one. Sections nest."""
        entry = Section(name or kind, time.monotonic(), self._limits.get(kind), f"watchdog.{kind}_s")
        with self._lock:
            self._sections.append(entry)
        try:
            yield
        finally:
            with self._lock:
                self._sections.pop()

    @contextlib.contextmanager
    def ending_after_errors(self) -> Iterator[None]:
        """After an error inside, other ranks may end before this one: it mostly hits all of them."""
        try:
            yield
        except BaseException:
            self._ending = True
            raise

    def neighbours_may_end(self) -> None:
        """Exits of other ranks are normal from now on. Call before the last collective."""
        self._ending = True

    # ---------------------------------------------------------------- the thread

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            if now - last > TICK_S + 1.0:
                self._credit(now - last)
            last = now
            reason = self._expired(now) or self._neighbour_gone() or self._others_expired()
            if reason is not None:
                self._give_up(reason)
                return

    def _credit(self, seconds: float) -> None:
        with self._lock:
            self._sections = [s._replace(since=s.since + seconds) for s in self._sections]

    def _expired(self, now: float) -> str | None:
        with self._lock:
            for s in self._sections:
                if s.limit_s is not None and now - s.since > s.limit_s:
                    return f"{self._where()} has taken more than {s.limit_s:g} s ({s.key})"
        return None

    def _where(self) -> str:
        return " > ".join(s.name for s in self._sections) or "between two sections"

    def _neighbour_gone(self) -> str | None:
        host = self._ranks[self._rank][0]
        for rank, (other, pid, _) in enumerate(self._ranks):
            if other == host and rank != self._rank and not self._ending and not psutil.pid_exists(pid):
                return f"rank {rank} (process {pid}) is gone"
        return None

    def _others_expired(self) -> str | None:
        flag = self.folder / "expired"
        return f"asked by {flag}" if flag.exists() else None

    def _give_up(self, reason: str) -> None:
        try:
            self._write_stacks(reason)
            silent = self._wait_for_others()
            self._report(reason, silent)
        finally:
            # Even if the disk fails: this process is of no use any more.
            self._end(EXIT_HANG)

    def _write_stacks(self, reason: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        host, pid, _ = self._ranks[self._rank]
        temporary = self.folder / f"rank-{self._rank:05d}.new"
        with temporary.open("w") as file:
            with self._lock:
                file.write(f"rank {self._rank}, process {pid} on {host}: {reason}\n")
                for s in self._sections:
                    file.write(f"  in {s.name} for {time.monotonic() - s.since:.1f} s\n")
            file.write("\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        temporary.rename(self._file(self._rank))
        (self.folder / "expired").touch()

    def _wait_for_others(self) -> list[int]:
        """Wait for the stacks of all ranks; kill the ranks of this host that wrote none. Returns the ranks without stacks."""
        deadline = time.monotonic() + GRACE_S
        silent = list(range(len(self._ranks)))
        host = self._ranks[self._rank][0]
        while True:
            silent = [r for r in silent if not self._file(r).exists()]
            waiting = [r for r in silent if self._ranks[r][0] != host or psutil.pid_exists(self._ranks[r][1])]
            if not waiting or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for rank in silent:
            other, pid, _ = self._ranks[rank]
            if other == host:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        return silent

    def _report(self, reason: str, silent: list[int]) -> None:
        # Directly to standard error: the main thread may hang while it holds the logger's lock.
        without = f", none of rank {', '.join(map(str, silent))}, which did not react" if silent else ""
        os.write(
            sys.__stderr__.fileno() if sys.__stderr__ else 2,
            f"rank {self._rank}: {reason}; stacks in {self.folder}{without}; ending with code {EXIT_HANG}\n".encode(),
        )

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.txt"
