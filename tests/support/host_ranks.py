"""The two sides of the rank tests: the host engine on W forked ranks with gloo, and plain transformers in one process.

Everything is fp64 (`compute_dtype="fp64"`, `Fp32MeansFp64`, and an AdamW with fp64 moments), so that numbers of ranks differ by
rounding at 1e-16 only. The case, the model, the batches and the plain side are those of the mesh engine's tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import mesh_parity
import mesh_ranks
from engines import host_engine
from fp64 import Fp32MeansFp64
from megatrain.engine.host.buffers import DeviceBuffers
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh.layout import Layout
from megatrain.engine.objective import IGNORED
from megatrain.optim.spec import OptimizerSpec, StateSpec
from mesh_cases import Case
from mesh_parity import CLIP, EPS, LEARNING_RATE, STEPS, Run

Fault = Callable[[], None]


@dataclass(frozen=True)
class AdamW64(OptimizerSpec):
    """torch.optim.AdamW's arithmetic on fp64 planes."""

    learning_rate: float = LEARNING_RATE
    weight_decay: float = 0.01
    max_grad_norm: float | None = CLIP

    @property
    def states(self) -> tuple[StateSpec, ...]:
        return StateSpec("m", torch.float64), StateSpec("v", torch.float64)

    def update_(self, master: Tensor, grad: Tensor, states: Mapping[str, Tensor], scalars: Any) -> None:
        rate, beta1, beta2 = scalars.learning_rate, 0.9, 0.999
        m, v = states["m"], states["v"]
        master.mul_(1 - rate * scalars.weight_decay)
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        denominator = (v / (1 - beta2**scalars.step)).sqrt_().add_(EPS)
        master.addcdiv_(m, denominator, value=-rate / (1 - beta1**scalars.step))


@dataclass(frozen=True)
class RankCase:
    """A model, a kind of batch and a plan.

    Attributes:
        plan: Keywords of `engines.plan_of`.
        rows: Rows of a step; None: as in the mesh tests, 7.
        untargeted: Rows, from the first one, whose tokens are no targets.
        staged: Copy weights through the packing thread, as on a GPU where planes are not pinned.
    """

    family: str = "llama"
    tied: bool = True
    kind: str = "packed"
    plan: dict[str, Any] = field(default_factory=dict)
    rows: int | None = None
    untargeted: int = 0
    staged: bool = False

    @property
    def case(self) -> Case:
        return Case(self.family, Layout(), 3, self.tied, self.kind)

    def batches(self) -> list[dict[str, Tensor]]:
        batches = mesh_parity.batches(self.case)
        for batch in batches:
            for name in batch:
                batch[name] = batch[name][: self.rows].clone()
            batch["labels"][: self.untargeted] = IGNORED
        return batches


def on_ranks(case: RankCase, world: int, fault: Fault | None = None) -> Run:
    """Run the case on `world` ranks. Asserts that all report the same."""
    model, batches = mesh_parity.build(case.case), case.batches()
    results = mesh_ranks.run(world, _work, case, model, batches, fault)
    for rank, other in enumerate(results):
        assert (other.losses, other.norms) == (results[0].losses, results[0].norms), f"rank {rank}"
        for name, weight in other.weights.items():
            assert torch.equal(weight, results[0].weights[name]), f"rank {rank}: {name}"
    return results[0]


def _work(case: RankCase, model: Any, batches: list[dict[str, Tensor]], fault: Fault | None) -> Run:
    if fault is not None:
        fault()
    if case.staged:
        DeviceBuffers._pin_planes = lambda self, pin: False  # type: ignore[method-assign]
    with Fp32MeansFp64(), engine_of(case, model) as engine:
        return steps_of(engine, batches)


def engine_of(case: RankCase, model: Any, **more: Any) -> HostEngine:
    group = dist.group.WORLD if dist.is_initialized() else None
    words = {"compute_dtype": "fp64", "threads": 1, **case.plan}
    return host_engine(model, group=group, device="cpu", verify="never", optim=AdamW64(), **words, **more)


def steps_of(engine: HostEngine, batches: list[dict[str, Tensor]]) -> Run:
    engine.backward(batches[0])
    gradients = {name: grad.clone() for name, grad in engine.named_gradients()}
    losses, norms, evaluation = [], [], None
    for number, batch in enumerate(batches):
        result = engine.train_step(batch)
        assert result.skipped is None, result.skipped
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if number == 0:
            found = engine.eval_step(batches[2])
            evaluation = found.loss_sum / found.tokens
    assert len(losses) == STEPS
    weights = {name: weight.clone() for name, weight in engine.named_parameters()}
    return Run(losses, norms, gradients, weights, evaluation)


def plain(case: RankCase) -> Run:
    """The same steps by plain transformers and torch's AdamW."""
    with contextlib.ExitStack() as stack:
        batches = case.batches()
        stack.callback(setattr, mesh_parity, "batches", mesh_parity.batches)
        mesh_parity.batches = lambda _: batches  # type: ignore[assignment]
        return mesh_parity._plain.__wrapped__(case.family, 3, case.tied, case.kind, True, None)
