"""One printer: who reaches the console, who reaches log.txt, and what a step's line says."""

from __future__ import annotations

import io
import logging
import warnings
from pathlib import Path

import pytest
from rich.console import Console

from megatrain.metrics.logger import RunLogger, quiet_libraries, step_line
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


def test_what_transformers_says_goes_to_the_file(
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


def test_a_resumed_run_goes_on_in_its_log(tmp_path: Path, console: Console) -> None:
    for text in ("first", "second"):
        with RunLogger(console) as log:
            log.open_folder(tmp_path)
            log.info(text)
    assert [line.split()[-1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first", "second"]


def test_long_lines_are_not_wrapped(console: Console) -> None:
    with RunLogger(console) as log:
        log.info("word " * 100)
    assert shown(console).count("\n") == 1


def test_the_line_of_a_step() -> None:
    line = step_line(record(12, loss=2.34567, grad_norm=1.234, processed_tokens_per_s=10250.0), 300, left_s=898.4)
    assert line == (
        "step  12/300  loss 2.3457  norm 1.23  lr 1.00e-05  10.2k tok/s, 1.5k trained  "
        "2.00 s (forward 0.50, data 0.10)  ETA 0:14:58"
    )


def test_a_step_without_loss_says_so() -> None:
    line = step_line(record(3, loss=None, grad_norm=None, skipped="gradient norm is nan"), 9, left_s=0)
    assert "loss n/a  norm n/a" in line
    assert line.endswith("SKIPPED: gradient norm is nan")
