"""Hub datasets are read from the local caches, never from the network."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import tiny_tokenizer as tiny
from megatrain.config.schema import DataConfig, SourceConfig
from megatrain.data import load_data
from megatrain.data.sources import find_files, is_hub_id
from megatrain.errors import UserError

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches, an empty current directory, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tmp_path


def snapshot(cache: Path, files: dict[str, str], name: str = "datasets--org--some-set") -> Path:
    """What `hf download` leaves."""
    repo = cache / "hub" / name
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(SHA)
    for path, text in files.items():
        file = repo / "snapshots" / SHA / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return repo / "snapshots" / SHA


def found(cache: Path, hub_id: str = "org/some-set", **words: str) -> list[str]:
    return [
        str(file.relative_to(cache)).split(SHA + "/")[-1] for file in find_files(hub_id, "data.train[0]", **words).files
    ]


LINE = '{"text": "the quick brown fox"}\n'


def test_a_cached_dataset_is_read_like_a_file(cache: Path) -> None:
    snapshot(
        cache, {"data/train-00000-of-00001.jsonl": LINE * 5, "data/test-00000-of-00001.jsonl": LINE, "README.md": ""}
    )
    data = DataConfig(train=(SourceConfig(path="org/some-set"),), cache_dir=str(cache / "tokens"))
    rows, _ = load_data(data, tiny.make_tokenizer(), log=lambda line: None)
    assert rows.stats.samples == 5
    data = DataConfig(train=(SourceConfig(path="org/some-set", split="test"),), cache_dir=str(cache / "tokens"))
    rows, _ = load_data(data, tiny.make_tokenizer(), log=lambda line: None)
    assert rows.stats.samples == 1


def test_file_names_decide_the_split(cache: Path) -> None:
    snapshot(
        cache,
        {
            "train/a.jsonl": LINE,
            "b_training.jsonl": LINE,
            "dev.jsonl": LINE,
            "dataset_infos.json": "{}",
            "LICENSE.txt": "x",
        },
    )
    assert found(cache) == ["b_training.jsonl", "train/a.jsonl"]
    assert found(cache, split="validation") == ["dev.jsonl"]


def test_files_without_a_split_word_are_train(cache: Path) -> None:
    snapshot(cache, {"alpaca_data.json": "[]", ".hidden.json": "[]", "code.py": ""})
    assert found(cache) == ["alpaca_data.json"]


def test_the_readme_front_matter_decides_the_splits(cache: Path) -> None:
    matter = """---
configs:
- config_name: en
  default: true
  data_files:
  - {split: train, path: "english/*.jsonl"}
  - {split: test, path: [t1.jsonl, t2.jsonl]}
- config_name: de
  data_files: german.jsonl
---
text
"""
    names = ("english/a.jsonl", "english/b.jsonl", "german.jsonl", "t1.jsonl", "t2.jsonl", "train.jsonl")
    snapshot(cache, {"README.md": matter, **dict.fromkeys(names, LINE)})
    assert found(cache) == ["english/a.jsonl", "english/b.jsonl"]
    assert found(cache, split="test") == ["t1.jsonl", "t2.jsonl"]
    assert found(cache, subset="de") == ["german.jsonl"]
    with pytest.raises(UserError, match="no subset fr\n  -> set subset to one of en, de"):
        found(cache, subset="fr")


def test_one_of_several_subsets_without_a_default_must_be_chosen(cache: Path) -> None:
    matter = "---\nconfigs:\n- {config_name: a, data_files: a.jsonl}\n- {config_name: b, data_files: b.jsonl}\n---\n"
    snapshot(cache, {"README.md": matter, "a.jsonl": LINE, "b.jsonl": LINE})
    with pytest.raises(UserError, match="several subsets\n  -> set subset to one of a, b"):
        found(cache)


def test_a_missing_split_is_an_error_that_lists_the_others(cache: Path) -> None:
    snapshot(cache, {"train.jsonl": LINE, "test.jsonl": LINE})
    with pytest.raises(UserError, match="has no split validation\n  -> set split to one of test, train"):
        found(cache, split="validation")


def test_the_cache_of_the_datasets_library_is_read(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    file = cache / "raw.jsonl"
    file.write_text(LINE * 7)
    made = datasets.load_dataset("json", data_files={"train": str(file)}, cache_dir=str(cache / "made"))
    arrow = Path(made["train"].cache_files[0]["filename"])
    target = cache / "datasets" / "org___open_orca" / "default" / "0.0.0" / "abc"
    target.mkdir(parents=True)
    (target / "dataset_info.json").write_bytes((arrow.parent / "dataset_info.json").read_bytes())
    (target / "open_orca-train.arrow").write_bytes(arrow.read_bytes())
    data = DataConfig(train=(SourceConfig(path="org/OpenOrca"),), cache_dir=str(cache / "tokens"))
    rows, _ = load_data(data, tiny.make_tokenizer(), log=lambda line: None)
    assert rows.stats.samples == 7
    with pytest.raises(UserError, match="set split to one of train"):
        found(cache, "org/OpenOrca", split="test")


def test_a_dataset_that_is_not_cached_is_refused_at_once(cache: Path) -> None:
    with pytest.raises(UserError) as refusal:
        found(cache, "org/other")
    assert str(refusal.value) == (
        "data.train[0]: org/other is neither a local path nor a dataset in the local cache; megatrain downloads nothing\n"
        "  -> check the path, or fetch the dataset first: hf download org/other --repo-type dataset"
    )


def test_a_path_in_an_existing_folder_is_not_a_hub_id(cache: Path) -> None:
    Path("data").mkdir()
    Path("data/chat.json").write_text(json.dumps([]))
    with pytest.raises(UserError, match=r"data/chat.jsonl does not exist\n  -> did you mean data/chat.json"):
        found(cache, "data/chat.jsonl")
    with pytest.raises(UserError, match="subset is for datasets of the hub, split also for folders"):
        find_files("data/chat.json", "data.train[0]", split="test")


def test_a_path_with_a_misspelt_folder_is_not_taken_for_a_hub_id(cache: Path) -> None:
    Path("data").mkdir()
    with pytest.raises(UserError, match=r"dat/chat\.jsonl does not exist"):
        found(cache, "dat/chat.jsonl")


@pytest.mark.parametrize(
    ("path", "is_id"),
    [
        ("org/name", True),
        ("a-b.c/D_1.2", True),
        ("name", False),
        ("/org/name", False),
        ("a/b/c", False),
        ("./name", False),
    ],
)
def test_which_paths_look_like_hub_ids(cache: Path, path: str, is_id: bool) -> None:
    assert is_hub_id(path) is is_id
