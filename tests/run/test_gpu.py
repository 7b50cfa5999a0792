"""Whole runs on a GPU, through the command line: they compile once, and deterministic ones repeat and resume bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from megatrain.commands.main import main
from megatrain.metrics.record import read_records
from tiny_run import config, write_model, write_texts

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

STEPS, EVERY = 30, 10
KINDS = {f"{packing}-{place}": (packing, place) for packing in ("packed", "unpacked") for place in ("host", "device")}


def run_file(folder: Path, name: str, **sections: dict[str, object]) -> Path:
    file = folder / f"{name}.yaml"
    run = {"dir": str(folder / name), "device": "cuda", **sections.pop("run", {})}
    words = {"model": {"path": str(folder / "model")}, "run": run, **sections}
    with file.open("w") as out:
        YAML().dump(config(folder, **words), out)
    return file


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
def test_three_epochs_with_validations_and_a_save_compile_nothing_after_the_start(
    tmp_path: Path, packing: bool
) -> None:
    write_model(tmp_path / "model", hidden_size=64)
    write_texts(tmp_path / "texts.jsonl", 100)
    write_texts(tmp_path / "val.jsonl", 21, seed=5)
    data = {"packing": packing, "val": str(tmp_path / "val.jsonl"), "overflow": "truncate"}
    file = run_file(
        tmp_path,
        "run",
        data=data,
        batch={"tokens_per_step": 64 * 8},
        schedule={"steps": None, "epochs": 3},
        eval={"every_steps": 4},
        checkpoint={"every_steps": 7},
    )
    assert main(["train", str(file)]) == 0
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert min(record.rows for record in records) < max(record.rows for record in records), "no partial step"
    assert sum(record.val_loss is not None for record in records) >= 3
    compiled = [record.pipeline.compilations for record in records if record.pipeline]
    assert len(compiled) == len(records)
    assert sum(compiled[1:]) == 0, compiled


@dataclass
class Run:
    """A run in a process of its own."""

    process: subprocess.Popen[bytes]
    output: Path

    @classmethod
    def start(cls, file: Path, *words: str) -> Run:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command, output = [sys.executable, "-m", "megatrain", "train", str(file), *words], file.with_suffix(".out")
        with output.open("wb") as out:
            return cls(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment), output)

    def end(self) -> str:
        """Wait for its end; what it has printed."""
        code = self.process.wait(timeout=300)
        assert code == 0, self.output.read_text()[-3000:]
        return self.output.read_text()

    def kill(self, metrics: Path, after: int) -> None:
        """Kill it when it has taken `after` steps."""
        deadline = time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") >= after):
            assert self.process.poll() is None, self.output.read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.002)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def test_deterministic_runs_repeat_and_resume_bit_for_bit(tmp_path: Path) -> None:
    """Two runs, and one that is killed and resumed: equal losses, norms, weights and moments, bit for bit."""
    write_model(tmp_path / "model", hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
    write_texts(tmp_path / "texts.jsonl", 300)
    files = {}
    for kind, (packing, place) in KINDS.items():
        for name in "abc":
            files[kind, name] = run_file(
                tmp_path,
                f"{kind}-{name}",
                data={"packing": packing == "packed", "cache_dir": str(tmp_path / f"cache-{kind}")},
                batch={"tokens_per_step": 64 * 32},
                memory={"device_gib": 2.0 if place == "device" else 0.3},
                schedule={"steps": STEPS},
                checkpoint={"every_steps": EVERY, "keep": 5},
                run={"deterministic": True},
            )
    for kind in KINDS:  # the data's cache is made by one
        assert main(["check", str(files[kind, "a"])]) == 0
    running = {key: Run.start(file) for key, file in files.items()}
    for kind in KINDS:
        running[kind, "c"].kill(tmp_path / f"{kind}-c" / "metrics.jsonl", after=STEPS // 2)
    for (_, name), run in running.items():
        if name != "c":
            run.end()
    resumed = {kind: Run.start(files[kind, "c"], "--resume", "auto") for kind in KINDS}
    for kind, run in resumed.items():
        assert f"after step {EVERY}" in run.end(), kind
    for kind, (_, place) in KINDS.items():
        folders = [tmp_path / f"{kind}-{name}" for name in "abc"]
        first, *others = ([(r.loss, r.grad_norm) for r in read_records(f / "metrics.jsonl")] for f in folders)
        assert len(first) == STEPS
        assert all(other == first for other in others), kind
        pipeline = read_records(folders[0] / "metrics.jsonl")[-1].pipeline
        assert pipeline is not None
        placed, units = map(int, pipeline.policy.rpartition("resident ")[2].split(" of "))
        assert (placed == units) == (place == "device"), pipeline.policy
        states = [sorted((f / "checkpoints").glob(f"*{STEPS}/**/*.safetensors")) for f in folders]
        assert states[0]
        for own in states[1:]:
            assert [path.read_bytes() for path in own] == [path.read_bytes() for path in states[0]], kind
