"""Names, samples, prompts and settings cannot steer the terminal or write lines of their own, whatever the command."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from megatrain.commands.main import main
from megatrain.config.load import load_config
from tiny_run import config, prepare

EVIL = "a\x1b[31m\u202eb\nforged: a line\r c"
"""In the names of all files and folders: an escape code, a mark of direction, line breaks."""
RAW = ("\x1b", "\u202e", "\r", "\x07", "\udce9")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evil") / EVIL
    folder.mkdir()
    prepare(folder)
    with (folder / "texts.jsonl").open("a") as file:
        for _ in range(120):
            file.write(json.dumps({"text": "the fox \x1b]0;title\x07 \u202e jumps\nforged: a sample\nover"}) + "\n")
        file.write("not json\n")
    plain = config(folder, data={"val": {"fraction": 0.2}, "allow_rejects": 0.5})
    YAML().dump(plain, folder / "run.yaml")
    assert main(["train", str(folder / "run.yaml")]) == 0
    shutil.copytree(folder / "run", folder / EVIL)
    (folder / EVIL / "log.txt").write_text(EVIL.replace("\n", " "))
    return folder


def run_yaml(place: Path, *words: str) -> list[str]:
    return [str(place / "run.yaml"), *words]


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "data": lambda place: ["data", *run_yaml(place, "--samples=9")],
    "check": lambda place: ["check", *run_yaml(place, f"--run.dir={place}/next")],
    "train": lambda place: ["train", *run_yaml(place, f"--run.dir={place}/again")],
    "train, verbose": lambda place: ["train", *run_yaml(place, f"--run.dir={place}/third", "--verbose")],
    "resume": lambda place: ["train", *run_yaml(place, "--resume=auto")],
    "eval": lambda place: ["eval", str(place / "run")],
    "monitor": lambda place: ["monitor", str(place / EVIL)],
    "plot": lambda place: ["plot", str(place / EVIL), f"--out={place}/plot"],
    "generate": lambda place: ["generate", str(place / "run"), f"--prompt={EVIL}", "--tokens=30", "--temperature=2"],
    "verify": lambda place: ["verify", str(place / "run")],
    "export": lambda place: ["export", str(place / "run"), str(place / "export")],
    "trace": lambda place: ["trace", *run_yaml(place, f"--out={place}/trace.json")],
    "init": lambda place: ["init", str(place / "model"), str(place / "texts.jsonl"), f"--out={place}/new.yaml"],
    "error: used folder": lambda place: ["train", *run_yaml(place)],
    "error: no file": lambda place: ["train", str(place / f"{EVIL}\udce9")],  # a byte that is not UTF-8
    "error: no data": lambda place: ["check", *run_yaml(place, f"--data.train={place}/{EVIL}")],
    "error: unknown key": lambda place: ["check", *run_yaml(place, f"--optim.x{EVIL}=3", "--optim.learning_rte=3")],
    "error: wrong value": lambda place: ["check", *run_yaml(place, f"--optim.learning_rate='{EVIL}'")],
    "error: unknown argument": lambda place: ["check", *run_yaml(place, f"--wrong{EVIL}")],
    "error: no model": lambda place: ["generate", str(place / f"no {EVIL}"), "--prompt=x"],
    "error: not a choice": lambda place: ["doctor", f"--device={EVIL}"],
    "error: file name too long": lambda place: ["train", EVIL * 30],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_output_of_a_command_holds_what_steers_a_terminal(
    place: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place))
    try:
        code = main(COMMANDS[command](place))
    except SystemExit as ended:
        code = int(str(ended.code))
    assert (code == 2) == command.startswith("error")
    shown = capsys.readouterr()
    for text in (shown.out, shown.err):
        assert [mark for mark in RAW if mark in text] == []
        assert [line for line in text.splitlines() if line.startswith("forged")] == []
    assert "\\x1b" in shown.out + shown.err, "the test shows the name at all"


def test_neither_do_the_files_that_are_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log and config of a run, the card of an export, the config of `init`, the page of a plot."""
    monkeypatch.setenv("HOME", str(place))
    out = place / "out"
    assert main(["export", str(place / EVIL), str(out / "model")]) == 0
    assert main(["init", str(place / "model"), str(place / "texts.jsonl"), f"--out={out}/new {EVIL}.yaml"]) == 0
    assert main(["plot", str(place / EVIL), f"--out={out}/plot"]) == 0
    new = out / f"new {EVIL}.yaml"
    for file in (place / "run/log.txt", place / "run/config.yaml", out / "model/README.md", new, out / "plot.html"):
        text = file.read_text()
        assert [mark for mark in RAW if mark in text] == []
        assert [line for line in text.splitlines() if line.startswith("forged")] == []
    assert load_config(new).data.train[0].path == str(place / "texts.jsonl")
    assert load_config(place / "run" / "config.yaml").run.dir == str(place / "run"), "the config is still the same"
