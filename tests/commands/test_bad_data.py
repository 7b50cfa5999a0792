"""Forty wrong data files through the real entry point: exit code 2, the place, a remedy, and no traceback.

Samples that are too long or malformed are never dropped silently.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet
import pytest
from ruamel.yaml import YAML

import tiny_tokenizer as tiny
from megatrain.commands.main import main
from tiny_run import config, write_model


def _jsonl(*rows: object) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def _chat(*turns: tuple[object, object], **more: object) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


GOOD = _chat(("user", "What is the number?"), ("assistant", "one two three"))


def _parquet(table: dict[str, list[Any]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(table), out)
    return out.getvalue()


class Bad(NamedTuple):
    """`content` in a file `file`; the message contains `place` and `says`. `words` extend the command line."""

    name: str
    file: str
    content: bytes | Callable[[Path], None]
    place: str
    says: str
    words: tuple[str, ...] = ()


def _folder_of_pictures(path: Path) -> None:
    path.mkdir()
    (path / "a.png").touch()


def _mixed_folder(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_bytes(_jsonl(GOOD))
    (path / "b.txt").write_text("Only text")


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEXT = _jsonl({"text": "the quick brown fox"})
REPAIR = "repair them, or set data.allow_rejects to"
BAD = [
    # the file as a whole
    Bad("missing", "chat.jsonl", lambda path: None, "data.train[0].path", "does not exist\n  -> check the path"),
    Bad("misspelt", "x.jsonl", lambda path: path.with_name("xx.jsonl").touch(), "data.train[0].path", "did you mean"),
    Bad("glob without a match", "*.parquet", lambda path: None, "data.train[0].path", "matches no file"),
    Bad("empty folder", "data", Path.mkdir, "data.train[0].path", "it is empty"),
    Bad("folder of pictures", "data", _folder_of_pictures, "data.train[0].path", "it holds only .png"),
    Bad("folder of text and chats", "data", _mixed_folder, "data.train[0]", "give them as two sources"),
    Bad("empty file", "a.jsonl", b"", "a.jsonl", "there are no samples in it"),
    Bad("empty text", "a.txt", b" \n\n ", "a.txt:1", "empty text"),
    Bad("blank lines", "a.jsonl", b"\n\n\n", "a.jsonl", "check that this is the right file"),
    Bad("latin-1", "a.txt", "Über die Brücke".encode("latin-1"), "a.txt", "iconv -f LATIN1 -t UTF-8"),
    Bad("latin-1 in a table", "a.csv", "text\nfür\n".encode("latin-1"), "a.csv", "iconv"),
    Bad("utf-16", "a.txt", "hello".encode("utf-16"), "a.txt", "is not UTF-8 text"),
    Bad("binary text", "a.txt", b"abc\x00def", "a.txt", "contains zero bytes"),
    Bad("gzip cut short", "a.jsonl.gz", gzip.compress(_jsonl(GOOD) * 50)[:-9], "a.jsonl.gz", "truncated or damaged"),
    Bad("no gzip", "a.jsonl.gz", _jsonl(GOOD), "a.jsonl.gz", "cannot be decompressed"),
    Bad(
        "zstd cut short",
        "a.jsonl.zst",
        pyarrow.compress(_jsonl(GOOD) * 50, codec="zstd", asbytes=True)[:-5],
        "a.jsonl.zst",
        "truncated or damaged",
    ),
    Bad("broken parquet", "a.parquet", _parquet({"text": ["a"]})[:-6], "a.parquet", "cannot be read as a table"),
    Bad("parquet that is JSON", "a.parquet", _jsonl(GOOD), "a.parquet", "damaged, or of another type"),
    Bad("broken arrow", "a.arrow", b"ARROW1\0\0 no", "a.arrow", "cannot be read as a table"),
    Bad("broken JSON", "a.json", b'[{"text": "a"},\n {"text": }]', "a.json:2", "is not valid JSON"),
    Bad("JSON number", "a.json", b"7", "a.json", "write a list of objects"),
    Bad("JSON lines of numbers", "a.jsonl", b"1\n2\n", "a.jsonl:1", "not an object with columns"),
    Bad("JSON lines cut in the middle", "a.jsonl", _jsonl(GOOD) + b'{"messages": [{"ro', "a.jsonl:2", "not valid JSON"),
    Bad("CSV with a header only", "a.csv", b"text\n", "a.csv", "there are no samples in it"),
    Bad("CSV row too short", "a.csv", b"prompt,completion\na,b\nc\n", "a.csv:3", "not as many fields as the header"),
    # columns
    Bad("unknown columns", "a.jsonl", _jsonl({"body": "x"}), "a.jsonl", "set columns: {text: body}"),
    Bad(
        "a format without its columns",
        "a.jsonl",
        TEXT,
        "a.jsonl",
        "format alpaca needs instruction and output",
        ("--data.train.0.format=alpaca",),
    ),
    Bad(
        "columns that are not there",
        "a.jsonl",
        TEXT,
        "a.jsonl",
        "did you mean text?",
        ("--data.train.0.columns={text: texts}",),
    ),
    Bad(
        "a column of no format",
        "a.jsonl",
        TEXT,
        "a.jsonl",
        "did you mean completion?",
        ("--data.train.0.columns={completon: text}",),
    ),
    Bad(
        "chats asked of plain text",
        "a.txt",
        b"hello",
        "a.txt",
        "use text or lines",
        ("--data.train.0.format=messages",),
    ),
    # samples
    Bad("text of another type", "a.jsonl", _jsonl({"text": 5}), "a.jsonl:1", "text is not a string: a.jsonl:1 (int)"),
    Bad("no messages", "a.jsonl", _jsonl(GOOD, _chat()), "a.jsonl:2", "no messages"),
    Bad("messages that are text", "a.jsonl", _jsonl(GOOD, {"messages": "hi"}), "a.jsonl:2", "messages is not a list"),
    Bad(
        "a message that is text",
        "a.jsonl",
        _jsonl(GOOD, {"messages": ["hi"]}),
        "a.jsonl:2",
        "not an object: a.jsonl:2 (str)",
    ),
    Bad("an unknown role", "a.jsonl", _jsonl(_chat(("narrator", "x"))), "a.jsonl:1", "unknown role 'narrator'"),
    Bad("no role", "a.jsonl", _jsonl({"messages": [{"content": "x"}]}), "a.jsonl:1", "unknown role None"),
    Bad(
        "an empty answer",
        "a.jsonl",
        _jsonl(_chat(("user", "a"), ("assistant", " "))),
        "a.jsonl:1",
        "an empty assistant",
    ),
    Bad("no answer", "a.jsonl", _jsonl(_chat(("user", "a"))), "a.jsonl:1", "no assistant message"),
    Bad("answer first", "a.jsonl", _jsonl(_chat(("assistant", "a"))), "a.jsonl:1", "the assistant speaks first"),
    Bad(
        "content that is a number",
        "a.jsonl",
        _jsonl(_chat(("user", 3))),
        "a.jsonl:1",
        "content is not text: a.jsonl:1 (int)",
    ),
    Bad(
        "a picture",
        "a.jsonl",
        _jsonl(_chat(("user", [{"type": "image", "url": "x"}]), ("assistant", "a"))),
        "a.jsonl:1",
        "only text can be trained",
    ),
    Bad(
        "a weight between 0 and 1",
        "a.jsonl",
        _jsonl({"messages": [{"role": "user", "content": "a", "weight": 0.5}]}),
        "a.jsonl:1",
        "weight of a message is neither 0 nor 1: a.jsonl:1 (0.5)",
    ),
    Bad(
        "every answer flagged 0",
        "a.jsonl",
        _jsonl({"messages": [GOOD["messages"][0], {"role": "assistant", "content": "a", "train": False}]}),  # type: ignore[index]
        "a.jsonl:1",
        "no message is trained",
    ),
    Bad(
        "a tool call without a name",
        "a.jsonl",
        _jsonl({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}),
        "a.jsonl:1",
        "a tool call without a function name",
    ),
    Bad("tools that are text", "a.jsonl", _jsonl({**GOOD, "tools": "add"}), "a.jsonl:1", "not a list of JSON schemas"),
    Bad(
        "alpaca without an answer",
        "a.json",
        json.dumps([{"instruction": "a", "output": ""}]).encode(),
        "a.json row 1",
        "an empty assistant",
    ),
    Bad(
        "an empty completion",
        "a.parquet",
        _parquet({"prompt": ["a"], "completion": [""]}),
        "a.parquet row 1",
        "empty completion",
    ),
    Bad("ids that are words", "a.jsonl", _jsonl({"input_ids": ["a"]}), "a.jsonl:1", "not a list of token ids"),
    Bad("negative ids", "a.jsonl", _jsonl({"input_ids": [5, -1]}), "a.jsonl:1", "not a list of token ids"),
    Bad("labels too short", "a.jsonl", _jsonl({"input_ids": [5, 6], "labels": [5]}), "a.jsonl:1", "not as long as"),
    Bad(
        "shifted labels", "a.jsonl", _jsonl({"input_ids": [5, 6], "labels": [6, 7]}), "a.jsonl:1", "labels differ from"
    ),
    Bad("ids of another tokenizer", "a.jsonl", _jsonl({"input_ids": [5, 60_000]}), "a.jsonl:1", "vocabulary of"),
    Bad(
        "documents of one token",
        "a.jsonl",
        _jsonl(*[{"input_ids": [5]}] * 4),
        "data.train",
        "no token of train would be",
    ),
    # the data as a whole
    Bad(
        "a sample longer than a row",
        "a.jsonl",
        _jsonl(GOOD, _chat(("user", "one"), ("assistant", "two " * 100))),
        "a.jsonl:2",
        "raise data.max_tokens to",
    ),
    Bad(
        "labels that are all masked",
        "a.jsonl",
        _jsonl({"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}),
        "a.jsonl",
        "1 x all labels are -100: no token of it is trained",
    ),
    Bad(
        "nothing left after dropping",
        "a.jsonl",
        _jsonl(_chat(("user", "one"), ("assistant", "two " * 100))),
        "data.overflow",
        "overflow: split",
        ("--data.overflow=drop",),
    ),
    Bad(
        "more than 1% malformed",
        "a.jsonl",
        _jsonl(*[GOOD] * 50, {"messages": []}),
        "a.jsonl:51",
        f"{REPAIR} 0.02",
    ),
    Bad(
        "one sample to divide",
        "a.jsonl",
        TEXT,
        "data.val.fraction",
        "a single sample, which cannot be split",
        ("--data.val={fraction: 0.5}",),
    ),
    Bad(
        "a template that is no jinja",
        "a.jsonl",
        lambda path: (path.write_bytes(_jsonl(GOOD)), path.with_name("t.jinja").write_text("{% for %}"))[0] and None,
        "data.chat_template",
        "not valid jinja",
        ("--data.chat_template=t.jinja",),
    ),
    Bad(
        "a template that is not there",
        "a.jsonl",
        _jsonl(GOOD),
        "data.chat_template",
        "give a jinja template file",
        ("--data.chat_template=t.jinja",),
    ),
    Bad(
        "a template that never ends a turn",
        "a.jsonl",
        lambda path: (
            (path.write_bytes(_jsonl(GOOD)), path.with_name("t.jinja").write_text(tiny.NO_TURN_END))[0] and None
        ),
        "a.jsonl:1",
        "the model would not learn to stop",
        ("--data.chat_template=t.jinja",),
    ),
    Bad(
        "a template that allows no tool calls in a row",
        "a.jsonl",
        lambda path: (
            (
                path.write_bytes(_jsonl(_chat(("user", "a"), ("user", "b"), ("assistant", "c")))),
                path.with_name("t.jinja").write_text(tiny.ALTERNATING),
            )[0]
            and None
        ),
        "a.jsonl:1",
        "roles must alternate",
        ("--data.chat_template=t.jinja",),
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bad_data") / "model", weights=False)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_wrong_data_file_is_refused_with_place_and_remedy(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: Bad
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / bad.file
    if isinstance(bad.content, bytes):
        path.write_bytes(bad.content)
    else:
        bad.content(path)
    sections = {"model": {"path": str(model), "init": "random"}, "data": {"train": [{"path": bad.file}]}}
    YAML().dump(config(tmp_path, **sections), tmp_path / "run.yaml")
    assert main(["check", "run.yaml", *bad.words]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "Traceback" not in text
    assert bad.place in text
    assert bad.says in text
    assert "\n  -> " in text, "a remedy"
    left = list((tmp_path / "cache").glob("*.tmp")) if (tmp_path / "cache").exists() else []
    assert not left, "half a token store was left behind"


def test_there_are_forty() -> None:
    assert len({bad.name for bad in BAD}) == len(BAD) >= 40


def test_an_unreadable_file_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.jsonl"
    file.write_bytes(TEXT)
    plain_open = Path.open

    def refuse(path: Path, *words: Any, **named: Any) -> Any:
        if path.name == "a.jsonl":  # chmod does not restrict root
            raise PermissionError(13, "Permission denied")
        return plain_open(path, *words, **named)

    monkeypatch.setattr(Path, "open", refuse)
    sections = {"model": {"path": str(model), "init": "random"}, "data": {"train": [{"path": "a.jsonl"}]}}
    with plain_open(tmp_path / "run.yaml", "w") as out:
        YAML().dump(config(tmp_path, **sections), out)
    assert main(["check", "run.yaml"]) == 2
    assert "a.jsonl: cannot be read: Permission denied\n  -> " in capsys.readouterr().err


def test_allowed_rejects_are_still_counted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(_jsonl(*[GOOD] * 9, {"messages": []}))
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    sections = {
        "model": {"path": str(model), "init": "random"},
        "data": {"train": [{"path": "a.jsonl"}], "allow_rejects": 0.2},
    }
    YAML().dump(config(tmp_path, **sections), tmp_path / "run.yaml")
    assert main(["check", "run.yaml"]) == 0
    assert "a.jsonl: 1 x no messages: a.jsonl:10" in capsys.readouterr().out
