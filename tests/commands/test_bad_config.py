"""Forty wrong configs through the real entry point: exit code 2, the place, a remedy, and no traceback.

Among them are `1e-5` as text, `no` as a boolean, and misspelt keys.
"""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import NamedTuple

import pytest

from megatrain.commands.main import main

GOOD = """\
model:
  path: model
data:
  train: texts.jsonl
  max_tokens: 64
batch:
  tokens_per_step: 256
optim:
  learning_rate: 1e-3
schedule:
  steps: 4
run:
  dir: run
"""


class Bad(NamedTuple):
    """A fault in GOOD: `old` is replaced by `new`; the message contains `place` and `says`."""

    name: str
    old: str
    new: str
    place: str
    says: str


BAD = [
    # the file
    Bad("empty file", GOOD, "", "run.yaml", "should contain the sections model, data, batch, run, ...; found nothing"),
    Bad("a list", GOOD, "- model\n- data\n", "run.yaml", "found a list"),
    Bad("a sentence", GOOD, "train the model", "run.yaml", "found a str"),
    Bad("broken indentation", "  max_tokens", "   max_tokens", "run.yaml:5", "check indentation, colons and quotes"),
    Bad("an open bracket", "texts.jsonl", "[texts.jsonl", "run.yaml:", "is not valid YAML"),
    Bad("a tab", "  dir: run", "\tdir: run", "run.yaml:13", "check indentation"),
    Bad("a key twice", "  steps: 4", "  steps: 4\n  steps: 5", "run.yaml:12", "is not valid YAML"),
    Bad("two documents", "run:", "---\nrun:", "run.yaml", "is not valid YAML"),
    # keys
    Bad("unknown section", "optim:", "optimizer:", "run.yaml:8 optimizer", 'did you mean "optim"?'),
    Bad("misspelt key", "learning_rate", "learning_rte", "run.yaml:9", 'did you mean "optim.learning_rate"?'),
    Bad("another trainer's key", "learning_rate", "lr", "run.yaml:9 optim.lr", 'did you mean "optim.learning_rate"?'),
    Bad("key of another section", "steps: 4", "max_tokens: 4", "run.yaml:11", 'did you mean "data.max_tokens"?'),
    Bad("key at the top", "run:", "max_steps: 4\nrun:", "run.yaml:12 max_steps", 'did you mean "schedule.steps"?'),
    Bad("dashes in a key", "max_tokens", "max-tokens", "run.yaml:5", 'did you mean "data.max_tokens"?'),
    Bad("capital letters", "max_tokens", "Max_Tokens", "run.yaml:5", 'did you mean "data.max_tokens"?'),
    Bad("no model", "model:\n  path: model\n", "", "run.yaml model", "a section with path"),
    Bad("no data", "  train: texts.jsonl\n", "", "run.yaml:3 data.train", "a path, or a list of paths"),
    Bad("no step size", "batch:\n  tokens_per_step: 256\n", "", "run.yaml batch", "a section with tokens_per_step"),
    Bad("no run folder", "run:\n  dir: run\n", "", "run.yaml run", "a section with dir"),
    # values
    Bad("a number as text", "1e-3", "'1e-3'", "run.yaml:9 optim.learning_rate", "expected a number, found the text"),
    Bad("a word for a number", "1e-3", "fast", "run.yaml:9 optim.learning_rate", "found the text 'fast'"),
    Bad("a boolean for a number", "steps: 4", "steps: true", "run.yaml:11 schedule.steps", "expected a number"),
    Bad("yes for true", "max_tokens: 64", "packing: yes", "run.yaml:5 data.packing", "written true or false"),
    Bad("off for false", "max_tokens: 64", "packing: off", "run.yaml:5 data.packing", "written true or false"),
    Bad("a negative rate", "1e-3", "-1e-3", "run.yaml:9 optim.learning_rate", "should be greater than 0"),
    Bad("not a number", "1e-3", ".nan", "run.yaml:9 optim.learning_rate", "should be"),
    Bad("infinite", "1e-3", ".inf", "run.yaml:9 optim.learning_rate", "should be a finite number"),
    Bad(
        "half a token",
        "max_tokens: 64",
        "max_tokens: 64.5",
        "run.yaml:5 data.max_tokens",
        "should be a whole number, found 64.5",
    ),
    Bad("no tokens", "max_tokens: 64", "max_tokens: 0", "run.yaml:5 data.max_tokens", "should be 2 or more"),
    Bad("an unknown choice", "steps: 4", "kind: cosin", "run.yaml:11 schedule.kind", 'did you mean "cosine"?'),
    Bad("an unknown format", "texts.jsonl", "{path: a, format: alpacca}", "data.train.0.format", '"alpaca"'),
    Bad("an unknown overflow", "max_tokens: 64", "overflow: cut", "run.yaml:5 data.overflow", "'error', 'drop'"),
    Bad(
        "a path that is a number", "texts.jsonl", "{path: 7}", "run.yaml:4 data.train.0.path", "should be text, found 7"
    ),
    Bad("an empty path", "path: model", "path: ''", "run.yaml:2 model.path", "should be a text that is not empty"),
    *(
        Bad(f"a NUL in {place}", old, new, place, "must not contain a NUL character")
        for old, new, place in [
            ("dir: run", 'dir: "r\\0n"', "run.yaml:13 run.dir"),
            ("path: model", 'path: "\\0"', "run.yaml:2 model.path"),
            ("texts.jsonl", '"a\\0b"', "run.yaml:4 data.train.0.path"),
            ("max_tokens: 64", 'cache_dir: "a\\0"', "run.yaml:5 data.cache_dir"),
            ("max_tokens: 64", 'chat_template: "a\\0"', "run.yaml:5 data.chat_template"),
        ]
    ),
    Bad("a NUL in the file", "texts.jsonl", "a\0b", "run.yaml", "is not valid YAML"),
    Bad("no sources", "texts.jsonl", "[]", "run.yaml:4 data.train", "a list with at least one item"),
    Bad("a weight of nothing", "texts.jsonl", "{path: a, weight: 0}", "data.train.0.weight", "greater than 0"),
    Bad("a fraction over 1", "max_tokens: 64", "val: {fraction: 2}", "run.yaml:5 data.val.fraction", "less than 1"),
    Bad("a section that is a word", "  steps: 4", "  {}\nmemory: lots", "run.yaml:12 memory", "a section with keys"),
    Bad("a bad pattern", "1e-3", "1e-3\n  groups: [{pattern: '('}]", "optim.groups.0", "not a regular expression"),
    Bad("betas of one number", "1e-3", "1e-3\n  betas: [0.9]", "run.yaml:10 optim.betas:", "list of two numbers"),
    Bad("one beta", "1e-3", "1e-3\n  betas: 0.9", "run.yaml:10 optim.betas", "list of two numbers, like [0.9, 0.999]"),
    Bad("a beta too many", "1e-3", "1e-3\n  betas: [0, 0, 0]", "run.yaml:10 optim.betas", "list of two numbers"),
    Bad("a word for a list", "run:", "metrics: {trackers: wandb}\nrun:", "metrics.trackers", "a list, found 'wandb'"),
    Bad("true for names", "  dir: run", "  dir: run\n  allow_changes: true", "run.yaml:14", "a list, found true"),
    Bad(
        "rows of one token",
        "max_tokens: 64",
        "max_tokens: 1",
        "run.yaml:5 data.max_tokens",
        "should be 2 or more, found 1",
    ),
    Bad("too little memory", "run:", "memory: {host_gib: -1}\nrun:", "memory.host_gib", "a positive number of GiB"),
    # across keys
    Bad("rows that do not fit", "256", "200", "run.yaml:7 batch.tokens_per_step", "for example 192 or 256"),
    Bad("steps and epochs", "steps: 4", "steps: 4\n  epochs: 1", "run.yaml:10 schedule", "give epochs or steps"),
    Bad(
        "two warm-ups",
        "steps: 4",
        "warmup_steps: 1\n  warmup_ratio: 0.1",
        "run.yaml:10 schedule",
        "leave the other out",
    ),
    Bad(
        "two kinds of val",
        "max_tokens: 64",
        "val: {fraction: 0.1, path: b}",
        "data.val",
        "either a fraction or sources",
    ),
    Bad("no gradient plane", "run:", "memory: {gradient_plane: false}\nrun:", "gradient_plane", "max_grad_norm: null"),
]


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.name)
def test_a_wrong_config_is_refused_with_place_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], bad: Bad
) -> None:
    assert bad.old in GOOD
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(GOOD.replace(bad.old, bad.new))
    assert main(["check", "run.yaml"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert "Traceback" not in text
    assert bad.place in text
    assert bad.says in text
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"], "nothing was written"


def test_there_are_forty() -> None:
    assert len({bad.name for bad in BAD}) == len(BAD) >= 40


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a0: &a0 [x]\n" + BOMB + GOOD, "expands to more than 100,000 values"),
        (GOOD.replace("texts.jsonl", "[" * 110 + "]" * 110), "is nested more than 100 levels deep"),
        (GOOD.replace("texts.jsonl", "[" * 3000 + "]" * 3000), "is nested too deeply"),
        ("".join("  " * depth + "a:\n" for depth in range(500)), "is nested too deeply"),
        (GOOD + "#" * (5 << 20), "too large for a config"),
    ],
    ids=["nested aliases", "brackets", "many brackets", "indentation", "a data file"],
)
def test_a_short_yaml_cannot_exhaust_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    yaml = tmp_path / "run.yaml"
    yaml.write_text(text)
    tracemalloc.start()
    assert main(["check", str(yaml)]) == 2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
    said = capsys.readouterr().err
    assert f"error: {yaml}: " in said
    assert says in said
    assert len(said) < 1000


