"""`megatrain init`: writes a config that trains from a model and data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatrain.commands.init import Lengths, choose_fraction, choose_rows
from megatrain.commands.main import main
from megatrain.config.load import load_config
from tiny_run import write_chats, write_model, write_texts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init")
    write_model(folder / "model")
    write_chats(folder / "chats.jsonl", 400)
    write_texts(folder / "texts.jsonl", 200)
    return folder


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new config's run folder and token cache are relative to the current directory and HOME."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_the_written_config_is_checked_and_trains(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(files / "model"), str(files / "chats.jsonl")]) == 0
    shown = capsys.readouterr().out
    assert "format messages" in shown
    assert "all checks passed" in shown
    text = Path("run.yaml").read_text()
    assert "# format messages (columns messages): 400 samples" in text
    assert text.count("#") >= 12, "every key has its comment"
    run = load_config("run.yaml")
    assert run.data.max_tokens == 256  # the model's positions
    assert run.data.val is not None
    assert run.data.val.fraction is not None
    assert main(["train", "run.yaml", "--schedule.epochs=null", "--schedule.steps=1", "--schedule.warmup_ratio=0"]) == 0
    assert (Path(run.run.dir) / "checkpoints" / "latest").is_file()


def test_the_config_has_ten_keys(files: Path) -> None:
    assert main(["init", str(files / "model"), str(files / "chats.jsonl"), "--out", "a.yaml"]) == 0
    given = load_config("a.yaml").model_dump(exclude_unset=True)
    keys = [f"{section}.{key}" for section, values in given.items() for key in values]
    assert keys == [
        "model.path",
        "data.train",
        "data.val",
        "data.max_tokens",
        "data.train_on",
        "batch.tokens_per_step",
        "optim.learning_rate",
        "schedule.warmup_ratio",
        "schedule.epochs",
        "run.dir",
    ]


def test_several_sources_and_a_model_without_weights(files: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "fresh", weights=False)
    assert main(["init", str(model), str(files / "texts.jsonl"), str(files / "chats.jsonl"), "--out", "b.yaml"]) == 0
    run = load_config("b.yaml")
    assert run.model.init == "random"
    assert run.optim.learning_rate == 3e-4
    assert [Path(source.path).name for source in run.data.train] == ["texts.jsonl", "chats.jsonl"]


def test_columns_with_other_names(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"question": f"what is {n}?", "answer": f"it is {n}"} for n in range(8)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["init", str(files / "model"), "qa.jsonl", "--out", "qa.yaml"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    hint = said[said.index("--columns") : said.index(")", said.index("--columns"))]
    assert not Path("qa.yaml").exists()
    assert main([*asked, *hint.split()]) == 0, "what the error says works as it stands"
    assert load_config("qa.yaml").data.train[0].columns == {"instruction": "question", "output": "answer"}
    assert main([*asked[:-1], "b.yaml", "--columns", "instruction"]) == 2
    assert "'instruction' is not NAME=COLUMN" in capsys.readouterr().err


def test_samples_longer_than_the_models_positions_are_dropped_with_a_comment(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"instruction": "count", "output": "one " * n} for n in (5, 6, 7, 900)]
    (tmp_path / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["init", str(files / "model"), "long.jsonl"]) == 0
    assert load_config("run.yaml").data.overflow == "drop"
    assert "# 1 sample (25.0%) longer than the model's positions" in Path("run.yaml").read_text()
    assert "longer than 256 tokens: drop; 1 left out" in capsys.readouterr().out


def test_file_names_with_yaml_syntax_are_quoted(files: Path, tmp_path: Path) -> None:
    odd = tmp_path / "yes: #1 'a' \"b\" ünï.jsonl"
    odd.write_text((files / "chats.jsonl").read_text())
    assert main(["init", str(files / "model"), odd.name]) == 0
    assert load_config("run.yaml").data.train[0].path == odd.name


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("modle", "chats.jsonl", "no such model folder"),
        ("model", "chat.jsonl", "did you mean"),
        ("model", "model/config.json", "they fit no format"),
    ],
)
def test_unusable_input_leaves_no_file(
    files: Path, capsys: pytest.CaptureFixture[str], model: str, data: str, words: str
) -> None:
    assert main(["init", str(files / model), str(files / data)]) == 2
    assert words in capsys.readouterr().err
    assert not Path("run.yaml").exists()


def test_an_existing_file_is_never_overwritten(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run.yaml").write_text("mine")
    assert main(["init", str(files / "model"), str(files / "chats.jsonl")]) == 2
    assert "already exists" in capsys.readouterr().err
    assert Path("run.yaml").read_text() == "mine"


def test_init_takes_no_config_keys(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", str(files / "model"), str(files / "chats.jsonl"), "--data.max_tokens=9"]) == 2
    assert "init takes no config keys" in capsys.readouterr().err


# ---- choices


@pytest.mark.parametrize(
    ("lengths", "max_tokens"),
    [
        (Lengths(np.array([606]), False, 100_000, 8192), 1024),
        (Lengths(np.array([1024]), False, 100_000, None), 1024),
        (Lengths(np.array([1025]), False, 100_000, 8192), 2048),
        (Lengths(np.array([40]), False, 100_000, 8192), 512),
        (Lengths(np.array([40]), True, 100_000, 8192), 2048),
        (Lengths(np.zeros(0, np.int64), True, 100_000, 8192), 2048),
        (Lengths(np.array([9000]), True, 100_000, 4096), 4096),
    ],
)
def test_rows_fit_the_longest_sample_within_the_models_positions(lengths: Lengths, max_tokens: int) -> None:
    assert choose_rows(lengths).max_tokens == max_tokens


@pytest.mark.parametrize("tokens", [10, 1000, 100_000, 10_000_000, 10**12])
def test_a_step_is_whole_rows_and_an_epoch_has_about_fifty_steps(tokens: int) -> None:
    rows = choose_rows(Lengths(np.array([1000]), False, tokens, None))
    assert rows.tokens_per_step % rows.max_tokens == 0
    assert rows.tokens_per_step <= 262_144
    assert rows.tokens_per_step == rows.max_tokens or tokens / rows.tokens_per_step >= 50


def test_no_fraction_is_chosen_that_holds_out_nothing() -> None:
    spread = np.linspace(0, 2**64 - 2**12, 10_000).astype(np.uint64)
    assert choose_fraction([spread]) == 0.01
    assert choose_fraction([spread[:: 10_000 // 400]]) == 0.05
    assert choose_fraction([spread[-1:]]) is None
    assert choose_fraction([spread[:1]]) is None, "nothing would be left to train on"
