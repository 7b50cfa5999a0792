"""Files with checksums, and folders that appear complete or not at all.

Safetensors files are written here and not by the safetensors library, which wants all tensors of a file at once, in memory of
their final type. A checkpoint's tensors come one at a time, and this writer checksums them on the way, syncs to disk while
it writes, reports progress, can be cancelled, and says which file the system refused.

[Note: life of a checkpoint folder]
A folder is written as `<name>.tmp-<pid>`, with a marker file in it that names the process that writes. Every file is
checksummed while it is written, and synced. Then follow: the manifest, a sync of the folder, reading every file back and
comparing it with its checksum, the rename to `<name>`, and the removal of the marker. So a folder under its own name is
complete, and was read from disk once as it was written. Every other folder is named `.tmp-<pid>` or lacks a valid manifest,
and readers ignore it. A writer that dies leaves only a temporary folder, which the next writer in the same place removes
once the process is gone. Removing a folder runs backwards: marked, renamed, emptied, and the marker last.

[Note: several writers]
On a file system that hosts share, processes of other hosts may write files into a folder that one process has made. Each of
them checksums, syncs and reads back its own files, and gives their records to the process that made the folder, which alone
writes the manifest, renames and removes. The marker names that process: once it is gone, nobody can finish the folder. A
writer of another host may outlive it for a moment, but makes no folder of that name again: a removed folder stays removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

import psutil
import torch

from megatrain.checkpoint.format import (
    MANIFEST_FILE,
    MARKER_FILE,
    PIECE_BYTES,
    FileRecord,
    canonical,
    damaged,
    damages,
    safetensors_header,
    tensor_bytes,
    tensor_crc32,
)
from megatrain.errors import UserError, WriteFailed
from megatrain.paths import open_regular, parse_json, read_limited, refuse_names, regular_file

logger = logging.getLogger(__name__)

CRC_THREADS = 4
"""zlib's CRC-32 runs at 1 to 3 GB/s, a tensor at a time: several tensors at once keep up with a fast disk."""
FLUSH_BYTES = 128 << 20
"""A file is synced after this many bytes, and again and again, while the rest is written: the disk does not wait for its end."""
MARKER_BYTES = 4096
"""Largest marker file."""
UNSYNCED = 3
"""Flushes and files that may wait for the disk while the next ones are written; bounds the dirty pages in the page cache."""


