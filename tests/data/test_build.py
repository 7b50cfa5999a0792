"""Token stores are built once, completely or not at all, and count the samples they reject."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tiny_tokenizer as tiny
from megatrain.config.schema import SourceConfig
from megatrain.data import build
from megatrain.data import store as store_module
from megatrain.data.build import EARLY_CHECK, Builder
from megatrain.data.encoder import Encoder
from megatrain.data.render import ChatRenderer
from megatrain.data.specials import SpecialTokens
from megatrain.data.store import TokenStore
from megatrain.errors import UserError


class _Built:
    """A builder with its log."""

    def __init__(
        self,
        cache: Path,
        template: str | None = tiny.CHATML,
        allow: float = 0.01,
        special: Any = "auto",
        **options: Any,
    ):
        self.lines: list[str] = []
        self.tokenizer = tiny.make_tokenizer(template, **options)
        renderer = ChatRenderer(self.tokenizer, None, "assistant")
        self._builder = Builder(
            Encoder(self.tokenizer), renderer, SpecialTokens(self.tokenizer, special), cache, allow, self.lines.append
        )

    def open(self, path: Path | str, **source: Any) -> TokenStore:
        return self._builder.open(SourceConfig(path=str(path), **source), "data.train[0]")

    @property
    def from_cache(self) -> bool:
        return any("from the cache" in line for line in self.lines)


def _jsonl(file: Path, rows: list[Any]) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def _chat(answer: str = "ho") -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]}


def _document(store: TokenStore, sample: int) -> list[int]:
    begin = store.starts[sample]
    return store.tokens[begin : begin + store.lengths[sample]].tolist()


def test_documents_end_with_eos_and_begin_with_bos_if_the_tokenizer_adds_it(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [{"text": "The dog"}, {"text": "<|begin|>The fox"}])
    for adds_bos in (False, True):
        built = _Built(tmp_path / "cache", adds_bos=adds_bos)
        store = built.open(file)
        bare = built.tokenizer(["The dog", "The fox"], add_special_tokens=False)["input_ids"]
        bos, eos = built.tokenizer.bos_token_id, built.tokenizer.eos_token_id
        assert _document(store, 0) == [*([bos] if adds_bos else []), *bare[0], eos]
        assert _document(store, 1) == [bos, *bare[1], eos], "a text with its own BOS gets no second one"


def test_a_long_text_is_tokenized_in_pieces_with_the_ids_of_the_whole(tmp_path: Path) -> None:
    text = "The lazy dog jumps, and the quick fox\ndoes not care. " * 3000
    (tmp_path / "a.txt").write_text(text)
    _jsonl(tmp_path / "a.jsonl", [{"text": text}])
    built = _Built(tmp_path / "cache")
    want = [*built.tokenizer(text, add_special_tokens=False)["input_ids"], built.tokenizer.eos_token_id]
    stores = [built.open(tmp_path / name) for name in ("a.txt", "a.jsonl")]
    assert [_document(store, 0) for store in stores] == [want, want]
    assert stores[0].hashes.tolist() == stores[1].hashes.tolist(), "the same content, however it was read"


def test_prompt_and_completion_are_joined_and_only_the_completion_is_trained(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [{"prompt": "one two ", "completion": "<|pad|>three"}])
    built = _Built(tmp_path / "cache", adds_bos=True)
    store = built.open(file)
    assert store.trained is not None
    ids = np.array(_document(store, 0))
    text = built.tokenizer.decode(ids[store.trained[:] == 1])
    assert text == "<|pad|>three<|im_end|>"
    assert ids[0] == built.tokenizer.bos_token_id


def test_string_prompts_skip_the_template_and_message_prompts_use_it(tmp_path: Path) -> None:
    messages = {"q": [{"role": "user", "content": "hi"}], "a": [{"role": "assistant", "content": "ho"}]}
    file = _jsonl(tmp_path / "a.jsonl", [{"q": "hi ", "a": "ho"}, messages, messages])
    columns = {"prompt": "q", "completion": "a"}
    built = _Built(tmp_path / "cache")
    store = built.open(file, columns=columns)
    texts = [built.tokenizer.decode(_document(store, number)) for number in range(2)]
    assert texts == ["hi ho<|im_end|>", "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nho<|im_end|>\n"]
    assert [line.removeprefix(f"{file}: ") for line in built.lines[1:]] == [
        "1 sample with prompt and completion as text, joined as they are, without the chat template of tiny "
        "(columns: {instruction: q, output: a} would use it)",
        "2 samples with prompt and completion as messages, rendered by the chat template of tiny",
    ]
    again = _Built(tmp_path / "cache")
    again.open(file, columns=columns)
    assert again.from_cache
    assert again.lines[1:] == built.lines[1:]

    _jsonl(file, [{"q": "hi ", "a": "ho"}])
    store = built.open(file, columns={"instruction": "q", "output": "a"})
    assert built.tokenizer.decode(_document(store, 0)).startswith("<|im_start|>user\nhi"), "as the note said"
    plain = _Built(tmp_path / "cache", template=None)
    plain.open(file, columns=columns)
    assert plain.lines[1].endswith("as text, joined as they are"), "there is no template to speak of"


def test_token_samples_are_stored_unchanged(tmp_path: Path) -> None:
    built = _Built(tmp_path / "cache")
    stream = built.open(_jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6]}, {"input_ids": [7]}]))
    assert (stream.kind, stream.tokens.tolist(), stream.lengths.tolist()) == ("stream", [5, 6, 7], [2, 1])
    samples = built.open(_jsonl(tmp_path / "b.jsonl", [{"input_ids": [5, 6, 7], "labels": [5, -100, 7]}]))
    assert samples.trained is not None
    assert (samples.kind, samples.trained.tolist(), samples.targets.tolist()) == ("samples", [1, 0, 1], [1])


def test_lines_of_a_text_file_can_be_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    built = _Built(tmp_path / "cache")
    assert len(built.open(tmp_path / "a.txt")) == 1
    lines = built.open(tmp_path / "a.txt", format="lines")
    assert [lines.place(i) for i in range(3)] == [f"{tmp_path}/a.txt:{n}" for n in (1, 2, 4)]


def test_a_second_build_comes_from_the_cache_until_anything_changes(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    file = _jsonl(tmp_path / "a.jsonl", [_chat()] * 3)
    first = _Built(cache)
    first.open(file)
    assert not first.from_cache
    again = _Built(cache)
    again.open(file)
    assert again.from_cache
    assert again.lines[0].replace(" (from the cache)", "") == first.lines[0]
    changed = [_Built(cache, tiny.CHATML_TAGGED), _Built(cache, adds_bos=True)]
    for built in changed:
        built.open(file)
        assert not built.from_cache
    os.utime(file, ns=(1, 1))
    touched = _Built(cache)
    touched.open(file)
    assert not touched.from_cache


def test_a_damaged_store_is_rebuilt(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [_chat()] * 3)
    store = _Built(tmp_path / "cache").open(file)
    want = store.tokens.tolist()
    with (store.folder / "tokens.bin").open("r+b") as tokens:
        tokens.truncate(5)
    again = _Built(tmp_path / "cache")
    assert again.open(file).tokens.tolist() == want
    assert not again.from_cache


def test_a_failed_build_leaves_nothing_and_leftovers_of_a_killed_one_are_removed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(UserError):
        _Built(cache).open(_jsonl(tmp_path / "bad.jsonl", [{"text": ""}]))
    assert [entry.suffix for entry in cache.iterdir()] == [".lock"]
    file = _jsonl(tmp_path / "a.jsonl", [_chat()])
    folder = _Built(cache).open(file).folder
    leftover = folder.rename(folder.with_name(f"{folder.name}.{os.uname().nodename}.1.1.tmp"))
    other = folder.with_name(f"{folder.name}.elsewhere.1.1.tmp")
    other.mkdir()
    _Built(cache).open(file)
    assert not leftover.exists()
    assert other.exists(), "another machine may be at work there"


def test_concurrent_runs_build_a_store_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock belongs to an open file, not to a process, so threads can stand in for runs."""
    file = _jsonl(tmp_path / "a.jsonl", [_chat(f"answer {i}") for i in range(30)])
    runs = [_Built(tmp_path / "cache") for _ in range(3)]
    write, builds = build._SourceBuild.write, []

    def write_when_the_others_wait(self: build._SourceBuild, folder: Path) -> None:
        builds.append(folder)
        deadline = time.monotonic() + 30
        while sum("waiting for it" in line for run in runs for line in run.lines) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        write(self, folder)

    monkeypatch.setattr(build._SourceBuild, "write", write_when_the_others_wait)
    with ThreadPoolExecutor(3) as pool:
        stores = list(pool.map(lambda run: run.open(file), runs))
    assert len(builds) == 1
    assert [len(store) for store in stores] == [30, 30, 30]
    assert sum("waiting for it" in line for run in runs for line in run.lines) == 2


