"""The folder of a run: its files, its lock, and the checkpoint that a run resumes from.

    config.yaml              the whole config, defaults filled in
    metrics.jsonl            one record per step (metrics/record.py)
    log.txt, loss.png        for reading
    checkpoints/step_000100/ complete checkpoints (checkpoint/)
    checkpoints/latest       name of the newest one, written after it was read back whole
    weights/step_000100/     weights alone, to evaluate or publish (checkpoint.weights_every_steps)
    lock                     held by the process that trains here
    save, stop               touch one of these: the run saves, or saves and ends, after the step in progress
    aside/                   checkpoints made obsolete by a resume from an older one

A run never starts in a folder that holds anything: it resumes there, or chooses another place. Nothing is removed except
checkpoints that this run wrote, and those only when a newer one is complete.

[Note: the lock of a run]
The lock is the system's (flock), so it ends with its process however that ends. The file says who holds it. It is removed at an
orderly end; one that a killed process left is free. Commands that only read a run ignore it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from megatrain.checkpoint.files import leftover_bytes, remove_folder, remove_leftovers
from megatrain.checkpoint.format import MARKER_FILE, read_manifest
from megatrain.checkpoint.reader import is_complete, latest_complete
from megatrain.config.load import dump_config
from megatrain.config.schema import RunConfig
from megatrain.errors import MegatrainError, UserError, WriteFailed, writing
from megatrain.metrics.logger import RunLogger
from megatrain.run.signals import Stopped

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
_STEP_NAME = re.compile(r"step_(\d{6,})")


class RunLock:
    """Holds the lock of a run's folder while it is open. See [Note: the lock of a run].

    Folders that it had to create are removed at the end if nothing came into them.

    Args:
        folder: The run's folder; it need not exist.
        wait_s: How long to wait for the holder to end.
    """

    def __init__(self, folder: Path, wait_s: float = 0.0):
        self._folder, self._path = folder, folder / LOCK_NAME
        # a holder that ends between our opening and locking of its file makes one attempt fail: there is always a second one
        timeout_s = max(wait_s, 0.5)
        self._lock = FileLock(
            self._path, timeout=timeout_s, poll_interval=0.2, fallback_to_soft=False, on_acquired=self._sign
        )
        self._made: list[Path] = []

    def __enter__(self) -> RunLock:
        """Take the lock; a warning where the file system has none.

        Raises:
            UserError: Another process holds it; or a file of the folder is a link, through which the run would write elsewhere.
        """
        _refuse_links(self._folder)
        missing = [path for path in (self._folder, *self._folder.parents) if not path.exists()]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            return self  # a path that cannot be a folder: preflight reports it among all other problems
        self._made = missing
        try:
            self._lock.acquire()
        except Timeout:
            self._remove_made()
            raise UserError(
                f"is being trained by {self._holder()}",
                str(self._folder),
                "wait for it, or end it first (touch RUN/stop saves and ends it); `megatrain monitor RUN` shows it",
            ) from None
        except OSError as error:
            self._path.unlink(missing_ok=True)
            logger.warning("%s: cannot be locked (%s): a second process could train here", self._path, error.strerror)
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock.is_locked:
            self._path.unlink(missing_ok=True)  # while it is locked: nobody else can have taken it yet
            self._lock.release()
        self._remove_made()

    def _sign(self, file: int) -> None:
        since = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        words = json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since})
        try:
            os.ftruncate(file, 0)
            os.pwrite(file, words.encode() + b"\n", 0)
        except OSError as error:  # on a full disk the lock holds all the same
            logger.warning("%s: cannot be written: %s", self._path, error.strerror)

    def _holder(self) -> str:
        try:
            found = json.loads(self._path.read_text())
            return f"process {found['process']} on {found['host']} since {found['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"  # between locking and signing, or on a full disk

    def _remove_made(self) -> None:
        for path in self._made:
            try:
                path.rmdir()
            except OSError:  # not empty: the run has begun
                break
        self._made = []


class RunFolder:
    """Paths of a run's folder and changes in it. Constructing it touches nothing.

    Args:
        path: The folder.
        read_only: Ignore all changes, on ranks that do not write.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False):
        self.path, self._read_only = Path(path), read_only
        self.config = self.path / "config.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.plot = self.path / "loss.png"
        self.checkpoints = self.path / "checkpoints"
        self.aside = self.path / "aside"
        self.weights = self.path / "weights"

    def open(self, run: RunConfig, log: RunLogger) -> None:
        """Create the folder, or take it over from a process that has ended; from now on `log` writes into it.

        Raises:
            UserError: It cannot be created.
            WriteFailed: The system refuses a write.
        """
        if self._read_only:
            return
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"cannot be created: {error.strerror}"
            raise UserError(what, str(self.path), "set run.dir to another place") from None
        if (
            not self.config.exists()
        ):  # it marks the folder as a run's, so it comes first: making the engine may take long
            self.write_config(run)
        log.open_folder(self.path)
        self.tidy()
        for request in ("save", "stop"):
            if self.taken(request):
                log.info(f"{self.path / request}: from before the start, removed")

    def write_config(self, run: RunConfig) -> None:
        """Write `config.yaml`, which marks the folder as a run's.

        Raises:
            WriteFailed: The system refuses it.
        """
        if not self._read_only:
            replace_text(self.config, dump_config(run))

    def checkpoint(self, step: int) -> Path:
        """Where the checkpoint of a step is, or will be."""
        return self.checkpoints / f"step_{step:06d}"

    def tidy(self) -> None:
        """Remove what a killed process was writing or removing, and its mark on what it had just completed."""
        for parent in (self.checkpoints, self.weights):
            if parent.is_dir():
                remove_leftovers(parent)
                for path in self._step_folders(parent):
                    if is_complete(path):
                        (path / MARKER_FILE).unlink(missing_ok=True)

    def taken(self, signal: str) -> bool:
        """Whether the file `save` or `stop` is there; it is removed, so that it counts once."""
        if self._read_only:
            return False
        try:
            (self.path / signal).unlink()
        except OSError:  # mostly because it is not there; one that cannot be removed would be a request at every step
            return False
        return True

    def resume_point(self, resume: str | None) -> Path | None:
        """The checkpoint that the run starts from; None for a run from the beginning.

        Args:
            resume: None: the folder must be empty or missing. "auto": the newest complete checkpoint, or the beginning if
                there is none. "latest": the newest complete checkpoint. Anything else: a checkpoint's path.

        Raises:
            UserError: The folder is not free, or there is nothing to resume from.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UserError("is a file, not a folder", str(self.path), "set run.dir to another place")
        used = self.path.is_dir() and any(path.name != LOCK_NAME for path in self.path.iterdir())
        if resume is None:
            if used:
                raise UserError(
                    "is not empty",
                    f"run.dir {self.path}",
                    "set run.dir to a new folder, or resume the run in it: --resume auto",
                )
            return None
        if used and not self.config.is_file() and self._was_begun():
            logger.info("%s: left by a start that ended before the run began; starting", self.path)
            used = False
        if used and not self.config.is_file():
            raise UserError(
                "holds files but no run (no config.yaml)", f"run.dir {self.path}", "set run.dir to a new folder"
            )
        if resume in ("auto", "latest"):
            newest = latest_complete(self.checkpoints)
            if newest is None and resume == "latest":
                raise UserError(
                    "there is no complete checkpoint to resume from",
                    str(self.checkpoints),
                    "start from the beginning: leave --resume out, or use --resume auto",
                )
            return newest
        return self._chosen(Path(resume), used)

    def _was_begun(self) -> bool:
        """Whether the folder holds only what a start leaves that was killed before it wrote the config."""
        own = {self.checkpoints.name, self.config.name + ".new", LOCK_NAME}
        inside = {path.name for path in self.path.iterdir()}
        return inside <= own and not (self.checkpoints.is_dir() and any(self.checkpoints.iterdir()))

    def _chosen(self, chosen: Path, used: bool) -> Path:
        try:
            read_manifest(chosen)
        except UserError as error:
            there = "no such checkpoint folder"
            if chosen.is_dir():
                place = "" if error.where is None or error.where == str(chosen) else f"{error.where}: "
                there = (
                    error.what
                    if "is not a complete" in error.what
                    else f"is not a complete checkpoint: {place}{error.what}"
                )
            newest = latest_complete(chosen / "checkpoints") if (chosen / "checkpoints").is_dir() else None
            remedy = (
                f"its newest is {newest}" if newest is not None else "give a folder like RUN/checkpoints/step_000100"
            )
            raise UserError(there, f"--resume {chosen}", remedy) from error
        if used and chosen.resolve().parent != self.checkpoints.resolve():
            raise UserError(
                f"holds another run than {chosen}",
                f"run.dir {self.path}",
                "set run.dir to a new folder to continue from that checkpoint there",
            )
        return chosen

    def set_aside(self, after_step: int) -> None:
        """Move checkpoints of steps after `after_step` to `aside`: they belong to another history.

        Raises:
            WriteFailed: The system refuses it.
        """
        if self._read_only:
            return
        for path in [*self._step_folders(self.checkpoints), *self._step_folders(self.weights)]:
            if _step_of(path) > after_step:
                kind = "weights_" if path.parent == self.weights else ""
                with writing(self.aside):
                    self.aside.mkdir(exist_ok=True)
                    target = _free_name(self.aside / (kind + path.name))
                    path.rename(target)
                logger.warning(
                    "%s: newer than step %d, which the run resumes from; moved to %s", path, after_step, target
                )

    def mark_latest(self, path: Path) -> None:
        """Let `latest` name a checkpoint; call when it is complete.

        Raises:
            WriteFailed: The system refuses it; `latest` is unchanged.
        """
        if self._read_only:
            return
        temporary = self.checkpoints / "latest.new"
        with writing(self.checkpoints / "latest"):
            with temporary.open("w", encoding="utf-8") as file:
                file.write(path.name + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.checkpoints / "latest")

    def remove_old_checkpoints(self, keep: int | None, keep_every: int | None = None) -> None:
        """Remove complete checkpoints except the newest `keep`. Incomplete ones do not count.

        Args:
            keep: None keeps all.
            keep_every: Checkpoints of every N-th step are kept as well.
        """
        if keep is None or self._read_only:
            return
        # A link is the user's own: to remove what it leads to could be a surprise.
        for path in [path for path in self._complete() if not path.is_symlink()][:-keep]:
            if keep_every is None or _step_of(path) % keep_every:
                remove_folder(path)
                logger.info("removed %s (checkpoint.keep: %d)", path, keep)

    def complete_steps(self) -> list[int]:
        """Steps of the complete checkpoints, in order."""
        return [_step_of(path) for path in self._complete()]

    def bytes_there(self, steps: Collection[int]) -> int:
        """Bytes of the checkpoints of some steps and of the run's small files, and of what `tidy` will remove."""
        own = [self.config, self.metrics, self.plot, self.checkpoints / "latest"]
        own += [self.path / name for name in ("log.txt", LOCK_NAME)]
        for step in steps:
            own += self.checkpoint(step).rglob("*")
        left = leftover_bytes(self.checkpoints) + leftover_bytes(self.weights)
        return left + sum(file.lstat().st_size for file in own if file.is_file())

    def _complete(self) -> list[Path]:
        return [path for path in self._step_folders(self.checkpoints) if is_complete(path)]

    def _step_folders(self, parent: Path) -> list[Path]:
        if not parent.is_dir():
            return []
        found = [path for path in parent.iterdir() if _STEP_NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_step_of)


