"""Find the files of a source and read them record by record, each with its place.

A record is a dict of columns in every file type: a line of JSON, an element of a JSON array, a row of a table, or
`{"text": ...}` for plain text. Files are streamed, except `.json`, which is one value and is read whole.

[Note: hub datasets]
Datasets of the Hugging Face hub are read from the local cache. Nothing is downloaded, and no code of a dataset runs.
Two caches are searched, in this order: the hub's, with the files as published (`hf download ORG/NAME --repo-type dataset`),
and the cache of the `datasets` library, with Arrow files (`datasets.load_dataset`). The first that has the split is used.

The README's front matter lists the files of each split. Without it, file names decide, as on the hub: a path containing
the word `train` belongs to the split `train`; if no path contains a split's word, all files are `train`. The `datasets`
library itself is not used: it is no dependency, it takes seconds to import, and offline it guesses a subset instead of asking.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import os
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatrain.data.formats import SampleRejected
from megatrain.errors import UserError, near_paths

RECORD_SUFFIXES = {
    ".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl",
    ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".tsv": "csv",
}  # fmt: skip
TEXT_SUFFIX = ".txt"
COMPRESSED_SUFFIXES = (".gz", ".zst")
READABLE = "json, jsonl, parquet, arrow, csv, tsv, txt (json, jsonl, csv, tsv and txt also as .gz or .zst)"

PIECE_CHARS = 16_384
"""Long texts are tokenized in pieces of about this size: tokenizers slow down on longer ones, and process pieces in
parallel."""
_BLOCK_CHARS = 1 << 20
_TABLE_ROWS = 256
_BOM = b"\xef\xbb\xbf"
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SPLIT_WORDS = {
    "train": {"train", "training"},
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
}
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
_Splits = dict[str, list[Path]]


@dataclass(frozen=True)
class Record:
    """One record of a file."""

    line: int  # or row in the file, from 1
    value: dict[str, Any] | SampleRejected  # the columns, or why they cannot be read
    more: bool = False  # the text continues in the next record (a long `.txt` comes in pieces)


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


def find_files(path: str, where: str, *, subset: str | None = None, split: str | None = None) -> list[Path]:
    """The files of a source, in a fixed order.

    Args:
        path: A file, a folder (all readable files below it, except hidden ones), a glob, or the id of a dataset in the
            local Hugging Face cache (see [Note: hub datasets]).
        where: The config key of the path.
        subset, split: Of a hub dataset; None: its default subset, and `train`.

    Raises:
        UserError: There are no files, or none that can be read.
    """
    expanded = Path(path).expanduser()
    is_path = expanded.exists() or glob.has_magic(path) or _file_type(expanded) != (None, None)
    if not is_path and is_hub_id(path):
        return _cached_files(path, subset, split, where)
    if subset is not None or split is not None:
        what = f"subset and split are for datasets of the hub; {path} is a path"
        raise UserError(what, where, "remove them, or give the files themselves")
    if expanded.is_file():
        return [expanded]
    if expanded.is_dir():
        below = [file for file in sorted(expanded.rglob("*")) if file.is_file() and not _hidden(file, expanded)]
        if files := [file for file in below if _readable(file)]:
            return files
        suffixes = sorted({file.suffix or file.name for file in below})
        found = f"it holds only {', '.join(suffixes[:8])}" if suffixes else "it is empty"
        remedy = f"megatrain reads {READABLE}; a glob such as {path.rstrip('/')}/**/*.py reads any file as text"
        raise UserError(f"no data files in the folder {path}: {found}", where, remedy)
    if glob.has_magic(path):
        names = glob.glob(str(expanded), recursive=True)  # noqa: PTH207  (Path.glob takes no absolute patterns)
        if files := sorted(Path(name) for name in names if Path(name).is_file()):
            return files
        raise UserError(f"the glob {path} matches no file", where, near_paths(expanded.parent))
    raise UserError(f"{path} does not exist", where=where, remedy=near_paths(expanded))


def unit_of(file: Path) -> str:
    """What `Record.line` counts in this file: `line`, or `row` where a line number would be misleading."""
    return "row" if _file_type(file)[0] in ("json", "parquet", "arrow") else "line"


def is_text(file: Path) -> bool:
    """Whether the file is plain text, without columns."""
    return _file_type(file)[0] in ("txt", None)


def read_records(file: Path, lines: bool = False, progress: FileProgress | None = None) -> Generator[Record]:
    """Read one file, according to its suffix; an unknown suffix means plain text.

    Args:
        lines: For plain text: each line that is not blank is a document. Otherwise the whole file is one.
        progress: Updated while reading.

    Raises:
        UserError: The file as a whole cannot be read.
    """
    kind, _ = _file_type(file)
    reader = _READERS.get(kind, _read_lines if lines else _read_text)
    with _errors_of(file):
        yield from reader(file, progress or FileProgress(file))


def cut_point(text: str, begin: int, limit: int) -> int:
    """Where to end the piece of a long text that begins at `begin`, at most `limit` characters later.

    Cuts before a single space followed by a letter, else before a newline between two letters or digits. Common
    tokenizers start a new word there, so the pieces together give the tokens of the whole text. Otherwise it
    cuts at the limit; `begin + limit` must lie inside the text.
    """
    for mark in (" ", "\n"):
        at = begin + limit
        while (at := text.rfind(mark, begin + limit // 2, at)) > begin:
            before, after = text[at - 1], text[at + 1]
            in_words = after.isalpha() and not before.isspace()
            if in_words if mark == " " else before.isalnum() and after.isalnum():
                return at
    return begin + limit


def split_text(text: str) -> list[str]:
    """Split a text into pieces of about `PIECE_CHARS`; joined they are the text."""
    pieces, begin = [], 0
    while len(text) - begin > PIECE_CHARS:
        end = cut_point(text, begin, PIECE_CHARS)
        pieces.append(text[begin:end])
        begin = end
    pieces.append(text[begin:])
    return pieces


def _file_type(file: Path) -> tuple[str | None, str | None]:
    """(kind, compression) by suffix; kind None: unknown."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    compression = suffixes.pop() if suffixes and suffixes[-1] in COMPRESSED_SUFFIXES else None
    suffix = suffixes[-1] if suffixes else ""
    return ("txt" if suffix == TEXT_SUFFIX else RECORD_SUFFIXES.get(suffix)), compression