def test_without_locks_the_first_to_rename_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [_chat()])
    whole = _Built(tmp_path / "elsewhere").open(file)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    rename = build._rename

    def slow_rename(temporary: Path, folder: Path) -> None:
        whole.folder.rename(folder)  # the other run
        rename(temporary, folder)

    monkeypatch.setattr(fcntl, "flock", no_locks)
    monkeypatch.setattr(build, "_rename", slow_rename)
    built = _Built(tmp_path / "cache")
    assert len(built.open(file)) == 1
    assert any("without locks" in line for line in built.lines)
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.suffix == ".tmp"] == []


def test_rejects_are_counted_by_reason_with_their_places(tmp_path: Path) -> None:
    rows: list[Any] = [_chat()] * 400
    rows[6] = {"messages": [{"role": "usr", "content": "hi"}]}
    rows[16] = rows[26] = _chat("")
    rows[36] = "{broken"
    file = _jsonl(tmp_path / "a.jsonl", rows)
    built = _Built(tmp_path / "cache")
    assert len(built.open(file)) == 396
    report = [line.removeprefix(f"{file}: ") for line in built.lines[1:]]
    assert report[0] == f"2 x an empty assistant message: {file}:17, {file}:27"
    assert f"1 x unknown role 'usr': {file}:7" in report
    assert any(line.startswith(f"1 x not valid JSON: {file}:37") for line in report)


