"""Names, bytes and checksums of a checkpoint folder, and their verification. The spec is docs/checkpoint.md.

[Note: what a reader trusts]
Nothing. A manifest, a state.json and a header of a safetensors file may come from anybody, with right checksums. Each is read up
to a limit and checked against one schema (the dataclasses below, by pydantic); names are plain relative paths ([Note: names in a
folder] in paths.py); and the size of a file is compared with its record before it is opened. Whatever is wrong is a UserError.
"""

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
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
import torch
from pydantic import Field, Strict, TypeAdapter, ValidationError

from megatrain.errors import UserError
from megatrain.paths import (
    JSON_BYTES,
    file_problem,
    open_regular,
    parse_json,
    read_json,
    read_limited,
    refuse_names,
    shown,
)
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
STATE_BYTES = 256 << 20
"""Largest `state.json`, which is read whole; a save whose `extra` is larger is refused."""
STATE_VALUES = 20_000_000
"""See `paths.JSON_VALUES`."""
HEADER_BYTES = 100_000_000
"""Largest header of a safetensors file, as in the safetensors library."""
MOST_DIMENSIONS = 64
"""Of a tensor; torch allows no more."""

T = TypeVar("T")
Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 63)]
Step = Annotated[int, Strict(), Field(ge=0, lt=10**9)]
Crc32 = Annotated[int, Strict(), Field(ge=0, lt=1 << 32)]
Number = Annotated[int, Strict(), Field(ge=0)] | Annotated[float, Strict(), Field(ge=0)]
Text = Annotated[str, Strict()]

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

    size: Count
    crc32: Crc32
    tensors: dict[Text, Crc32] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        record: dict[str, Any] = {"size": self.size, "crc32": self.crc32}
        return record | {"tensors": self.tensors} if self.tensors else record


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

    step: Step
    files: dict[Text, FileRecord]
    """By path relative to the folder."""


@dataclass(frozen=True)
class UnitState:
    """What `state.json` has of a unit."""

    weights_crc32: dict[Text, Crc32]


@dataclass(frozen=True)
class SavedState:
    """`state.json`. `state` is as `to_json` wrote it. `frozen` are full names of parameters that were not trained."""

    state: dict[Text, Any] = field(default_factory=dict)
    units: dict[Text, UnitState] = field(default_factory=dict)
    source_dtype: Text | None = None
    optimizer: Text = DEFAULT_OPTIMIZER
    frozen: tuple[Text, ...] = ()


@dataclass(frozen=True)
class EngineState:
    """The part of `state` that both engines write. The host engine adds `ladder`."""

    step: Step
    updates: Step
    seed: Annotated[int, Strict(), Field(ge=-(1 << 63), lt=1 << 64)]
    extra: dict[Text, Any]
    loss_scale: dict[Text, Number] | None = None
    ladder: dict[Text, Number | Annotated[bool, Strict()] | None] | None = None


