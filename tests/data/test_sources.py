"""Files are found, and every record has its place."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatrain.data.files import FileProgress, kind_of
from megatrain.data.formats import SampleRejected
from megatrain.data.sources import Record, find_files, read_records, unit_of
from megatrain.errors import UserError

ROWS = [{"text": f"text {i}", "n": i} for i in range(700)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def _read(file: Path, **options: bool) -> list[Record]:
    return list(read_records(file, kind_of(file), **options))


def _values(file: Path) -> list[dict]:
    return [record.value for record in _read(file) if isinstance(record.value, dict)]


def _write(file: Path, content: str | bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def _write_arrow(file: Path, stream: bool) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with (
        pa.OSFile(str(file), "wb") as sink,
        (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=300)
    return file


def test_all_file_types_give_the_same_records(tmp_path: Path) -> None:
    frames = [zstd(part.encode()) for part in (JSONL[:5000], JSONL[5000:])]
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=150)
    files = [
        _write(tmp_path / "a.jsonl", JSONL),
        _write(tmp_path / "bom.jsonl", "\ufeff" + JSONL),
        _write(tmp_path / "a.json", json.dumps(ROWS)),
        _write(tmp_path / "wrapped.json", json.dumps({"data": ROWS})),
        _write(tmp_path / "lines.json", JSONL),
        _write(tmp_path / "a.jsonl.gz", gzip.compress(JSONL.encode())),
        _write(tmp_path / "a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        _write(tmp_path / "two_frames.jsonl.zst", b"".join(frames)),
        _write_arrow(tmp_path / "stream.arrow", stream=True),
        _write_arrow(tmp_path / "file.arrow", stream=False),
        tmp_path / "a.parquet",
    ]
    for file in files:
        assert _values(file) == ROWS, file.name
        assert [record.line for record in _read(file)] == list(range(1, 701)), file.name


def test_csv_and_tsv_rows_have_columns_and_file_lines(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.csv", 'text,n\n"two\nlines",1\nplain,2\nshort\n')
    records = _read(file)
    assert [(r.line, r.value) for r in records[:2]] == [
        (2, {"text": "two\nlines", "n": "1"}),
        (4, {"text": "plain", "n": "2"}),
    ]
    assert records[2].line == 5
    assert isinstance(records[2].value, SampleRejected)
    assert _values(_write(tmp_path / "a.tsv", "a\tb\n1\t2,3\n")) == [{"a": "1", "b": "2,3"}]


def test_bad_lines_keep_their_line_numbers(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.jsonl", '{"text": "a"}\n\nnot json\n[1]\n{"text": "b"}\n')
    records = _read(file)
    assert [record.line for record in records] == [1, 3, 4, 5]
    assert str(records[2].value) == "not an object with columns (list)"
    assert isinstance(records[1].value, SampleRejected)
    assert records[1].value.reason == "not valid JSON"


def test_one_conversation_in_a_json_file_is_one_record(tmp_path: Path) -> None:
    value = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    assert _values(_write(tmp_path / "a.json", json.dumps(value))) == [value]


def test_a_text_file_is_one_document_however_long(tmp_path: Path) -> None:
    text = "".join(f"Line {i} of a long text.\n" for i in range(150_000))
    records = _read(_write(tmp_path / "a.txt", text))
    assert len(records) > 2
    assert all(record.value["text"][-1] in " \n" for record in records if isinstance(record.value, dict))
    assert [record.more for record in records] == [True] * (len(records) - 1) + [False]
    assert "".join(record.value["text"] for record in records if isinstance(record.value, dict)) == text


def test_lines_of_a_text_file_can_be_documents(tmp_path: Path) -> None:
    records = _read(_write(tmp_path / "a.txt", "one\n\ntwo\nthree"), lines=True)
    assert [(r.line, r.value) for r in records] == [(1, {"text": "one"}), (3, {"text": "two"}), (4, {"text": "three"})]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "l.json", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "a.txt"]
)
def test_reading_progress_is_known(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    pieces = {
        "a.json": json.dumps(ROWS).encode(), "a.jsonl.gz": gzip.compress(JSONL.encode(), 0),
        "a.jsonl.zst": zstd(JSONL.encode()), "a.txt": b"a word " * 500_000,
    }  # fmt: skip
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file, row_group_size=150)
    elif name == "a.arrow":
        _write_arrow(file, stream=True)
    else:
        file.write_bytes(pieces.get(name, JSONL.encode()))
    progress = FileProgress(file)
    assert progress.share == 0
    shares = [progress.share for _ in read_records(file, kind_of(file), progress=progress)]
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= progress.share
    assert progress.share == pytest.approx(1.0, abs=0.01)


def test_folders_are_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2.jsonl", "b/1.jsonl", "a.txt", "image.png", ".hidden.jsonl", ".cache/x.jsonl"):
        _write(tmp_path / name, "{}")
    found = find_files(str(tmp_path), "data.train[0].path").files
    assert [str(file.relative_to(tmp_path)) for file in found] == ["a.txt", "b/1.jsonl", "b/2.jsonl"]


def test_globs_read_any_suffix_as_text(tmp_path: Path) -> None:
    _write(tmp_path / "pkg/b.py", "import os\n")
    _write(tmp_path / "a.py", "import sys\n")
    found = find_files(f"{tmp_path}/**/*.py", "here").files
    assert [file.name for file in found] == ["a.py", "b.py"]
    assert _values(found[0]) == [{"text": "import sys\n"}]


def test_places_count_lines_or_rows() -> None:
    assert {unit_of(kind_of(Path(name))) for name in ("a.jsonl.gz", "a.txt", "a.csv", "a.jl")} == {"line"}
    assert {unit_of(kind_of(Path(name))) for name in ("a.json", "a.parquet")} == {"row"}


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("chat.json", r"chat.json does not exist\n  -> did you mean .*/chat.jsonl"),
        ("chta.jsonl", r"did you mean .*/chat.jsonl"),
        ("nowhere/chat.jsonl", "does not exist\n  -> check the path; .* contains bad, chat.jsonl"),
        ("*.csv", "matches no file"),
        ("empty", "no data files in the folder .*: it is empty"),
        ("bad", "no data files in the folder .*: it holds only .png\n  -> megatrain reads json"),
    ],
)
def test_missing_files_are_named_with_suggestions(tmp_path: Path, path: str, said: str) -> None:
    _write(tmp_path / "chat.jsonl", "{}")
    _write(tmp_path / "bad/image.png", b"\x89PNG")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=f"(?s)^data.train.*{said}"):
        find_files(str(tmp_path / path), "data.train[0].path")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'[{"text": "a"},\n {"text": ]', r"a.json:2: is not valid JSON"),
        ("a.json", b'"text"', "holds a str, not a list of samples"),
        ("a.txt", "Ärger".encode("latin-1"), r"a.txt: is not UTF-8 text.*0xc4.*\n  -> convert it"),
        ("a.jsonl.gz", b"not gzip at all", "a.jsonl.gz: cannot be decompressed"),
        ("a.jsonl.gz", gzip.compress(JSONL.encode())[:-20], "cannot be decompressed"),
        ("a.jsonl.zst", zstd(JSONL.encode())[:-20], "cannot be decompressed.*[Tt]runcated"),
        ("a.jsonl.zst", b"not zstd at all", "cannot be decompressed"),
        ("a.parquet", b"PAR1 but no more", "a.parquet: cannot be read as a table"),
        ("a.arrow", b"nothing of the kind", "a.arrow: cannot be read as a table"),
        ("a.csv", b"text,n,text\na,1,b\n", "a.csv:1: has two columns called text, of which one would be lost"),
        ("a.bin", b"\x00\x01\x02", "a.bin: is not text: it contains zero bytes"),
    ],
)
def test_broken_files_are_errors_that_name_them(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    file = _write(tmp_path / name, content)
    with pytest.raises(UserError, match=f"(?s){said}"):
        _read(file)