def _readable(file: Path) -> bool:
    return _file_type(file)[0] is not None


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(folder).parts)


# ---- opening


@contextmanager
def _errors_of(file: Path) -> Iterator[None]:
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
def _errors_of_table(file: Path) -> Iterator[None]:
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the system, not of pyarrow
        what = f"cannot be read as a table: {error}"
        raise UserError(what, str(file), "the file is damaged, or of another type") from error


def _open_binary(file: Path, progress: FileProgress) -> IO[bytes]:
    _, compression = _file_type(file)
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


def _open_text(file: Path, progress: FileProgress, newline: str | None = None) -> IO[str]:
    return io.TextIOWrapper(_open_binary(file, progress), encoding="utf-8-sig", newline=newline)


# ---- reading


def _read_json(file: Path, progress: FileProgress) -> Iterator[Record]:
    import orjson

    with _open_binary(file, progress) as stream:
        content = stream.read().removeprefix(_BOM)
    progress.reached(0.0)  # from here on it counts samples
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        if _is_object(content.lstrip().split(b"\n", 1)[0]):
            # JSON lines in a file called .json are common.
            lines = content.split(b"\n")
            for record in _json_lines(iter(lines)):
                progress.reached(record.line / len(lines))
                yield record
            return
        if not content.strip():
            return
        raise UserError(f"is not valid JSON: {error.msg}", f"{file}:{error.lineno}", "repair the file") from error
    if isinstance(value, dict):
        tables = [item for item in value.values() if isinstance(item, list) and item and isinstance(item[0], dict)]
        # {"data": [...]} wraps the records; {"messages": [...]} is a record.
        value = tables[0] if len(value) == 1 and tables and next(iter(value)) not in _SAMPLE_KEYS else [value]
    if not isinstance(value, list):
        raise UserError(f"holds a {type(value).__name__}, not a list of samples", str(file), "write a list of objects")
    for row, item in enumerate(value, 1):
        progress.reached(row / len(value))
        yield Record(row, _as_columns(item))


_SAMPLE_KEYS = ("messages", "conversations", "conversation")


def _is_object(line: bytes) -> bool:
    import orjson

    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False


def _read_jsonl(file: Path, progress: FileProgress) -> Iterator[Record]:
    with _open_binary(file, progress) as stream:
        yield from _json_lines(iter(stream))


