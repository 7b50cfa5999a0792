"""A run's fingerprint is the data that it trains: a resume with other ids, targets, weights or order is refused as `data`."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import pytest

import tiny_tokenizer as tiny
from counting import CountingEngine
from megatrain.checkpoint.reader import latest_complete, saved_extra
from megatrain.config.schema import DataConfig
from megatrain.data import load_data
from megatrain.errors import UserError
from megatrain.run import loop
from megatrain.run.loop import train
from megatrain.run.resume import content_crc32
from tiny_run import make, prepare, write_chats

DATED = "{% set day = strftime_now('%d %B %Y') %}{{ '<|im_start|>system\n' + day + '<|im_end|>\n' }}" + tiny.CHATML
KEYED = tiny.CHATML.replace("+ '\n' + m['content']", "+ ('\n' if lines else ':') + m['content']").replace(
    "assistant\n'", "assistant' + ('\n' if lines else ':')"
)
"""Reads a keyword."""


def _crc(folder: Path, template: str = tiny.CHATML, today: str | None = None, **data: Any) -> int:
    plain = {"train": [str(folder / "a.jsonl"), str(folder / "b.jsonl")], "max_tokens": 128}
    config = DataConfig(**{**plain, **data, "cache_dir": str(folder / "cache")})
    rows, _ = load_data(config, tiny.make_tokenizer(template), date=today, log=lambda line: None)
    return content_crc32(rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate("abc"):
        write_chats(folder / f"{name}.jsonl", 20, seed=seed)
    return folder


def test_what_is_trained_changes_the_fingerprint_and_where_it_lies_does_not(folder: Path, tmp_path: Path) -> None:
    a, b, c = (str(folder / f"{name}.jsonl") for name in "abc")
    ids = {
        "as it was": _crc(folder),
        "mask": _crc(folder, train_on="all"),
        "template of the same length": _crc(folder, KEYED),
        "order of sources": _crc(folder, train=[b, a]),
        "another file": _crc(folder, train=[a, c]),
        "mixture": _crc(folder, train=[{"path": a, "weight": 2}, {"path": b, "weight": 1}]),
        "mixture the other way": _crc(folder, train=[{"path": a, "weight": 1}, {"path": b, "weight": 2}]),
        "rows": _crc(folder, packing=False),
        "a day": _crc(folder, DATED, "2026-11-30"),
        "the next day": _crc(folder, DATED, "2026-12-01"),
    }
    assert len(set(ids.values())) == len(ids), ids
    assert _crc(folder, today="2026-11-30") == ids["as it was"], "a template that reads no date"
    assert _crc(folder, KEYED, chat_template_kwargs={"lines": True}) == ids["as it was"], (
        "the config's keywords are read"
    )
    moved = shutil.copytree(folder, tmp_path / "moved", ignore=lambda *_: ["cache"])
    assert _crc(moved) == ids["as it was"]


def test_a_dated_template_has_the_date_of_the_config_then_of_the_run(folder: Path) -> None:
    assert _crc(folder, DATED, "2024-07-26") == _crc(folder, DATED, "2026-01-01", date="2024-07-26")


def test_a_resumed_run_keeps_the_day_on_which_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    write_chats(tmp_path / "texts.jsonl", 40)
    (tmp_path / "dated.jinja").write_text(DATED)
    words = (f"--data.chat_template={tmp_path}/dated.jinja", "--checkpoint.every_steps=2", "--schedule.steps=4")
    run = make(tmp_path, tmp_path, *words)

    class NextDay(datetime.date):
        @classmethod
        def today(cls) -> datetime.date:
            return datetime.date(2031, 5, 6)

    train(run, engine=CountingEngine())
    today = datetime.date.today().isoformat()
    last = latest_complete(tmp_path / "run" / "checkpoints")
    assert last is not None
    assert saved_extra(last)["date"] == today
    monkeypatch.setattr(loop.datetime, "date", NextDay)
    longer = make(tmp_path, tmp_path, *words[:2], "--schedule.steps=6")
    train(longer, resume="auto", engine=CountingEngine())
    last = latest_complete(tmp_path / "run" / "checkpoints")
    assert last is not None
    assert saved_extra(last)["date"] == today
    for change in (f"--data.date={NextDay.today()}", "--data.train_on=all"):
        with pytest.raises(
            UserError, match=r"checksum of token ids, targets, rows and weights(?s:.*)--allow-changes data"
        ):
            train(
                make(tmp_path, tmp_path, *words[:2], "--schedule.steps=8", change),
                resume="auto",
                engine=CountingEngine(),
            )