def test_more_than_the_allowed_share_of_rejects_is_an_error(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [_chat()] * 98 + [_chat("")] * 2)
    with pytest.raises(
        UserError, match=r"(?s)2 of 100 samples cannot be used \(2.0%; 1.0% allowed\).*a.jsonl:99.*0.02"
    ):
        _Built(tmp_path / "cache").open(file)
    assert len(_Built(tmp_path / "cache", allow=0.02).open(file)) == 98
    with pytest.raises(UserError, match="2 of 100"):
        _Built(tmp_path / "cache").open(file)  # cached under a higher limit, and still an error


def test_a_plainly_wrong_source_is_refused_early(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [_chat("")] * (3 * EARLY_CHECK))
    with pytest.raises(UserError, match=f"{EARLY_CHECK} of {EARLY_CHECK} samples"):
        _Built(tmp_path / "cache").open(file)


def test_a_conversation_the_template_refuses_is_rejected(tmp_path: Path) -> None:
    two_users = {"messages": [{"role": "user", "content": "a"}, *_chat()["messages"]]}
    file = _jsonl(tmp_path / "a.jsonl", [_chat(), two_users])
    built = _Built(tmp_path / "cache", tiny.ALTERNATING, allow=0.5)
    assert len(built.open(file)) == 1
    assert any(
        "the chat template refuses it" in line and "a.jsonl:2 (Conversation roles" in line for line in built.lines
    )


@pytest.mark.parametrize("rows", [[], ["", ""]])
def test_empty_files_are_errors(tmp_path: Path, rows: list[str]) -> None:
    for name in ("a.jsonl", "a.json", "a.csv"):
        file = _jsonl(tmp_path / name, rows)
        with pytest.raises(UserError, match=f"{name}: there are no samples in it"):
            _Built(tmp_path / "cache").open(file)
    with pytest.raises(UserError, match=r"1 of 1 samples cannot be used(?s:.*)empty text"):
        _Built(tmp_path / "cache").open(_jsonl(tmp_path / "a.txt", rows))


def test_a_source_without_usable_samples_is_an_error_even_if_rejects_are_allowed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none of 1 samples can be used"):
        _Built(tmp_path / "cache", allow=1.0).open(_jsonl(tmp_path / "a.jsonl", [_chat("")]))


