"""Files with checksums, and folders that appear whole or not at all.

[Note: life of a checkpoint folder]
A folder is written as `<name>.tmp-<pid>` with a marker file in it that says which process writes. Every file is checksummed
while it is written and fsynced; then come the manifest, an fsync of the folder, the read-back of every file against its
checksum, the rename to `<name>`, and last the removal of the marker. So a folder under its own name is complete and was once
read from the disk as it was meant; anything else is named `.tmp-<pid>` or lacks a valid manifest, and no reader looks at it.
A writer that dies leaves only such a temporary folder, which the next writer in the same place removes once it sees that the
process is gone. A folder is removed the same way backwards: marked, renamed, emptied, and the marker last.

[Note: several writers]
On a file system that several hosts share, processes of other hosts may write files into a folder that one process has made. Each
checksums, fsyncs and reads back its own files, and hands their records to the one that made the folder, which alone writes
the manifest, renames and removes. The marker names that one: when it is gone, nobody else will finish the folder. A writer of
another host may outlive it for a moment; it makes no folder of that name again, so what was removed stays removed.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import psutil
import torch

from megatrain.errors import UserError
from megatrain.units import SAFETENSORS_DTYPES, torch_dtype

logger = logging.getLogger(__name__)

MANIFEST_FILE = "manifest.json"
MARKER_FILE = ".megatrain-partial"
PIECE_BYTES = 32 << 20
READ_BACK_THREADS = 4
CRC_THREADS = 4
"""zlib's CRC-32 runs at 1 to 3 GB/s, and a tensor's is computed in one go: several tensors at a time keep up with a fast disk."""
FLUSH_BYTES = 128 << 20
"""So much of a file is sent to the disk while the rest is being written: the disk never waits for a file to end."""
UNSYNCED = 3
"""Flushes and files that may wait for the disk while the next ones are written; bounds the dirty pages in the page cache."""

DTYPES = {name: torch_dtype(name) for name in SAFETENSORS_DTYPES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class FileRecord:
    """What the manifest says of a file. A safetensors file has one checksum per tensor, so that an error can name it.

    Attributes:
        size: Bytes.
        crc32: Of the whole file; for safetensors of the part before the tensors' data.
        tensors: CRC-32 of each tensor's bytes, for safetensors files.
    """

    size: int
    crc32: int
    tensors: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"size": self.size, "crc32": self.crc32}
        return record | {"tensors": self.tensors} if self.tensors else record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> FileRecord:
        tensors = {str(name): int(crc) for name, crc in record.get("tensors", {}).items()}
        return cls(int(record["size"]), int(record["crc32"]), tensors)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy. The view keeps its memory alive."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu", (tensor.stride(), tensor.device)
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_crc32(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor_bytes(tensor.contiguous()))


def safetensors_header(tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, list[str]]:
    """The bytes before the data of a safetensors file, and the order of the tensors in it."""
    # Wide types first: then every tensor starts at a multiple of its item size, whatever the sizes of the others.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


class FilesWriter:
    """Writes files into a folder that another writer has made; see [Note: several writers].

    Use as a context manager. All methods raise UserError, naming the file, when the system refuses a write.

    Args:
        temp: Where the folder is now.
        target: The name that it will get, for errors.
        on_bytes: Called with the number of bytes after each piece that was written; what it raises ends the writing.
    """

    def __init__(self, temp: Path, target: Path, on_bytes: Callable[[int], None] = lambda count: None):
        self.temp, self.target, self.on_bytes = temp, target, on_bytes
        self.read_back_s = 0.0
        self.records: dict[str, FileRecord] = {}
        """Of what this process wrote."""
        self._settled: set[str] = set()
        self._crc_threads = ThreadPoolExecutor(CRC_THREADS, "checkpoint-crc")
        self._sync_thread = ThreadPoolExecutor(1, "checkpoint-fsync")
        self._syncs: list[tuple[str, Future[None]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_files()

    def close_files(self) -> None:
        """Wait for what was handed to the disk; nothing can be written any more."""
        self._crc_threads.shutdown()
        self._sync_thread.shutdown()

    def write_tensors(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write a safetensors file from CPU tensors, straight from their memory where they are contiguous."""
        with self.tensors_by_and_by(name, tensors) as write:
            for key in safetensors_header(tensors)[1]:
                write(key, tensors[key])

    @contextmanager
    def tensors_by_and_by(
        self, name: str, described: Mapping[str, torch.Tensor]
    ) -> Iterator[Callable[[str, torch.Tensor], None]]:
        """Write a safetensors file whose tensors come one by one, in any order.

        Args:
            name: The file.
            described: Tensors with the shapes and types of those that come; their values are not looked at.

        Yields:
            write(key, tensor): must be called once for each. The tensor must not change before the file is complete.
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
        """Copy a file's content, a piece at a time."""
        crc = 0
        with self._file(name) as file, source.open("rb") as stream:
            while piece := stream.read(PIECE_BYTES):
                crc = zlib.crc32(piece, crc)
                file.append(memoryview(piece))
        self.records[name] = FileRecord(file.size, crc)

    def settle(self) -> None:
        """Return when everything written so far is durable, and was read from the disk again and compared with its record.

        The files' pages were dropped from the cache after the fsync. What an earlier call has compared is not read again.
        """
        self._wait_for_syncs(0)
        new = {name: record for name, record in self.records.items() if name not in self._settled}
        try:
            for folder in sorted({(self.temp / name).parent for name in new} | {self.temp}):
                _sync_folder(folder)
        except OSError as error:
            raise _refused(error, self.target) from error
        started = time.perf_counter()
        for problem in damages(self.temp, new, lambda: self.on_bytes(0)):
            raise UserError(
                f"was not read back as it was written: {problem.what}",
                problem.where,
                "the disk or its controller is not to be trusted; the state in memory and older checkpoints are untouched",
            )
        self._settled |= new.keys()
        self.read_back_s += time.perf_counter() - started

    def _file(self, name: str) -> _OpenFile:
        self._wait_for_syncs(UNSYNCED)
        return _OpenFile(self, name)

    def _sync_later(self, name: str, fd: int, flush: Callable[[int], None]) -> None:
        """Have `flush(fd)` called in the thread that does so in order."""
        self._wait_for_syncs(UNSYNCED)
        self._syncs.append((name, self._sync_thread.submit(flush, fd)))

    def _wait_for_syncs(self, left: int) -> None:
        while len(self._syncs) > left:
            name, sync = self._syncs.pop(0)
            try:
                sync.result()
            except OSError as error:
                raise _refused(error, self.target / name) from error


