"""All that decides about a run is in its checkpoint: a stopped and resumed run does what the undisturbed one does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counting import CountingEngine
from megatrain.checkpoint.reader import saved_extra
from megatrain.config.schema import RunConfig
from megatrain.data.rows import Prefetcher
from megatrain.engine.base import StepResult
from megatrain.errors import NumericStop
from megatrain.run.loop import train
from tiny_run import log_of, make, prepare, records

BAD = StepResult(float("nan"), float("inf"), 100, "gradient norm is not finite")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("files"))


def stopping(after: int, on_step: Callable[[int], StepResult | None] = lambda step: None) -> CountingEngine:
    """An engine that is asked to stop in a step."""

    def step(number: int) -> StepResult | None:
        if number == after:
            os.kill(os.getpid(), signal.SIGTERM)
        return on_step(number)

    return CountingEngine(step)


# ---- divergence


def spiking(step: int) -> StepResult:
    return StepResult(9.0 if step == 23 else 1.0, 1.0, 100)


def test_a_resumed_run_remembers_the_losses_that_a_spike_is_measured_by(files: Path, tmp_path: Path) -> None:
    words = ("--schedule.steps=30", "--run.loss_spike=3")
    with pytest.raises(NumericStop) as undisturbed:
        train(make(files, tmp_path / "whole", *words), engine=CountingEngine(spiking))
    run = make(files, tmp_path, *words)
    assert train(run, engine=stopping(21, spiking)).stopped_by == "SIGTERM"
    with pytest.raises(NumericStop) as resumed:
        train(run, resume="auto", engine=CountingEngine(spiking))
    for caught in (undisturbed, resumed):
        assert "the loss of step 23 is 9.0000, more than 3 times the median 1.0000" in str(caught.value)
    assert records(run)[-1].step == 23


def test_a_resumed_run_remembers_the_bad_steps_in_a_row(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--schedule.steps=12", "--run.max_bad_steps=4")

    def bad(step: int) -> StepResult | None:
        return BAD if step > 2 else None

    train(run, engine=stopping(4, bad))
    with pytest.raises(NumericStop, match="4 steps in a row") as caught:
        train(run, resume="auto", engine=CountingEngine(bad))
    assert [record.step for record in records(run)] == [1, 2, 3, 4, 5, 6]
    assert "the weights are good up to step 2" in str(caught.value)


def test_a_rollback_keeps_the_losses_before_it(files: Path, tmp_path: Path) -> None:
    """A second spike right behind a rollback is found, too."""
    words = ("--schedule.steps=30", "--run.loss_spike=3", "--run.on_divergence=rollback", "--checkpoint.every_steps=21")
    run = make(files, tmp_path, *words, "--run.max_rollbacks=1")
    with pytest.raises(NumericStop, match=r"step 23 .* after 1 rollback"):
        train(run, engine=CountingEngine(spiking))
    assert "rollback 1 of 1" in log_of(run)


def test_skipped_steps_are_counted_without_the_metrics_of_an_earlier_process(files: Path, tmp_path: Path) -> None:
    """Three steps were taken: that the two others are skipped does not mean that nothing was trained."""
    run = make(files, tmp_path, "--schedule.steps=5")

    def bad(step: int) -> StepResult | None:
        return BAD if step in (2, 4, 5) else None

    train(run, engine=stopping(3, bad))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert train(run, resume="auto", engine=CountingEngine(bad)).step == 5
    assert [record.skipped_steps for record in records(run)] == [2, 3]


def test_a_run_that_skipped_all_steps_has_failed_when_it_is_resumed_too(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--schedule.steps=4")
    train(run, engine=stopping(2, lambda step: BAD))
    (tmp_path / "run" / "metrics.jsonl").unlink()
    with pytest.raises(NumericStop, match="nothing was trained: all 4 steps were skipped"):
        train(run, resume="auto", engine=CountingEngine(lambda step: BAD))


# ---- alerts


def test_a_resumed_run_remembers_the_alerts_in_the_making(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule needs four steps; two of them are before the stop. Each process has a warm-up of five."""
    real = Prefetcher.next

    def late(self: Prefetcher) -> Any:
        time.sleep(0.01)
        return real(self)

    monkeypatch.setattr(Prefetcher, "next", late)
    words = ("--schedule.steps=30", "--alerts.steps=4", "--alerts.data_wait=0.001", "--alerts.data_wait_action=stop")
    run = make(files, tmp_path, *words)
    assert train(run, engine=stopping(7)).stopped_by == "SIGTERM"
    summary = train(run, resume="auto", engine=CountingEngine())
    assert (summary.step, summary.stopped_by) == (14, "the alert data_wait")
    train(run, resume="auto", engine=stopping(27))
    assert log_of(run).count("alert data_wait: ") == 1, "it has spoken, and is not over"


# ---- validation


VALIDATING = ("--data.val={fraction: 0.5}", "--schedule.steps=4", "--eval.every_steps=2")


def numbers(run: RunConfig) -> list[tuple[int, float | None, float | None, int | None]]:
    return [(record.step, record.loss, record.val_loss, record.val_tokens) for record in records(run)]


def stop_now() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("step", [2, 4])
def test_a_validation_that_was_cut_short_is_measured_by_the_resumed_run_once(
    files: Path, tmp_path: Path, step: int
) -> None:
    whole = make(files, tmp_path / "whole", *VALIDATING)
    train(whole, engine=CountingEngine())
    run = make(files, tmp_path, *VALIDATING)
    calls: list[int] = []
    engine = CountingEngine()
    engine.on_eval = lambda: stop_now() if engine.step == step else None
    assert train(run, engine=engine).step == step
    assert records(run)[-1].val_loss is None
    summary = train(run, resume="auto", engine=CountingEngine(on_eval=lambda: calls.append(1)))
    assert numbers(run) == numbers(whole)
    assert (summary.val_step, summary.val_loss) == (4, records(whole)[-1].val_loss)
    assert calls
    calls.clear()
    train(run, resume="auto", engine=CountingEngine(on_eval=lambda: calls.append(1)))
    assert not calls and numbers(run) == numbers(whole)


def test_a_validation_that_is_missing_is_measured_without_the_metrics(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, *VALIDATING)
    train(run, engine=CountingEngine())
    known = records(run)[-1].val_loss
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert train(run, resume="auto", engine=CountingEngine()).val_loss == known
    assert [(record.step, record.val_loss) for record in records(run)] == [(4, known)]


# ---- how steps are computed


def test_a_resumed_run_says_what_it_computes_differently(files: Path, tmp_path: Path) -> None:
    """Nothing is said where nothing has changed; a changed setting wins, and is named."""
    train(make(files, tmp_path, "--schedule.steps=2"), engine=CountingEngine())
    saved = saved_extra(tmp_path / "run" / "checkpoints" / "step_000002")["plan"]
    assert saved["device"] == "cpu" and saved["settings"]["batch.microbatch_rows"] is None
    same = make(files, tmp_path, "--schedule.steps=3")
    train(same, resume="auto", engine=CountingEngine())
    assert "computed differently" not in log_of(same)
    other = make(files, tmp_path, "--schedule.steps=4", "--batch.microbatch_rows=2", "--batch.accumulation_steps=2")
    train(other, resume="auto", engine=CountingEngine())
    assert (
        "warning: steps are computed differently than before step 3's checkpoint, results may differ in their last bits: "
        "batch.accumulation_steps was 1 and is 2; batch.microbatch_rows was null and is 2\n"
    ) in log_of(other)
