"""A folder gives its training files; held-out ones and files of other types are named."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from megatrain.data.files import kind_of
from megatrain.data.sources import find_files, read_records
from megatrain.data.splits import split_of
from megatrain.errors import UserError

LINE = '{"text": "the quick brown fox"}\n'


def _folder(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(LINE)
    return folder


def _found(folder: Path, split: str | None = None) -> tuple[list[str], str]:
    """Relative paths of the files, and the remarks."""
    found = find_files(str(folder), "data.train[0].path", split=split)
    return [str(file.relative_to(folder)) for file in found.files], "\n".join(found.remarks)


@pytest.mark.parametrize(
    ("names", "trained", "held_out"),
    [
        (["train.jsonl", "test.jsonl"], ["train.jsonl"], "test.jsonl"),
        (["data/train-0-of-1.jsonl", "data/validation-0-of-1.jsonl"], ["data/train-0-of-1.jsonl"], "data/validation"),
        (["dev/a.jsonl", "chats.jsonl", "eval/a.jsonl"], ["chats.jsonl"], "dev/a.jsonl, eval/a.jsonl"),
        (["train_sft.jsonl", "extra.jsonl", "test_sft.jsonl"], ["extra.jsonl", "train_sft.jsonl"], "test_sft.jsonl"),
        (["latest.jsonl", "contest.jsonl"], ["contest.jsonl", "latest.jsonl"], ""),
    ],
)
def test_held_out_files_of_a_folder_are_not_trained_and_named(
    tmp_path: Path, names: list[str], trained: list[str], held_out: str
) -> None:
    folder = _folder(tmp_path / "eval set", *names)  # words of the folder's own path do not count
    files, remarks = _found(folder)
    assert files == trained
    assert held_out in remarks
    assert bool(remarks) == bool(held_out)
    assert _found(folder, "all") == (sorted(names), "")


def test_a_split_of_a_folder_can_be_asked_for(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "ds", "train.jsonl", "dev.jsonl", "test.jsonl")
    assert _found(folder, "test")[0] == ["test.jsonl"]
    assert _found(folder, "validation")[0] == _found(folder, "dev")[0] == ["dev.jsonl"]
    with pytest.raises(UserError, match=r"no files of the split best: .* test, train, validation\n  -> set split to"):
        _found(folder, "best")
    only = _folder(tmp_path / "only", "test.jsonl")
    with pytest.raises(UserError, match="no files of the split train: by their names they are test"):
        _found(only)


def test_files_of_other_types_are_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "ds", "a.jsonl", "b.jsonl.bz2", "c.xz", "README.md", "LICENSE")
    assert _found(folder) == (["a.jsonl"], "2 files of other types are not read: .bz2, .xz")


def test_a_glob_that_mixes_splits_is_taken_literally_with_a_warning(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "ds", "train.jsonl", "test.jsonl")
    found = find_files(f"{folder}/*.jsonl", "data.train[0].path")
    assert [file.name for file in found.files] == ["test.jsonl", "train.jsonl"]
    assert found.remarks == ("warning: the glob also matches files that are held out by their names: test.jsonl",)
    assert find_files(f"{folder}/test*", "data.train[0].path").remarks == (), "asked for by name"


def test_folders_of_save_to_disk_are_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list([{"text": f"row {i}", "note": None if i else {"a": 1}} for i in range(10)])
    rows.save_to_disk(tmp_path / "one", num_shards=2)
    (tmp_path / "one" / "cache-1234.arrow").write_bytes(b"left by map()")
    files, _ = _found(tmp_path / "one")
    assert [Path(name).suffix for name in files] == [".arrow", ".arrow"]
    assert "cache-1234.arrow" not in files
    values = [record.value for file in files for record in read_records(tmp_path / "one" / file, "arrow")]
    assert [value["text"] for value in values if isinstance(value, dict)] == [f"row {i}" for i in range(10)]

    splits = datasets.DatasetDict({"train": rows, "test": rows.select(range(2)).flatten_indices()})
    splits.save_to_disk(tmp_path / "many")
    assert all(name.startswith("train/") for name in _found(tmp_path / "many")[0])
    assert "test/data" in _found(tmp_path / "many")[1]
    assert all(name.startswith("test/") for name in _found(tmp_path / "many", "test")[0])
    with pytest.raises(UserError, match=r"has no split best\n  -> set split to one of test, train, or all"):
        _found(tmp_path / "many", "best")
    _folder(tmp_path / "beside", "more.jsonl")
    rows.save_to_disk(tmp_path / "beside" / "saved")
    assert len(_found(tmp_path / "beside")[0]) == 2

    (tmp_path / "one" / files[0]).unlink()
    with pytest.raises(UserError, match=r"is incomplete: data-00000-of-00002\.arrow is missing"):
        _found(tmp_path / "one")


def test_the_words_of_a_path_name_its_split() -> None:
    words = {"a/test/x.jsonl": "test", "train-test.jsonl": "train", "x.val.json": "validation", "attest.json": ""}
    assert {path: split_of(Path(path)) for path in words} == words


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonlines", LINE, "jsonl"),
        ("a.jl", LINE, "jsonl"),
        ("a.txt", LINE * 9, "jsonl"),
        ("part-00000", '{"messages": []}\n' * 2, "jsonl"),
        ("a.data", '[\n {"prompt": "a", "completion": "b"}\n]', "json"),
        ("a.txt", '\ufeff\n{"instruction": "a", "output": "b"}\n', "jsonl"),
        ("a.txt", "{not json}\n", "txt"),
        ("a.txt", 'He wrote:\n{"text": "a"}\n', "txt"),
        ("a.txt", '{"text": "a"}\nand more\n', "txt"),
        ("a.lock", '{"version": 3, "packages": {}}\n', None),
        ("a.ipynb", '{\n "cells": []\n}\n', None),
        ("a.txt", "[1, 2]\n", "txt"),
        ("a.txt", "", "txt"),
    ],
)
def test_samples_as_json_are_known_by_suffix_or_content(tmp_path: Path, name: str, content: str, kind: str) -> None:
    file = tmp_path / name
    file.write_text(content)
    assert kind_of(file) == kind
    if not name.endswith(("jsonlines", "jl")):
        assert kind_of(file, plain=True) in ("txt", None), "format: text is the way out"


def test_the_columns_that_the_user_names_make_a_sample(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text('{"q": "a", "a": "b"}\n')
    assert kind_of(file) == "txt"
    assert kind_of(file, columns=("a", "q")) == "jsonl"
