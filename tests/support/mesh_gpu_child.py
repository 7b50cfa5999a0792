"""The GPU side of engine/mesh/test_gpu.py, in a separate process: a crash there ends no test session and leaves its stacks.

    PYTHONPATH=src:tests/support python tests/support/mesh_gpu_child.py RESULTS.jsonl [--device cuda]

Writes one JSON line per case as soon as it ends: the results of both engines, or the traceback.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

import families
from engines import host_engine
from gpu_cases import arguments, run_cases
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.optim.adamw import AdamW

OPTIM = AdamW(learning_rate=1e-3, max_grad_norm=1.0)


@dataclass(frozen=True)
class GpuCase:
    """A family on one GPU, beside the host engine on the CPU."""

    family: str
    dtype: Literal["bf16", "fp32"] = "bf16"
    kind: families.Kind = "packed"
    recompute: bool = False
    compile: Literal["on", "off"] = "off"
    steps: int = 6
    resume: bool = False  # another engine goes on from a checkpoint in the middle

    def __str__(self) -> str:
        words = [self.family, self.dtype, self.kind, *(["recompute"] if self.recompute else [])]
        return "-".join(
            [*words, *(["compiled"] if self.compile == "on" else []), *(["resumed"] if self.resume else [])]
        )


CASES = [
    *(GpuCase(name, recompute=again) for name in ("llama", "qwen3", "gemma2", "qwen3_moe") for again in (False, True)),
    GpuCase("llama", "fp32", "padded", steps=3),
    GpuCase("llama", "fp32", resume=True),
    GpuCase("llama", compile="on"),
    GpuCase("qwen3", compile="on", recompute=True),
]


def run(case: GpuCase, device: str) -> dict[str, Any]:
    """Losses and norms of both engines, and the dtypes of the mesh engine's masters."""
    family = families.BY_NAME[case.family]
    model = families.build(family, seed=1, tie=True)
    batches = [families.batch(family, seed=s, rows=8, tokens=32, kind=case.kind) for s in range(case.steps)]
    with host_engine(model, device="cpu", compute_dtype=case.dtype, optim=OPTIM) as host:
        want = [host.train_step(batch) for batch in batches]
    plan = MeshPlan(Layout(microbatches=2), case.recompute, case.compile, case.dtype)
    half = case.steps // 2 if case.resume else case.steps
    with tempfile.TemporaryDirectory() as folder:
        with MeshEngine(model, plan, device=device, optim=OPTIM) as mesh:
            got = [mesh.train_step(batch) for batch in batches[:half]]
            types = sorted({str(weight.dtype) for _, weight in mesh.named_parameters()})
            if case.resume:
                mesh.save(f"{folder}/checkpoint")
        if case.resume:
            with MeshEngine(model, plan, device=device, optim=OPTIM) as mesh:
                mesh.load(f"{folder}/checkpoint")
                got += [mesh.train_step(batch) for batch in batches[half:]]
    return {
        "losses": [r.loss for r in got],
        "norms": [r.grad_norm for r in got],
        "want_losses": [r.loss for r in want],
        "want_norms": [r.grad_norm for r in want],
        "types": types,
    }


def main() -> None:
    given = arguments(__doc__)
    print(f"torch {torch.__version__}, {torch.cuda.device_count()} CUDA devices", flush=True)
    run_cases(CASES, partial(run, device=given.device), given.results)


if __name__ == "__main__":
    main()
