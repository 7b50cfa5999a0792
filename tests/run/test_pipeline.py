"""What a run does with its instruments: the metrics file, alerts and their actions, and the end of host memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from counting import CountingEngine
from megatrain.checkpoint.reader import saved_extra
from megatrain.commands.main import main
from megatrain.data.rows import Prefetcher
from megatrain.engine.base import StepResult
from megatrain.errors import HostMemoryLow, UserError
from megatrain.metrics.record import Link, PipelineRecord, read_records
from megatrain.run import health
from megatrain.run.loop import train
from tiny_run import checkpoints, config, log_of, make, prepare


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("files"))


def test_every_step_records_where_its_time_went(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--checkpoint.at_end=false")
    train(run)
    lines = [orjson.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_bytes().splitlines()]
    assert len(lines) == 4
    for line in lines:
        pipeline = line["pipeline"]
        assert {"computed_s", "waited_s", "h2d", "d2h", "overlap", "slot_switch_s", "policy"} <= pipeline.keys()
        assert {"gpu_utilisation", "device_used_bytes", "device_total_bytes"}.isdisjoint(pipeline), "there is no GPU"
        assert pipeline["waited_s"].keys() >= {"weights", "data"}
        assert pipeline["computed_s"] + sum(pipeline["waited_s"].values()) <= line["step_s"]
    assert "adamw_params_per_s" in lines[-1]["pipeline"]
    read = read_records(tmp_path / "run" / "metrics.jsonl")[-1].pipeline
    assert isinstance(read, PipelineRecord)
    assert isinstance(read.h2d, Link)
    assert "alert" not in log_of(run), "a healthy run"


def test_instruments_can_be_switched_off(files: Path, tmp_path: Path) -> None:
    train(make(files, tmp_path, "--metrics.instruments=false", "--checkpoint.at_end=false"))
    assert all(record.pipeline is None for record in read_records(tmp_path / "run" / "metrics.jsonl"))


# ------------------------------------------------------------------ alerts

STEPS = ("--schedule.steps=20", "--alerts.steps=3", "--checkpoint.every_steps=null", "--batch.tokens_per_step=64")
DATA_BOUND = "--alerts.data_wait=0.01"
"""So little that a machine with other things to do stays above it."""


def slow_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch comes late."""
    real = Prefetcher.next

    def late(self: Prefetcher) -> Any:
        time.sleep(0.01)
        return real(self)

    monkeypatch.setattr(Prefetcher, "next", late)


