"""SIGKILL of one rank under torchrun: the run recovers and ends exactly like an undisturbed one.

    PYTHONPATH=src:tests/support python benchmarks/mesh_kill.py --out FOLDER [--device cuda] [--steps 300]

A tiny model, two processes, FSDP. Prints one JSON line: seconds from the kill to the next step, largest relative difference of
any step's loss from the undisturbed run, and whether the last checkpoints are equal byte for byte.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
from ruamel.yaml import YAML

import tiny_run
from megatrain.metrics.record import StepRecord, read_records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of each of the two runs")
    given = parser.parse_args()
    folder = tiny_run.prepare(given.out)
    config = tiny_run.config(folder, run={"device": given.device}, schedule={"steps": given.steps})
    del config["run"]["threads"]
    config["activations"] = {"compile": "off"}  # compiling would take longer than the run
    config["checkpoint"] = {"every_steps": max(1, given.steps // 6), "keep": None}
    YAML().dump({**config, "engine": "mesh", "parallel": {"shard": 2}}, folder / "run.yaml")
    killed_s, killed_at = disturbed(folder, given)
    plain = start(folder, "plain")
    assert plain.wait(given.limit) == 0, f"the undisturbed run failed, see {folder / 'plain.log'}"
    records, other = (read_records(folder / name / "metrics.jsonl") for name in ("killed", "plain"))
    difference = max(
        abs(a.loss - b.loss) / abs(b.loss) for a, b in zip(records, other, strict=True) if a.loss and b.loss
    )
    resumed = first_after(records, killed_s)
    line = {
        "row": "kill", "killed_at_step": killed_at, "went_on_at_step": resumed.step,
        "recovery_s": round(resumed.unix_time_s - killed_s, 1), "steps": len(records), "max_rel_diff": difference,
        "equal_bytes": equal_checkpoints(folder, given.steps),
    }  # fmt: skip
    print(json.dumps(line), flush=True)


def start(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Start torchrun in a new session, with its output in NAME.log."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command = [*torchrun, "-m", "megatrain", "train", str(folder / "run.yaml"), "--resume", "auto"]
    words = ["--run.dir", str(folder / name)]
    log = (folder / f"{name}.log").open("w")
    return subprocess.Popen([*command, *words], stdout=log, stderr=log, start_new_session=True)


def disturbed(folder: Path, given: argparse.Namespace) -> tuple[float, int]:
    """Kill rank 1 in the middle of a run; returns the time of the kill and the last step before it."""
    run = start(folder, "killed")
    deadline = time.monotonic() + given.limit
    step = 0
    while step < given.steps * 0.45:
        assert time.monotonic() < deadline and run.poll() is None, f"no progress, see {folder / 'killed.log'}"
        time.sleep(0.01)
        records = read_records(folder / "killed" / "metrics.jsonl")
        step = records[-1].step if records else 0
    os.kill(rank_of(run.pid, 1), signal.SIGKILL)
    killed_s = time.time()
    try:
        code = run.wait(deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert code == 0, f"it ended with {code}, see {folder / 'killed.log'}"
    return killed_s, step


def rank_of(torchrun: int, rank: int) -> int:
    """Process id of a rank below a torchrun."""
    for child in psutil.Process(torchrun).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child.pid
    raise AssertionError(f"no rank {rank} below process {torchrun}")


def first_after(records: list[StepRecord], killed_s: float) -> StepRecord:
    """The first step of the restarted process: the first record after the kill whose process began after it."""
    return next(r for r in records if r.unix_time_s > killed_s and r.unix_time_s - r.elapsed_s > killed_s)


def equal_checkpoints(folder: Path, steps: int) -> bool:
    mine, other = (folder / name / "checkpoints" / f"step_{steps:06d}" for name in ("killed", "plain"))
    names = [str(path.relative_to(other)) for path in other.rglob("*") if path.is_file()]
    _, differing, failed = filecmp.cmpfiles(mine, other, names, shallow=False)
    return not differing and not failed


if __name__ == "__main__":
    main()
