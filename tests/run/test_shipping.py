"""The trained chat template and the trained end of a turn go into checkpoints and exports, and generation uses them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

import tiny_tokenizer as tiny
from megatrain.checkpoint.export import export, find_checkpoint
from megatrain.commands.generate import generate
from megatrain.config.schema import RunConfig
from megatrain.data.load import load_data
from megatrain.run.loop import train
from megatrain.run.shipping import shipped_files, with_defaults
from tiny_run import config, group_ended, load_config, write_chats, write_model, write_texts

BRACKETS = (
    "{% for m in messages %}{{ '[' + m['role'] + ']\n' + m['content'] + '<|assistant|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '[assistant]\n' }}{% endif %}"
)
"""Ends turns with a token at which the model does not stop."""


no_group_left = pytest.fixture(autouse=True)(group_ended)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_model(tmp_path / "model")
    write_chats(tmp_path / "chats.jsonl", 20)
    (tmp_path / "chat.jinja").write_text(BRACKETS)
    return tmp_path


def _run(files: Path, **data: Any) -> RunConfig:
    return load_config(config(files, data={"train": str(files / "chats.jsonl"), "max_tokens": 128, **data}), ())


def _shipped(run: RunConfig, files: Path) -> tuple[dict[str, bytes | None], list[str]]:
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    rows, _ = load_data(run.data, tokenizer)
    log: list[str] = []
    return shipped_files(
        run, files / "model", AutoConfig.from_pretrained(files / "model"), tokenizer, rows, log.append
    ), log


def _stops(files: Path, shipped: dict[str, bytes | None]) -> Any:
    content = shipped.get("generation_config.json")
    return None if content is None else json.loads(content)["eos_token_id"]


@pytest.mark.parametrize("engine", ["host", "mesh"])
def test_template_and_end_token_reach_checkpoint_export_and_generation(
    engine: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With older copies of the template in every place where transformers looks."""
    model = files / "model"
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": tiny.CHATML}))
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text(tiny.CHATML)
    data = {"train": str(files / "chats.jsonl"), "max_tokens": 128, "chat_template": str(files / "chat.jinja")}
    plain = config(files, data=data)
    if engine == "mesh":
        del plain["run"]["threads"]
    run = load_config({**plain, "engine": engine}, ())
    train(run)
    checkpoint = find_checkpoint(Path(run.run.dir))
    made = export(run.run.dir, tmp_path / "export")
    messages = [{"role": "user", "content": "hello"}]
    for folder in (checkpoint, made):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == BRACKETS
        for tools in (None, [{"type": "function", "function": {"name": "f"}}]):
            text = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, tokenize=False)
            assert text == "[user]\nhello<|assistant|>[assistant]\n"
        ends = GenerationConfig.from_pretrained(folder).eos_token_id
        assert ends == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|assistant|>")]
        assert "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text())
    log = (Path(run.run.dir) / "log.txt").read_text()
    assert "trained answers end with <|assistant|>, at which" in log
    assert "checkpoints get the chat template" in log
    capsys.readouterr()
    generate(made, ["hello"], tokens=2)
    assert "chat template" in capsys.readouterr().out


