"""Files as they lie on a disk: their kinds, opening them, and how much of one has been read."""

from __future__ import annotations

import functools
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from megatrain.data.formats import FORMATS, TURN_COLUMNS
from megatrain.data.values import parse_line
from megatrain.errors import UserError

RECORD_SUFFIXES = {
    ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".ldjson": "jsonl", ".jsonlines": "jsonl", ".jl": "jsonl",
    ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
TEXT_SUFFIX = ".txt"
COMPRESSED_SUFFIXES = (".gz", ".zst")
READABLE = "json, jsonl, parquet, arrow, csv, tsv, txt (json, jsonl, csv, tsv and txt also as .gz or .zst)"
"""For messages. JSON lines have four more suffixes: see `RECORD_SUFFIXES`."""

BOM = b"\xef\xbb\xbf"
_SNIFFED_LINES = 5
_FIRST_BYTES = 1 << 10
_MOST_SNIFFED_BYTES = 1 << 24


class FileProgress:
    """How much of a file has been read. The reader updates it; the log reads it."""

    def __init__(self, file: Path):
        self.size_bytes = file.stat().st_size
        self._raw: Any = None  # the open file on disk, before decompression; once closed, it has been read
        self._share = 0.0

    def follow(self, raw: Any) -> None:
        """Measure progress by `raw.tell()`, in bytes of the file."""
        self._raw = raw

    def reached(self, share: float) -> None:
        """Set the progress, 0 to 1."""
        self._raw, self._share = None, share

    @property
    def share(self) -> float:
        """Progress, 0 to 1."""
        if self._raw is None:
            return self._share
        return 1.0 if self._raw.closed else min(1.0, self._raw.tell() / max(self.size_bytes, 1))


def file_type(file: Path) -> tuple[str | None, str | None]:
    """(kind, compression) by suffix; kind None: unknown."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES else None
    suffix = suffixes[-1] if suffixes else ""
    return ("txt" if suffix == TEXT_SUFFIX else RECORD_SUFFIXES.get(suffix)), compression


def readable(file: Path) -> bool:
    return file_type(file)[0] is not None


def kind_of(file: Path, plain: bool = False, columns: tuple[str, ...] = ()) -> str | None:
    """The kind of a file: by its suffix, and for plain text (`txt`, or None for an unknown suffix) by its content too.

    JSON lines and JSON arrays whose objects are samples are read as samples, whatever the file's name: as plain text, their
    braces would be trained.

    Args:
        plain: The user wants plain text.
        columns: Columns of the file that the user names; without them, those of the formats tell what a sample is.
    """
    kind, _ = file_type(file)
    if kind not in ("txt", None) or plain:
        return kind
    try:
        stat = file.stat()
    except OSError:
        return kind
    return _sniffed(str(file), columns, stat.st_size, stat.st_mtime_ns) or kind


@functools.lru_cache(maxsize=4096)
def _sniffed(path: str, columns: tuple[str, ...], size: int, time: int) -> str | None:
    """`jsonl` or `json` if a file of plain text holds samples as JSON, else None. `size`, `time`: for the cache."""
    file = Path(path)
    needed = (columns,) if columns else _SAMPLE_COLUMNS
    try:
        with open_binary(file, FileProgress(file)) as stream:
            if stream.read(_FIRST_BYTES).removeprefix(BOM).lstrip()[:1] not in (b"{", b"[", b""):
                return None  # before a line is read, which may be the whole file
        with open_binary(file, FileProgress(file)) as stream:
            lines: list[bytes] = []
            while len(lines) < _SNIFFED_LINES and (line := stream.readline(_MOST_SNIFFED_BYTES)):
                line = line.removeprefix(BOM).strip()
                if not lines and line[:1] not in (b"{", b"[", b""):
                    return None
                lines += [line] if line else []
            if not lines:
                return None
            if lines[0].startswith(b"["):
                rest = stream.read(_MOST_SNIFFED_BYTES)
                return "json" if _holds_samples(b"\n".join([*lines, rest]), needed) else None
            return "jsonl" if all(_is_sample(line, needed) for line in lines) else None
    except (OSError, EOFError, zlib.error):
        return None  # whoever reads it will say so


_SAMPLE_COLUMNS = (*((name,) for name in TURN_COLUMNS), *(form.required for form in FORMATS.values()))
"""Columns that make an object a sample: all of one of these."""


def _is_sample(line: bytes, needed: Sequence[tuple[str, ...]]) -> bool:
    try:
        return _has_columns(parse_line(line), needed)
    except (ValueError, UnicodeDecodeError):
        return False


def _holds_samples(content: bytes, needed: Sequence[tuple[str, ...]]) -> bool:
    try:
        value = parse_line(content)
    except (ValueError, UnicodeDecodeError):
        return False
    return (
        isinstance(value, list) and bool(value) and all(_has_columns(item, needed) for item in value[:_SNIFFED_LINES])
    )


def _has_columns(value: object, needed: Sequence[tuple[str, ...]]) -> bool:
    return isinstance(value, dict) and any(all(name in value for name in names) for names in needed)


# ---- opening


@contextmanager
def errors_of(file: Path) -> Iterator[None]:
    """Turn the exceptions of a broken file into one error that names it."""
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        if not isinstance(error, OSError) or error.errno is None:  # of gzip and pyarrow, not of the system
            what, remedy = f"cannot be decompressed: {error}", "the file is truncated or damaged"
        else:
            what, remedy = f"cannot be read: {error.strerror or error}", "check its permissions, and the disk it is on"
        raise UserError(what, str(file), remedy) from error
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text: {error.reason} (byte 0x{error.object[error.start]:02x})"
        raise UserError(what, str(file), "convert it, for example with iconv -f LATIN1 -t UTF-8") from error


@contextmanager
def errors_of_table(file: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the system, not of pyarrow
        what = f"cannot be read as a table: {error}"
        raise UserError(what, str(file), "the file is damaged, or of another type") from error


def open_binary(file: Path, progress: FileProgress) -> IO[bytes]:
    _, compression = file_type(file)
    if compression == ".gz":
        unzipped = gzip.GzipFile(file, "rb")
        progress.follow(unzipped.fileobj)
        return io.BufferedReader(unzipped)  # pyright: ignore[reportArgumentType]  (it is a raw stream)
    raw = file.open("rb")
    progress.follow(raw)
    if compression is None:
        return raw
    import pyarrow

    # zstandard's stream reader accepts a truncated file as complete; pyarrow's does not
    return io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), buffer_size=1 << 17)


def open_text(file: Path, progress: FileProgress, newline: str | None = None) -> IO[str]:
    return io.TextIOWrapper(open_binary(file, progress), encoding="utf-8-sig", newline=newline)
