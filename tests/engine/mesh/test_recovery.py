"""A rank that dies, freezes or hangs: all ranks end, start again by themselves, and train what an undisturbed run trains."""

from __future__ import annotations

import filecmp
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ruamel.yaml import YAML

import mesh_agent
from megatrain.checkpoint import files as checkpoint_files
from megatrain.checkpoint.async_save import explain
from megatrain.config.load import load_config
from megatrain.config.schema import WatchdogConfig
from megatrain.engine.mesh import launch, watchdog
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.errors import Aftermath, HostMemoryLow, NumericStop, UserError
from megatrain.metrics.record import read_records
from megatrain.run import coordinator
from megatrain.run.coordinator import EndedBefore, StartAgain, section_limits
from megatrain.run.engine_factory import mesh_plan
from tiny_run import config, prepare

STEPS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("files"))
    plain = config(folder, schedule={"steps": STEPS}, checkpoint={"every_steps": 2, "keep": None})
    del plain["run"]["threads"]
    YAML().dump({**plain, "engine": "mesh", "precision": {"compute_dtype": "fp32"}}, folder / "run.yaml")
    return folder


def train(
    files: Path, run: Path, sabotage: mesh_agent.Sabotage, *words: str, worlds: Sequence[int] = (2, 2, 2)
) -> list[list[int]]:
    run.parent.mkdir(exist_ok=True)
    command = ["train", str(files / "run.yaml"), "--run.dir", str(run), "--parallel.pipeline=2", *words]
    return mesh_agent.run(worlds, command, run.with_suffix(".log"), sabotage)


def undisturbed(rank: int, attempt: int) -> None:
    pass