def test_generation_stops_at_the_end_that_was_learnt(files: Path) -> None:
    """A base model that ends texts with one token, trained on turns that end with another."""
    chats = [{"messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "one two"}]}] * 8
    (files / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    run = load_config(
        config(
            files,
            data={"train": str(files / "chats.jsonl"), "chat_template": str(files / "chat.jinja"), "max_tokens": 64},
            optim={"learning_rate": 1e-2},
            schedule={"steps": 40},
        ),
        (),
    )
    train(run)
    (answer,) = generate(run.run.dir, ["hello"], tokens=30)
    assert answer == "one two"


def test_keywords_of_the_template_become_its_defaults(files: Path) -> None:
    """Trained without thoughts, asked without thoughts."""
    keywords = {"enable_thinking": False, "note": 'a "b"\n{{ c }} %} é', "more": [1, None, {"x": 2.5}]}
    switch = "{% if enable_thinking is defined and enable_thinking is false %}{{ 'NO' }}{% endif %}{{ note }}{{ more }}"
    messages = [{"role": "user", "content": "hello"}]
    for start in ("", "\n", "  "):
        text = start + tiny.CHATML + switch
        made = with_defaults(text, keywords)
        tokenizer = tiny.make_tokenizer(text)

        def rendered(template: str, tokenizer: Any = tokenizer, **given: Any) -> str:
            return tokenizer.apply_chat_template(messages, tokenize=False, chat_template=template, **given)

        assert rendered(text) != rendered(text, **keywords) == rendered(made)
        other = {**keywords, "enable_thinking": True}
        assert rendered(made, enable_thinking=True) == rendered(text, **other)
    shipped, log = _shipped(_run(files, chat_template_kwargs={"enable_thinking": False}), files)
    assert (shipped["chat_template.jinja"] or b"").decode() == with_defaults(tiny.CHATML, {"enable_thinking": False})
    assert log == [f"checkpoints get the chat template of {files / 'model'}, with enable_thinking as trained"]


def test_a_model_that_stops_there_already_is_left_as_it_is(files: Path) -> None:
    assert _shipped(_run(files), files) == ({}, [])


def test_known_stop_tokens_stay_and_everything_else_in_the_file_too(files: Path) -> None:
    own = {"eos_token_id": [1, 3], "temperature": 0.5, "do_sample": True}
    (files / "model" / "generation_config.json").write_text(json.dumps(own))
    shipped, log = _shipped(_run(files), files)
    assert shipped.keys() == {"generation_config.json"}
    assert json.loads(shipped["generation_config.json"] or b"") == {**own, "eos_token_id": [1, 3, 2]}
    assert len(log) == 1
    assert "<|im_end|>" in log[0]


def test_without_a_generation_config_that_of_the_model_is_extended(files: Path) -> None:
    (files / "model" / "generation_config.json").unlink()
    run = _run(files, chat_template=str(files / "chat.jinja"))
    shipped, _ = _shipped(run, files)
    tokenizer = AutoTokenizer.from_pretrained(files / "model")
    assert _stops(files, shipped) == [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|assistant|>")]
    (files / "model" / "generation_config.json").write_bytes(shipped["generation_config.json"] or b"")
    read = GenerationConfig.from_pretrained(files / "model")
    assert (read.pad_token_id, read.eos_token_id) == (tokenizer.pad_token_id, _stops(files, shipped))


@pytest.mark.parametrize("train_on", ["assistant", "last_assistant", "all"])
def test_where_the_next_turns_token_ends_answers_it_is_a_stop_token(files: Path, train_on: str) -> None:
    (files / "chat.jinja").write_text(tiny.NEXT_TURN_ENDS)
    shipped, log = _shipped(_run(files, chat_template=str(files / "chat.jinja"), train_on=train_on), files)
    assert "<|user|>" in log[-1]
    assert len(_stops(files, shipped)) == 2


def test_answers_without_a_template_end_with_the_tokenizers_end(files: Path) -> None:
    """A config that stops elsewhere would never stop where the completions ended."""
    (files / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    (files / "chats.jsonl").write_text(json.dumps({"prompt": "the ", "completion": "dog"}) + "\n")
    run = _run(files, chat_template=str(files / "chat.jinja"))
    shipped, _ = _shipped(run, files)
    assert _stops(files, shipped) == [0, AutoTokenizer.from_pretrained(files / "model").eos_token_id]


def test_plain_text_changes_nothing(files: Path) -> None:
    write_texts(files / "chats.jsonl", 5)
    (files / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    assert _shipped(_run(files, chat_template=str(files / "chat.jinja")), files) == ({}, [])