@dataclass(frozen=True)
class RunExtra:
    """What is read of the trainer's `extra`; see [Note: what a checkpoint remembers of its run] in run/resume.py."""

    step: Step
    data: dict[Text, Any] = field(default_factory=dict)
    schedule: dict[Text, Any] = field(default_factory=dict)
    settings: dict[Text, Any] = field(default_factory=dict)
    past_rates_crc32: Crc32 | None = None
    held_out: Annotated[str, Strict(), Field(pattern="^([0-9a-f]{16})*$")] = ""
    data_offset: Step = 0
    rollbacks: Count = 0
    skipped_steps: Step = 0
    guard: dict[Text, Step | list[float]] = field(default_factory=dict)
    alerts: dict[Text, Any] = field(default_factory=dict)
    plan: dict[Text, Any] = field(default_factory=dict)
    model: Text | None = None
    computed_in: Text | None = None
    date: Text | None = None
    date: Annotated[str, Strict(), Field(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] | None = None


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in the header of a safetensors file."""

    dtype: Text
    shape: tuple[Count, ...]
    data_offsets: tuple[Count, Count]


@cache
def _adapter(schema: Any) -> TypeAdapter[Any]:
    return TypeAdapter(schema)


def checked(schema: type[T], value: Any, where: Path) -> T:
    """A JSON value as `schema`, a dataclass or type above. Unknown keys are ignored.

    Raises:
        UserError: Lists what does not fit, up to three places.
    """
    try:
        return _adapter(schema).validate_python(value)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(str(key)[:80] for key in one['loc']) or 'the whole'}: {one['msg']}" for one in found]
    more = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
    raise damaged(where, f"not as the format says: {'; '.join(repr(line)[1:-1] for line in lines[:3])}{more}")


def read_manifest(folder: Path, *, sizes: bool = True) -> Manifest:
    """Read and verify a checkpoint's manifest; with `sizes`, check that all files exist in their recorded size.

    Raises:
        UserError: No manifest, a damaged one, another format, a name that is no plain path inside the folder, or a file that is
            missing, no regular file of the folder, or has another size.
    """
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        there = "is not a complete checkpoint: it has no manifest.json" if folder.is_dir() else "no such folder"
        raise UserError(there, str(folder))
    raw = read_json(folder, MANIFEST_FILE)
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise UserError("is not the manifest of a megatrain checkpoint", str(path))
    crc = raw.pop("crc32", None)
    try:
        same = crc == zlib.crc32(canonical(raw))
    except RecursionError:  # JSON may be nested a little deeper where it is read
        same = False
    if not same:
        raise damaged(path, "checksum differs")
    version = checked(Count, raw.get("version"), path)  # type: ignore[arg-type]
    if version > FORMAT_VERSION:
        raise UserError(
            f"has format version {version}, this megatrain reads up to {FORMAT_VERSION}",
            str(folder),
            "install a newer megatrain",
        )
    manifest = checked(Manifest, raw, path)
    refuse_names(manifest.files, path)
    for name in manifest.files.keys() & {MANIFEST_FILE, MARKER_FILE}:
        raise damaged(path, f"lists {name}, which is none of the files that it describes")
    for name, record in manifest.files.items() if sizes else ():
        if (problem := size_problem(folder, name, record)) is not None:
            raise damaged(folder / name, problem)
    return manifest


def size_problem(folder: Path, name: str, record: FileRecord) -> str | None:
    """Why `name` is not a regular file of the recorded size inside the folder; None if it is. Opens nothing."""
    if (problem := file_problem(folder, name)) is not None:
        return problem
    size = (folder / name).stat().st_size
    return None if size == record.size else f"has {size} bytes, {record.size} were written"


class SafetensorsReader:
    """Reads tensors of a safetensors file and verifies each against its record. A context manager; threads may share it.

    Args:
        path: A regular file of the recorded size, see `size_problem`.
        record: The file's entry in the manifest.

    Raises:
        UserError: The file is unreadable or damaged; names file and tensor.
    """

    def __init__(self, path: Path, record: FileRecord):
        self.path, self._record = path, record
        with _reading(path):
            self._fd = open_regular(path)
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
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return DTYPES[self._entries[name].dtype]

    def read(self, name: str) -> torch.Tensor:
        """A new tensor."""
        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into(name, tensor)
        return tensor

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read into the memory of `out`, contiguous and of the tensor's shape and dtype."""
        assert (tuple(out.shape), out.dtype) == (self.shape(name), self.dtype(name)), (name, out.shape, out.dtype)
        begin, end = self._entries[name].data_offsets
        view = tensor_bytes(out)
        assert len(view) == end - begin, (name, len(view), begin, end)
        self._compare(name, self._pread(view, self._data_start + begin))

    def read_box(self, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, as a new one. Reads its pages alone and verifies nothing: see `verify`."""
        kind, shape = self.dtype(name), self.shape(name)
        plain = np.dtype(f"i{kind.itemsize}")
        begin = self._data_start + self._entries[name].data_offsets[0]
        if 0 in shape:
            return torch.empty(shape, dtype=kind)[box]
        with _reading(self.path):
            whole = np.memmap(self.path, dtype=plain, mode="r", offset=begin, shape=shape)
            return torch.from_numpy(np.array(whole[box])).view(kind)

    def recorded_crc32(self, name: str) -> int | None:
        return self._record.tensors.get(name)

    def verify(self, name: str, buffer: mmap.mmap) -> None:
        """Read a tensor through `buffer`, a piece at a time, and compare its checksum."""
        begin, end = self._entries[name].data_offsets
        crc = 0
        view = memoryview(buffer)
        for start in range(begin, end, len(buffer)):
            crc = self._pread(view[: min(len(buffer), end - start)], self._data_start + start, crc)
        self._compare(name, crc)

    def _compare(self, name: str, crc: int) -> None:
        if crc != self._record.tensors.get(name):
            raise damaged(self.path, f"tensor {shown(name)[1:-1]}: checksum differs")

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

    def _read_header(self) -> tuple[dict[str, TensorEntry], int]:
        size = os.fstat(self._fd).st_size
        if size != self._record.size:
            raise damaged(self.path, f"has {size} bytes, {self._record.size} were written")
        start = bytearray(8)
        self._pread(memoryview(start), 0)
        length = int.from_bytes(start, "little")
        if length > min(size - len(start), HEADER_BYTES):
            raise damaged(self.path, f"a header of {length:,} bytes in a file of {size:,} (at most {HEADER_BYTES:,})")
        header = bytearray(length)
        self._pread(memoryview(header), len(start))
        if zlib.crc32(header, zlib.crc32(start)) != self._record.crc32:
            raise damaged(self.path, "the header's checksum differs")
        raw = parse_json(bytes(header), self.path)
        if isinstance(raw, dict):
            raw.pop("__metadata__", None)
        entries = checked(dict[str, TensorEntry], raw, self.path)
        if (problem := layout_problem(entries, size - len(start) - length)) is not None:
            raise damaged(self.path, problem)
        if strange := sorted(entries.keys() ^ self._record.tensors.keys()):
            raise damaged(self.path, f"tensor {shown(strange[0])} is in only one of header and manifest")
        return entries, len(start) + length


def layout_problem(entries: Mapping[str, TensorEntry], data_bytes: int) -> str | None:
    """Why a header does not describe `data_bytes` of data, each byte once; None if it does."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, end = entry.data_offsets
        if entry.dtype not in DTYPES:
            return f"tensor {shown(name)} has the unknown dtype {shown(entry.dtype)}"
        if len(entry.shape) > MOST_DIMENSIONS:
            return f"tensor {shown(name)} has {len(entry.shape):,} dimensions"
        if begin != at:
            return f"tensor {shown(name)} begins at byte {begin:,} of the data, the one before ends at {at:,}"
        needed = math.prod(entry.shape) * DTYPES[entry.dtype].itemsize
        if end - begin != needed:
            return f"tensor {shown(name)} has {end - begin:,} bytes, its shape and dtype need {needed:,}"
        at = end
    return None if at == data_bytes else f"the tensors need {at:,} bytes, the file has {data_bytes:,}"


def canonical(value: Any) -> bytes:
    """The form of a JSON value that its checksum is taken over: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def read_verified(folder: Path, name: str, record: FileRecord, limit_bytes: int = JSON_BYTES) -> bytes:
    """The content of a small file, verified.

    Raises:
        UserError: It is damaged, or larger than the limit.
    """
    if (problem := size_problem(folder, name, record)) is not None:
        raise damaged(folder / name, problem)
    data = read_limited(folder / name, limit_bytes)
    if (len(data), zlib.crc32(data)) != (record.size, record.crc32):
        raise damaged(folder / name, "checksum differs")
    return data


def verify_file(folder: Path, name: str, record: FileRecord) -> None:
    """Compare a file with its record, a piece at a time. UserError if it differs."""
    path = folder / name
    if (problem := size_problem(folder, name, record)) is not None:
        raise damaged(path, problem)
    crc, left = 0, record.size
    with _reading(path), os.fdopen(open_regular(path), "rb", buffering=0) as file:
        while left and (piece := file.read(min(left, PIECE_BYTES))):
            crc, left = zlib.crc32(piece, crc), left - len(piece)
    if left or crc != record.crc32:
        raise damaged(path, "checksum differs")


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
        for problem in pool.map(lambda item: _damage(folder, item[0], item[1], between), records.items()):
            if problem is not None:
                yield problem


def _damage(folder: Path, name: str, record: FileRecord, between: Callable[[], None]) -> UserError | None:
    try:
        if not name.endswith(".safetensors"):
            verify_file(folder, name, record)
            return None
        if (problem := size_problem(folder, name, record)) is not None:
            raise damaged(folder / name, problem)
        # A mapping, unmapped with its last view: heap buffers used by changing threads would stay with the process.
        piece = mmap.mmap(-1, max(1, min(PIECE_BYTES, record.size)))
        with SafetensorsReader(folder / name, record) as reader:
            for tensor in reader.names:
                between()
                reader.verify(tensor, piece)
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


def from_json(value: Any, where: Path) -> Any:
    """The inverse of `to_json`. UserError, naming the file `where`, for a value that `to_json` never writes."""
    try:
        return _from_json(value)
    except (
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        RuntimeError,
    ) as error:  # RecursionError is a RuntimeError
        raise damaged(where, f"a value cannot be decoded: {type(error).__name__}: {error}") from error


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"$float": text}:
            return float(text)
        case {"$tuple": items}:
            return tuple(_from_json(item) for item in items)
        case {"$bytes": text}:
            return base64.b64decode(text, validate=True)
        case {"$tensor": {"dtype": dtype, "shape": shape, "data": text}}:
            data = bytearray(base64.b64decode(text, validate=True))
            flat = torch.frombuffer(data, dtype=DTYPES[dtype]) if data else torch.empty(0, dtype=DTYPES[dtype])
            return flat.reshape(shape)
    return {key: _from_json(item) for key, item in value.items()}
