"""`megatrain monitor`: a view of a run from its files, while they are being written."""

from __future__ import annotations

import asyncio
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console
from ruamel.yaml import YAML

import tiny_run
from megatrain.commands import monitor as monitor_module
from megatrain.commands.main import main
from megatrain.commands.monitor import Tail, Watcher, _redraw, application, chart, monitor, render
from megatrain.metrics.record import MetricsWriter
from step_records import record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    YAML().dump(tiny_run.config(tmp_path, schedule={"steps": None, "epochs": 2}), folder / "config.yaml")
    (folder / "log.txt").write_text("".join(f"line {n}\n" for n in range(2000)))
    return folder


def shown(run: Path, now_s: float = 1.7e9 + 5) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(render(Watcher(run).poll(now_s), 80))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_view_shows_progress_numbers_and_the_end_of_the_log(run: Path) -> None:
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        for step in range(1, 6):
            metrics.write(record(step, loss=4.0 - step / 2, val_loss=3.0 if step == 2 else None, skipped_steps=1))
    text = shown(run)
    assert "run: step 5/20, epoch 0.50, 0:00:30 left" in text  # 10 steps an epoch, 2 epochs, 2 s a step
    for words in ("1.5000", "2.5000", "validation loss", "lowest 3.0000 at 2", "skipped steps", "2,000"):
        assert words in text
    assert "line 1999" in text
    assert "line 1993" not in text


def test_before_the_first_step(run: Path) -> None:
    text = shown(run)
    assert "no step yet" in text
    assert "line 1999" in text


def test_a_stalled_run_and_a_finished_one(run: Path) -> None:
    with MetricsWriter(run / "metrics.jsonl") as metrics:
        metrics.write(record(5))
    assert "no step for 0:05:00" in shown(run, now_s=1.7e9 + 300)
    with MetricsWriter(run / "metrics.jsonl", 5) as metrics:
        metrics.write(record(100, epoch=10.0))
    assert ", done" in shown(run, now_s=1.7e9 + 300)


def test_new_lines_are_read_once_and_partial_lines_later(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    with MetricsWriter(path) as metrics:
        metrics.write(record(1))
        assert [one.step for one in tail.read()] == [1]
        metrics.write(record(2))
    content = path.read_bytes()
    with path.open("ab") as file:
        file.write(content.splitlines(keepends=True)[1][:50])
        file.flush()
        assert [one.step for one in tail.read()] == [1, 2]
        file.write(content.splitlines(keepends=True)[1][50:])
    assert [one.step for one in tail.read()] == [1, 2, 2]


def test_the_file_of_a_resumed_run_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    with MetricsWriter(path) as metrics:
        for step in range(1, 6):
            metrics.write(record(step))
    assert len(tail.read()) == 5
    with MetricsWriter(path, resume_step=3) as metrics:  # replaces the file
        assert [one.step for one in tail.read()] == [1, 2, 3]
        metrics.write(record(4, loss=9.0))
        assert tail.read()[-1].loss == 9.0


def test_the_chart_shows_the_range_and_the_decrease() -> None:
    lines = chart([4.0, 3.0, 2.0, 1.0], 40, 2)
    assert lines == ["   4.0000 █▃  ", "   1.0000 ██▆▁"]
    assert chart([], 40, 2) == []
    assert len(chart([1.0] * 10_000, 30, 4)[0]) == 10 + 30
    assert all("nan" not in line for line in chart([2.0], 40, 2))


def test_without_a_terminal_the_view_is_printed_once(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitor", str(run)]) == 0
    assert "no step yet" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nowhere", "bare"])
def test_a_folder_without_a_run_is_a_user_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "bare").mkdir()
    assert main(["monitor", str(tmp_path / name)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_without_textual_the_view_is_redrawn(run: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    polls = iter([True, True, False])

    def go_on() -> bool:
        with MetricsWriter(run / "metrics.jsonl", 100) as metrics:
            metrics.write(record(len(metrics.history) + 1, epoch=0.1))
        return next(polls)

    _redraw(Watcher(run), 0.01, console, go_on)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "no step yet" in text
    assert "step 1/" in text
    assert "step 2/" in text


def test_textual_is_imported_only_on_a_terminal(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textual.app", None)
    monitor(run, console=Console(file=io.StringIO(), width=80))
    monkeypatch.setattr(monitor_module, "find_spec", lambda name: None)
    seen: list[float] = []
    monkeypatch.setattr(monitor_module, "_redraw", lambda watcher, every_s, console, go_on: seen.append(every_s))
    monitor(run, every_s=7.0, console=Console(file=io.StringIO(), force_terminal=True))
    assert seen == [7.0]


def test_the_application_shows_new_steps_and_q_quits(run: Path) -> None:
    pytest.importorskip("textual")
    from textual.app import App
    from textual.widgets import Static

    async def use() -> None:
        app = application(Watcher(run), every_s=1000.0)
        async with app.run_test(size=(90, 30)) as pilot:
            assert "no step yet" in text_of(app)
            with MetricsWriter(run / "metrics.jsonl") as metrics:
                metrics.write(record(7, epoch=0.7))
            await pilot.press("r")
            assert "step 7/20" in text_of(app)
            await pilot.press("q")
        assert app.return_code == 0

    def text_of(app: App[None]) -> str:
        console = Console(file=io.StringIO(), width=86)
        console.print(app.query_one("#view", Static).content)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    asyncio.run(use())
