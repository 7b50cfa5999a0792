"""The worked example of docs/extending.md: torch's breadth-first schedule is two entries away."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

import mesh_ranks as ranks
from fp64 import Fp32MeansFp64
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import SCHEDULES, Layout, MeshPlan, ScheduleKind
from megatrain.engine.mesh.pipeline_schedule import SCHEDULE_CLASSES
from megatrain.optim.adamw import AdamW
from mesh_cases import Case
from mesh_parity import batches, build


def test_a_schedule_of_torch_trains_like_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCHEDULES, "looped_bfs", ScheduleKind("looped_bfs", (2, None)))
    monkeypatch.setitem(SCHEDULE_CLASSES, "looped_bfs", ScheduleLoopedBFS)
    case = Case("llama", Layout(), 4, tied=False, kind="plain")
    model, steps = build(case), batches(case)

    def losses(layout: Layout) -> list[float | None]:
        plan, optim = MeshPlan(layout, compute_dtype="fp64"), AdamW(learning_rate=1e-2, max_grad_norm=0.1)
        with MeshEngine(model, plan, optim=optim, debug=Fp32MeansFp64) as engine:
            return [engine.train_step(batch).loss for batch in steps]

    (plain,) = ranks.run(1, losses, Layout())
    for found in ranks.run(2, losses, Layout(pipeline=2, virtual=2, schedule="looped_bfs")):
        assert found == pytest.approx(plain, rel=1e-12)
