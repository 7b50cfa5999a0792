"""Names, bytes and checksums of a checkpoint folder, and their verification. The spec is docs/checkpoint.md."""

from __future__ import annotations

import base64
import json
import math
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatrain.errors import UserError
from megatrain.units import SAFETENSORS_DTYPES, torch_dtype

MANIFEST_FILE = "manifest.json"
MARKER_FILE = ".megatrain-partial"
PIECE_BYTES = 32 << 20
READ_BACK_THREADS = 4
FORMAT_NAME = "megatrain-checkpoint"
FORMAT_VERSION = 1
STATE_FILE = "state.json"
STATE_FOLDER = "state"
WEIGHTS_DTYPE = torch.bfloat16
"""Dtype of the weights that transformers loads. Weights that it keeps in fp32 are saved in fp32."""
DEFAULT_OPTIMIZER = "AdamW"
"""The optimizer of a checkpoint whose `state.json` names none."""


DTYPES = {name: torch_dtype(name) for name in SAFETENSORS_DTYPES}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass
class FileRecord:
    """A file's entry in the manifest.

    Attributes:
        size: Bytes.
        crc32: Checksum of the whole file; for safetensors files, of the part before the tensors' data.
        tensors: Checksum of each tensor's data in a safetensors file, so that an error can name the tensor.
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
    # Wide types first, so that every tensor starts at a multiple of its item size, whatever the sizes of the others.
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


def state_key(plane: str, full_name: str) -> str:
    """Name of a plane's tensor in a state file: `lo/model.layers.0.mlp.up_proj.weight`."""
    return f"{plane}/{full_name}"


@dataclass(frozen=True)
class Manifest:
    """The list of a checkpoint's files. A folder without a valid one is not a checkpoint."""

    step: int
    files: dict[str, FileRecord]
    """By path relative to the folder."""


def read_manifest(folder: Path, *, sizes: bool = True) -> Manifest:
    """Read and verify a checkpoint's manifest; with `sizes`, check that all files exist in their recorded size.

    Raises:
        UserError: No manifest, a damaged one, another format, or a file that is missing or has another size.
    """
    path = folder / MANIFEST_FILE
    if not path.exists():
        raise UserError("is not a complete checkpoint: it has no manifest.json", str(folder))
    with _reading(path):
        raw = json.loads(path.read_bytes())
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise UserError("is not the manifest of a megatrain checkpoint", str(path))
    crc = raw.pop("crc32", None)
    if crc != zlib.crc32(canonical(raw)):
        raise damaged(path, "checksum differs")
    if raw["version"] > FORMAT_VERSION:
        raise UserError(
            f"has format version {raw['version']}, this megatrain reads up to {FORMAT_VERSION}",
            str(folder),
            "install a newer megatrain",
        )
    files = {name: FileRecord.from_json(record) for name, record in raw["files"].items()}
    for name, record in files.items() if sizes else ():
        file = folder / name
        if not file.is_file():
            raise damaged(file, "the file is missing")
        if file.stat().st_size != record.size:
            raise damaged(file, f"has {file.stat().st_size} bytes, {record.size} were written")
    return Manifest(raw["step"], files)


class SafetensorsReader:
    """Reads tensors of a safetensors file and verifies each against its record. A context manager; threads may share it.

    Raises:
        UserError: The file is unreadable or damaged; names file and tensor.
    """

    def __init__(self, path: Path, record: FileRecord):
        self.path, self._record = path, record
        with _reading(path):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._entries, self._data_start = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SafetensorsReader:
        return self

    def __exit__(self, *error: object) -> None:
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
        """Read into the memory of `out`, contiguous and of the tensor's shape and dtype."""
        assert (tuple(out.shape), out.dtype) == (self.shape(name), self.dtype(name)), (name, out.shape, out.dtype)
        begin, end = self._entries[name]["data_offsets"]
        view = tensor_bytes(out)
        assert len(view) == end - begin, (name, len(view), begin, end)
        self._compare(name, self._pread(view, self._data_start + begin))

    def read_box(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, as a new one. Reads its pages alone and verifies nothing: see `verify`."""
        kind, shape = self.dtype(name), self.shape(name)
        plain = np.dtype(f"i{kind.itemsize}")
        begin = self._data_start + self._entries[name]["data_offsets"][0]
        if 0 in shape:
            return torch.empty(shape, dtype=kind)[box]
        with _reading(self.path):
            whole = np.memmap(self.path, dtype=plain, mode="r", offset=begin, shape=shape)
            return torch.from_numpy(np.array(whole[box])).view(kind)

    def recorded_crc32(self, name: str) -> int | None:
        return self._record.tensors.get(name)

    def verify(self, name: str, buffer: mmap.mmap) -> None:
        """Read a tensor through `buffer`, a piece at a time, and compare its checksum."""
        begin, end = self._entries[name]["data_offsets"]
        crc = 0
        view = memoryview(buffer)
        for start in range(begin, end, len(buffer)):
            crc = self._pread(view[: min(len(buffer), end - start)], self._data_start + start, crc)
        self._compare(name, crc)

    def _compare(self, name: str, crc: int) -> None:
        if crc != self._record.tensors.get(name):
            raise damaged(self.path, f"tensor {name}: checksum differs")

    def _pread(self, view: memoryview, offset: int, crc: int = 0) -> int:
        """Fill `view` from the file. Returns its CRC-32, continued from `crc`."""
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            done = 0
            while done < len(piece):
                with _reading(self.path):
                    count = os.preadv(self._fd, [piece[done:]], offset + start + done)
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
    """The form of a JSON value that its checksum is taken over: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def read_verified(path: Path, record: FileRecord) -> bytes:
    """The content of a small file, verified."""
    with _reading(path):
        data = path.read_bytes()
    if (len(data), zlib.crc32(data)) != (record.size, record.crc32):
        raise damaged(path, "checksum differs")
    return data


def damages(
    folder: Path, records: Mapping[str, FileRecord], between: Callable[[], None] = lambda: None
) -> Iterator[UserError]:
    """An error for every file that differs from its record; names the file and its first damaged tensor.

    Args:
        folder: The folder of the files.
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
        # A mapping, unmapped with its last view: heap buffers used by changing threads would stay with the process.
        piece = mmap.mmap(-1, max(1, min(PIECE_BYTES, record.size)))
        with SafetensorsReader(path, record) as reader:
            for name in reader.names:
                between()
                reader.verify(name, piece)
    except UserError as error:
        return error
    return None


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:  # a memory map of a file that is too short raises ValueError
        raise damaged(path, getattr(error, "strerror", None) or str(error)) from error


def damaged(path: Path, what: str) -> UserError:
    return UserError(f"the checkpoint is damaged: {what}", str(path), "restore the file, or take another checkpoint")


def to_json(value: Any, where: str = "state") -> Any:
    """JSON for numbers, strings, lists, tuples, dicts with string keys, bytes and tensors. TypeError for anything else."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key.startswith("$"):
                raise TypeError(f"{where}: key {key!r} cannot be saved; keys are strings that do not start with '$'")
        return {key: to_json(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_json(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu().contiguous()
        data = base64.b64encode(tensor_bytes(tensor)).decode()
        return {"$tensor": {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data": data}}
    raise TypeError(f"{where}: {type(value).__name__} cannot be saved in a checkpoint")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(from_json(item) for item in items)
        case {"$bytes": text}:
            return base64.b64decode(text)
        case {"$tensor": {"dtype": dtype, "shape": shape, "data": text}}:
            data = bytearray(base64.b64decode(text))
            flat = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
            return flat.reshape(shape)
    return {key: from_json(item) for key, item in value.items()}