def _json_lines(lines: Iterator[bytes]) -> Iterator[Record]:
    import orjson

    for number, line in enumerate(lines, 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        try:
            value = _as_columns(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            value = SampleRejected("not valid JSON", error.msg)
        yield Record(number, value)


def _as_columns(value: object) -> dict[str, Any] | SampleRejected:
    return value if isinstance(value, dict) else SampleRejected("not an object with columns", type(value).__name__)


def _read_parquet(file: Path, progress: FileProgress) -> Iterator[Record]:
    import pyarrow.parquet

    row = 0
    with _errors_of_table(file), pyarrow.parquet.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=_TABLE_ROWS):
            for value in batch.to_pylist():
                row += 1
                yield Record(row, value)
            progress.reached(row / max(table.metadata.num_rows, 1))


def _read_arrow(file: Path, progress: FileProgress) -> Iterator[Record]:
    import pyarrow

    row = 0
    with _errors_of_table(file), pyarrow.memory_map(str(file)) as mapped:
        try:
            batches = iter(pyarrow.ipc.open_stream(mapped))
        except pyarrow.ArrowInvalid:  # Arrow's file layout instead of its stream layout
            mapped.seek(0)
            table = pyarrow.ipc.open_file(mapped)
            batches = (table.get_batch(i) for i in range(table.num_record_batches))
        for batch in batches:
            for start in range(0, batch.num_rows, _TABLE_ROWS):
                for value in batch.slice(start, _TABLE_ROWS).to_pylist():
                    row += 1
                    yield Record(row, value)
            progress.reached(mapped.tell() / max(progress.size_bytes, 1))


def _read_csv(file: Path, progress: FileProgress) -> Iterator[Record]:
    csv.field_size_limit(1 << 30)
    delimiter = "\t" if ".tsv" in file.suffixes else ","
    with _open_text(file, progress, newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter)
        header = next((fields for fields in reader if fields), None)
        if header is None:
            return
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
    with _open_text(file, progress) as stream:
        for number, line in enumerate(stream, 1):
            if text := line.rstrip("\n"):
                yield Record(number, {"text": text})


def _read_text(file: Path, progress: FileProgress) -> Iterator[Record]:
    with _open_text(file, progress) as stream:
        buffer = stream.read(_BLOCK_CHARS)
        if "\x00" in buffer:
            raise UserError("is not text: it contains zero bytes", str(file), f"megatrain reads {READABLE}")
        while block := stream.read(_BLOCK_CHARS):
            *pieces, rest = split_text(buffer)
            yield from (Record(1, {"text": piece}, more=True) for piece in pieces)
            buffer = rest + block
        *pieces, rest = split_text(buffer)
        yield from (Record(1, {"text": piece}, more=True) for piece in pieces)
        yield Record(1, {"text": rest})


_READERS: dict[str | None, Callable[[Path, FileProgress], Iterator[Record]]] = {
    "json": _read_json, "jsonl": _read_jsonl, "parquet": _read_parquet, "arrow": _read_arrow, "csv": _read_csv,
}  # fmt: skip


# ---- datasets of the hub


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist may be a hub id, `org/name`: one slash, and no local folder `org`."""
    return _ID.fullmatch(path) is not None and not Path(path).parent.is_dir()


def _cached_files(hub_id: str, subset: str | None, split: str | None, where: str) -> list[Path]:
    """The files of one split (None: `train`) of a cached dataset, in a fixed order. See [Note: hub datasets].

    `subset`: the hub's "subset" or "config"; None: the default, or the only one.
    """
    wanted = split or "train"
    seen: list[str] = []
    for splits in _cached_splits(hub_id, subset, where):
        if wanted in splits:
            return splits[wanted]
        seen += splits
    if seen:
        what = f"the dataset {hub_id} has no split {wanted}" + (f" in the subset {subset}" if subset else "")
        raise UserError(what, where, f"set split to one of {', '.join(dict.fromkeys(seen))}")
    what = f"{hub_id} is neither a local path nor a dataset in the local cache; megatrain downloads nothing"
    remedy = f"check the path, or fetch the dataset first: hf download {hub_id} --repo-type dataset"
    raise UserError(what, where, remedy)


def _cached_splits(hub_id: str, subset: str | None, where: str) -> Iterator[_Splits]:
    """The splits of the dataset in each cache that has it."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        # The path is read at each call, as tests and users change it after the import.
        folder = snapshot_download(hub_id, repo_type="dataset", cache_dir=constants.HF_HUB_CACHE, local_files_only=True)
    except (HFValidationError, LocalEntryNotFoundError):
        pass
    else:
        snapshot = Path(str(folder))
        splits = _declared(snapshot, subset, where)
        if splits := _by_name(snapshot, subset) if splits is None else splits:
            yield splits
    if splits := _prepared(hub_id, subset, where):
        yield splits


def _declared(snapshot: Path, subset: str | None, where: str) -> _Splits | None:
    """The splits listed in the README's front matter, or None."""
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        configs = (metadata_load(snapshot / "README.md") or {}).get("configs")
    except (OSError, ValueError, YAMLError):
        return None  # no README, or one without valid front matter: file names decide, as on the hub
    if not isinstance(configs, list):
        return None
    named = {str(c.get("config_name", "default")): c for c in configs if isinstance(c, dict) and c.get("data_files")}
    if not named:
        return None
    default = next((name for name, c in named.items() if c.get("default")), None)
    config = named[_choose(list(named), subset, default, where)]
    root = snapshot / str(config.get("data_dir", "."))
    splits: _Splits = {}
    for split, pattern in _patterns(config["data_files"]):
        splits.setdefault(split, []).extend(sorted(file for file in root.glob(pattern) if file.is_file()))
    return {split: files for split, files in splits.items() if files}


def _patterns(data_files: object) -> Iterator[tuple[str, str]]:
    """(split, glob) pairs from any form that `data_files` may have."""
    for item in data_files if isinstance(data_files, list) else [data_files]:
        split, paths = (
            (item.get("split", "train"), item.get("path", [])) if isinstance(item, Mapping) else ("train", item)
        )
        for path in paths if isinstance(paths, list) else [paths]:
            yield str(split), str(path)


def _by_name(snapshot: Path, subset: str | None) -> _Splits:
    """The splits according to the words in the files' paths."""
    splits: _Splits = {}
    for file in sorted(snapshot.rglob("*")):
        path = file.relative_to(snapshot)
        is_other = file.name in _NO_DATA or file.name.lower().startswith(("readme", "license"))
        if is_other or any(part.startswith(".") for part in path.parts) or not (file.is_file() and _readable(file)):
            continue
        if subset is not None and subset not in path.parts[:-1]:
            continue
        words = set(re.split(r"[^a-z]+", str(path).lower()))
        split = next((name for name, aliases in _SPLIT_WORDS.items() if words & aliases), "")
        splits.setdefault(split, []).append(file)
    without = splits.pop("", [])
    return splits or ({"train": without} if without else {})


def _prepared(hub_id: str, subset: str | None, where: str) -> _Splits:
    """The splits in the cache of the `datasets` library:
    CACHE/org___name/SUBSET/VERSION/HASH/name-train[-00000-of-00002].arrow"""
    from huggingface_hub import constants

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    organisation, name = hub_id.split("/")
    # The library stores OpenOrca as open_orca.
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    name = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()
    infos = (cache / f"{organisation}___{name}").glob("*/*/*/dataset_info.json")
    folders = [info.parent for info in infos if not info.parent.name.endswith(".incomplete")]  # of an aborted build
    if not folders:
        return {}
    subsets = sorted({folder.parts[-3] for folder in folders})
    chosen = _choose(subsets, subset, "default" if "default" in subsets else None, where)
    newest = max(
        (folder for folder in folders if folder.parts[-3] == chosen),
        key=lambda folder: (folder / "dataset_info.json").stat().st_mtime_ns,
    )
    splits: _Splits = {}
    for file in sorted(newest.glob(f"{name}-*.arrow")):
        if match := re.fullmatch(re.escape(name) + r"-(.+?)(-\d{5}-of-\d{5})?\.arrow", file.name):
            splits.setdefault(match[1], []).append(file)
    return splits


def _choose(subsets: Sequence[str], wanted: str | None, default: str | None, where: str) -> str:
    if wanted is None and (default is not None or len(subsets) == 1):
        return default if default is not None else subsets[0]
    if wanted is not None and wanted in subsets:
        return wanted
    what = "the dataset has several subsets" if wanted is None else f"the dataset has no subset {wanted}"
    raise UserError(what, where, f"set subset to one of {', '.join(subsets)}")
