"""`megatrain data`: the preview of the data before training."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from ruamel.yaml import YAML

import tiny_tokenizer as tiny
from megatrain.commands.data import Bin, Piece, histogram, marked, pieces_of
from megatrain.commands.main import main
from tiny_run import config, write_chats, write_model, write_texts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("front")
    write_model(folder / "model", weights=False)
    write_texts(folder / "texts.jsonl", 40)
    write_chats(folder / "chats.jsonl", 30)
    YAML().dump(config(folder), folder / "run.yaml")
    return folder


def _data(files: Path, capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["data", str(files / "run.yaml"), *words]) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_answers_are_marked_as_trained_and_questions_are_not(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _data(files, capsys, "--data.train", str(files / "chats.jsonl"), "--samples", "1")
    place = next(line for line in shown.splitlines() if line.startswith("--- "))
    number = int(place.split(":")[1])
    sample = json.loads((files / "chats.jsonl").read_text().splitlines()[number - 1])["messages"]
    want = f"  <|im_start|>user\n  {sample[0]['content']}<|im_end|>\n  <|im_start|>assistant\n  "
    assert f"{want}⟦{sample[1]['content']}<|im_end|>⟧" in shown
    assert shown.count("⟦") == 2, "one in the headline, one around the answer"


def test_the_preview_shows_special_tokens(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is shown as often as the model sees it, so a second BOS would be visible."""
    template = files / "bos.jinja"
    template.write_text(tiny.HEADERS_WITH_BOS)
    shown = _data(
        files, capsys, "--data.train", str(files / "chats.jsonl"), "--data.chat_template", str(template), "--samples=2"
    )
    assert shown.count("<|begin|>") == 2


