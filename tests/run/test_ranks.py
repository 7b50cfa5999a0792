"""Runs of the host engine on several processes through the real command line: losses, signals, deaths, other numbers of ranks."""

from __future__ import annotations

import filecmp
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
import mesh_ranks
from megatrain.checkpoint import files as checkpoint_files
from megatrain.commands.main import main
from megatrain.config.load import load_config
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh import watchdog
from megatrain.errors import UserError
from megatrain.metrics.record import read_records
from megatrain.run.engine_factory import check_host_ranks
from megatrain.run.ranks import processes_of
from tiny_run import config, prepare

STEPS = 6


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("files"))
    plain = config(folder, schedule={"steps": STEPS}, checkpoint={"every_steps": 2, "keep": None})
    YAML().dump({**plain, "precision": {"compute_dtype": "fp32"}}, folder / "run.yaml")
    return folder


def command(files: Path, run: Path, *words: str) -> list[str]:
    return ["train", str(files / "run.yaml"), "--run.dir", str(run), *words]


def on_ranks(files: Path, run: Path, world: int, *words: str) -> None:
    def work() -> int:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads that the parent may have begun do not live here
        return main(command(files, run, *words))

    assert mesh_ranks.run(world, work) == [0] * world


def with_sabotage(
    files: Path, run: Path, sabotage: mesh_agent.Sabotage, *words: str, worlds: Sequence[int] = (2, 2, 2)
) -> list[list[int]]:
    run.parent.mkdir(exist_ok=True)
    return mesh_agent.run(worlds, command(files, run, *words), run.with_suffix(".log"), sabotage)


