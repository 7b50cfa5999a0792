"""Find the files of a source and read them record by record, each with its place.

A record is a dict of columns in every file type: a line of JSON, an element of a JSON array, a row of a table, or
`{"text": ...}` for plain text. Files are streamed, except `.json`, which is one value and is read whole.

"""

from __future__ import annotations

import csv
import glob
import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatrain.data.files import (
    BOM,
    READABLE,
    FileProgress,
    errors_of,
    errors_of_table,
    file_type,
    open_binary,
    open_text,
)
from megatrain.data.formats import TURN_COLUMNS
from megatrain.data.hub import cached_files, is_hub_id
from megatrain.data.samples import SampleRejected
from megatrain.data.splits import Found, folder_files, glob_remarks
from megatrain.data.values import parse_line, without_nulls
from megatrain.errors import UserError, near_paths

_BLOCK_CHARS = 1 << 18
_WORD_CHARS = 4096
"""A longer word may be cut between two blocks of a text file."""
_TABLE_ROWS = 256


@dataclass(frozen=True)
class Record:
    """One record of a file."""

    line: int  # or row in the file, from 1
    value: dict[str, Any] | SampleRejected  # the columns, or why they cannot be read
    more: bool = False  # the text continues in the next record (a long `.txt` comes in pieces)


def find_files(path: str, where: str, *, subset: str | None = None, split: str | None = None) -> Found:
    """The files of a source.

    Args:
        path: A file, a folder (its readable files that are not held out: see [Note: splits of a folder]), a glob, or the id
            of a dataset in the local Hugging Face cache (see [Note: hub datasets]).
        where: The config key of the path.
        subset: Of a hub dataset; None: its default.
        split: Of a hub dataset or a folder; None: `train`.

    Raises:
        UserError: There are no files, or none that can be read.
    """
    expanded = Path(path).expanduser()
    is_path = expanded.exists() or glob.has_magic(path) or file_type(expanded) != (None, None)
    if not is_path and is_hub_id(path):
        return Found(cached_files(path, subset, split, where))
    if subset is not None or (split is not None and not expanded.is_dir()):
        is_what = "a folder" if expanded.is_dir() else "a path"
        what = f"subset is for datasets of the hub, split also for folders; {path} is {is_what}"
        raise UserError(what, where, "remove them, or give the files themselves")
    if expanded.is_file():
        return Found([expanded])
    if expanded.is_dir():
        return folder_files(expanded, split, where)
    if glob.has_magic(path):
        names = glob.glob(str(expanded), recursive=True)  # noqa: PTH207  (Path.glob takes no absolute patterns)
        if files := sorted(Path(name) for name in names if Path(name).is_file()):
            return Found(files, glob_remarks(files))
        raise UserError(f"the glob {path} matches no file", where, near_paths(expanded.parent))
    raise UserError(f"{path} does not exist", where=where, remedy=near_paths(expanded))


def unit_of(kind: str | None) -> str:
    """What `Record.line` counts in a file of this kind: `line`, or `row` where a line number would be misleading."""
    return "row" if kind in ("json", "parquet", "arrow") else "line"


def is_text(kind: str | None) -> bool:
    """Whether a file of this kind is plain text, without columns."""
    return kind in ("txt", None)


def read_records(
    file: Path, kind: str | None, lines: bool = False, progress: FileProgress | None = None
) -> Generator[Record]:
    """Read one file.

    Args:
        kind: From `kind_of`; None means plain text.
        lines: For plain text: each line that is not blank is a document. Otherwise the whole file is one.
        progress: Updated while reading.

    Raises:
        UserError: The file as a whole cannot be read.
    """
    reader = _READERS.get(kind, _read_lines if lines else _read_text)
    with errors_of(file):
        yield from reader(file, progress or FileProgress(file))


# ---- reading


def _read_json(file: Path, progress: FileProgress) -> Iterator[Record]:
    with open_binary(file, progress) as stream:
        content = stream.read().removeprefix(BOM)
    progress.reached(0.0)  # from here on it counts samples
    try:
        value = parse_line(content)
    except ValueError as error:
        if _is_object(content.lstrip().split(b"\n", 1)[0]):
            # JSON lines in a file called .json are common.
            lines = content.split(b"\n")
            for record in _json_lines(iter(lines)):
                progress.reached(record.line / len(lines))
                yield record
            return
        if not content.strip():
            return
        line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
        raise UserError(f"is not valid JSON: {_reason(error)}", f"{file}:{line}", "repair the file") from error
    if isinstance(value, dict):
        tables = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        # {"data": [...]} wraps the records; {"messages": [...]} is a record.
        value = tables[0] if len(value) == 1 and tables and next(iter(value)) not in TURN_COLUMNS else [value]
    if not isinstance(value, list):
        raise UserError(f"holds a {type(value).__name__}, not a list of samples", str(file), "write a list of objects")
    for row, item in enumerate(value, 1):
        progress.reached(row / len(value))
        yield Record(row, _as_columns(item))


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(parse_line(line), dict)
    except ValueError:
        return False


