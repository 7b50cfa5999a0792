"""The training loop with an engine that only counts: what is recorded, saved, skipped, stopped and resumed."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from counting import CountingEngine, Saved
from megatrain.config.load import load_config
from megatrain.config.schema import RunConfig
from megatrain.data.rows import StepLoader
from megatrain.engine.base import StepResult
from megatrain.errors import NumericStop, UserError
from megatrain.run.loop import TrainSummary, train
from megatrain.run.preflight import steps_of
from tiny_run import log_of, make, prepare, records, write_texts


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("files"))


def numbers(run: RunConfig) -> list[tuple[Any, ...]]:
    """What must not depend on how a run was cut."""
    return [
        (
            r.step,
            r.epoch,
            r.loss,
            r.grad_norm,
            r.learning_rate,
            r.rows,
            r.processed_tokens,
            r.trained_tokens,
            r.skipped,
            r.val_loss,
        )
        for r in records(run)
    ]


def test_the_folder_of_a_run(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--schedule.steps=4", "--checkpoint.every_steps=2")
    summary = train(run, engine=CountingEngine())
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "log.txt",
        "loss.png",
        "checkpoints",
    }
    assert {path.name for path in (folder / "checkpoints").iterdir()} == {"step_000002", "step_000004", "latest"}
    assert load_config(folder / "config.yaml") == run
    found = records(run)
    assert [record.step for record in found] == [1, 2, 3, 4]
    assert summary == TrainSummary(
        folder, 4, 4, found[0].loss, found[-1].loss, None, None, folder / "checkpoints" / "step_000004", None
    )
    first = found[0]
    assert first.rows == 4
    assert first.processed_tokens == 256
    assert first.split_s == {"forward": 0.1}
    assert 0 <= first.data_wait_s <= first.step_s
    assert first.processed_tokens_per_s == pytest.approx(256 / first.step_s)
    assert first.host_rss_bytes > 1 << 20
    log = log_of(run)
    assert "4 steps of 256 tokens" in log
    assert log.count("  loss ") == 4


def test_the_summary_line_of_a_run(files: Path, tmp_path: Path) -> None:
    words = ["--schedule.steps=2", "--data.val={fraction: 0.5}", "--eval.at_start"]
    run = make(files, tmp_path, *words, "--checkpoint.at_end=false", "--checkpoint.every_steps=null")
    summary = train(run, engine=CountingEngine())
    found = records(run)
    assert found[0].step == 0
    assert (summary.first_val_loss, summary.val_loss) == (found[0].val_loss, found[-1].val_loss)
    last = log_of(run).splitlines()[-1]
    for part in (
        f"training loss {found[1].loss:.4f} -> {found[-1].loss:.4f} (first and last step alone); ",
        f"validation loss {found[0].val_loss:.4f} -> {found[-1].val_loss:.4f}; no checkpoint; picture",
    ):
        assert part in last


# ---- partial steps, steps without targets


def test_the_partial_step_of_an_epoch_is_trained(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--schedule.steps=null", "--schedule.epochs=2", "--batch.tokens_per_step=320")
    summary = train(run, engine=CountingEngine())
    found = records(run)
    per_epoch = summary.total_steps // 2
    last_of_epoch = [found[per_epoch - 1], found[-1]]
    assert [record.epoch for record in last_of_epoch] == [1.0, 2.0]
    assert all(0 < record.rows < 5 for record in last_of_epoch)
    assert all(0 < record.trained_tokens < record.processed_tokens <= record.rows * 64 for record in last_of_epoch)
    one, two = found[:per_epoch], found[per_epoch:]
    assert sum(record.trained_tokens for record in one) == sum(record.trained_tokens for record in two)
    assert [record.loss for record in one] != [record.loss for record in two]


def test_speed_counts_no_padding(files: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "short.jsonl", 3)
    run = make(files, tmp_path, f"--data.train={tmp_path}/short.jsonl", "--data.packing=false", "--data.max_tokens=256",
               "--batch.tokens_per_step=1024", "--schedule.steps=1")  # fmt: skip
    train(run, engine=CountingEngine())
    (record,) = records(run)
    assert record.rows == 3
    assert record.trained_tokens == record.processed_tokens - 3


def test_a_step_without_targets_is_not_a_loss_of_zero(files: Path, tmp_path: Path) -> None:
    engine = CountingEngine(lambda step: StepResult(None, None, 0, "no target tokens") if step in (2, 3) else None)
    run = make(files, tmp_path, "--run.max_bad_steps=2")
    train(run, engine=engine)
    found = records(run)
    assert [record.loss is None for record in found] == [False, True, True, False]
    assert [record.trained_tokens for record in found[1:3]] == [0, 0]
    log = log_of(run)
    assert "step 2: no target token in its samples, nothing was changed" in log
    assert "texts.jsonl:" in log.split("nothing was changed: ")[1].splitlines()[0]
    assert "loss n/a" in log


# ---- steps that are not finite


def test_steps_that_are_not_finite_stop_the_run_only_in_a_row(files: Path, tmp_path: Path) -> None:
    bad = StepResult(float("nan"), float("inf"), 100, "gradient norm is not finite")
    run = make(files, tmp_path, "--schedule.steps=9", "--run.max_bad_steps=3", "--checkpoint.every_steps=5")
    with pytest.raises(NumericStop) as caught:
        train(run, engine=CountingEngine(lambda step: bad if step in (2, 3, 6, 7, 8) else None))
    assert caught.value.exit_code == 4
    found = records(run)
    assert [record.step for record in found] == list(range(1, 9))
    assert [record.skipped_steps for record in found] == [0, 1, 2, 2, 2, 3, 4, 5]
    assert found[1].loss is None
    assert "3 steps in a row" in str(caught.value)
    assert "step_000005" in str(caught.value)
    assert "3 steps in a row" in log_of(run)
    assert log_of(run).count("SKIPPED: gradient norm is not finite") == 5
    assert "Traceback" not in log_of(run)


def test_a_run_that_skipped_all_of_its_steps_has_failed(files: Path, tmp_path: Path) -> None:
    bad = StepResult(float("nan"), float("inf"), 100, "gradient norm is not finite")
    run = make(files, tmp_path, "--schedule.steps=3", "--run.max_bad_steps=10")
    with pytest.raises(
        NumericStop, match="nothing was trained: all 3 steps were skipped, the last because of: gradient"
    ):
        train(run, engine=CountingEngine(lambda step: bad))
    assert not list((tmp_path / "run" / "checkpoints").iterdir())
    assert "nothing was trained" in log_of(run)


def test_a_run_that_took_one_step_has_not_failed(files: Path, tmp_path: Path) -> None:
    bad = StepResult(float("nan"), float("inf"), 100, "gradient norm is not finite")
    run = make(files, tmp_path, "--schedule.steps=3", "--run.max_bad_steps=10")
    assert train(run, engine=CountingEngine(lambda step: bad if step > 1 else None)).step == 3


# ---- evaluation


def test_evaluation_changes_nothing_and_takes_no_more_rows_than_a_step(files: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "val.jsonl", 40, seed=9)
    plain = make(files, tmp_path / "plain", "--schedule.steps=5")
    train(plain, engine=CountingEngine())
    run = make(
        files,
        tmp_path,
        f"--data.val={tmp_path}/val.jsonl",
        "--eval.every_steps=2",
        "--eval.at_start",
        "--schedule.steps=5",
    )
    engine = CountingEngine()
    summary = train(run, engine=engine)
    found = records(run)
    assert [record.step for record in found if record.val_loss is not None] == [0, 2, 4, 5]
    assert [record.loss for record in found[1:]] == [record.loss for record in records(plain)]
    assert found[0].val_loss == 1.0
    assert summary.val_loss == pytest.approx(engine.weight)
    assert max(engine.eval_rows) == 4
    per_eval = len(engine.eval_rows) // 4
    assert len(engine.eval_rows) == 4 * per_eval
    assert len({record.val_tokens for record in found if record.val_tokens}) == 1


# ---- resume is exact, by step number alone


def test_two_halves_equal_the_whole(files: Path, tmp_path: Path) -> None:
    words = ["--schedule.epochs=2", "--schedule.steps=null", "--schedule.kind=cosine", "--schedule.warmup_steps=2"]
    words += ["--data.val={fraction: 0.2}", "--eval.every_steps=2"]
    whole = make(files, tmp_path / "whole", *words)
    total = train(whole, engine=CountingEngine()).total_steps
    cut = make(files, tmp_path, *words)
    stopped = train(
        cut, engine=CountingEngine(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 5 else None)
    )
    assert (stopped.step, stopped.stopped_by) == (5, "SIGTERM")
    assert stopped.step < total
    resumed = train(cut, resume="auto", engine=CountingEngine())
    assert resumed.step == total
    assert numbers(cut) == numbers(whole)
    assert "resumed from" in log_of(cut)


def test_a_crash_loses_nothing_but_the_steps_after_the_checkpoint(files: Path, tmp_path: Path) -> None:
    whole = make(files, tmp_path / "whole", "--schedule.steps=7")
    train(whole, engine=CountingEngine())

    def crash(step: int) -> None:
        if step == 6:
            raise RuntimeError("the device fell off the bus")

    run = make(files, tmp_path, "--schedule.steps=7", "--checkpoint.every_steps=3")
    with pytest.raises(RuntimeError, match="fell off"):
        train(run, engine=CountingEngine(crash))
    assert [record.step for record in records(run)] == [1, 2, 3, 4, 5]
    assert "Traceback" in log_of(run)
    train(run, resume="latest", engine=CountingEngine())
    assert numbers(run) == numbers(whole)
    assert "metrics.jsonl: 2 records after step 3 dropped" in log_of(run)


def test_resuming_a_finished_run_does_nothing(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path)
    first = train(run, engine=CountingEngine())
    before = numbers(run)
    again = train(run, resume="auto", engine=CountingEngine(lambda step: pytest.fail("a step was trained")))
    assert (again.step, again.checkpoint) == (first.step, first.checkpoint)
    assert numbers(run) == before


def test_resuming_with_other_data_is_refused_unless_allowed(files: Path, tmp_path: Path) -> None:
    train(make(files, tmp_path), engine=CountingEngine())
    write_texts(tmp_path / "more.jsonl", 80)
    run = make(files, tmp_path, f"--data.train={tmp_path}/more.jsonl", "--schedule.steps=6")
    with pytest.raises(
        UserError,
        match=r"data \(rows\) was \d+ and is \d+; .*data \(checksum of token ids, targets, rows and weights\)",
    ) as caught:
        train(run, resume="auto", engine=CountingEngine())
    assert "--allow-changes" in str(caught.value)
    assert [record.step for record in records(run)] == [1, 2, 3, 4], "nothing was touched"
    train(run, resume="auto", allow_changes=("data",), engine=CountingEngine())
    assert "data (checksum of token ids, targets, rows and weights)" in log_of(run)
    assert "allowed" in log_of(run)
    assert [record.step for record in records(run)] == [1, 2, 3, 4, 5, 6]


def test_resuming_with_another_model_folder_says_whose_weights_they_are(files: Path, tmp_path: Path) -> None:
    train(make(files, tmp_path), engine=CountingEngine())
    shutil.copytree(make(files, tmp_path).model.path, tmp_path / "other")
    run = make(files, tmp_path, f"--model.path={tmp_path}/other", "--schedule.steps=6")
    train(run, resume="auto", engine=CountingEngine())
    assert "the weights are the checkpoint's" in log_of(run)


def test_going_back_to_an_older_checkpoint_keeps_the_newer_one_aside(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--checkpoint.every_steps=2")
    train(run, engine=CountingEngine())
    checkpoints = tmp_path / "run" / "checkpoints"
    train(run, resume=str(checkpoints / "step_000002"), engine=CountingEngine())
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"step_000002", "step_000004", "latest"}
    assert [path.name for path in (tmp_path / "run" / "aside").iterdir()] == ["step_000004"]


def test_old_checkpoints_go_when_the_new_one_is_complete(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--schedule.steps=6", "--checkpoint.every_steps=1", "--checkpoint.keep=2")
    train(run, engine=CountingEngine())
    names = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert names == {"step_000005", "step_000006", "latest"}


# ---- a signal loses nothing, not even during an evaluation


def test_a_signal_during_an_evaluation_ends_it_and_saves(files: Path, tmp_path: Path) -> None:
    calls = []

    def interrupt() -> None:
        calls.append(1)
        os.kill(os.getpid(), signal.SIGINT)

    run = make(files, tmp_path, "--data.val={fraction: 0.5}", "--eval.every_steps=2")
    summary = train(run, engine=CountingEngine(on_eval=interrupt))
    assert summary.stopped_by == "SIGINT"
    assert summary.step == 2
    assert len(calls) == 1
    assert summary.checkpoint == tmp_path / "run" / "checkpoints" / "step_000002"
    assert [record.val_loss for record in records(run)] == [None, None]


def test_a_signal_while_a_checkpoint_is_loaded_leaves_all_as_it_was(files: Path, tmp_path: Path) -> None:
    class Interrupted(CountingEngine):
        def load(self, directory: Path, *, wait: bool = True, convert_states: bool = False) -> dict[str, Any]:
            os.kill(os.getpid(), signal.SIGTERM)
            return super().load(directory, wait=wait, convert_states=convert_states)

    run = make(files, tmp_path, "--schedule.steps=3")
    train(run, engine=CountingEngine())
    before = numbers(run)
    longer = make(files, tmp_path, "--schedule.steps=9")
    summary = train(longer, resume="auto", engine=Interrupted())
    assert (summary.step, summary.stopped_by) == (3, "SIGTERM")
    assert summary.checkpoint == tmp_path / "run" / "checkpoints" / "step_000003"
    assert numbers(run) == before


def test_a_signal_before_the_first_step_writes_no_checkpoint(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--data.val={fraction: 0.5}", "--eval.at_start")
    summary = train(run, engine=CountingEngine(on_eval=lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert (summary.step, summary.checkpoint, summary.stopped_by) == (0, None, "SIGTERM")


def test_a_second_signal_stops_at_once(files: Path, tmp_path: Path) -> None:
    def interrupt(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    run, before = make(files, tmp_path), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(run, engine=CountingEngine(interrupt))
    assert [record.step for record in records(run)] == [1]
    assert signal.getsignal(signal.SIGINT) is before


def test_after_a_signal_the_log_says_saving_saved_stopped(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path)
    train(run, engine=CountingEngine(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None))
    lines = [line.partition(" ")[2].partition(" ")[2] for line in log_of(run).splitlines()[-3:]]
    assert re.fullmatch(r"saving step 3 \([\d.]+ MiB\); a second signal aborts it", lines[0])
    assert lines[1].startswith("step 3: saved ")
    assert lines[2] == "stopped by SIGTERM after step 3 of 4"


def test_a_second_signal_during_the_save_names_the_checkpoint_to_resume_from(files: Path, tmp_path: Path) -> None:
    class Insisted(CountingEngine):
        def save(self, directory: Path, *rest: Any, **more: Any) -> Saved:
            if self.step == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().save(directory, *rest, **more)

    run = make(files, tmp_path, "--checkpoint.every_steps=2")
    with pytest.raises(KeyboardInterrupt) as caught:
        train(run, engine=Insisted(lambda step: os.kill(os.getpid(), signal.SIGTERM) if step == 3 else None))
    assert str(caught.value) == "interrupted; resume from step_000002 with --resume auto"
    assert log_of(run).endswith(f" {caught.value}\n")
    assert "Traceback" not in log_of(run) and "stopped by" not in log_of(run)


def test_long_states_are_logged_when_they_begin(files: Path, tmp_path: Path) -> None:
    words = ("--data.val={fraction: 0.5}", "--eval.at_end", "--schedule.steps=2", "--checkpoint.every_steps=1")
    run = make(files, tmp_path, *words, "--checkpoint.background=false")
    heard: list[str] = []

    def on_step(step: int) -> None:
        heard.append(log_of(run).splitlines()[-1])

    train(run, engine=CountingEngine(on_step, lambda: heard.append(log_of(run).splitlines()[-1])))
    assert heard[0].endswith(" first step")
    assert heard[-1].endswith(" step 2: validating")
    log = log_of(run)
    for step in (1, 2):
        assert re.search(rf"saving step {step} \(.*\n.* step {step}: saved", log)
    assert log.count("first step\n") == 1 and log.count("saving step") == 2


# ---- errors of the batch thread


def test_an_error_of_the_batch_thread_reaches_the_caller(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StepLoader.batch

    def broken(self: StepLoader, step: int) -> dict[str, torch.Tensor]:
        if step == 2:
            raise OSError("the disk is gone")
        return original(self, step)

    monkeypatch.setattr(StepLoader, "batch", broken)
    run = make(files, tmp_path)
    with pytest.raises(OSError, match="the disk is gone") as caught:
        train(run, engine=CountingEngine())
    assert any(entry.name == "broken" for entry in caught.traceback)
    assert [record.step for record in records(run)] == [1, 2]


# ---- starting


def test_a_run_killed_while_its_engine_is_made_can_resume(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while a large model is read, it goes on with --resume auto."""
    run = make(files, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("megatrain.run.loop"), "make_engine", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(run)
    assert train(run, resume="auto", engine=CountingEngine()).step == 4


def test_a_folder_that_is_not_empty_stays_as_it_is(files: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty"):
        train(make(files, tmp_path), engine=CountingEngine())
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_warm_up_as_long_as_the_run_is_refused_before_the_start(files: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a warm-up of 4 steps does not fit into a run of 4") as caught:
        train(make(files, tmp_path, "--schedule.warmup_steps=4"), engine=CountingEngine())
    assert "schedule.warmup_steps" in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("ratio", "total", "warmup"), [(0.03, 1, 0), (0.03, 2, 1), (0.99, 4, 3), (0.5, 4, 2)])
def test_a_warmup_ratio_is_less_than_the_run(
    files: Path, tmp_path: Path, ratio: float, total: int, warmup: int
) -> None:
    """A run of one step is how one tries a config that warms up by a ratio."""
    run = make(files, tmp_path, f"--schedule.warmup_ratio={ratio}", f"--schedule.steps={total}")
    assert steps_of(run).warmup == warmup


def test_steps_are_counted_after_packing(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--schedule.steps=null")
    total = train(run, engine=CountingEngine()).total_steps
    packed_rows = sum(record.rows for record in records(run))
    assert total == -(-packed_rows // 4)
    assert packed_rows < 60  # samples, of which a row holds several