def test_an_alias_bomb_on_the_command_line_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text(GOOD)
    bomb = "{a0: &a0 [x], " + ", ".join(BOMB.splitlines()) + "}"
    assert main(["check", str(tmp_path / "run.yaml"), "--data.train", bomb]) == 2
    assert "--data.train: expands to more than 100,000 values" in capsys.readouterr().err


def test_all_faults_of_a_config_are_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = GOOD.replace("1e-3", "fast").replace("steps: 4", "stepps: 4").replace("64", "-1")
    Path("run.yaml").write_text(text)
    assert main(["check", "run.yaml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: 3 problems in the config")
    assert said.index("run.yaml:5") < said.index("run.yaml:9") < said.index("run.yaml:11")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--optim.learning-rate", "fast"], "--optim.learning-rate: expected a number, found the text 'fast'"),
        (["--optim.learning_rte=1"], 'did you mean "optim.learning_rate"?'),
        (["--learning_rate", "1"], 'did you mean "--optim.learning_rate"?'),
        (["--optim.learning_rate"], "write --optim.learning_rate VALUE"),
        (["--data.train.3.path", "a"], "count from 0"),
        (["--model.path.x", "a"], "which has no keys"),
        (["--data.packing", "maybe"], "--data.packing"),
    ],
)
def test_a_wrong_override_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(GOOD.replace("texts.jsonl", "[texts.jsonl]"))
    assert main(["check", "run.yaml", *words]) == 2
    assert says in capsys.readouterr().err