def _reason(error: ValueError) -> str:
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _read_jsonl(file: Path, progress: FileProgress) -> Iterator[Record]:
    with open_binary(file, progress) as stream:
        yield from _json_lines(iter(stream))


def _json_lines(lines: Iterator[bytes]) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(BOM)
        if not line.strip():
            continue
        try:
            value = _as_columns(parse_line(line))
        except ValueError as error:
            value = SampleRejected("not valid JSON", _reason(error))
        yield Record(number, value)


def _as_columns(value: object) -> dict[str, Any] | SampleRejected:
    return value if isinstance(value, dict) else SampleRejected("not an object with columns", type(value).__name__)


def _read_parquet(file: Path, progress: FileProgress) -> Iterator[Record]:
    import pyarrow.parquet

    row = 0
    with errors_of_table(file), pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=_TABLE_ROWS):
            for value in _rows_of(batch):
                row += 1
                yield Record(row, value)
            progress.reached(row / max(table.metadata.num_rows, 1))


def _rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """The rows of a batch of a table, without the nulls that it filled in for absent keys of nested objects."""
    import pyarrow

    nested = [one.name for one in batch.schema if _holds(one.type, pyarrow.types.is_struct)]
    maps = any(_holds(one.type, pyarrow.types.is_map) for one in batch.schema)
    for value in batch.to_pylist(**({"maps_as_pydicts": "strict"} if maps else {})):
        for column in nested:
            value[column] = without_nulls(value[column])
        yield value


def _holds(type_: Any, is_kind: Callable[[Any], bool]) -> bool:
    """Whether a type of a table is of a kind, or holds one inside."""
    return is_kind(type_) or any(_holds(type_.field(i).type, is_kind) for i in range(type_.num_fields))


def _read_arrow(file: Path, progress: FileProgress) -> Iterator[Record]:
    import pyarrow

    row = 0
    with errors_of_table(file), pyarrow.memory_map(str(file)) as mapped:
        try:
            batches = iter(pyarrow.ipc.open_stream(mapped))
        except pyarrow.ArrowInvalid:  # Arrow's file layout instead of its stream layout
            mapped.seek(0)
            table = pyarrow.ipc.open_file(mapped)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, _TABLE_ROWS):
                for value in _rows_of(batch.slice(start, _TABLE_ROWS)):
                    row += 1
                    yield Record(row, value)
            progress.reached(mapped.tell() / max(progress.size_bytes, 1))


def _read_csv(file: Path, progress: FileProgress) -> Iterator[Record]:
    csv.field_size_limit(1 << 30)
    delimiter = "\t" if ".tsv" in file.suffixes else ","
    with open_text(file, progress, newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter)
        header = next((fields for fields in reader if fields), None)
        if header is None:
            return
        if twice := sorted({name for name in header if header.count(name) > 1}):
            what = f"has two columns called {', '.join(twice)}, of which one would be lost"
            raise UserError(what, f"{file}:{reader.line_num}", "rename one in the header")
        line = reader.line_num + 1
        try:
            for fields in reader:
                if len(fields) == len(header):
                    yield Record(line, dict(zip(header, fields, strict=True)))
                elif fields:
                    yield Record(line, SampleRejected("not as many fields as the header", f"{len(fields)}"))
                line = reader.line_num + 1
        except csv.Error as error:
            raise UserError(f"is not valid CSV: {error}", f"{file}:{line}", "repair the file") from error


def _read_lines(file: Path, progress: FileProgress) -> Iterator[Record]:
    with open_text(file, progress) as stream:
        for number, line in enumerate(stream, 1):
            if text := line.rstrip("\n"):
                yield Record(number, {"text": text})


def _read_text(file: Path, progress: FileProgress) -> Iterator[Record]:
    with open_text(file, progress) as stream:
        buffer = stream.read(_BLOCK_CHARS)
        if "\x00" in buffer:
            raise UserError("is not text: it contains zero bytes", str(file), f"megatrain reads {READABLE}")
        while block := stream.read(_BLOCK_CHARS):
            # not in a word, which may be a special token
            cut = max(buffer.rfind(mark, len(buffer) - _WORD_CHARS) for mark in " \n") + 1 or len(buffer)
            yield Record(1, {"text": buffer[:cut]}, more=True)
            buffer = buffer[cut:] + block
        yield Record(1, {"text": buffer})


_READERS: dict[str | None, Callable[[Path, FileProgress], Iterator[Record]]] = {
    "json": _read_json, "jsonl": _read_jsonl, "parquet": _read_parquet, "arrow": _read_arrow, "csv": _read_csv,
}  # fmt: skip