class FolderWriter(FilesWriter):
    """Writes one folder that appears whole or not at all; see [Note: life of a checkpoint folder].

    Use as a context manager. Leaving it without `commit` removes what was written. All methods raise UserError, naming the
    file, when the system refuses a write.

    Args:
        target: The folder to make. It must not exist, or be empty.
        on_bytes: Called with the number of bytes after each piece that was written; what it raises ends the writing.
    """

    def __init__(self, target: Path, on_bytes: Callable[[int], None] = lambda count: None):
        super().__init__(target.with_name(f"{target.name}.tmp-{os.getpid()}"), target, on_bytes)
        self._of_others: dict[str, FileRecord] = {}
        self._committed = False

    def __enter__(self) -> Self:
        try:
            self.target.parent.mkdir(parents=True, exist_ok=True)
            _remove_leftovers(self.target)
            self.temp.mkdir()
            (self.temp / MARKER_FILE).write_text(json.dumps(_writer_identity()), encoding="utf-8")
        except OSError as error:
            self.close_files()
            raise _refused(error, self.target) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close_files()
        if self._committed:
            return
        try:
            _remove_unfinished(self.temp)
        except OSError as problem:
            logger.warning("could not remove %s: %s", self.temp, problem)

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for files that other code writes, to be copied with `copy_file`. It is gone before the commit."""
        path = self.temp / ".scratch"
        try:
            path.mkdir()
            yield path
            shutil.rmtree(path)
        except OSError as error:
            raise _refused(error, self.target) from error

    def take_over(self, records: Mapping[str, FileRecord]) -> None:
        """Let files that other writers wrote, and read back, belong to the folder. See [Note: several writers]."""
        for name, record in records.items():
            try:
                size = (self.temp / name).stat().st_size
            except OSError as error:
                raise _refused(error, self.target / name) from error
            if size != record.size:
                raise damaged(self.temp / name, f"has {size} bytes here, another process wrote {record.size}")
        self._of_others |= records

    def commit(self, manifest: Mapping[str, Any]) -> None:
        """Make the folder durable and give it its name. `manifest` is completed with the file records and a checksum."""
        self._wait_for_syncs(0)
        records = sorted((self.records | self._of_others).items())
        body = dict(manifest) | {"files": {name: record.to_json() for name, record in records}}
        self.write_json(MANIFEST_FILE, body | {"crc32": zlib.crc32(canonical(body))})
        self._finish(lambda: None)

    def finish_plain(self, check: Callable[[], object]) -> None:
        """The same for a folder that is no checkpoint and has no manifest.

        Args:
            check: Called when everything is in `temp` and was read back; what it raises keeps the folder from appearing.
        """
        self._finish(check)

    def _finish(self, check: Callable[[], object]) -> None:
        self.settle()
        try:
            check()
            self.temp.rename(self.target)
            self._committed = True
            _sync_folder(self.target.parent)
        except OSError as error:
            raise _refused(error, self.target) from error
        try:
            (self.target / MARKER_FILE).unlink()
        except OSError as error:  # it says nothing beside a manifest
            logger.warning("could not remove %s: %s", self.target / MARKER_FILE, error)


class _OpenFile:
    """One file being written; leaving hands it to the fsync thread."""

    def __init__(self, folder: FilesWriter, name: str):
        self._folder, self._name, self.size = folder, name, 0
        self._fd = -1
        self._flushed = 0

    def __enter__(self) -> _OpenFile:
        path = self._folder.temp / self._name
        try:
            if path.parent != self._folder.temp:  # which is not made again where it has been removed
                path.parent.mkdir(exist_ok=True)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _refused(error, self._folder.target / self._name) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._folder._sync_later(self._name, self._fd, _sync_and_close)
                return
        except BaseException:  # an earlier file was refused
            self._folder._sync_thread.submit(os.close, self._fd)
            raise
        self._folder._sync_thread.submit(os.close, self._fd)  # behind its flushes

    def seek(self, offset: int) -> None:
        """Let the next `append` write there; each byte of the file is to be written once."""
        os.lseek(self._fd, offset, os.SEEK_SET)

    def append(self, data: memoryview) -> None:
        """Write `data` behind what was written last, or where `seek` went; a piece at a time."""
        for start in range(0, len(data), PIECE_BYTES):
            self._write(data[start : start + PIECE_BYTES])

    def _write(self, piece: memoryview) -> None:
        try:
            while piece:
                written = os.write(self._fd, piece)
                piece, self.size = piece[written:], self.size + written
                self._folder.on_bytes(written)
        except OSError as error:
            raise _refused(error, self._folder.target / self._name) from error
        if self.size - self._flushed >= FLUSH_BYTES:
            self._flushed = self.size
            self._folder._sync_later(self._name, self._fd, os.fdatasync)


class SafetensorsReader:
    """Reads tensors of one safetensors file of a checkpoint and verifies each against its record.

    Thread safe: reads are positional.

    Raises:
        UserError: The file is unreadable or damaged; names file and tensor.
    """

    def __init__(self, path: Path, record: FileRecord):
        self.path, self._record = path, record
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise damaged(path, error.strerror or str(error)) from error
        try:
            self._entries, self._data_start = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._entries[name]["dtype"]]

    def read(self, name: str) -> torch.Tensor:
        """A new tensor."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read into the memory of `out`, which has the tensor's shape and dtype and is contiguous."""
        assert (tuple(out.shape), out.dtype) == (self.shape(name), self.dtype(name)), (name, out.shape, out.dtype)
        begin, end = self._entries[name]["data_offsets"]
        view = tensor_bytes(out)
        assert len(view) == end - begin, (name, len(view), begin, end)
        if self._pread(view, self._data_start + begin) != self._record.tensors.get(name):
            raise damaged(self.path, f"tensor {name}: checksum differs")

    def read_box(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, as a new one. Only its pages are read, and nothing is verified: see `verify`."""
        kind, shape = self.dtype(name), self.shape(name)
        plain = np.dtype(f"i{kind.itemsize}")
        begin = self._data_start + self._entries[name]["data_offsets"][0]
        if 0 in shape:
            return torch.empty(shape, dtype=kind)[box]
        try:
            whole = np.memmap(self.path, dtype=plain, mode="r", offset=begin, shape=shape)
            return torch.from_numpy(np.array(whole[box])).view(kind)
        except (OSError, ValueError) as error:
            raise damaged(self.path, str(error)) from error

    def recorded_crc32(self, name: str) -> int | None:
        """What `verify` compares a tensor's bytes with."""
        return self._record.tensors.get(name)

    def verify(self, name: str, buffer: mmap.mmap) -> None:
        """Read a tensor a piece at a time through `buffer`, and keep nothing of it."""
        begin, end = self._entries[name]["data_offsets"]
        crc = 0
        view = memoryview(buffer)
        for start in range(begin, end, len(buffer)):
            crc = self._pread(view[: min(len(buffer), end - start)], self._data_start + start, crc)
        if crc != self._record.tensors.get(name):
            raise damaged(self.path, f"tensor {name}: checksum differs")

    def _pread(self, view: memoryview, offset: int, crc: int = 0) -> int:
        """Fill `view` from the file; returns its CRC-32, going on from `crc`."""
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            done = 0
            while done < len(piece):
                try:
                    count = os.preadv(self._fd, [piece[done:]], offset + start + done)
                except OSError as error:
                    raise damaged(self.path, error.strerror or str(error)) from error
                if count == 0:
                    raise damaged(self.path, "the file ends too early")
                done += count
            crc = zlib.crc32(piece, crc)
        return crc

    def _read_header(self) -> tuple[dict[str, Any], int]:
        size = os.fstat(self._fd).st_size
        if size != self._record.size:
            raise damaged(self.path, f"has {size} bytes, {self._record.size} were written")
        length = bytearray(8)
        self._pread(memoryview(length), 0)
        header = bytearray(min(int.from_bytes(length, "little"), size))
        self._pread(memoryview(header), 8)
        if zlib.crc32(header, zlib.crc32(length)) != self._record.crc32:
            raise damaged(self.path, "the header's checksum differs")
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return entries, 8 + len(header)


def canonical(value: Any) -> bytes:
    """The bytes that a JSON value's checksum is taken over: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def read_verified(path: Path, record: FileRecord) -> bytes:
    """The content of a small file, verified."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise damaged(path, error.strerror or str(error)) from error
    if (len(data), zlib.crc32(data)) != (record.size, record.crc32):
        raise damaged(path, "checksum differs")
    return data


def damages(
    folder: Path, records: Mapping[str, FileRecord], between: Callable[[], None] = lambda: None
) -> Iterator[UserError]:
    """Every file of a folder that differs from its record, as an error that names it, and its first wrong tensor.

    Args:
        folder: Where the files are.
        records: What they should be.
        between: Called before each tensor, in several threads; what it raises ends the reading.
    """
    with ThreadPoolExecutor(READ_BACK_THREADS, "checkpoint-verify") as pool:
        for problem in pool.map(lambda item: _damage(folder / item[0], item[1], between), records.items()):
            if problem is not None:
                yield problem


def _damage(path: Path, record: FileRecord, between: Callable[[], None]) -> UserError | None:
    try:
        if not path.name.endswith(".safetensors"):
            read_verified(path, record)
            return None
        # A mapping of its own, gone with its last view: from the heap, buffers of changing threads would stay for ever.
        piece = mmap.mmap(-1, max(1, min(PIECE_BYTES, record.size)))
        with SafetensorsReader(path, record) as reader:
            for name in reader.names:
                between()
                reader.verify(name, piece)
    except UserError as error:
        return error
    return None


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"the checkpoint is damaged: {what}", str(path), "restore the file, or take another checkpoint")


