"""A user's optimizer in its own file (momentum_sgd.py) trains, saves, resumes and is counted like AdamW."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import mesh_ranks as ranks
from families import BY_NAME, batch, build
from megatrain.checkpoint.reader import OpenCheckpoint
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import UserError
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import OptimizerSpec, ParamGroup
from momentum_sgd import MomentumSGD
from reference import reference_loss_and_grads

LLAMA = BY_NAME["llama"]
OPTIM = MomentumSGD(learning_rate=0.1, momentum=0.9, weight_decay=0.01, max_grad_norm=0.5)


def engine_of(optim: OptimizerSpec = OPTIM, seed: int = 0, **plan: Any) -> HostEngine:
    plan = {"compute_dtype": "fp32", "threads": 2, **plan}
    return HostEngine(build(LLAMA, seed=seed), ExecutionPlan(**plan), optim=optim, device="cpu", verify="never")


def rows_of(step: int) -> dict[str, torch.Tensor]:
    return batch(LLAMA, seed=step, rows=4, tokens=16, kind="padded")


def state_of(engine: HostEngine) -> dict[str, torch.Tensor]:
    """Every plane of the state, by unit and kind."""
    dict(engine.named_parameters())  # waits for the updates
    return {f"{name}.{kind}": p for name, unit in engine.store.units.items() for kind, p in unit.state().items()}


def assert_same_bits(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, plane in one.items():
        assert torch.equal(plane.view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.mark.parametrize(
    "plan",
    [{}, {"placement": "device"}, {"accumulation_steps": 2, "microbatch_rows": 1}],
    ids=["host", "device", "cut"],
)
def test_five_steps_equal_torch_sgd(plan: dict[str, Any]) -> None:
    model = build(LLAMA, seed=0)
    plain = copy.deepcopy(model)
    groups = [
        {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.01},
        {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    sgd = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    with engine_of(**plan) as engine:
        for step in range(5):
            want, got = reference_loss_and_grads(plain, rows_of(step)), engine.train_step(rows_of(step))
            assert got.loss == pytest.approx(want.loss, rel=1e-5)
            for name, parameter in plain.named_parameters():
                parameter.grad = want.gradients[name]
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            assert got.grad_norm == pytest.approx(norm.item(), rel=1e-4) and norm > 0.5, "the clip must be active"
            sgd.step()
        weights = dict(engine.named_parameters())
    for name, parameter in plain.named_parameters():
        expected = parameter.detach()
        assert float((weights[name] - expected).norm() / expected.norm()) < 1e-5, name
    moved = [
        float((model.get_parameter(n) - p).detach().norm() / p.detach().norm()) for n, p in plain.named_parameters()
    ]
    assert max(moved) > 1e-2, "five steps must show"


def test_the_bits_depend_neither_on_threads_nor_on_placement() -> None:
    states = []
    for plan in ({"threads": 1}, {"threads": 3}, {"placement": {"layer.0": "device", "head": "device"}}):
        with engine_of(compute_dtype="bf16", **plan) as engine:
            for step in range(3):
                engine.train_step(rows_of(step))
            states.append(state_of(engine))
    assert "layer.0.lo" in states[0] and "layer.0.momentum" in states[0] and "layer.0.m" not in states[0]
    assert_same_bits(states[1], states[0])
    assert_same_bits(states[2], states[0])


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path, compute: str) -> None:
    with engine_of(compute_dtype=compute) as engine:
        for step in range(4):
            engine.train_step(rows_of(step))
        straight = state_of(engine)
    with engine_of(compute_dtype=compute) as engine:
        for step in range(2):
            engine.train_step(rows_of(step))
        engine.save(tmp_path / "saved")
    with engine_of(compute_dtype=compute, seed=1, placement={"layer.1": "device"}) as engine:
        engine.load(tmp_path / "saved")
        for step in range(2, 4):
            engine.train_step(rows_of(step))
        assert_same_bits(state_of(engine), straight)


def test_a_checkpoint_names_its_optimizer_and_is_refused_by_another(tmp_path: Path) -> None:
    with engine_of() as engine:
        engine.train_step(rows_of(0))
        engine.save(tmp_path / "momentum")
        structure = engine.structure
    assert json.loads((tmp_path / "momentum" / "state.json").read_text())["optimizer"] == "MomentumSGD"
    with engine_of(AdamW(learning_rate=1e-3)) as engine:
        engine.train_step(rows_of(0))
        engine.save(tmp_path / "adamw")
        before = {name: plane.clone() for name, plane in state_of(engine).items()}
        with pytest.raises(UserError, match=r"MomentumSGD.*AdamW"):
            engine.load(tmp_path / "momentum")
        assert_same_bits(state_of(engine), before)
        engine.train_step(rows_of(1))
    assert "optimizer" not in json.loads((tmp_path / "adamw" / "state.json").read_text())
    with pytest.raises(UserError, match=r"AdamW.*MomentumSGD"):
        OpenCheckpoint(tmp_path / "adamw", structure, OPTIM)


def test_memory_and_disk_follow_from_its_states(tmp_path: Path) -> None:
    assert OPTIM.bytes_per_parameter == 8
    with engine_of(compute_dtype="bf16") as engine:
        elements = sum(unit.layout.numel for unit in engine.structure.units)
        pages = 4096 * len(engine.structure.units)
        sizes = {name: size for name, size in engine.memory().items() if name.startswith("host_")}
        assert "host_m" not in sizes and "host_v" not in sizes
        for name, width in {"hi": 2, "lo": 2, "momentum": 4}.items():
            assert 0 <= sizes[f"host_{name}"] - width * elements <= pages
        engine.save(tmp_path / "saved")
        parameters = engine.structure.param_count
    written = sum(f.stat().st_size for f in (tmp_path / "saved").rglob("*.safetensors"))
    assert 0 <= written - 8 * parameters < 64_000, "headers are all that is added"


def test_hyper_parameters_and_groups_are_checked_like_those_of_adamw() -> None:
    with pytest.raises(UserError, match=r"learning_rate = -1.*momentum = 1.0 is outside \[0, 1\)"):
        MomentumSGD(learning_rate=-1, momentum=1.0)
    with pytest.raises(UserError, match="no parameter matches the pattern 'nowhere'"):
        engine_of(MomentumSGD(groups=(ParamGroup("nowhere"),)))


def test_the_mesh_engine_trains_with_its_torch_optimizer_and_shares_its_checkpoints(tmp_path: Path) -> None:
    def train(folder: Path) -> tuple[list[float | None], dict[str, torch.Tensor]]:
        plan = MeshPlan(Layout(shard=2), compute_dtype="fp32")
        with MeshEngine(build(LLAMA, seed=0), plan, optim=OPTIM, device="cpu") as engine:
            losses = [engine.train_step(rows_of(step)).loss for step in range(2)]
            engine.save(folder)
            return losses, dict(engine.named_parameters())

    losses, weights = ranks.run(2, train, tmp_path / "mesh")[0]
    with engine_of() as engine:
        assert losses == pytest.approx([engine.train_step(rows_of(step)).loss for step in range(2)], rel=1e-5)
        straight, after = dict(engine.named_parameters()), engine.train_step(rows_of(2)).loss
        for name, weight in weights.items():
            torch.testing.assert_close(weight, straight[name], rtol=1e-5, atol=1e-6)
        engine.load(tmp_path / "mesh")
        assert engine.train_step(rows_of(2)).loss == pytest.approx(after, rel=1e-5)


def test_an_optimizer_without_a_torch_optimizer_is_refused_by_the_mesh_engine() -> None:
    @dataclass(frozen=True)
    class HostOnly(MomentumSGD):
        torch_optimizer = OptimizerSpec.torch_optimizer

    with pytest.raises(UserError, match="cannot train with HostOnly"):
        HostOnly().torch_optimizer([], None)