@pytest.mark.parametrize("action", ["warn", "save", "stop"])
def test_an_alert_is_logged_once_and_its_action_taken(
    action: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_data(monkeypatch)
    run = make(files, tmp_path, *STEPS, DATA_BOUND, f"--alerts.data_wait_action={action}", "--checkpoint.keep=null")
    summary = train(run, engine=CountingEngine())
    assert log_of(run).count("alert data_wait: data-bound") == 1
    assert "step 8: alert" in log_of(run), "five steps of warm-up, then three in a row"
    assert summary.step == (8 if action == "stop" else 20)
    assert (
        checkpoints(run)
        == {
            "warn": ["step_000020"],
            "save": ["step_000008", "step_000020"],
            "stop": ["step_000008"],
        }[action]
    )
    if action == "stop":
        assert summary.stopped_by == "the alert data_wait"


def test_an_alert_can_roll_back_although_a_divergence_would_stop(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_data(monkeypatch)
    run = make(files, tmp_path, *STEPS, DATA_BOUND, "--alerts.data_wait_action=rollback", "--checkpoint.every_steps=5")
    assert run.run.on_divergence == "stop"
    summary = train(run, engine=CountingEngine())
    assert summary.step == 20
    assert "back to" in log_of(run)
    assert "alerts.data_wait_action: rollback" in log_of(run)


def test_figures_of_an_engine_reach_the_rules(files: Path, tmp_path: Path) -> None:
    sick = PipelineRecord(computed_s=0.0, waited_s={"slabs": 1.0}, slabs=2, slabs_in_use=2, slab_waits=7)
    run = make(files, tmp_path, *STEPS, "--alerts.data_wait=null")
    train(run, engine=CountingEngine(lambda step: StepResult(1.0, 1.0, 10, pipeline=sick)))
    assert "alert slab_wait" in log_of(run)
    assert "memory.gradient_slabs" in log_of(run)


def test_a_rollback_is_refused_where_ranks_could_not_agree_on_it(files: Path, tmp_path: Path) -> None:
    run = make(files, tmp_path, "--engine=mesh", "--alerts.speed_action=rollback")
    with pytest.raises(UserError, match=r"alerts\.speed_action"):
        train(run)


# ------------------------------------------------------------------ the end of host memory


class Filling:
    """Host memory that is at its end from some moment on."""

    def __init__(self) -> None:
        self.full = False
        self.looked = 0

    def available(self) -> int:
        self.looked += self.full
        return (1 << 20) if self.full else (1 << 40)


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Filling:
    filling = Filling()
    monkeypatch.setattr(health, "WATERMARK_EVERY_S", 0.005)
    monkeypatch.setattr(health.HostWatermark.__init__, "__defaults__", (filling.available,))
    return filling


def wait_until_seen(filling: Filling) -> None:
    """The thread that looks ends when it has told."""
    filling.full = True
    while any(thread.name == "host-watermark" for thread in threading.enumerate()):
        time.sleep(0.001)
    assert filling.looked == 1


def test_a_run_low_on_host_memory_is_saved_and_ends_with_the_breakdown(
    files: Path, tmp_path: Path, filling: Filling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step is dropped in its middle; what it would have been comes after the resume, bit for bit."""
    from megatrain.models.shell import Shell

    calm = make(files, tmp_path / "calm", "--schedule.steps=4")
    train(calm)
    run = make(files, tmp_path, "--schedule.steps=4")
    real, calls = Shell.call_layer, [0]

    def call_layer(self: Shell, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2 * 4 + 2:  # two layers, forward and backward: in the third step
            wait_until_seen(filling)
        return real(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Shell, "call_layer", call_layer)
        with pytest.raises(HostMemoryLow, match=r"host_reserve_gib(.|\n)*resident set(.|\n)*--resume auto") as caught:
            train(run)
    assert caught.value.exit_code == 3
    assert checkpoints(run) == ["step_000002"]
    assert saved_extra(tmp_path / "run" / "checkpoints" / "step_000002")["step"] == 2
    assert "HostMemoryLow" not in log_of(run), "an error of ours, without a traceback"
    filling.full = False
    train(run, resume="auto")
    losses = [[record.loss for record in read_records(Path(one.run.dir) / "metrics.jsonl")] for one in (run, calm)]
    assert losses[0] == losses[1]


def test_where_a_step_cannot_be_dropped_it_is_finished_first(files: Path, tmp_path: Path, filling: Filling) -> None:
    def on_step(step: int) -> None:
        if step == 3:
            wait_until_seen(filling)

    run = make(files, tmp_path, "--schedule.steps=9")
    with pytest.raises(HostMemoryLow):
        train(run, engine=CountingEngine(on_step))
    assert checkpoints(run) == ["step_000003"]


def test_low_memory_during_an_evaluation_loses_no_record(
    files: Path, tmp_path: Path, filling: Filling, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.engine.host.engine import HostEngine

    real = HostEngine.eval_step

    def eval_step(self: HostEngine, batch: Any) -> Any:
        wait_until_seen(filling)
        return real(self, batch)

    monkeypatch.setattr(HostEngine, "eval_step", eval_step)
    run = make(files, tmp_path, "--data.val={fraction: 0.3}", "--eval.every_steps=2")
    with pytest.raises(HostMemoryLow):
        train(run)
    assert checkpoints(run) == ["step_000002"]
    assert [record.step for record in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_the_command_line_ends_with_exit_code_3(
    files: Path, tmp_path: Path, filling: Filling, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filling.full = True
    path = tmp_path / "run.yaml"
    path.write_text(orjson.dumps(config(files, run={"dir": str(tmp_path / "run")}, schedule={"steps": 500})).decode())
    assert main(["train", str(path)]) == 3
    assert "host memory is below" in capsys.readouterr().err


def test_a_reserve_of_zero_disables_the_watermark(files: Path, tmp_path: Path, filling: Filling) -> None:
    filling.full = True
    run = make(files, tmp_path, "--memory.host_reserve_gib=0")
    assert train(run, engine=CountingEngine()).step == 4
    assert filling.looked == 0