@pytest.fixture(scope="module")
def reference(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("reference") / "run"
    assert train(files, run, undisturbed) == [[0, 0]]
    return run


def assert_equal_runs(run: Path, reference: Path) -> None:
    """Weights, moments and everything else of the last checkpoint byte for byte; the same record of every step."""
    mine, other = (folder / "checkpoints" / f"step_{STEPS:06d}" for folder in (run, reference))
    names = [str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()]
    _, differing, failed = filecmp.cmpfiles(mine, other, names, shallow=False)
    assert names and not differing and not failed, (differing, failed)
    losses = [
        [(r.step, r.loss, r.grad_norm) for r in read_records(each / "metrics.jsonl")] for each in (run, reference)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == STEPS
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step_{STEPS:06d}"
    assert not list(run.glob("checkpoints/*.tmp-*"))


def resumed_after(run: Path) -> list[int]:
    return [int(step) for step in re.findall(r"resumed from .* after step (\d+)", (run / "log.txt").read_text())]


def at_step(step: int, do: Callable[[], Any]) -> None:
    """In this process: `do` in the middle of a step."""
    backward = MeshEngine.backward

    def disturbed(self: MeshEngine, batch: Any) -> Any:
        if self.step + 1 == step:
            do()
        return backward(self, batch)

    MeshEngine.backward = disturbed  # type: ignore[method-assign]


def once_saved(run: Path, do: Callable[[], Any]) -> None:
    while not (run / "checkpoints" / "latest").exists():
        time.sleep(0.01)
    do()


@pytest.mark.parametrize(
    ("victim", "writer"),
    [(0, 0), pytest.param(1, 0, marks=pytest.mark.slow), (1, 1), pytest.param(0, 1, marks=pytest.mark.slow)],
)
def test_kill_9_during_a_save_in_the_background(
    files: Path, reference: Path, tmp_path: Path, victim: int, writer: int
) -> None:
    """Training is steps ahead when a writer is stuck, and it or the other rank is killed. The save never counts.

    With writer 1 both ranks write, as on two hosts.
    """
    run, gone_on = tmp_path / "run", tmp_path / "gone-on"

    def sabotage(rank: int, attempt: int) -> None:
        if attempt > 0:
            return
        if rank == writer:  # the save of step 4 gets stuck in its second unit
            if writer == 1:
                os.environ["LOCAL_RANK"] = "0"
            write = checkpoint_files.FilesWriter.write_tensors

            def slow(self: Any, name: str, tensors: Any) -> None:
                if "step_000004" in self.temp.name and sum("state/" in file for file in self.records) == 1:
                    (run / f"stuck-{rank}").write_text("")
                    time.sleep(mesh_agent.TIMEOUT_S)
                write(self, name, tensors)

            checkpoint_files.FilesWriter.write_tensors = slow  # type: ignore[method-assign]
        if rank == victim:

            def die() -> None:
                gone_on.write_text("")
                time.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)

            at_step(6, die)

    codes = train(files, run, sabotage)
    assert codes[0][victim] == -signal.SIGKILL and codes[1:] == [[0, 0]]
    assert gone_on.exists(), "training did not go on while step 4 was being written"
    assert (run / f"stuck-{writer}").exists() and resumed_after(run) == [2]
    assert re.findall(r"(attempt \d+) of this job: .*, resuming (.*)", (run / "log.txt").read_text()) == [
        ("attempt 2", "after step 2")
    ]
    assert_equal_runs(run, reference)


def test_a_frozen_rank(files: Path, reference: Path, tmp_path: Path) -> None:
    """SIGSTOP. The others notice, leave their stacks, and end the frozen process too."""
    run = tmp_path / "run"

    def sabotage(rank: int, attempt: int) -> None:
        watchdog.GRACE_S = 0.5
        if attempt == 0 and rank == 1:
            at_step(4, lambda: once_saved(run, lambda: os.kill(os.getpid(), signal.SIGSTOP)))

    codes = train(files, run, sabotage, "--watchdog.step_s=1.5")
    assert codes == [[watchdog.EXIT_HANG, -signal.SIGKILL], [0, 0]]
    assert resumed_after(run) == [2]
    (stacks,) = run.glob("hangs/*/rank-*.txt")
    assert "step 4 > forward and backward has taken more than 1.5 s (watchdog.step_s)" in stacks.read_text()
    assert "none of rank 1" in run.with_suffix(".log").read_text()
    assert_equal_runs(run, reference)


def test_a_hang_in_a_collective(files: Path, reference: Path, tmp_path: Path) -> None:
    """Stacks of all ranks, an exit code, a restart from the newest complete step."""
    run = tmp_path / "run"

    def sabotage(rank: int, attempt: int) -> None:
        watchdog.GRACE_S = 2.0
        if attempt == 0 and rank == 1:
            at_step(3, lambda: once_saved(run, lambda: time.sleep(mesh_agent.TIMEOUT_S)))

    codes = train(files, run, sabotage, "--watchdog.step_s=1.5")
    assert codes == [[watchdog.EXIT_HANG] * 2, [0, 0]]
    stacks = {path.name: path.read_text() for path in run.glob("hangs/*/rank-*.txt")}
    assert sorted(stacks) == ["rank-00000.txt", "rank-00001.txt"]
    assert "forward_backward" in stacks["rank-00000.txt"] and "disturbed" in stacks["rank-00001.txt"]
    assert resumed_after(run) == [2]
    assert_equal_runs(run, reference)


@pytest.mark.slow
def test_with_fewer_ranks_it_resumes_in_another_layout(files: Path, reference: Path, tmp_path: Path) -> None:
    """The layout comes from the table; every step has the samples that it would have had."""
    run = tmp_path / "run"

    def sabotage(rank: int, attempt: int) -> None:
        if attempt == 0 and rank == 1:
            at_step(4, lambda: once_saved(run, lambda: os.kill(os.getpid(), signal.SIGKILL)))

    table = "--parallel.by_world_size={1: {microbatches: 2}, 8: {tensor: 2}}"
    codes = train(files, run, sabotage, table, worlds=(2, 1))
    assert codes[0][1] == -signal.SIGKILL and codes[1] == [0]
    assert resumed_after(run) == [2]
    mine, other = ([r.loss for r in read_records(each / "metrics.jsonl")] for each in (run, reference))
    assert mine == pytest.approx(other, rel=1e-6) and len(mine) == STEPS


@pytest.mark.slow
def test_out_of_memory_restarts_with_smaller_microbatches(files: Path, reference: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def sabotage(rank: int, attempt: int) -> None:
        def out_of_memory() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        if attempt == 0 and rank == 1:
            at_step(4, lambda: once_saved(run, out_of_memory))

    codes = train(files, run, sabotage)
    assert codes[0][1] == watchdog.EXIT_HANG and codes[1:] == [[0, 0]]
    assert "out of device memory; restarting with parallel.microbatches: 4" in (run.with_suffix(".log").read_text())
    assert "using parallel.microbatches: 4" in (run / "log.txt").read_text()
    assert resumed_after(run) == [2] and (run / "denser").read_text() == "1\n"
    mine, other = ([r.loss for r in read_records(each / "metrics.jsonl")] for each in (run, reference))
    assert mine == pytest.approx(other, rel=1e-6) and len(mine) == STEPS


def test_an_error_that_would_repeat_is_not_retried(files: Path, tmp_path: Path) -> None:
    """The attempts behind it end with its code and text, and do not look at the model."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "somebody's").touch()  # a folder that holds anything is not started in

    def sabotage(rank: int, attempt: int) -> None:
        if attempt > 0:
            coordinator.check_mesh = lambda run: os._exit(99)

    with pytest.raises(AssertionError, match="exit codes") as ended:
        train(files, run, sabotage)
    (statuses,) = re.findall(r"exit codes (.*)", str(ended.value))
    first, *others = json.loads(statuses)
    # In the later attempts rank 0 may get SIGTERM because rank 1 has ended already.
    assert set(first) == {2} and {s for each in others for s in each} <= {2, 130, -signal.SIGTERM}
    assert all(2 in each for each in others)
    assert "error: " in run.with_suffix(".log").read_text()


@pytest.mark.parametrize("late", [0, 1])
def test_a_layout_that_cannot_run_is_told_once_and_blames_no_earlier_attempt(
    files: Path, tmp_path: Path, late: int
) -> None:
    """Whichever rank comes first; and torchrun ends the others as soon as one has ended."""

    def sabotage(rank: int, attempt: int) -> None:
        if rank == late:
            time.sleep(1.0)

    log = tmp_path / "log"
    words = ["train", str(files / "run.yaml"), "--run.dir", str(tmp_path / "run"), "--parallel.pipeline=2"]
    words += ["--parallel.tensor=1", "--batch.tokens_per_step=64"]
    with pytest.raises(AssertionError, match=r"exit codes \[\[(2, -?\d+|-?\d+, 2)\]\]"):
        mesh_agent.run([2], words, log, sabotage)
    text = log.read_text()
    assert text.count("a step has 1 row, fewer than 1 data rank x 2 microbatches = 2") == 1, text
    assert "batch.tokens_per_step: 2 x data.max_tokens" in text
    assert "earlier attempt" not in text


def test_the_first_error_is_noted_and_none_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_shared", dist.HashStore())
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    launch.note_end(2, "nobody hears it")
    assert launch.noted_end() is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert launch.noted_end() is None
    for error in (NumericStop("three steps in a row"), UserError("another rank", "step 3")):
        with pytest.raises(type(error)), coordinator.noting_repeating_errors():
            raise error
    assert launch.noted_end() == (4, "three steps in a row", 0)
    with pytest.raises(EndedBefore, match=r"three steps in a row$") as ended:
        coordinator.raise_noted_error(main=True)
    assert ended.value.exit_code == 4
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(EndedBefore, match=r"three steps in a row\n  \(from an earlier attempt"):
        coordinator.raise_noted_error(main=True)
    with pytest.raises(SystemExit) as silent:
        coordinator.raise_noted_error(main=False)
    assert silent.value.code == 4


@pytest.mark.parametrize(
    "error",
    [
        HostMemoryLow("ledger"),
        StartAgain("denser"),
        RuntimeError("NCCL"),
        explain(RuntimeError("gloo")),
        Aftermath("rank 3 could not write the checkpoint"),
    ],
)
def test_errors_that_may_not_repeat_are_retried(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_shared", dist.HashStore())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(type(error)), coordinator.noting_repeating_errors():
        raise error
    assert launch.noted_end() is None


def test_stacks_come_before_timeouts_of_collectives() -> None:
    limits = section_limits(WatchdogConfig(step_s=900.0))
    assert set(limits) == {"start", "first_step", "step", "save", "load", "evaluation"} and limits["step"] == 900.0
    longest = max(limit for limit in limits.values() if limit is not None)
    assert longest < coordinator.collective_timeout_s(limits) < longest + 120
    assert coordinator.collective_timeout_s({**limits, "step": None}) > 86400.0


@pytest.mark.parametrize(("schedule", "auto"), [("1f1b", True), ("zb1p", False)])
def test_a_split_backward_recomputes_when_asked_by_name(
    files: Path, schedule: str, auto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for policy, recompute in (("auto", auto), ("recompute", True), ("keep", False)):
        words = [f"parallel.schedule={schedule}", "parallel.pipeline=2", f"activations.policy={policy}"]
        assert mesh_plan(load_config(files / "run.yaml", words)).recompute == recompute, policy


@pytest.mark.slow
def test_torchrun_itself_restarts(tmp_path: Path) -> None:
    """SIGKILL of a rank under the real torchrun, which shares one store between its attempts."""
    script = Path(__file__).parents[3] / "benchmarks" / "mesh_kill.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), "--out", str(tmp_path), "--steps", "60"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["equal_bytes"] and found["max_rel_diff"] == 0.0 and found["steps"] == 60
    assert 0 < found["went_on_at_step"] <= found["killed_at_step"] + 1