def losses(run: Path) -> list[float | None]:
    return [record.loss for record in read_records(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def reference(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run on two ranks."""
    run = tmp_path_factory.mktemp("reference") / "run"
    on_ranks(files, run, 2)
    return run


@pytest.fixture(scope="module")
def alone(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float | None]:
    """The losses of one process."""
    run = tmp_path_factory.mktemp("alone") / "run"
    on_ranks(files, run, 1)
    return losses(run)


def assert_equal_runs(run: Path, reference: Path) -> None:
    """Everything of the last checkpoint byte for byte; the same record of every step."""
    mine, other = (folder / "checkpoints" / f"step_{STEPS:06d}" for folder in (run, reference))
    names = [str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()]
    _, differing, failed = filecmp.cmpfiles(mine, other, names, shallow=False)
    assert names and not differing and not failed, (differing, failed)
    assert losses(run) == losses(reference) and len(losses(run)) == STEPS
    assert not list(run.glob("checkpoints/*.tmp-*"))


def resumed_after(run: Path) -> list[int]:
    return [int(step) for step in re.findall(r"resumed from .* after step (\d+)", (run / "log.txt").read_text())]


def at_step(step: int, do: Callable[[], Any]) -> None:
    """In this process: `do` at the start of a step's computation."""
    compute = HostEngine._forward_backward

    def disturbed(self: HostEngine, *rest: Any) -> Any:
        if self.step + 1 == step:
            do()
        return compute(self, *rest)

    HostEngine._forward_backward = disturbed  # type: ignore[method-assign]


def once_saved(run: Path, do: Callable[[], Any]) -> None:
    while not (run / "checkpoints" / "latest").exists():
        time.sleep(0.01)
    do()


def test_ranks_have_the_losses_of_one_process(reference: Path, alone: list[float | None]) -> None:
    assert losses(reference) == pytest.approx(alone, rel=1e-5)
    for record in read_records(reference / "metrics.jsonl"):
        assert record.mesh["slowest_rank"] in range(2) and record.mesh["slowest_excess"] >= 0.0


def test_a_run_resumes_on_another_number_of_ranks_and_in_the_other_engine(
    files: Path, tmp_path: Path, alone: list[float | None]
) -> None:
    """2 -> 1 -> 4 -> mesh -> 2, a step each: every step has the samples that it would have had."""
    run = tmp_path / "run"
    every = ("--checkpoint.every_steps=1",)
    on_ranks(files, run, 2, *every, "--schedule.steps=1")
    on_ranks(files, run, 1, *every, "--schedule.steps=2", "--resume", "latest")
    on_ranks(files, run, 4, *every, "--schedule.steps=3", "--resume", "latest")
    on_ranks(files, run, 2, *every, "--schedule.steps=4", "--resume", "latest", "--engine=mesh", "--run.threads=null")
    on_ranks(files, run, 2, *every, "--resume", "latest")
    assert losses(run) == pytest.approx(alone, rel=1e-5)


def test_two_hosts_with_a_copy_of_the_state_each(files: Path, tmp_path: Path, alone: list[float | None]) -> None:
    """Two simulated hosts of two ranks, which then continue with one copy for both."""

    def of_job(run: Path, wanted: int, *words: str) -> None:
        def work() -> tuple[int, int]:
            os.environ |= {
                "TOKENIZERS_PARALLELISM": "false",
                "LOCAL_WORLD_SIZE": "2",
                "LOCAL_RANK": str(dist.get_rank() % 2),
            }
            made: list[int] = []
            train_step = HostEngine.train_step

            def noted(self: HostEngine, *rest: Any, **words: Any) -> Any:
                made.append(self.plan.replicas)
                return train_step(self, *rest, **words)

            HostEngine.train_step = noted  # type: ignore[method-assign]
            return main(command(files, run, *words)), made[0]

        assert mesh_ranks.run(4, work) == [(0, wanted)] * 4

    run = tmp_path / "run"
    of_job(run, 2, "--run.replicate_hosts=true", "--schedule.steps=4")
    of_job(run, 1, "--resume", "latest")
    assert losses(run) == pytest.approx(alone, rel=1e-5)


def test_kill_9_during_a_save_in_the_background(files: Path, reference: Path, tmp_path: Path) -> None:
    """Training is steps ahead when the writer is stuck, and the other rank is killed. The save never counts."""
    run = tmp_path / "run"

    def sabotage(rank: int, attempt: int) -> None:
        if attempt > 0:
            return
        if rank == 0:  # the save of step 4 gets stuck in its second unit
            write = checkpoint_files.FilesWriter.write_tensors

            def slow(self: Any, name: str, tensors: Any) -> None:
                if "step_000004" in self.temp.name and sum("state/" in file for file in self.records) == 1:
                    (run / "stuck").write_text("")
                    time.sleep(mesh_agent.TIMEOUT_S)
                write(self, name, tensors)

            checkpoint_files.FilesWriter.write_tensors = slow  # type: ignore[method-assign]
        if rank == 1:

            def die() -> None:
                while not (run / "stuck").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

            at_step(6, die)

    codes = with_sabotage(files, run, sabotage)
    assert codes[0][1] == -signal.SIGKILL and codes[1:] == [[0, 0]]
    assert (run / "stuck").exists() and resumed_after(run) == [2]
    assert_equal_runs(run, reference)


def test_a_frozen_rank(files: Path, reference: Path, tmp_path: Path) -> None:
    """SIGSTOP. The other notices, leaves its stacks, and ends the frozen process too."""
    run = tmp_path / "run"

    def sabotage(rank: int, attempt: int) -> None:
        watchdog.GRACE_S = 0.5
        if attempt == 0 and rank == 1:
            at_step(4, lambda: once_saved(run, lambda: os.kill(os.getpid(), signal.SIGSTOP)))

    codes = with_sabotage(files, run, sabotage, "--watchdog.step_s=3")
    assert codes == [[watchdog.EXIT_HANG, -signal.SIGKILL], [0, 0]]
    (stacks,) = run.glob("hangs/*/rank-*.txt")
    assert "step 4 has taken more than 3 s (watchdog.step_s)" in stacks.read_text()
    assert_equal_runs(run, reference)


def test_out_of_memory_on_one_rank_restarts_all_with_a_smaller_plan(
    files: Path, tmp_path: Path, alone: list[float | None]
) -> None:
    run = tmp_path / "run"

    def sabotage(rank: int, attempt: int) -> None:
        def out_of_memory() -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

        if attempt == 0 and rank == 1:
            at_step(4, lambda: once_saved(run, out_of_memory))

    codes = with_sabotage(files, run, sabotage)
    assert codes[0][1] == watchdog.EXIT_HANG and codes[1:] == [[0, 0]]
    assert "using a smaller plan: batch.microbatch_rows: 1" in (run / "log.txt").read_text()
    assert (run / "denser").read_text() == "1\n"
    assert losses(run) == pytest.approx(alone, rel=1e-5)


def test_an_evaluation_on_ranks_is_that_of_one_process(
    files: Path, reference: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = reference / "checkpoints" / f"step_{STEPS:06d}"
    words = ["eval", str(files / "run.yaml"), "--checkpoint", str(checkpoint), "--data.val={fraction: 0.3}"]

    def work() -> int:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        return main(words)

    found = []
    for world in (1, 2):
        assert mesh_ranks.run(world, work) == [0] * world
        output = capfd.readouterr().out
        assert output.count("validation loss") == 1, output
        found.append(float(re.findall(r"validation loss ([\d.]+)", output)[0]))
    assert found[1] == pytest.approx(found[0], abs=2e-4)


def test_unequal_hosts_cannot_have_a_copy_each(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for allowed in ("auto", "false"):
        check_host_ranks(load_config(files / "run.yaml", [f"run.replicate_hosts={allowed}"]))
    with pytest.raises(UserError, match=r"run.replicate_hosts: .* there are 3, 2 of them on one host"):
        check_host_ranks(load_config(files / "run.yaml", ["run.replicate_hosts=true"]))


def start(files: Path, run: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-m", "megatrain", *command(files, run, *words)]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_one_command_starts_the_processes_and_passes_signals_on(
    files: Path, tmp_path: Path, alone: list[float | None]
) -> None:
    """SIGINT to the command: both ranks end at the same step, a checkpoint is written, and the exit code is 0."""
    run = tmp_path / "run"
    process = start(files, run, "--run.gpus=2", "--schedule.steps=100000", "--checkpoint.every_steps=null")
    deadline = time.monotonic() + 120
    while process.poll() is None and len(losses(run) if (run / "metrics.jsonl").exists() else []) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    found = losses(run)
    assert found[:3] == pytest.approx(alone[:3], rel=1e-5)
    saved = (run / "checkpoints" / "latest").read_text().strip()
    assert saved == f"step_{len(found):06d}"
    assert output.count("100,000") and "Traceback" not in output


def test_an_error_of_the_ranks_is_told_once_with_its_exit_code(files: Path, tmp_path: Path) -> None:
    process = start(files, tmp_path / "run", "--run.gpus=2", "--alerts.speed_action=rollback")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2
    assert output.count("alerts.speed_action") == 1 and "Traceback" not in output, output


def test_how_many_processes(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(*words: str) -> int:
        return processes_of(load_config(files / "run.yaml", words))

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert count() == 1, "run.device: cpu"
    assert count("run.gpus=2") == 2
    assert count("run.device=auto") == 4
    assert count("run.device=auto", "run.gpus=3") == 3
    assert count("run.device=auto", "run.gpus=1") == 1
    with pytest.raises(UserError, match="5 GPUs, 4 are visible"):
        count("run.device=auto", "run.gpus=5")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert count("run.device=auto") == 1
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert count("run.gpus=2") == 1, "torchrun has started them"
