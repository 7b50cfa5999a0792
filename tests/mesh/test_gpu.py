"""One CUDA device: the mesh engine at world size 1 follows the host engine, which computes the same steps on the CPU."""

from __future__ import annotations

import pytest
import torch

import families
from megatrain.executor.engine import HostEngine
from megatrain.mesh.engine import MeshEngine
from megatrain.mesh.layout import Layout
from megatrain.optim.adamw import AdamW

pytestmark = pytest.mark.gpu

OPTIM = AdamW(learning_rate=1e-3, max_grad_norm=1.0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "qwen3_moe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_losses_overlay_the_host_engines(name, recompute):
    family = families.BY_NAME[name]
    model = families.build(family, seed=1, tie=True)
    batches = [families.batch(family, seed=s, rows=8, tokens=32, kind="packed") for s in range(6)]
    with HostEngine(model, device="cpu", compute_dtype="bf16", optim=OPTIM) as host:
        want = [host.train_step(batch) for batch in batches]
    with MeshEngine(model, Layout(microbatches=2), device="cuda", optim=OPTIM, recompute=recompute) as mesh:
        got = [mesh.train_step(batch) for batch in batches]
        assert all(weight.dtype == torch.float32 for _, weight in mesh.named_parameters())
    assert [r.loss for r in got] == pytest.approx([r.loss for r in want], rel=5e-3)
    assert [r.grad_norm for r in got] == pytest.approx([r.grad_norm for r in want], rel=3e-2)


def test_fp32_on_the_gpu_is_the_host_engine_on_the_cpu():
    family = families.BY_NAME["llama"]
    model = families.build(family, seed=1, tie=True)
    batches = [families.batch(family, seed=s, rows=8, tokens=32, kind="padded") for s in range(3)]
    with HostEngine(model, device="cpu", compute_dtype="fp32", optim=OPTIM) as host:
        want = [host.train_step(batch).loss for batch in batches]
    with MeshEngine(model, Layout(), device="cuda", compute_dtype="fp32", optim=OPTIM) as mesh:
        got = [mesh.train_step(batch).loss for batch in batches]
    assert got == pytest.approx(want, rel=1e-4)
