"""From the data section of a config to rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_tokenizer as tiny
from megatrain.config.schema import DataConfig, SourceConfig, ValConfig
from megatrain.data import PackedRows, StepLoader, load_data
from megatrain.errors import UserError


def _write(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def _texts(file: Path, count: int, first: int = 0) -> str:
    return _write(file, [{"text": f"The number {i} is a number, and the dog."} for i in range(first, first + count)])


def _chats(file: Path, lengths: list[int]) -> str:
    return _write(file, [{"instruction": "Count", "output": "one " * n} for n in lengths])


def _load(
    tmp_path: Path, *paths: str, log: list[str] | None = None, pad: str = "<|pad|>", **settings: Any
) -> tuple[PackedRows, PackedRows | None]:
    data = DataConfig(
        train=tuple(SourceConfig(path=path) for path in paths),
        **{"max_tokens": 64, "cache_dir": str(tmp_path / "cache"), **settings},
    )
    lines = log if log is not None else []
    return load_data(
        data, tiny.make_tokenizer(pad=pad), vocab_size=len(tiny.make_tokenizer()), seed=1, log=lines.append
    )


def _documents(rows: PackedRows) -> set[str]:
    return {place for row in range(len(rows)) for place in rows.places(row)}


def test_text_and_chats_can_be_mixed_in_a_run(tmp_path: Path) -> None:
    lines: list[str] = []
    paths = (_texts(tmp_path / "a.jsonl", 20), _chats(tmp_path / "b.jsonl", [3, 9, 20, 5] * 5))
    rows, val = _load(tmp_path, *paths, log=lines)
    assert val is None
    assert [group.name for group in rows.groups] == list(paths)
    batch = StepLoader(rows, len(rows), seed=0).batch(0)
    assert (batch["labels"] != -100).sum() == rows.stats.targets
    assert batch["input_ids"].shape == (len(rows), 64)
    assert any(line.startswith(f"{paths[0]}: format text (columns text): 20 samples") for line in lines)
    assert any(line.startswith("train: 40 samples in ") and "% filled" in line for line in lines)


def test_eos_is_trained_even_if_it_is_also_the_padding(tmp_path: Path) -> None:
    rows, _ = _load(tmp_path, _chats(tmp_path / "b.jsonl", [3, 4]), pad="<|im_end|>")
    arrays = rows.arrays(range(len(rows)))
    end = tiny.make_tokenizer().eos_token_id
    assert (arrays["labels"] == end).sum() == 2
    assert (arrays["input_ids"] == end).sum() > 4, "the padding is there, and masked by position"


def test_samples_longer_than_a_row_are_an_error_with_counts_and_the_longest(tmp_path: Path) -> None:
    paths = _chats(tmp_path / "a.jsonl", [3, 90, 200]), _chats(tmp_path / "b.jsonl", [100, 1])
    with pytest.raises(UserError) as caught:
        _load(tmp_path, *paths)
    said = str(caught.value)
    assert f"{paths[0]}: 2 of 3 samples longer than 64 tokens; {paths[1]}: 1 of 2 samples" in said
    assert f"({paths[0]}:3)" in said
    longest = int(said.split("the longest has ")[1].split()[0])
    assert f"raise data.max_tokens to {longest}" in said
    assert _load(tmp_path, *paths, max_tokens=longest)[0].stats.samples == 5


@pytest.mark.parametrize(("overflow", "samples"), [("drop", 1), ("truncate", 3), ("split", 3)])
def test_the_other_overflow_policies_log_what_they_did(tmp_path: Path, overflow: str, samples: int) -> None:
    lines: list[str] = []
    path = _chats(tmp_path / "a.jsonl", [3, 90, 200])
    rows, _ = _load(tmp_path, path, overflow=overflow, log=lines)
    assert rows.stats.samples == samples
    assert rows.stats.longest <= 64
    warning = "warning: " if overflow == "drop" else ""
    said = f"{warning}{path}: 2 of 3 samples (66.7%) longer than 64 tokens: {overflow}"
    assert any(line.startswith(said) for line in lines)
    assert rows.stats.targets == (rows.arrays(range(len(rows)))["labels"] != -100).sum()


def test_dropping_all_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no samples are left for train with overflow: drop"):
        _load(tmp_path, _chats(tmp_path / "a.jsonl", [90, 200]), overflow="drop")


def test_documents_of_one_token_cannot_be_trained(tmp_path: Path) -> None:
    one = _write(tmp_path / "a.jsonl", [{"input_ids": [5]}] * 4)
    with pytest.raises(UserError, match=r"no token of train would be trained: its 4 samples have 4 tokens"):
        _load(tmp_path, one)
    with pytest.raises(UserError, match=r"data.val: no token of val would be trained: its 4 samples have 4 tokens"):
        _load(tmp_path, _texts(tmp_path / "b.jsonl", 3), val=ValConfig(sources=(SourceConfig(path=one),)))


def test_all_sources_are_checked_before_the_first_is_tokenized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = _texts(tmp_path / "a.jsonl", 3)
    bad = _write(tmp_path / "b.jsonl", [{"body": "x"}]), _write(tmp_path / "c.jsonl", [{"headline": "x"}])
    with monkeypatch.context() as patch:
        patch.setattr("megatrain.data.encoder.Encoder.ids", lambda *_: pytest.fail("tokenized"))
        with pytest.raises(UserError, match=r"2 problems(?s:.*)the columns are body(?s:.*)the columns are headline"):
            _load(tmp_path, good, bad[0], val=ValConfig(sources=(SourceConfig(path=bad[1]),)))
    assert _load(tmp_path, good, _texts(tmp_path / "d.jsonl", 2))[0].stats.samples == 5


def test_the_held_out_fraction_is_stable(tmp_path: Path) -> None:
    """Neither more data nor another order moves a sample between training and validation."""
    file = tmp_path / "a.jsonl"
    train, val = _load(tmp_path, _texts(file, 300), val=ValConfig(fraction=0.2))
    assert val is not None
    assert 30 < len(_documents(val)) < 90
    assert not _documents(train) & _documents(val)
    assert len(_documents(train) | _documents(val)) == 300
    _, more_val = _load(tmp_path, _texts(file, 600), val=ValConfig(fraction=0.2))
    assert more_val is not None
    assert {d for d in _documents(more_val) if int(d.rsplit(":", 1)[1]) <= 300} == _documents(val)


def test_a_fraction_that_holds_out_nothing_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("The dog. " * 100)
    with pytest.raises(
        UserError, match=r"data.val.fraction: the data is a single sample, which cannot be split(?s:.*)lines"
    ):
        _load(tmp_path, str(tmp_path / "a.txt"), val=ValConfig(fraction=0.01))


def test_separate_validation_sources_are_used_and_shared_samples_are_logged(tmp_path: Path) -> None:
    lines: list[str] = []
    train, held = _texts(tmp_path / "a.jsonl", 50), _texts(tmp_path / "b.jsonl", 10, first=45)
    rows, val = _load(tmp_path, train, val=ValConfig(sources=(SourceConfig(path=held),)), log=lines)
    assert val is not None
    assert (rows.stats.samples, val.stats.samples) == (50, 10)
    assert f"warning: 5 of 10 samples of {held} are also in the training data" in lines


def test_unpacked_rows(tmp_path: Path) -> None:
    rows, _ = _load(tmp_path, _chats(tmp_path / "a.jsonl", [3, 9, 20]), packing=False)
    assert len(rows) == 3
    batch = StepLoader(rows, 3, seed=0).batch(0)
    assert batch["input_ids"].shape == (3, rows.stats.longest)
    assert batch["attention_mask"].sum() == rows.stats.tokens


def test_rows_do_not_depend_on_the_cache(tmp_path: Path) -> None:
    path = _chats(tmp_path / "a.jsonl", [3, 9, 20, 7] * 10)
    first, again = (_load(tmp_path, path)[0].arrays(range(5)) for _ in range(2))
    other = _load(tmp_path, path, cache_dir=str(tmp_path / "other"))[0].arrays(range(5))
    for arrays in (again, other):
        assert all((first[name] == arrays[name]).all() for name in first)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"train": (SourceConfig(path="nowhere.jsonl"),)}, r"data.train\[0\].path: nowhere.jsonl does not exist"),
        ({"val": ValConfig(sources=(SourceConfig(path="nowhere"),))}, r"data.val.sources\[0\].path: nowhere does not"),
        ({"chat_template": "gone.jinja"}, "data.chat_template: gone.jinja does not exist"),
        ({"max_tokens": 9999}, "data.max_tokens: rows of 9999 tokens are longer than the 512 positions of the model"),
    ],
)
def test_errors_name_the_config_key(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    plain = {"train": (SourceConfig(path=_texts(tmp_path / "a.jsonl", 3)),), "cache_dir": str(tmp_path / "cache")}
    with pytest.raises(UserError, match=f"^{said}(?s:.*)\n  -> "):
        load_data(DataConfig(**{"max_tokens": 64, **plain, **settings}), tiny.make_tokenizer(), model_max_length=512)


def test_ids_outside_the_models_vocabulary_are_found_before_training(tmp_path: Path) -> None:
    path = _texts(tmp_path / "a.jsonl", 3)
    data = DataConfig(train=(SourceConfig(path=path),), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=r"a.jsonl:\d: token id \d+ is outside the model's vocabulary of 100"):
        load_data(data, tiny.make_tokenizer(), vocab_size=100)
