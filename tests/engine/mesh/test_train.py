"""`engine: mesh` through the real command line: the host engine's losses, resume in another layout, signals, refusals."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ruamel.yaml import YAML

import mesh_ranks as ranks
from megatrain.commands.main import main
from megatrain.data.rows import StepLoader
from megatrain.engine.mesh.data_parallel import local
from megatrain.engine.mesh.gradients import Gradients
from megatrain.metrics.record import read_records
from megatrain.run import engine_factory
from tiny_run import config, prepare


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = prepare(tmp_path_factory.mktemp("files"))
    plain = config(folder)
    YAML().dump(plain, folder / "host.yaml")
    del plain["run"]["threads"]
    YAML().dump({**plain, "engine": "mesh", "precision": {"compute_dtype": "fp32"}}, folder / "mesh.yaml")
    return folder


@pytest.fixture(scope="module")
def host_losses(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("host") / "run"
    words = [
        "--run.dir",
        str(folder),
        "--precision.compute_dtype",
        "fp32",
        "--data.val={fraction: 0.2}",
        "--eval.every_steps=2",
    ]
    assert main(["train", str(files / "host.yaml"), *words]) == 0
    return losses(folder)


def train(files: Path, folder: Path, *words: str) -> int:
    return main(["train", str(files / "mesh.yaml"), "--run.dir", str(folder), *words])


def losses(folder: Path) -> list[float]:
    """Training and validation losses, in order."""
    found = [value for r in read_records(folder / "metrics.jsonl") for value in (r.loss, r.val_loss)]
    return [value for value in found if value is not None]


VALIDATED = ("--data.val={fraction: 0.2}", "--eval.every_steps=2")


def test_a_run_has_the_host_engines_losses(files: Path, tmp_path: Path, host_losses: list[float]) -> None:
    words = ("--parallel.tensor=2", "--parallel.pipeline=2", *VALIDATED)
    assert ranks.run(4, train, files, tmp_path / "run", *words) == [0] * 4
    assert losses(tmp_path / "run") == pytest.approx(host_losses, rel=1e-5)
    for record in read_records(tmp_path / "run" / "metrics.jsonl"):
        assert len(record.mesh["stage_busy_s"]) == len(record.mesh["stage_peak_bytes"]) == 2
        assert 0.0 <= record.mesh["bubble_simulated"] < 1.0 and 0.0 <= record.mesh["bubble"] < 1.0
        assert record.mesh["slowest_rank"] in range(4) and "mfu" not in record.mesh
    assert "simulated)" in (tmp_path / "run" / "log.txt").read_text()
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "log.txt", "loss.png", "checkpoints"}


def test_a_run_over_context_ranks_has_the_host_engines_losses(
    files: Path, tmp_path: Path, host_losses: list[float]
) -> None:
    assert ranks.run(2, train, files, tmp_path / "run", "--parallel.context=2", *VALIDATED) == [0, 0]
    assert losses(tmp_path / "run") == pytest.approx(host_losses, rel=1e-5)


def test_a_run_resumes_in_another_layout(files: Path, tmp_path: Path, host_losses: list[float]) -> None:
    """Another number of data ranks continues with the right samples, another layout with the right state."""
    folder = tmp_path / "run"
    first = ("--parallel.pipeline=2", "--schedule.steps=2", *VALIDATED)
    assert ranks.run(2, train, files, folder, *first) == [0, 0]
    second = ("--parallel.tensor=2", "--parallel.shard=2", "--resume", "latest", *VALIDATED)
    assert ranks.run(4, train, files, folder, *second) == [0] * 4
    assert losses(folder) == pytest.approx(host_losses, rel=1e-5)


def test_a_nan_on_one_rank_takes_all_ranks_back(files: Path, tmp_path: Path) -> None:
    """Rank 1's gradients are NaN in steps 4 and 5; both ranks skip them, roll back to step 2 and continue with later data."""

    def work() -> tuple[int, list[int]]:
        finish, steps, seen = Gradients.finish, itertools.count(1), []
        batch = StepLoader.batch

        def poisoned(self: Gradients, local_loss: torch.Tensor) -> tuple[float, float]:
            if next(steps) in (4, 5) and dist.get_rank() == 1:
                local(next(iter(self.owned().values()))[0].grad).fill_(float("nan"))
            return finish(self, local_loss)

        def noted(self: StepLoader, position: int) -> Any:
            seen.append(position)
            return batch(self, position)

        Gradients.finish, StepLoader.batch = poisoned, noted  # type: ignore[method-assign]
        words = ("--run.on_divergence=rollback", "--run.max_bad_steps=2", "--checkpoint.every_steps=2")
        return train(files, tmp_path / "run", "--parallel.pipeline=2", "--schedule.steps=5", *words), seen

    results = ranks.run(2, work)
    assert [code for code, _ in results] == [0, 0]
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [r.step for r in records] == [1, 2, 3, 4, 5] and all(r.loss is not None for r in records)
    assert "rollback 1 of 3" in (tmp_path / "run" / "log.txt").read_text()
    # Steps 3 to 5 come again with the batches behind those that they had.
    assert all([p for p in seen if p >= 5][:3] == [5, 6, 7] for _, seen in results)


