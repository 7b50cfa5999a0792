"""Before the first step of a process there is nothing to save: a signal ends the run where it is, and nothing is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest

from counting import CountingEngine
from megatrain.commands.main import main
from megatrain.config.schema import RunConfig
from megatrain.data import build
from megatrain.data.encoder import Encoder
from megatrain.engine.host import engine as engine_module
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.host.optimizer import HostOptimizer
from megatrain.models import weights
from megatrain.run import prepare as prepare_module
from megatrain.run.loop import train
from tiny_run import config, log_of, make, prepare, records, write_texts


@pytest.fixture
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """New for each test: nothing is in the cache."""
    return prepare(tmp_path_factory.mktemp("files"))


def signalled(number: signal.Signals, real: Callable[..., Any], calls: list[int], at: int) -> Callable[..., Any]:
    """`real`, with a signal to this process at its call `at`; the first is 1."""

    def call(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            os.kill(os.getpid(), number)
        return real(*arguments, **named)

    return call


def nothing_left(files: Path, run: RunConfig) -> None:
    assert not list((files / "cache").glob("*.tmp")), "half a store"
    assert not (Path(run.run.dir) / "lock").exists()
    assert not [thread for thread in threading.enumerate() if "prefetch" in thread.name.lower()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU])
def test_a_signal_while_tokenizing_ends_the_run_and_keeps_the_sources_that_are_ready(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    write_texts(files / "more.jsonl", 40, seed=7)
    monkeypatch.setattr(build, "BATCH_CHARS", 1000)
    calls: list[int] = []
    run = make(files, tmp_path, f"--data.train=[{files}/texts.jsonl, {files}/more.jsonl]")
    monkeypatch.setattr(prepare_module, "load_data", _after_first_source(monkeypatch, number, calls))
    summary = train(run, engine=CountingEngine())
    assert (summary.stopped_by, summary.step, summary.checkpoint) == (number.name, 0, None)
    assert not Path(run.run.dir).exists(), "nothing was begun"
    nothing_left(files, run)
    assert len([path for path in (files / "cache").iterdir() if path.is_dir()]) == 1, "the first source is ready"
    monkeypatch.undo()
    assert train(run, resume="auto", engine=CountingEngine()).step == 4
    assert "texts.jsonl: format text (columns text): 60 samples" in log_of(run)
    assert log_of(run).count("(from the cache)") == 1


def _after_first_source(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, calls: list[int]) -> Any:
    """`load_data` which gets a signal in the second batch of its second source, and fails at a further batch."""
    real, ids, opened = prepare_module.load_data, Encoder.ids, build.Builder.open

    def encode(self: Encoder, texts: Any) -> Any:
        if len(calls) < 1:
            return ids(self, texts)
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        assert len(calls) < 4, "a batch was tokenized after the signal"
        return ids(self, texts)

    def open_source(self: build.Builder, source: Any, where: str) -> Any:
        store = opened(self, source, where)
        calls.append(1)
        return store

    monkeypatch.setattr(Encoder, "ids", encode)
    monkeypatch.setattr(build.Builder, "open", open_source)
    return real


@pytest.mark.parametrize("command", ["check", "data", "eval"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_while_another_command_tokenizes_leaves_no_half_store(
    files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    number: signal.Signals,
) -> None:
    from ruamel.yaml import YAML

    YAML().dump(config(files), files / "run.yaml")
    before = signal.getsignal(number)
    if number == signal.SIGINT and before == signal.SIG_IGN:  # the shell that started the tests in the background
        before = signal.default_int_handler
        signal.signal(number, before)
    monkeypatch.setattr(Encoder, "ids", signalled(number, Encoder.ids, [], at=1))
    assert main([command, str(files / "run.yaml"), "--data.val={fraction: 0.5}"]) == 130
    assert signal.getsignal(number) is before
    assert not list((files / "cache").glob("*.tmp"))
    assert "Traceback" not in capsys.readouterr().err


PLACES: dict[str, tuple[Any, str]] = {
    "model": (prepare_module, "build_meta_model"),
    "parity check": (prepare_module, "verify_family"),
    "memory": (prepare_module, "check_cpu_memory"),
    "weights": (weights, "find_weight_files"),
    "planes": (HostEngine, "_make_store"),
    "kernels": (HostOptimizer, "compile_kernels"),
    "first step": (HostEngine, "_forward_backward"),
    "first update": (HostEngine, "_update"),
}


@pytest.mark.parametrize(
    ("place", "resumed"), [*((place, False) for place in PLACES), ("planes", True), ("first step", True)]
)
def test_a_signal_before_the_first_step_ends_the_run_where_it_is(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, resumed: bool
) -> None:
    run = make(files, tmp_path)
    if resumed:
        train(make(files, tmp_path, "--schedule.steps=2"))
    owner, name = PLACES[place]
    later: list[int] = []
    real = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _signal_before(real, later))
        summary = train(run, resume="auto")
    assert not later, "it went on after the signal"
    newest = Path(run.run.dir) / "checkpoints" / "step_000002" if resumed else None
    assert (summary.stopped_by, summary.step, summary.checkpoint) == ("SIGTERM", 2 if resumed else 0, newest)
    nothing_left(files, run)
    if place.startswith("first"):
        assert train(run, resume="auto").step == 4
        train(make(files, tmp_path / "whole"))
        assert [(r.step, r.loss, r.grad_norm) for r in records(run)] == [
            (r.step, r.loss, r.grad_norm) for r in records(make(files, tmp_path / "whole"))
        ]


def test_a_signal_while_weights_are_read_does_not_wait_for_all_of_them(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read by another thread, which the run waits for: it is told to end between two tensors."""
    ended: list[int] = []

    def read(*arguments: Any) -> None:
        check = arguments[-1]
        time.sleep(0.3)  # the run is at other work, or waits for this thread
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(6000):
            try:
                check()
            except CancelledError:
                ended.append(1)
                raise
            time.sleep(0.01)

    monkeypatch.setattr(engine_module, "load_masters", read)
    assert train(make(files, tmp_path)).stopped_by == "SIGTERM"
    assert ended


@pytest.mark.parametrize("checkpoint", [False, True], ids=["model", "checkpoint"])
def test_reading_weights_ends_between_two_tensors(files: Path, tmp_path: Path, checkpoint: bool) -> None:
    run = make(files, tmp_path, "--schedule.steps=1")
    train(run)
    folder = Path(run.run.dir) / "checkpoints" / "step_000001" if checkpoint else Path(run.model.path)
    with HostEngine(folder, device="cpu", init="empty", verify="never") as engine:
        calls: list[int] = []

        def check() -> None:
            calls.append(1)
            if len(calls) == 3:
                raise CancelledError

        with pytest.raises(CancelledError):
            engine_module.load_masters(folder, engine.structure, engine.store, {}, check)
    assert len(calls) == 3


def _signal_before(real: Callable[..., Any], later: list[int]) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        later.append(1)
        return real(*arguments, **named)

    return call


def test_a_signal_in_the_first_validation_ends_the_run(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--data.val={fraction: 0.5}", "--eval.at_start")
    summary = train(run, engine=CountingEngine(on_eval=lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert (summary.step, summary.checkpoint, summary.stopped_by) == (0, None, "SIGTERM")
    assert "stopped by SIGTERM before the first step; there was nothing to save" in log_of(run)
    assert "Traceback" not in log_of(run)
