"""Faults of whole runs: divergence, failing saves, signals by file, changed configs."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from counting import CountingEngine
from megatrain.checkpoint.export import verify
from megatrain.checkpoint.reader import OpenCheckpoint, latest_complete
from megatrain.config.schema import RunConfig
from megatrain.data.rows import StepLoader
from megatrain.engine.base import StepResult
from megatrain.errors import NumericStop, UserError
from megatrain.metrics.record import read_records
from megatrain.run.loop import train
from megatrain.run.prepare import check
from tiny_run import checkpoints, log_of, make, prepare


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("files"))


@pytest.fixture(scope="module")
def begun(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of six steps, to copy."""
    folder = tmp_path_factory.mktemp("begun")
    train(make(files, folder, "--checkpoint.every_steps=3", "--schedule.steps=6"), engine=CountingEngine())
    return folder / "run"


def losses(run: RunConfig) -> list[tuple[int, float | None]]:
    return [(record.step, record.loss) for record in read_records(Path(run.run.dir) / "metrics.jsonl")]


BAD = StepResult(float("nan"), float("inf"), 100, "gradient norm is not finite")


class BadBatches(CountingEngine):
    """Is not finite on the batches at some positions of the data, whenever it sees them."""

    def __init__(self, files: Path, run: RunConfig, positions: set[int], spike: float | None = None):
        super().__init__()
        self.seen: list[int] = []
        self.positions, self.spike = positions, spike

    def train_step(self, batch: Any, learning_rate: float) -> StepResult:
        position = next(p for p, one in enumerate(self.batches) if one.equal(batch["input_ids"]))
        self.seen.append(position)
        if position in self.positions and self.spike is None:
            self.step += 1
            return BAD
        result = super().train_step(batch, learning_rate)
        if position in self.positions and self.spike is not None:
            assert result.loss is not None
            return StepResult(result.loss * self.spike, 1.0, result.tokens)
        return result


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The batches of the run by position, as the loader makes them."""
    made: dict[int, Any] = {}
    real = StepLoader.batch

    def noting(self: StepLoader, step: int) -> Any:
        batch = real(self, step)
        made[step] = batch["input_ids"]
        return batch

    class Batches(list):
        def __iter__(self):  # type: ignore[override]
            return iter([made[p] for p in sorted(made)])

    monkeypatch.setattr(StepLoader, "batch", noting)
    BadBatches.batches = Batches()  # type: ignore[attr-defined]
    return BadBatches.batches  # type: ignore[attr-defined]


ROLLBACK = (
    "--run.on_divergence=rollback",
    "--run.max_bad_steps=2",
    "--checkpoint.every_steps=2",
    "--checkpoint.keep=null",
)


def test_a_divergence_rolls_back_and_skips_the_bad_data(files: Path, tmp_path: Path, noted: Any) -> None:
    """Batches 4 and 5 are bad: steps 5 and 6 are taken again with the batches behind them, and nothing else is lost."""
    run = make(files, tmp_path, *ROLLBACK, "--schedule.steps=8", "--batch.tokens_per_step=128")
    engine = BadBatches(files, run, {4, 5})
    summary = train(run, engine=engine)
    assert engine.seen == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (summary.step, engine.step) == (8, 8)
    assert [step for step, _ in losses(run)] == list(range(1, 9))
    assert all(loss is not None for _, loss in losses(run))
    assert "back to" in log_of(run) and "rollback 1 of 3" in log_of(run)
    assert checkpoints(run) == ["step_000002", "step_000004", "step_000006", "step_000008"]

    # resumed from behind the rollback: the offset is in the checkpoint
    again = BadBatches(files, run, set())
    train(run, resume=str(tmp_path / "run" / "checkpoints" / "step_000006"), engine=again)
    assert again.seen == [8, 9]


def test_rollbacks_are_counted_and_limited(files: Path, tmp_path: Path, noted: Any) -> None:
    run = make(files, tmp_path, *ROLLBACK, "--schedule.steps=9", "--batch.tokens_per_step=64", "--run.max_rollbacks=2")
    with pytest.raises(NumericStop, match="after 2 rollbacks") as caught:
        train(run, engine=BadBatches(files, run, set(range(2, 40))))
    assert "step_000002" in str(caught.value)
    assert checkpoints(run) == ["step_000002"]


def test_without_a_checkpoint_before_it_a_divergence_ends_the_run(files: Path, tmp_path: Path, noted: Any) -> None:
    run = make(files, tmp_path, *ROLLBACK, "--schedule.steps=8", "--batch.tokens_per_step=128")
    with pytest.raises(NumericStop, match="resume from the start"):
        train(run, engine=BadBatches(files, run, {0, 1}))


@pytest.mark.parametrize("policy", ["stop", "rollback"])
def test_a_loss_spike_is_a_divergence(policy: str, files: Path, tmp_path: Path, noted: Any) -> None:
    words = (
        f"--run.on_divergence={policy}",
        "--run.loss_spike=5",
        "--checkpoint.every_steps=10",
        "--checkpoint.keep=null",
    )
    run = make(
        files, tmp_path, *words, "--schedule.steps=26", "--batch.tokens_per_step=64", "--optim.learning_rate=1e-9"
    )
    engine = BadBatches(files, run, {22}, spike=100.0)
    if policy == "stop":
        with pytest.raises(NumericStop, match="times the median"):
            train(run, engine=engine)
        return
    train(run, engine=engine)
    assert engine.seen == [*range(23), *range(23, 29)], "steps 21 to 23 come again with batches 23, 24, 25"
    found = [loss for _, loss in losses(run)]
    assert len(found) == 26
    assert all(loss is not None and loss < 5 * min(one for one in found if one is not None) for loss in found)


# ------------------------------------------------------------------ signals by file


def test_the_file_save_saves_once_and_the_file_stop_ends_the_run(files: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def touch(step: int) -> None:
        if step in (3, 6):
            (folder / {3: "save", 6: "stop"}[step]).touch()

    run = make(files, tmp_path, "--schedule.steps=9", "--checkpoint.every_steps=null", "--checkpoint.keep=null")
    folder.mkdir()
    summary = train(run, engine=CountingEngine(touch))
    assert (summary.step, summary.stopped_by) == (6, f"the file {folder / 'stop'}")
    assert checkpoints(run) == ["step_000003", "step_000006"]
    assert not (folder / "save").exists() and not (folder / "stop").exists()
    (folder / "stop").touch()  # left from before: it must not end a run that somebody starts
    assert train(run, resume="auto", engine=CountingEngine()).step == 9
    assert f"{folder / 'stop'}: from before the start" in log_of(run)


def test_a_stop_file_ends_an_evaluation(files: Path, tmp_path: Path) -> None:
    calls: list[int] = []

    def touch() -> None:
        calls.append(1)
        (tmp_path / "run" / "stop").touch()

    run = make(files, tmp_path, "--data.val={fraction: 0.5}", "--eval.every_steps=2")
    summary = train(run, engine=CountingEngine(on_eval=touch))
    assert (summary.step, len(calls)) == (2, 1)
    assert summary.checkpoint == tmp_path / "run" / "checkpoints" / "step_000002"


# ------------------------------------------------------------------ what matters to a resume


@pytest.mark.parametrize(
    ("word", "named", "allow"),
    [
        ("--batch.tokens_per_step=128", "batch.tokens_per_step", "batch"),
        ("--data.max_tokens=128", "data.max_tokens was 64 and is 128", "data,batch"),
        ("--run.seed=7", "run.seed was 0 and is 7", "seed"),
        ("--data.val={fraction: 0.3}", "data (checksum of token ids, targets, rows and weights)", "data"),
        ("--optim.learning_rate=2e-3", "optim.learning_rate was 0.001 and is 0.002", "schedule"),
        ("--schedule.kind=linear", "schedule.kind was constant and is linear", "schedule"),
        ("--schedule.warmup_steps=2", "schedule.warmup_steps was null and is 2", "schedule"),
        ("--optim.betas=[0.9, 0.95]", "optim.betas was [0.9, 0.999] and is [0.9, 0.95]", "optim"),
        ("--optim.weight_decay=0.5", "optim.weight_decay was 0.01 and is 0.5", "optim"),
        ("--optim.eps=1e-6", "optim.eps was 1e-08 and is 1e-06", "optim"),
        ("--optim.max_grad_norm=2", "optim.max_grad_norm was 1.0 and is 2.0", "optim"),
        ("--optim.groups=[{pattern: norm}]", "optim.groups was [] and is [{'pattern': 'norm'", "optim"),
        ("--precision.compute_dtype=bf16", "precision.compute_dtype was auto and is bf16", "precision"),
    ],
)
def test_a_change_that_matters_is_named_and_refused(
    word: str, named: str, allow: str, files: Path, begun: Path, tmp_path: Path
) -> None:
    shutil.copytree(begun, tmp_path / "run")
    changed = make(files, tmp_path, word, "--schedule.steps=6")
    with pytest.raises(UserError) as caught:
        check(changed, resume="auto")
    assert named in str(caught.value)
    # What the refusal says is enough, the first time or, where data had to be read for more, the second.
    allowed = allowed_by(caught.value)
    if set(allowed) != set(allow.split(",")):
        with pytest.raises(UserError) as caught:
            train(changed, resume="auto", allow_changes=allowed, engine=CountingEngine())
        assert set(allowed_by(caught.value)) == set(allow.split(","))
    longer = make(files, tmp_path, word, "--schedule.steps=8", f"--run.allow_changes=[{allow}]")
    train(longer, resume="auto", engine=CountingEngine())
    assert named in log_of(longer)


def allowed_by(error: UserError) -> tuple[Any, ...]:
    """What the refusal says to pass."""
    found = re.search(r"--allow-changes ([\w,]+)", str(error))
    assert found is not None, error
    return tuple(found[1].split(","))


def test_one_name_does_not_allow_another_change(files: Path, tmp_path: Path) -> None:
    train(make(files, tmp_path, "--schedule.steps=2"), engine=CountingEngine())
    both = make(files, tmp_path, "--optim.eps=1e-6", "--run.seed=3", "--schedule.steps=2")
    with pytest.raises(UserError, match=r"run.seed was 0 and is 3.*\n.*--allow-changes seed,optim") as caught:
        train(both, resume="auto", allow_changes=("optim",), engine=CountingEngine())
    assert "optim.eps" not in str(caught.value)


@pytest.mark.parametrize("val", ["{fraction: 0.02}", "null"])
def test_held_out_samples_that_would_be_trained_are_counted(val: str, files: Path, tmp_path: Path) -> None:
    train(make(files, tmp_path, "--data.val={fraction: 0.3}", "--schedule.steps=2"), engine=CountingEngine())
    less = make(files, tmp_path, f"--data.val={val}", "--schedule.steps=2")
    with pytest.raises(UserError, match=r"(\d+) of (\d+) samples held out so far \(data.val\) would be trained now"):
        train(less, resume="auto", engine=CountingEngine())
    train(less, resume="auto", allow_changes=("data",), engine=CountingEngine())
    assert "held out so far" in log_of(less)


def test_more_held_out_samples_are_no_leak(files: Path, tmp_path: Path) -> None:
    train(make(files, tmp_path, "--data.val={fraction: 0.1}", "--schedule.steps=2"), engine=CountingEngine())
    more = make(files, tmp_path, "--data.val={fraction: 0.3}", "--schedule.steps=2")
    with pytest.raises(UserError, match="data \\(rows\\)") as caught:
        train(more, resume="auto", engine=CountingEngine())
    assert "held out so far" not in str(caught.value)


def test_a_run_may_be_prolonged_as_long_as_its_past_is_the_same(files: Path, tmp_path: Path) -> None:
    train(make(files, tmp_path, "--schedule.steps=4"), engine=CountingEngine())
    longer = make(files, tmp_path, "--schedule.steps=6", "--schedule.kind=wsd")
    assert train(longer, resume="auto", engine=CountingEngine()).step == 6
    assert "total steps was 4 and is 6; the learning rates so far are the same" in log_of(longer)


# ------------------------------------------------------------------ the real engine

RESUMES = {
    "middle of an epoch": (),
    "accumulation_steps": ("--batch.accumulation_steps=2",),
    "bf16": ("--precision.compute_dtype=bf16",),
    "eaten": ("--memory.gradient_plane=false", "--optim.max_grad_norm=null"),
    "segments": ("--activations.segment=2",),
}


@pytest.mark.parametrize("name", RESUMES)
def test_ten_steps_equal_five_and_five(name: str, files: Path, tmp_path: Path) -> None:
    """Weights, moments, metrics and order of samples; step 5 is in the middle of an epoch."""
    words = ("--schedule.steps=10", "--schedule.kind=cosine", "--checkpoint.every_steps=5", "--checkpoint.keep=null")
    words += ("--data.val={fraction: 0.2}", "--eval.every_steps=5", *RESUMES[name])
    whole = make(files, tmp_path / "whole", *words)
    train(whole)
    cut = make(files, tmp_path, *words)
    shutil.copytree(whole.run.dir, cut.run.dir)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_000010")
    train(cut, resume="auto")
    mine, other = (Path(run.run.dir) / "checkpoints" / "step_000010" for run in (cut, whole))
    for path in other.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (mine / path.relative_to(other)).read_bytes(), path.name
    numbers = [
        [(r.step, r.epoch, r.loss, r.grad_norm, r.learning_rate, r.rows, r.trained_tokens, r.val_loss) for r in found]
        for found in (read_records(Path(run.run.dir) / "metrics.jsonl") for run in (cut, whole))
    ]
    assert numbers[0] == numbers[1]
    assert any(not math.isclose(r[1], round(r[1])) for r in numbers[0])


def test_retention_goes_by_number_and_keeps_every_nth(files: Path, tmp_path: Path) -> None:
    words = ("--schedule.steps=7", "--checkpoint.every_steps=1", "--checkpoint.keep=2", "--checkpoint.keep_every=3")
    run = make(files, tmp_path, *words, "--checkpoint.weights_every_steps=4")
    train(run)
    assert checkpoints(run) == ["step_000003", "step_000006", "step_000007"]
    assert [path.name for path in (tmp_path / "run" / "weights").iterdir()] == ["step_000004"]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_000007\n"


def failing_saves(monkeypatch: pytest.MonkeyPatch, code: int, saves: set[int]) -> None:
    """The 20th write of some saves of the run fails; 1 is the first save."""
    writes: dict[threading.Thread, int] = {}  # each save has a thread of its own
    real = os.write

    def write(fd: int, piece: Any) -> int:
        thread = threading.current_thread()
        if thread.name == "checkpoint-save":
            writes[thread] = writes.get(thread, 0) + 1
            if list(writes).index(thread) + 1 in saves and writes[thread] == 20:
                raise OSError(code, os.strerror(code))
        return real(fd, piece)

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_save_that_fails_is_a_warning_and_the_run_continues(
    background: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = (
        "--schedule.steps=6",
        "--checkpoint.every_steps=2",
        "--checkpoint.keep=1",
        f"--checkpoint.background={background}",
    )
    whole = make(files, tmp_path / "whole", *words)
    train(whole)
    run = make(files, tmp_path, *words, "--checkpoint.on_error=warn")
    failing_saves(monkeypatch, errno.ENOSPC, {2})
    train(run)
    assert "was not saved, training" in log_of(run) and "No space left on device" in log_of(run)
    assert losses(run) == losses(whole)
    assert checkpoints(run) == ["step_000006"]
    verify(tmp_path / "run" / "checkpoints" / "step_000006")


def test_a_save_that_fails_stops_the_run_and_the_one_before_is_there(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--schedule.steps=6", "--checkpoint.every_steps=2", "--checkpoint.keep=1")
    whole = make(files, tmp_path / "whole", *words)
    train(whole)
    run = make(files, tmp_path, *words)
    with monkeypatch.context() as patch:
        failing_saves(patch, errno.EIO, {2})
        with pytest.raises(UserError, match="Input/output error"):
            train(run)
    assert "Traceback" not in log_of(run)
    assert checkpoints(run) == ["step_000002"], "the old one was not removed for one that is not there"
    assert latest_complete(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step_000002"
    train(run, resume="auto")
    assert losses(run) == losses(whole)


def test_the_last_save_must_not_fail_quietly(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make(files, tmp_path, "--schedule.steps=2", "--checkpoint.on_error=warn")
    failing_saves(monkeypatch, errno.ENOSPC, {1, 2})
    with pytest.raises(UserError, match="No space left"):
        train(run)


def test_sigterm_while_a_checkpoint_streams_in(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The load is cancelled, nothing is computed or written, and the run ends in order."""
    run = make(files, tmp_path, "--schedule.steps=3")
    train(run)
    before = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    restore: Callable[..., None] = OpenCheckpoint.restore
    restored: list[str] = []

    def interrupted(self: OpenCheckpoint, unit: Any, *rest: Any) -> None:
        if not restored:
            os.kill(os.getpid(), signal.SIGTERM)
        restored.append(unit.name)
        restore(self, unit, *rest)

    monkeypatch.setattr(OpenCheckpoint, "restore", interrupted)
    summary = train(make(files, tmp_path, "--schedule.steps=9"), resume="auto")
    assert (summary.stopped_by, summary.checkpoint) == (
        "SIGTERM",
        tmp_path / "run" / "checkpoints" / f"step_{summary.step:06d}",
    )
    assert summary.step in (3, 4), "the signal comes before the first step, or during it"
    if summary.step == 3:
        assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == before


@pytest.mark.parametrize("unit", ["embedding", "layer.1"])
def test_a_damaged_checkpoint_is_not_trained_on(unit: str, files: Path, tmp_path: Path) -> None:
    """Found while it streams in, before any step is recorded; file, tensor and the newest other checkpoint are named."""
    run = make(files, tmp_path, "--schedule.steps=4", "--checkpoint.every_steps=2")
    train(run)
    path = tmp_path / "run" / "checkpoints" / "step_000004" / "state" / f"{unit}.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 4
    path.write_bytes(bytes(raw))
    other = tmp_path / "run" / "checkpoints" / "step_000002"
    with pytest.raises(UserError, match=r"tensor \S+: checksum differs") as caught:
        train(make(files, tmp_path, "--schedule.steps=6"), resume="auto")
    assert caught.value.where == str(path)
    assert caught.value.remedy is not None and caught.value.remedy.endswith(f": --resume {other}")
    assert "resuming after step 4: reading" in log_of(run) and "resumed from" not in log_of(run)
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4]
    train(run, resume=str(other))
    assert [step for step, _ in losses(run)] == [1, 2, 3, 4]
    assert f"resumed from {other} after step 2" in log_of(run)