@contextmanager
def errors_into_log(log: RunLogger, folder: RunFolder) -> Iterator[None]:
    """Write the error that ends a run into its log, with a traceback if it is unexpected."""
    try:
        yield
    except WriteFailed as failed:
        newest = latest_complete(folder.checkpoints)
        resume = f"from {newest} with --resume auto" if newest else "with --resume auto: nothing was saved yet"
        error = WriteFailed(failed.what, failed.where, f"{failed.remedy}, then resume {resume}")
        log.to_file(f"error: {error}")
        raise error from None
    except KeyboardInterrupt:
        newest = latest_complete(folder.checkpoints)
        resume = f"resume from {newest.name} with" if newest else "nothing was saved yet, start again with"
        text = f"interrupted; {resume} --resume auto"
        log.to_file(text)
        raise KeyboardInterrupt(text) from None
    except Stopped:
        raise  # a request, and no error
    except MegatrainError as error:
        log.to_file(f"error: {error}")
        raise
    except BaseException as error:
        log.to_file(f"error: {type(error).__name__}: {error}", error)
        raise


def _refuse_links(folder: Path) -> None:
    """Raise if a file that a run writes is a symbolic link. `checkpoints` itself may be one, to a larger disk."""
    written = ("config.yaml", "metrics.jsonl", "loss.png", "checkpoints/latest")
    for name in (LOCK_NAME, "log.txt", *written, *(f"{name}.new" for name in written)):
        if (folder / name).is_symlink():
            what = f"is a symbolic link, and the run would write to {(folder / name).readlink()}"
            raise UserError(what, str(folder / name), "remove the link, or set run.dir to another place")


def _step_of(path: Path) -> int:
    match = _STEP_NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def _free_name(path: Path) -> Path:
    free, number = path, 1
    while free.exists():
        number += 1
        free = path.with_name(f"{path.name}_{number}")
    return free


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically.

    Raises:
        WriteFailed: The system refuses it.
    """
    with writing(path):
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def nearest_existing(path: Path) -> Path:
    """The path, or the nearest folder above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
