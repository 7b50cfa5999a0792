"""Signals: the first asks, a second SIGINT or SIGTERM insists, the third does not wait."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import tiny_run
from megatrain.commands.main import main
from megatrain.metrics.logger import RunLogger
from megatrain.metrics.record import StepRecord
from megatrain.run.signals import Stopped, StopSignals, ending_by_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_the_second_insists_and_handlers_are_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals() as stop:
        assert stop.requested is None
        os.kill(os.getpid(), number)
        assert stop.requested == number.name
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_third_signal_ends_a_process_that_hangs() -> None:
    code = """
        import os, signal, time
        from megatrain.run.signals import StopSignals
        with StopSignals():
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                try:
                    os.kill(os.getpid(), signal.SIGTERM)
                    time.sleep(60)
                except KeyboardInterrupt:
                    pass
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 130
    assert "signal again to stop now" in done.stderr


def test_another_thread_than_the_main_one_installs_no_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def run() -> None:
        with StopSignals() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]
    assert signal.getsignal(signal.SIGTERM) is before


def test_only_sigint_and_sigterm_insist() -> None:
    """A batch system sends SIGUSR1 and minutes later SIGTERM: that must not abort the save of the first."""
    with StopSignals() as stop:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stop.requested == "SIGUSR1"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_torchrun_passes_on_does_not_insist() -> None:
    with StopSignals(echo_s=60.0) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGINT"


def test_where_nothing_is_to_be_saved_the_first_signal_ends_the_run() -> None:
    with StopSignals() as stop:
        stop.nothing_to_save = True
        with pytest.raises(Stopped, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested == "SIGTERM"


class Thing:
    """Can be referred to weakly."""


@pytest.mark.parametrize("handlers", ["a run's, nothing to save", "a run's, the second signal", "another command's"])
def test_a_signal_inside_a_callback_that_drops_exceptions_counts(handlers: str) -> None:
    """Python only reports what a finalizer or a weak reference's callback raises, and so what a signal's handler raises there."""
    thing = Thing()
    dying = weakref.ref(thing, lambda _: os.kill(os.getpid(), signal.SIGTERM))
    hook = sys.unraisablehook
    with StopSignals() if handlers.startswith("a run's") else ending_by_signals() as stop:
        if stop is not None:
            stop.nothing_to_save = "nothing" in handlers
            if "second" in handlers:
                os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Stopped if "nothing" in handlers else KeyboardInterrupt):  # noqa: PT012
            del thing
            for _ in range(3000):
                time.sleep(0.01)
    assert dying() is None
    assert sys.unraisablehook is hook and signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL


# ---- through the command line


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_run.prepare(tmp_path_factory.mktemp("files"))
    YAML().dump(tiny_run.config(folder, schedule={"kind": "constant", "steps": 6}), folder / "run.yaml")
    return folder


def train_with_signal(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, *words: str
) -> tuple[int, list[str], Path]:
    """(exit code, checkpoints, folder) of a run that gets a signal while it reports step 3."""
    real = RunLogger.step

    def step(self: RunLogger, record: StepRecord, total_steps: int) -> None:
        if record.step == 3:
            os.kill(os.getpid(), number)
        real(self, record, total_steps)

    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(RunLogger, "step", step)
        code = main(
            ["train", str(files / "run.yaml"), "--run.dir", str(folder), "--checkpoint.every_steps=null", *words]
        )
    return code, sorted(path.name for path in (folder / "checkpoints").glob("step_*")), folder


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU, signal.SIGTERM])
def test_signals_that_save_and_end_a_run(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    code, saved, folder = train_with_signal(files, tmp_path, monkeypatch, number)
    assert (code, saved) == (0, ["step_000003"])
    assert signal.getsignal(number) is before
    last = (folder / "log.txt").read_text().splitlines()[-1]
    assert last.endswith(f"stopped by {number.name} after step 3 of 6")  # docs/commands.md looks for it


def test_sigusr2_saves_and_training_continues(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, saved, folder = train_with_signal(files, tmp_path, monkeypatch, signal.SIGUSR2)
    assert (code, saved) == (0, ["step_000003", "step_000006"])
    assert "stopped by" not in (folder / "log.txt").read_text()


def test_a_sighup_that_nohup_ignores_stays_ignored(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, saved, _ = train_with_signal(files, tmp_path, monkeypatch, signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (code, saved) == (0, ["step_000006"])
