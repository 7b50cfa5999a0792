"""SmolLM2-135M on Alpaca on four processes (tensor 2, pipeline 2, torchrun), compared with one process of the host engine.

Use: python benchmarks/smollm2_mesh.py MODEL DATA OUT [--section.key=value ...]
     MODEL   SmolLM2-135M-Instruct as a Hugging Face folder
     DATA    a file of instruction, input and output (LLaMA-Factory's alpaca_en_demo.json)
     OUT     a folder that does not exist yet

Both runs are `megatrain train` on a CPU in fp32, with configs that differ only in the engine. Prints losses and norms of every
step and fails unless they agree to the tolerances below.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from ruamel.yaml import YAML

from megatrain.metrics.record import StepRecord, read_records

LOSS_TOLERANCE = 1e-5
"""Relative, in fp32: the orders of summation differ."""
NORM_TOLERANCE = 1e-4
"""Relative. The host engine sums squares in fp32, off by 2e-4 over an embedding of 28 M elements; the mesh engine in fp64."""
MESH = ("--engine=mesh", "--parallel.tensor=2", "--parallel.pipeline=2")


def config(model: str, data: str) -> dict[str, dict[str, object]]:
    """Three steps of four packed rows of 256 tokens; longer samples are dropped to be quick on two cores."""
    return {
        "model": {"path": model},
        "data": {"train": data, "max_tokens": 256, "overflow": "drop"},
        "batch": {"tokens_per_step": 1024},
        "optim": {"learning_rate": 2e-5},
        "schedule": {"kind": "constant", "steps": 3},
        "precision": {"compute_dtype": "fp32"},
        "checkpoint": {"at_end": False},
        "run": {"dir": "unused", "device": "cpu"},
    }


def run(out: Path, name: str, launcher: list[str], words: list[str]) -> tuple[list[StepRecord], float]:
    command = [*launcher, "-m", "megatrain", "train", str(out / "run.yaml"), f"--run.dir={out / name}", *words]
    began = time.perf_counter()
    subprocess.run(command, check=True)
    return read_records(out / name / "metrics.jsonl"), time.perf_counter() - began


def main(model: str, data: str, out: Path, words: list[str]) -> None:
    out.mkdir(parents=True)
    YAML().dump(config(model, data), out / "run.yaml")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    host, host_s = run(out, "host", [sys.executable], words)
    mesh, mesh_s = run(out, "mesh", torchrun, [*MESH, *words])
    losses, norms = [], []
    for one, four in zip(host, mesh, strict=True):
        assert one.loss and four.loss and one.grad_norm and four.grad_norm
        losses.append(abs(four.loss - one.loss) / one.loss)
        norms.append(abs(four.grad_norm - one.grad_norm) / one.grad_norm)
        print(
            f"step {one.step}: loss {one.loss:.6f} {four.loss:.6f}, norm {one.grad_norm:.6f} {four.grad_norm:.6f}, "
            f"{one.trained_tokens} target tokens"
        )
    print(f"one process {host_s:.0f} s, four {mesh_s:.0f} s in all")
    print(f"largest relative difference: loss {max(losses):.1e}, gradient norm {max(norms):.1e}")
    assert max(losses) <= LOSS_TOLERANCE and max(norms) <= NORM_TOLERANCE


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4:])