def test_folders_may_not_mix_text_and_chats(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("text")
    _jsonl(tmp_path / "data" / "b.jsonl", [_chat()])
    with pytest.raises(UserError, match=r"mixes plain text \(.*a.txt\) and whole samples \(.*b.jsonl\)"):
        _Built(tmp_path / "cache").open(tmp_path / "data")


def test_templates_without_an_end_of_turn_or_with_two_bos_are_errors(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [_chat()])
    with pytest.raises(
        UserError, match=r"a.jsonl:1: the chat template of tiny writes no special token after an answer"
    ):
        _Built(tmp_path / "cache", tiny.NO_TURN_END).open(file)
    with pytest.raises(UserError, match="the chat template of tiny begins a conversation with two BOS tokens"):
        _Built(tmp_path / "cache", "{{ bos_token }}" + tiny.HEADERS_WITH_BOS).open(file)


def test_rewritten_history_is_logged(tmp_path: Path) -> None:
    long = {"messages": _chat()["messages"] * 2}
    built = _Built(tmp_path / "cache", tiny.THINKING)
    store = built.open(_jsonl(tmp_path / "a.jsonl", [long, _chat()]))
    assert len(store) == 3
    assert len(set(store.hashes[:2].tolist())) == 1, "parts of one conversation are never split between train and val"
    assert any("the chat template of tiny rewrites earlier turns" in line for line in built.lines)


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"(?s)cannot be written.*data.cache_dir"):
        _Built(tmp_path / "file" / "cache").open(_jsonl(tmp_path / "a.jsonl", [_chat()]))


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_module.StoreWriter, "_put", full)
    with pytest.raises(UserError, match=r"(?s)no space for the tokenized data.*data.cache_dir"):
        _Built(tmp_path / "cache").open(_jsonl(tmp_path / "a.jsonl", [_chat()]))
    assert [entry.suffix for entry in (tmp_path / "cache").iterdir()] == [".lock"]


def test_ids_outside_the_vocabulary_name_their_sample(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [{"input_ids": [5, 6]}, {"input_ids": [7, 500]}])
    store = _Built(tmp_path / "cache").open(file)
    store.check_ids(501)
    with pytest.raises(UserError, match=r"a.jsonl:2: token id 500 is outside the model's vocabulary of 500"):
        store.check_ids(500)


def test_json_lines_in_a_text_file_are_samples_and_the_log_says_so(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "chat.txt", [*(_chat(str(i)) for i in range(6)), {"broken": 1}])
    built = _Built(tmp_path / "cache", allow=0.5)
    store = built.open(file)
    assert (len(store), store.kind, store.place(1)) == (6, "samples", f"{file}:2")
    assert any("samples as JSON, not plain text" in line and "chat.txt" in line for line in built.lines)
    assert built.open(file, format="text").kind == "stream"


def test_columns_that_are_not_read_are_named_once_also_from_the_cache(tmp_path: Path) -> None:
    file = _jsonl(tmp_path / "a.jsonl", [{**_chat(), "id": i, "source": "web", "none": None} for i in range(3)])
    for _ in range(2):
        built = _Built(tmp_path / "cache")
        built.open(file)
        assert [line for line in built.lines if "not read" in line] == [f"{file}: columns not read: id, source"]
    built = _Built(tmp_path / "cache")
    built.open(file, ignore=("id", "source"))
    assert not any("not read" in line for line in built.lines)


def test_nan_in_a_column_that_is_not_read_rejects_nothing(tmp_path: Path) -> None:
    lines = ['{"text": "one", "score": NaN}', '{"text": NaN}', '{"text": "two", "at": Infinity, "bad": "\\ud83d"}']
    file = _jsonl(tmp_path / "a.jsonl", [*lines, '{"text": "\\ud83d"}'])
    built = _Built(tmp_path / "cache", allow=0.5)
    assert len(built.open(file)) == 2
    assert f"{file}: 1 x text is not a string: {file}:2 (float)" in built.lines
    assert f"{file}: 1 x text: half of a surrogate pair: {file}:4" in built.lines


def test_keys_and_keywords_that_the_template_does_not_read_are_named(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi", "name": "Ann", "at": None}, {"role": "assistant", "content": "ho"}]
    record = {"messages": turns, "chat_template_kwargs": {"enable_thinking": False, "lang": "en"}}
    file = _jsonl(tmp_path / "a.jsonl", [record])
    built = _Built(tmp_path / "cache")
    built.open(file)
    name = "the chat template of tiny"
    assert built.lines[1:] == [
        f"{file}: keys of messages that {name} does not mention: name",
        f"{file}: keywords that {name} does not read: enable_thinking, lang",
    ]
    reads = "{% if lang and not enable_thinking %}{{ messages[0].get('name') }}{% endif %}" + tiny.CHATML
    built = _Built(tmp_path / "cache", reads)
    store = built.open(file)
    assert built.lines[1:] == []
    assert built.tokenizer.decode(_document(store, 0)).startswith("Ann<|im_start|>")
