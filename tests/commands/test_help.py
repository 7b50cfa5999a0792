"""What `--help` shows: a short overview first, everything on request."""

from __future__ import annotations

import re

import pytest

from megatrain.commands.main import main
from megatrain.commands.parser import parser
from megatrain.config.docs import MAIN_KEYS, section_names
from megatrain.config.load import fields


def _shown(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def _commands() -> list[str]:
    return re.findall(r"^  (\w+) .*$", parser().epilog or "", flags=re.MULTILINE)


def test_the_top_help_lists_every_command_once_in_order_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(capsys, "--help")
    commands = _commands()
    assert commands[:5] == ["init", "data", "check", "plan", "train"]
    assert len(set(commands)) == len(commands)
    assert shown.index("  init MODEL DATA") < shown.index("  train RUN.yaml") < shown.index("  export RUN OUT")
    assert len(shown.splitlines()) < 50
    known = _shown(capsys, "no-such-command", code=2).split("choose from")[1]
    assert set(re.findall(r"[a-z]+", known)) == set(commands)
    for command in commands:
        assert f"usage: megatrain {command} " in _shown(capsys, command, "--help")


def test_megatrain_alone_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert "  init MODEL DATA" in shown.err
    assert shown.out == ""


def test_the_help_of_a_command_is_short_and_points_to_help_all(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(capsys, "train", "--help")
    found = re.findall(r"^  --([a-z_]+(?:\.[a-z_]+)+) ", shown, flags=re.MULTILINE)
    assert set(found) == MAIN_KEYS
    assert "--help-all describes all keys" in shown
    assert len(shown.splitlines()) < 80
    assert max(map(len, shown.splitlines())) <= 130


def test_help_all_describes_all_keys_by_section(capsys: pytest.CaptureFixture[str]) -> None:
    shown = _shown(capsys, "train", "--help-all")
    place = 0
    for loc, info in fields():
        name = ".".join(map(str, loc))
        heading = len(loc) == 1 and info.description is None
        found = shown.index(f"\n{name}: " if heading else f"\n  --{name} ")
        assert found > place, f"{name} is not in the order of the YAML"
        place = found
    assert re.search(r"--data.max_tokens N +length of a row \[tokens\] \(default: 2048\)", shown)
    assert re.search(r"--model.path TEXT +Hugging Face model folder[^-]*\(required\)", shown)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["train", "--help"], ["plan", "--help-all"]])
def test_help_that_was_asked_for_goes_to_standard_output(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 0
    shown = capsys.readouterr()
    assert shown.out
    assert shown.err == ""


def test_every_command_can_be_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    for command in _commands():
        assert "--verbose" in _shown(capsys, command, "--help")


@pytest.mark.parametrize("section", ["optim", "engine"])
def test_help_all_of_one_section(capsys: pytest.CaptureFixture[str], section: str) -> None:
    shown = _shown(capsys, "check", "--help-all", section)
    assert f"--{section}" in shown
    assert not any(f"--{other}." in shown for other in section_names() if other != section)


def test_an_unknown_section_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert "'optimizer' is not a section; use one of model, engine, data" in _shown(
        capsys, "train", "--help-all", "optimizer", code=2
    )