def test_lengths_rows_and_rejects_are_counted(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "some.jsonl"
    bad.write_text((files / "chats.jsonl").read_text() + '{"messages": []}\nnot json\n')
    shown = _data(files, capsys, "--data.train", f"[{bad}, {{path: {files}/texts.jsonl, weight: 2}}]", code=2)
    assert "2 of 32 samples cannot be used" in shown
    assert f"1 x no messages: {bad}:31" in shown
    shown = _data(
        files,
        capsys,
        "--data.train",
        f"[{bad}, {{path: {files}/texts.jsonl, weight: 2}}]",
        "--data.allow_rejects=0.1",
        "--samples=1",
    )
    assert f"1 x not valid JSON: {bad}:32" in shown
    assert f"{bad}: lengths of 30 samples [tokens]" in shown
    assert "  median " in shown
    assert "% filled" in shown
    assert "weight 2" in shown
    assert "an epoch: " in shown
    assert sum(line.startswith("--- ") for line in shown.splitlines()) == 2, "a sample of each source"


LOST = {
    "developer messages": [{"role": "developer", "content": "call the tool"}],
    "later system messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "answer in order"}],
    "tool results": [{"role": "user", "content": "a"}, {"role": "tool", "content": "fox"}],
}


@pytest.mark.parametrize("part", LOST)
def test_what_the_template_leaves_out_is_named_and_refused_or_told(
    part: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A template with branches for a first system message, the user and the assistant."""
    known = "m['role'] in ('user', 'assistant') or loop.first and m['role'] == 'system'"
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if "
        + known
        + " %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    rest = [{"role": "user", "content": "What is one?"}, {"role": "assistant", "content": "A number."}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": LOST[part] + rest}) + "\n")
    words = ["--data.train", str(tmp_path / "a.jsonl"), "--data.chat_template", str(tmp_path / "t.jinja")]
    what = f"the chat template {tmp_path}/t.jinja leaves out {part}"
    refused = _data(files, capsys, *words, code=2)
    assert f"1 x {what} (data.left_out: warn would train without): {tmp_path}/a.jsonl:1" in refused
    told = _data(files, capsys, *words, "--data.left_out=warn")
    assert f"warning: {what}; these samples are trained without (1 time)" in told
    assert "⟦A number.<|im_end|>⟧" in told


def test_it_is_logged_if_no_sample_is_rejected(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "rejected: none" in _data(files, capsys)


def test_lengths_are_shown_even_if_samples_are_too_long(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _data(
        files,
        capsys,
        "--data.train",
        str(files / "chats.jsonl"),
        "--data.max_tokens=32",
        "--batch.tokens_per_step=32",
        code=2,
    )
    assert "longer than data.max_tokens" in shown
    assert "30 of 30 (100.0%) are longer than data.max_tokens (32)" in shown
    assert re.search(r"longest \d+ \(.*chats.jsonl:\d+\)", shown)
    assert sum(line.startswith("--- ") for line in shown.splitlines()) == 3, "whole samples are shown nevertheless"
    assert shown.rindex("--- ") < shown.index("error: "), "the error comes last"
    assert "⟦" in shown
    assert "set data.overflow to drop, truncate or split" in shown


def test_the_middle_of_a_long_sample_is_left_out(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _data(files, capsys, "--samples=1", "--tokens", "5")
    assert "tokens left out ..." in shown


@pytest.mark.parametrize("word", ["0", "-1", "many"])
def test_a_wrong_number_of_samples_is_refused(files: Path, capsys: pytest.CaptureFixture[str], word: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["data", str(files / "run.yaml"), f"--samples={word}"])
    assert end.value.code == 2
    assert f"should be an integer of at least 1, found '{word}'" in capsys.readouterr().err


def test_the_preview_needs_no_weights_and_creates_no_run_folder(files: Path) -> None:
    assert not list((files / "model").glob("*.safetensors"))
    assert not (files / "run").exists()


# ---- parts


def test_bins_count_every_sample_once_and_one_ends_at_the_row_length() -> None:
    lengths = np.array([3, 4, 7, 8, 9, 100, 101, 200])
    bins = histogram(lengths, 100)
    assert sum(one.count for one in bins) == len(lengths)
    assert bins[0] == Bin(3, 3, 1)
    assert Bin(64, 100, 1) in bins
    assert Bin(101, 127, 1) in bins
    assert bins[-1] == Bin(128, 200, 1)
    assert all(a.end + 1 == b.begin for a, b in zip(bins, bins[1:], strict=False))


def test_bins_of_one_length() -> None:
    assert histogram(np.array([5, 5]), 100) == [Bin(5, 5, 2)]
    assert histogram(np.array([5]), 4) == [Bin(5, 5, 1)]


@pytest.mark.parametrize("text", ["the quick brown fox jumps", "über Flüsse, 你好 and 🙂 over", "a  b\n\n c"])
def test_joined_pieces_are_the_text(text: str) -> None:
    tokenizer = tiny.make_tokenizer()
    ids = np.array(tokenizer(text)["input_ids"])
    trained = np.zeros(len(ids), bool)
    trained[len(ids) // 3 : len(ids) // 2] = True
    pieces = pieces_of(tokenizer, ids, trained, 1000)
    assert [piece.trained for piece in pieces] == [False, True, False]
    assert "".join(piece.text for piece in pieces) == text


def test_pieces_of_a_long_sample_count_what_is_left_out() -> None:
    tokenizer = tiny.make_tokenizer()
    ids = np.arange(100, 200)
    pieces = pieces_of(tokenizer, ids, np.ones(100, bool), 40)
    assert [piece.left_out for piece in pieces] == [0, 60, 0]


def test_a_character_of_several_tokens_is_shown_with_its_last_token() -> None:
    """The first token of a text is never a target, even if it is a third of a character."""
    tokenizer = tiny.make_tokenizer()
    ids = np.array(tokenizer("犬が走る")["input_ids"])
    place = np.arange(len(ids))
    assert pieces_of(tokenizer, ids, place > 0, 100) == [Piece("犬が走る", True)]
    assert pieces_of(tokenizer, ids, (place > 3) & (place < 7), 100) == [
        Piece("犬", False),
        Piece("が", True),
        Piece("走る", False),
    ]


def test_no_character_of_a_long_sample_is_split() -> None:
    """Each of these is three or four tokens of the tiny tokenizer, a byte each."""
    tokenizer = tiny.make_tokenizer()
    text = "犬が走る🦊" * 20
    ids = np.array(tokenizer(text)["input_ids"])
    assert len(ids) == len(text.encode())
    for most in range(16, 40):  # the end has at least four tokens, which contain a character
        head, gap, tail = pieces_of(tokenizer, ids, np.ones(len(ids), bool), most)
        assert text.startswith(head.text)
        assert text.endswith(tail.text)
        assert 0 <= most - (len(head.text.encode()) + len(tail.text.encode())) <= 6
        assert gap.left_out == len(ids) - len(head.text.encode()) - len(tail.text.encode())
    broken = np.array(tokenizer("犬")["input_ids"])[[0] * 40]
    head, gap, tail = pieces_of(tokenizer, broken, np.ones(40, bool), 20)
    assert gap.left_out == 20, "what is no text at all is cut where it was asked for"


def test_terminals_get_colours_and_logs_get_marks() -> None:
    pieces = [Piece("ask", False), Piece("answer", True)]
    assert marked(pieces, colours=False, marks=("<", ">")).plain == "  ask<answer>"
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=80)
    console.print(marked(pieces, colours=True, marks=("<", ">")))
    assert "\x1b[1;32manswer\x1b[0m" in out.getvalue()
    assert "<" not in out.getvalue()


def test_the_report_says_what_was_read_of_each_source_and_what_was_not(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "hi <|im_end|> there", "name": "Ann"}, {"role": "assistant", "content": "ho"}]
    rows: list[dict[str, Any]] = [{"messages": turns, "id": i, "source": "web"} for i in range(8)]
    rows += [{"messages": turns, "label": False}, {"messages": turns, "tools": [{"name": "f", "description": "adds"}]}]
    file = files / "report.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = (f"--data.train={file}", "--data.allow_rejects=0.2")
    for left_out, rejects in (("reject", 2), ("warn", 1)):
        shown = _data(files, capsys, *words, f"--data.left_out={left_out}")
        report = shown[shown.index(f"\n{file}\n") :].split("\n\n")[0].splitlines()[2:]
        assert report[:3] == [
            "  read: format messages (columns messages, tools)",
            "  columns not read: id, source",
            "  keys and keywords that the template does not read: name",
        ]
        assert report[3].startswith("  rejected: 1 of 10: ")
        assert "marked as undesirable: its label is false" in report[3]
        assert report[3].count(" of 10: ") == rejects
        assert report[4] == "  left out by the template: 1 x tool schemas"
        assert report[5] == f"  special tokens in text: {8 + 1} x <|im_end|>"
