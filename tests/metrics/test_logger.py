"""One printer: who reaches the console, who reaches log.txt, and what a step's line says."""

from __future__ import annotations

import io
import logging
import re
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from megatrain.metrics import logger
from megatrain.metrics.logger import RunLogger, bar_text, quiet_libraries, step_line
from step_records import record


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), highlight=False, markup=False, soft_wrap=True)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_our_lines_reach_console_and_file_others_only_the_file(tmp_path: Path, console: Console) -> None:
    with RunLogger(console) as log:
        logging.getLogger("megatrain.data").info("before the folder")
        log.open_folder(tmp_path)
        logging.getLogger("megatrain.data").warning("a [bold] thing")
        logging.getLogger("otherlib.x").warning("somebody's advice")
        warnings.warn("somebody's warning", stacklevel=1)
        log.to_file("for the file")
    logging.getLogger("megatrain.data").warning("after the run")
    text = (tmp_path / "log.txt").read_text()
    assert shown(console) == "before the folder\nwarning: a [bold] thing\n"
    for line in ("before the folder", "warning: a [bold] thing", "warning from otherlib.x: somebody's advice"):
        assert text.count(line) == 1
    assert "somebody's warning" in text
    assert "for the file" in text
    assert "after the run" not in text


def test_messages_of_transformers_go_to_the_file(
    tmp_path: Path, console: Console, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet_libraries()
    with RunLogger(console) as log:
        log.open_folder(tmp_path)
        logging.getLogger("transformers.modeling_utils").warning("some weights are new")
    assert "warning from transformers.modeling_utils: some weights are new" in (tmp_path / "log.txt").read_text()
    assert shown(console) == ""
    assert capsys.readouterr().err == ""


def test_a_traceback_is_kept_in_the_file(tmp_path: Path, console: Console) -> None:
    with RunLogger(console) as log:
        log.open_folder(tmp_path)
        try:
            raise ZeroDivisionError("no reason")
        except ZeroDivisionError as error:
            log.to_file("the run broke", error)
    assert "test_logger.py" in (tmp_path / "log.txt").read_text()
    assert shown(console) == ""


def test_a_resumed_run_appends_to_its_log(tmp_path: Path, console: Console) -> None:
    for text in ("first", "second"):
        with RunLogger(console) as log:
            log.open_folder(tmp_path)
            log.info(text)
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first", "second"]


def test_what_only_explains_is_shown_if_asked_for(tmp_path: Path, console: Console) -> None:
    def talk() -> None:
        with RunLogger(console) as log:
            log.open_folder(tmp_path)
            logging.getLogger("megatrain.models").debug("nothing a user can change")
            logging.getLogger("otherlib.x").warning("somebody's advice")

    talk()
    assert shown(console) == ""
    assert "nothing a user can change" not in (tmp_path / "log.txt").read_text()
    own = logging.getLogger("megatrain")
    own.setLevel(logging.DEBUG)  # --verbose
    try:
        talk()
        assert own.level == logging.DEBUG
    finally:
        own.setLevel(logging.NOTSET)
    assert shown(console) == "nothing a user can change\nwarning from otherlib.x: somebody's advice\n"
    assert "nothing a user can change" in (tmp_path / "log.txt").read_text()


def test_a_name_cannot_write_a_line_of_the_log(tmp_path: Path, console: Console) -> None:
    with RunLogger(console) as log:
        log.open_folder(tmp_path)
        log.info("reading a\n2026-01-01 00:00:00 all is well\x1b[2J\u202e:\n  two lines of ours")
    expected = "reading a\\n2026-01-01 00:00:00 all is well\\x1b[2J\\u202e:\n  two lines of ours\n"
    assert shown(console) == expected
    assert (tmp_path / "log.txt").read_text()[20:] == expected


def test_long_lines_are_not_wrapped(console: Console) -> None:
    with RunLogger(console) as log:
        log.info("word " * 100)
    assert shown(console).count("\n") == 1


def test_the_line_of_a_step() -> None:
    line = step_line(record(12, loss=2.34567, grad_norm=1.234, processed_tokens_per_s=10250.0), 300, left_s=898.4)
    assert line == (
        "step  12/300  loss 2.3457  norm 1.23  lr 1.00e-05  10.2k tok/s (1.5k trained)  "
        "2.00 s (forward 0.50, data 0.10)  ETA 0:14:58"
    )
    slow = step_line(record(1, processed_tokens_per_s=12.3, trained_tokens_per_s=0.22), 3, left_s=9.0)
    assert "  12 tok/s (0.2 trained)  " in slow, "a slow machine is not one that stands still"


def test_a_step_without_loss_says_so() -> None:
    line = step_line(record(3, loss=None, grad_norm=None, skipped="gradient norm is nan"), 9, left_s=0)
    assert "loss n/a  norm n/a" in line
    assert line.endswith("SKIPPED: gradient norm is nan")


# ---- on a terminal


def terminal(monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(logger, "LINE_EVERY_S", 1000.0)
    out = io.StringIO()
    environ = {"TERM": "xterm"}  # whatever the tests run in
    return Console(
        file=out, highlight=False, markup=False, soft_wrap=True, force_terminal=True, width=100, _environ=environ
    )


def test_a_terminal_has_a_bar_and_the_log_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(monkeypatch)
    with RunLogger(console) as log:
        log.open_folder(tmp_path)
        for step in range(1, 51):
            log.step(record(step, loss=3.0 - step / 100), 50)
            if step == 25:
                log.warning("in between")
        log.info("afterwards")
    text = shown(console)
    lines = [line for line in text.splitlines() if "norm" in line and "loss" in line]
    assert len(lines) == 2, "the first step and the last; the bar shows the others"
    assert "50/50" in text
    assert "ETA" in text
    assert "warning: in between" in text
    assert text.rindex("50/50") > text.rindex("afterwards"), (
        "the bar stays until the end: there may be more to wait for"
    )
    assert text.endswith("\x1b[1A\x1b[2K"), "then it is taken away"
    plain = (tmp_path / "log.txt").read_text()
    assert sum(" loss " in line for line in plain.splitlines()) == 50
    assert "\x1b" not in plain, "no colours and no bars in the log"


def test_a_state_is_a_word_beside_the_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(monkeypatch)
    with RunLogger(console) as log:
        log.open_folder(tmp_path)
        log.begin(0, 50)
        with log.state("first step: compiling"):
            before = shown(console)
        log.step(record(1), 50)
        with log.state("validating", "step 1: validating"):
            during = shown(console)
        with log.state("saving", "saving step 1 (1.5 GiB)", shown=True):
            pass
        log.step(record(2), 50)
    assert "0/50" in before and before.rstrip().endswith("first step: compiling"), (
        "there is a bar before the first step"
    )
    assert during.rstrip().endswith("validating") and "step 1: validating" not in during
    assert "saving step 1 (1.5 GiB)" in shown(console)
    lines = [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines() if " loss " not in line]
    assert lines == ["first step: compiling", "step 1: validating", "saving step 1 (1.5 GiB)"]


def test_a_state_is_one_line_without_a_terminal(console: Console) -> None:
    with RunLogger(console) as log:
        log.begin(0, 50)
        with log.state("validating", "step 1: validating"):
            pass
    assert shown(console) == "step 1: validating\n"


# ---- steps where the console is no terminal


def step_numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"^(?:[-\d]{10} [:\d]{8} )?step +(\d+)/", text, flags=re.MULTILINE)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time in seconds; a test sets it."""
    now = [1000.0]
    monkeypatch.setattr(logger.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_the_first_steps_and_then_one_every_few_seconds_are_lines(
    tmp_path: Path, console: Console, clock: list[float]
) -> None:
    with RunLogger(console, line_every_s=10.0) as log:
        log.open_folder(tmp_path)
        for step in range(1, 101):
            clock[0] += 1.0
            log.step(record(step), 100)
    assert step_numbers(shown(console)) == [*range(1, 11), *range(20, 101, 10)]
    assert step_numbers((tmp_path / "log.txt").read_text()) == [*range(1, 101)], "the log has every step"


def test_a_step_that_was_left_out_is_shown_before_what_belongs_to_it(console: Console, clock: list[float]) -> None:
    with RunLogger(console, line_every_s=10.0) as log:
        for step in range(1, 31):
            log.step(record(step, skipped="loss is nan" if step == 15 else None), 100)
            if step == 17:
                log.validation(record(step, val_loss=2.0, val_tokens=7, val_s=0.5))
            if step == 21:
                with log.state("saving", f"saving step {step}"):
                    pass
            if step == 25:
                logging.getLogger("megatrain.run").warning("an alert")
    text = shown(console)
    assert step_numbers(text) == [*range(1, 11), 15, 17, 21, 25, 30], "30: the last step of a run that ended early"
    lines = [re.split(r"  (?=loss)", line)[0] for line in text.splitlines()]
    assert lines[10:] == [
        "step  15/100", "step  17/100", "step 17: validation loss 2.0000 over 7 tokens, 0.5 s",
        "step  21/100", "saving step 21", "step  25/100", "warning: an alert", "step  30/100",
    ]  # fmt: skip


def test_every_step_is_a_line_if_the_config_says_so(console: Console, clock: list[float]) -> None:
    with RunLogger(console, line_every_s=0.0) as log:
        for step in range(1, 31):
            log.step(record(step), 100)
    assert step_numbers(shown(console)) == [*range(1, 31)]


def test_a_skipped_step_is_always_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(monkeypatch)
    with RunLogger(console) as log:
        for step in range(1, 5):
            log.step(record(step, skipped="loss is nan" if step == 3 else None), 50)
    assert "SKIPPED: loss is nan" in shown(console)


def test_an_error_removes_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    console = terminal(monkeypatch)

    def failing() -> None:
        with RunLogger(console) as log:
            log.step(record(1), 50)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert "\x1b[?25h" in shown(console), "the cursor is shown again"


def test_long_work_is_a_bar_on_a_terminal_and_few_lines_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = logging.getLogger("megatrain.data.build")

    def read(console: Console) -> str:
        with RunLogger(console) as log:
            log.open_folder(tmp_path)
            for percent in range(0, 101, 5):
                reading.info("a.jsonl: %d%%", percent, extra={"share": percent / 100})
            log.info("a.jsonl: done")
        return shown(console)

    on_a_terminal = read(terminal(monkeypatch))
    assert "a.jsonl: 100%" in on_a_terminal or "a.jsonl: 0%" in on_a_terminal
    assert on_a_terminal.rstrip().endswith("a.jsonl: done")
    assert "%" not in (tmp_path / "log.txt").read_text(), "no bar in the log"
    plain = read(Console(file=io.StringIO(), soft_wrap=True))
    assert plain == "a.jsonl: done\n", "too short for a line of its own"
    monkeypatch.setattr(logger, "LINE_EVERY_S", 0.0)
    assert read(Console(file=io.StringIO(), soft_wrap=True)).count("%") == 21


def test_the_bar_shows_loss_speed_and_time_left() -> None:
    assert bar_text(record(1, loss=2.5), 3723.4) == "loss 2.5000  2.0k tok/s  ETA 1:02:03"