def _refused(error: OSError, path: Path) -> UserError:
    """What the system said about writing `path`, for a person."""
    remedy = "free space or change the folder; the state in memory and older checkpoints are untouched"
    return UserError(f"cannot be written: {error.strerror or error}", str(path), remedy)


def _sync_and_close(fd: int) -> None:
    try:
        os.fsync(fd)
        # Written once, read perhaps never: leave the page cache to those who need it. Host memory is nearly full.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_leftovers(target: Path) -> None:
    """Refuse a target that holds something; remove what dead writers left beside it, or under its name."""
    if target.is_dir() and (target / MARKER_FILE).is_file() and not (target / MANIFEST_FILE).exists():
        logger.warning("removing %s, an unfinished checkpoint", target)
        _remove_unfinished(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise UserError("exists already; nothing is overwritten", str(target), "choose another folder, or move it away")
    remove_leftovers(target.parent, target)


def remove_leftovers(parent: Path, target: Path | None = None) -> None:
    """Remove the temporary folders in `parent` whose writers are gone.

    Args:
        parent: Where checkpoints are.
        target: What this process is about to write, if it is.
    """
    for folder in parent.iterdir():
        if re.search(r"\.tmp-\d+$", folder.name) and folder.is_dir() and _is_dead(folder, target):
            logger.warning("removing %s, left by a writer that died", folder)
            try:
                _remove_unfinished(folder)
            except (
                OSError
            ) as error:  # another host's writer may still put files into it; its marker is left for the next time
                logger.warning("could not remove all of %s: %s", folder, error)


def remove_folder(folder: Path) -> None:
    """Remove a checkpoint so that at no moment a part of it looks like one, and a part that is left gets removed later."""
    (folder / MARKER_FILE).write_text(json.dumps(_writer_identity()), encoding="utf-8")
    doomed = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    folder.rename(doomed)
    _remove_unfinished(doomed)


def _remove_unfinished(folder: Path) -> None:
    """The marker goes last: until then the next writer knows what the folder is, should this process die here."""
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != MARKER_FILE:
            entry.unlink()
    (folder / MARKER_FILE).unlink(missing_ok=True)
    folder.rmdir()


def _writer_identity() -> dict[str, Any]:
    """The start time tells a process from a later one with the same id."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_dead(folder: Path, target: Path | None) -> bool:
    """Whether a temporary folder is ours and its writer is gone. In doubt (another host, no marker) it is left alone."""
    own = target is not None and folder.name == f"{target.name}.tmp-{os.getpid()}"
    if own and not any(folder.iterdir()):
        return True  # a process that had our id died between the two lines that make a folder and its marker
    try:
        writer = json.loads((folder / MARKER_FILE).read_text(encoding="utf-8"))
        host, pid, started = writer["host"], writer["pid"], writer["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname():
        return False
    try:
        alive = psutil.Process(pid).create_time() == started
    except psutil.NoSuchProcess:
        alive = False
    # Our own failed attempt at this very target, whose removal failed too, is not in use either.
    return not alive or (pid == os.getpid() and own)
