"""`megatrain generate`: text from plain transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.commands.main import main
from megatrain.text import visible
from tiny_run import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("generate") / "model")


def _written(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["generate", *words]) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_greedy_output_equals_that_of_plain_transformers(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = _written(capsys, str(model), "--prompt", "the quick", "--prompt=hello", "--tokens=5", "--plain")
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    ids = tokenizer("the quick", return_tensors="pt").input_ids
    for _ in range(5):
        ids = torch.cat([ids, plain(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    want = tokenizer.decode(ids[0, -5:], skip_special_tokens=True)
    assert f"--- the quick\n{visible(want)} (stopped after --tokens 5)\n" in shown
    assert "--- hello\n" in shown
    assert "plain text" in shown


def test_a_chat_model_is_prompted_through_its_template(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    real = torch.nn.Module.__call__
    tokenizer = AutoTokenizer.from_pretrained(model)

    def noting(self, *args, **kwargs):
        if type(self).__name__ == "LlamaForCausalLM" and not asked:
            asked.append(tokenizer.decode(kwargs["input_ids"][0]))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, "__call__", noting)
    assert "chat template" in _written(capsys, str(model), "--prompt", "hello", "--tokens=2")
    assert asked == ["<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"]


def test_sampling_depends_on_the_seed(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(model), "--prompt=hello", "--tokens=8", "--temperature=1.5"]
    first, again, other = (_written(capsys, *words, f"--seed={seed}") for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--prompt=", "--plain"], "the prompt '' has no token"),
        (["--prompt=hello", "--tokens=9999"], r"longer than the 256 positions of the model"),
        (["--prompt=hello", "--run.seed=3"], "generate takes no config keys"),
        (["--prompt=hello", "--max_new_tokens=3"], r'did you mean "--tokens"\?\n  -> see `megatrain generate --help`'),
        (
            ["--prompt=hello", "--learning_rate=3"],
            "unknown argument '--learning_rate=3'\n  -> see `megatrain generate --help`",
        ),
    ],
)
def test_wrong_prompts_and_options_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert re.search(says, _written(capsys, str(model), *words, code=2))


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such model folder" in _written(capsys, str(tmp_path / "nothing"), "--prompt=x", code=2)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert "holds no complete checkpoint" in _written(capsys, str(tmp_path / "run"), "--prompt=x", code=2)
    assert "no config.json" in _written(capsys, str(tmp_path), "--prompt=x", code=2)