class FilesWriter:
    """Writes files into a folder that another writer has made; see [Note: several writers].

    A context manager. Every method raises WriteFailed, naming the file, if the system refuses a write.

    Args:
        temp: The folder's current path.
        target: Its final path, for errors.
        on_bytes: Called with the number of bytes after each piece written; what it raises ends the writing.
    """

    def __init__(self, temp: Path, target: Path, on_bytes: Callable[[int], None] = lambda count: None):
        self.temp, self.target, self.on_bytes = temp, target, on_bytes
        self.read_back_s = 0.0
        self.records: dict[str, FileRecord] = {}
        """The files that this process has written."""
        self._settled: set[str] = set()
        self._crc_threads = ThreadPoolExecutor(CRC_THREADS, "checkpoint-crc")
        self._sync_thread = ThreadPoolExecutor(1, "checkpoint-fsync")
        self._syncs: list[tuple[str, Future[None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close_files()

    def close_files(self) -> None:
        """Wait for pending syncs. Nothing can be written afterwards."""
        self._crc_threads.shutdown()
        self._sync_thread.shutdown()

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a safetensors file from CPU tensors, without copying contiguous ones."""
        with self.streamed_tensors(name, tensors) as write:
            for key in safetensors_header(tensors)[1]:
                write(key, tensors[key])

    @contextmanager
    def streamed_tensors(
        self, name: str, described: Mapping[str, torch.Tensor]
    ) -> Iterator[Callable[[str, torch.Tensor], None]]:
        """Write a safetensors file whose tensors come one at a time, in any order.

        Args:
            name: The file.
            described: Tensors of the right shapes and dtypes; their values are not read.

        Yields:
            write(key, tensor), to be called once for each key. The tensor must not change before the file is complete.
        """
        header, order = safetensors_header(described)
        places: dict[str, int] = {}
        offset = len(header)
        for key in order:
            places[key] = offset
            offset += described[key].numel() * described[key].element_size()
        crcs: dict[str, Future[int]] = {}
        with self._file(name) as file:
            file.append(memoryview(header))

            def write(key: str, tensor: torch.Tensor) -> None:
                want = described[key]
                assert (tensor.shape, tensor.dtype) == (want.shape, want.dtype), (key, tensor.shape, tensor.dtype)
                assert key not in crcs, key
                # The contiguous copy of a transposed tensor lives until it is written and checksummed.
                data = tensor_bytes(tensor.contiguous())
                crcs[key] = self._crc_threads.submit(zlib.crc32, data)
                file.seek(places[key])
                file.append(data)

            yield write
            assert crcs.keys() == described.keys(), sorted(described.keys() - crcs.keys())[:3]
            found = {key: crc.result() for key, crc in crcs.items()}
        self.records[name] = FileRecord(file.size, zlib.crc32(header), found)

    def crcs_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """CRC-32 of each tensor's bytes."""
        return dict(zip(tensors, self._crc_threads.map(tensor_crc32, tensors.values()), strict=True))

    def write_bytes(self, name: str, data: bytes) -> None:
        with self._file(name) as file:
            file.append(memoryview(data))
        self.records[name] = FileRecord(file.size, zlib.crc32(data))

    def write_json(self, name: str, value: Any) -> None:
        self.write_bytes(name, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False).encode())

    def copy_file(self, name: str, source: Path) -> None:
        """Copy a regular file, see `paths.regular_file`."""
        crc = 0
        with self._file(name) as file, _opened(source) as stream:
            while piece := stream.read(PIECE_BYTES):
                crc = zlib.crc32(piece, crc)
                file.append(memoryview(piece))
        self.records[name] = FileRecord(file.size, crc)

    def settle(self) -> None:
        """Return when everything written so far is on disk, and was read back and compared with its record.

        Reading back reaches the disk, because a file's pages leave the cache after its sync. Files that an earlier call has
        compared are not read again.
        """
        self._wait_for_syncs(0)
        new = {name: record for name, record in self.records.items() if name not in self._settled}
        with _writing(self.target):
            for folder in sorted({self.temp / parent for name in new for parent in Path(name).parents} | {self.temp}):
                _sync_folder(folder)
        started = time.perf_counter()
        for problem in damages(self.temp, new, lambda: self.on_bytes(0)):
            raise WriteFailed(
                f"was not read back as it was written: {problem.what}",
                problem.where,
                "do not trust the disk or its controller; the state in memory and older checkpoints are untouched",
            )
        self._settled |= new.keys()
        self.read_back_s += time.perf_counter() - started

    @contextmanager
    def _file(self, name: str) -> Iterator[_OpenFile]:
        """A new file. At the end of the block the sync thread gets it, and closes it after its flushes."""
        self._wait_for_syncs(UNSYNCED)
        refuse_names([name], self.target)
        path = self.temp / name
        with _writing(self.target / name):
            for folder in reversed(path.relative_to(self.temp).parents[:-1]):  # not `temp`, if it was removed
                (self.temp / folder).mkdir(exist_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            yield _OpenFile(self, name, fd)
            self.sync_later(name, fd, _sync_and_close)
        except BaseException:
            self._sync_thread.submit(os.close, fd)
            raise

    def sync_later(self, name: str, fd: int, flush: Callable[[int], None]) -> None:
        """Queue `flush(fd)` for the sync thread; waits while more than UNSYNCED are queued."""
        self._wait_for_syncs(UNSYNCED)
        self._syncs.append((name, self._sync_thread.submit(flush, fd)))

    def _wait_for_syncs(self, left: int) -> None:
        while len(self._syncs) > left:
            name, sync = self._syncs.pop(0)
            with _writing(self.target / name):
                sync.result()


class FolderWriter(FilesWriter):
    """Makes one folder that appears complete or not at all; see [Note: life of a checkpoint folder].

    A context manager: leaving it without `commit` or `finish_plain` removes what was written.

    Args:
        target: The folder to make. It must not exist, or be empty.
        on_bytes: See `FilesWriter`.
    """

    def __init__(self, target: Path, on_bytes: Callable[[int], None] = lambda count: None):
        super().__init__(target.with_name(f"{target.name}.tmp-{os.getpid()}"), target, on_bytes)
        self._of_others: dict[str, FileRecord] = {}
        self._committed = False

    def __enter__(self) -> Self:
        with _writing(self.target):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            if is_unfinished(self.target):
                logger.warning("removing %s, an unfinished checkpoint", self.target)
                _remove_unfinished(self.target)
            refuse_if_taken(self.target)
            remove_leftovers(self.target.parent, self.target)
            self.temp.mkdir()
            (self.temp / MARKER_FILE).write_text(json.dumps(writer_identity()), encoding="utf-8")
        return self

    def __exit__(self, *error: object) -> None:
        self.close_files()
        if self._committed:
            return
        try:
            _remove_unfinished(self.temp)
        except OSError as problem:
            logger.warning("could not remove %s: %s", self.temp, problem)

    def take_over(self, records: Mapping[str, FileRecord]) -> None:
        """Add files that other writers have written and read back. See [Note: several writers]."""
        for name, record in records.items():
            with _writing(self.target / name):
                size = (self.temp / name).stat().st_size
            if size != record.size:
                raise damaged(self.temp / name, f"has {size} bytes here, another process wrote {record.size}")
        self._of_others |= records

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Complete `manifest` with the file records and a checksum, write it, and give the folder its name."""
        self._wait_for_syncs(0)
        records = sorted((self.records | self._of_others).items())
        body = dict(manifest) | {"files": {name: record.to_json() for name, record in records}}
        self.write_json(MANIFEST_FILE, body | {"crc32": zlib.crc32(canonical(body))})
        self.finish_plain()

    def finish_plain(self, check: Callable[[], object] = lambda: None) -> None:
        """Give the folder its name, without a manifest.

        Args:
            check: Called when everything is in `temp` and was read back; what it raises keeps the folder from appearing.
        """
        self.settle()
        with _writing(self.target):
            check()
            self.temp.rename(self.target)
            self._committed = True
            _sync_folder(self.target.parent)
        try:
            (self.target / MARKER_FILE).unlink()
        except OSError as error:  # beside a manifest it means nothing
            logger.warning("could not remove %s: %s", self.target / MARKER_FILE, error)


class _OpenFile:
    """A file being written, in pieces that are flushed on the way."""

    def __init__(self, folder: FilesWriter, name: str, fd: int):
        self._folder, self._name, self._fd, self.size = folder, name, fd, 0
        self._flushed = 0

    def seek(self, offset: int) -> None:
        """Set where the next `append` writes. Each byte of the file must be written once."""
        os.lseek(self._fd, offset, os.SEEK_SET)

    def append(self, data: memoryview) -> None:
        """Write `data` after what was written last, or where `seek` went, a piece at a time."""
        for start in range(0, len(data), PIECE_BYTES):
            piece = data[start : start + PIECE_BYTES]
            with _writing(self._folder.target / self._name):
                while piece:
                    written = os.write(self._fd, piece)
                    piece, self.size = piece[written:], self.size + written
                    self._folder.on_bytes(written)
            if self.size - self._flushed >= FLUSH_BYTES:
                self._flushed = self.size
                self._folder.sync_later(self._name, self._fd, os.fdatasync)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the system's refusal to write `path` into a WriteFailed."""
    try:
        yield
    except OSError as error:
        remedy = "free space or change the folder; the state in memory and older checkpoints are untouched"
        raise WriteFailed(f"cannot be written: {error.strerror or error}", str(path), remedy) from error


@contextmanager
def _opened(source: Path) -> Iterator[BinaryIO]:
    """A file to copy; UserError if it cannot be opened."""
    try:
        stream = os.fdopen(open_regular(source), "rb")
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror or error}", str(source), "check its permissions") from error
    with stream:
        yield stream


def _sync_and_close(fd: int) -> None:
    try:
        os.fsync(fd)
        # The file may never be read again, and host memory is nearly full: leave the page cache to others.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_unfinished(folder: Path) -> bool:
    """Whether a writer died after it had given the folder its name, or while it removed it."""
    return not folder.is_symlink() and (folder / MARKER_FILE).is_file() and not os.path.lexists(folder / MANIFEST_FILE)


def refuse_if_taken(folder: Path) -> None:
    """Raise UserError if `folder` holds anything but a dead writer's unfinished files."""
    if folder.exists() and not is_unfinished(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise UserError("exists already; nothing is overwritten", str(folder), "choose another folder, or move it away")


def remove_leftovers(parent: Path, target: Path | None = None) -> None:
    """Remove the temporary folders in `parent` whose writers are gone.

    Args:
        parent: The folder of checkpoints.
        target: What this process is about to write, if anything.
    """
    for folder in parent.iterdir():
        if is_leftover(folder, target):
            logger.warning("removing %s, left by a writer that died", folder)
            try:
                _remove_unfinished(folder)
            except OSError as error:  # a writer of another host still adds files; the marker stays for the next time
                logger.warning("could not remove all of %s: %s", folder, error)


def is_leftover(folder: Path, target: Path | None = None) -> bool:
    """Whether a folder is a temporary one whose writer is gone; `target` as for `remove_leftovers`."""
    is_temporary = re.search(r"\.tmp-\d+$", folder.name) is not None
    return is_temporary and folder.is_dir() and not folder.is_symlink() and _is_dead(folder, target)


def leftover_bytes(parent: Path) -> int:
    """Disk space that `remove_leftovers` will free."""
    if not parent.is_dir():
        return 0
    files = (file for folder in parent.iterdir() if is_leftover(folder) for file in folder.rglob("*"))
    return sum(file.lstat().st_blocks * 512 for file in files)


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint so that no part of it ever looks like one, and a part that is left is removed later."""
    (folder / MARKER_FILE).write_text(json.dumps(writer_identity()), encoding="utf-8")
    doomed = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    folder.rename(doomed)
    _remove_unfinished(doomed)


def _remove_unfinished(folder: Path) -> None:
    """Remove a marked folder. The marker goes last: if this process dies, the next writer still knows what the folder is."""
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif entry.name != MARKER_FILE:
            entry.unlink()
    (folder / MARKER_FILE).unlink(missing_ok=True)
    folder.rmdir()


def writer_identity() -> dict[str, Any]:
    """Content of a marker file. The start time tells this process from a later one with the same id."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_dead(folder: Path, target: Path | None) -> bool:
    """Whether a temporary folder was made on this host by a process that is gone. In doubt (no marker) it is left alone."""
    own = target is not None and folder.name == f"{target.name}.tmp-{os.getpid()}"
    if own and not any(folder.iterdir()):
        return True  # an earlier process with our id died between making the folder and its marker
    try:
        marker = regular_file(folder, MARKER_FILE)
        writer = parse_json(read_limited(marker, MARKER_BYTES), marker)
    except UserError:
        return False
    fields = {"host": str, "pid": int, "started": (int, float)}
    if not isinstance(writer, dict) or any(not isinstance(writer.get(key), kind) for key, kind in fields.items()):
        return False
    host, pid, started = writer["host"], writer["pid"], writer["started"]
    if host != socket.gethostname() or not 0 < pid < 1 << 31:
        return False
    try:
        alive = psutil.Process(pid).create_time() == started
    except psutil.NoSuchProcess:
        alive = False
    # Our own failed attempt at this very target, whose removal failed too, is not in use either.
    return not alive or (pid == os.getpid() and own)