def test_sigterm_to_one_rank_ends_all_at_the_same_step(files: Path, tmp_path: Path) -> None:
    """A checkpoint is written, and the exit code is 0."""

    def work() -> int:
        if dist.get_rank() == 1:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
            signal.setitimer(signal.ITIMER_REAL, 3.0)
        return train(
            files, tmp_path / "run", "--parallel.pipeline=2", "--schedule.steps=100000", "--checkpoint.every_steps=null"
        )

    assert ranks.run(2, work) == [0, 0]
    last = read_records(tmp_path / "run" / "metrics.jsonl")[-1].step
    assert 0 < last < 100000
    saved = (tmp_path / "run" / "checkpoints" / "latest").read_text().strip()
    assert saved == f"step_{last:06d}"


def test_torchrun_starts_a_run(files: Path, tmp_path: Path) -> None:
    words = ["--parallel.pipeline=2", "--run.dir", str(tmp_path / "run"), "--schedule.steps=2"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "megatrain", "train"]
    source = str(Path(__file__).parents[3] / "src")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": source}
    done = subprocess.run(
        [*command, str(files / "mesh.yaml"), *words], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 2/2") == 1  # rank 0 alone reports
    assert [r.step for r in read_records(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


def test_a_bad_layout_is_refused_with_all_reasons_and_nothing_written(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--parallel.tensor=5", "--parallel.pipeline=4", "--memory.weight_slots=3", "--batch.accumulation_steps=2")
    assert train(files, tmp_path / "run", *words) == 2
    said = capsys.readouterr().err
    for reason in (
        "memory.weight_slots: is a setting of the host engine",
        "batch.accumulation_steps: is a setting of the host engine",
        "20 ranks, but there are 1 processes",
        "2 layers cannot fill pipeline 4",
        "intermediate_size 48 is not a multiple of tensor 5",
    ):
        assert reason in said, said
    assert not (tmp_path / "run").exists()


def test_a_layout_whose_state_is_more_than_a_gpu_has_is_refused(
    files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_factory, "_gpu_bytes", lambda run: 1 << 20)
    assert train(files, tmp_path / "run", "--batch.accumulation_steps=2") == 2
    said = capsys.readouterr().err
    assert "batch.accumulation_steps: is a setting of the host engine" in said
    assert "pipeline rank 0 needs" in said and "before any activation" in said and "plan --world" in said
    assert not (tmp_path / "run").exists()


def test_offloaded_inputs_need_the_host_engine(files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(files, tmp_path / "run", "--activations.offload_input=on") == 2
    assert "activations.offload_input: is a setting of the host engine" in capsys.readouterr().err


def test_evaluation_alone_needs_the_host_engine(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(files / "mesh.yaml"), "--data.val={fraction: 0.2}"]) == 2
    assert "--engine host" in capsys.readouterr().err
