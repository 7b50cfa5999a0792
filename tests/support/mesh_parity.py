"""The two sides of parity: the mesh engine on its ranks, and plain transformers in one process.

Everything runs in fp64 with `Fp32MeansFp64`, so that layouts differ only by rounding at 1e-16.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import families
import mesh_ranks as ranks
from fp64 import Fp32MeansFp64
from megatrain.engine.mesh.data_parallel import local
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.optim.adamw import AdamW
from mesh_cases import Case
from reference import ReferenceTrainer, gradient_error, reference_loss, reference_loss_and_grads

TOLERANCE = 1e-12
ROWS, TOKENS, STEPS = 7, 15, 3  # odd: rows and tokens are padded in most layouts
LEARNING_RATE, CLIP = 1e-2, 0.1  # norms are about 1: the clip is active in every step
EPS = 1e-6
"""AdamW divides by the root of the second moment: with eps 1e-8, an element whose gradient is pure rounding noise (a key bias,
mathematically zero) or very small would show that noise in its weight."""


@dataclass(frozen=True)
class Run:
    """The results that are compared."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    evaluation: float | None


def build(case: Case) -> Any:
    full = case.family == "qwen2_full"
    family = families.BY_NAME["qwen2" if full else case.family]
    overrides = {**family.overrides, "num_hidden_layers": case.layers}
    if case.heads:
        overrides["num_attention_heads"], overrides["num_key_value_heads"] = case.heads
        overrides["head_dim"] = 8
    if full:
        overrides["use_sliding_window"] = False
    if case.family == "gemma2":
        overrides["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(case.layers)]
    family = dataclasses.replace(family, overrides=overrides)
    model = families.build(family, seed=1, dtype=torch.float64, tie=case.tied)
    for parameter in model.parameters():  # some routers are fp32 in a model of any type
        parameter.data = parameter.data.double()
    if "moe" in family.tags:
        model.set_experts_implementation("eager")  # the grouped matrix product has no fp64
    return model


def batches(case: Case) -> list[dict[str, Tensor]]:
    family = families.BY_NAME["qwen2" if case.family == "qwen2_full" else case.family]
    return [families.batch(family, seed=s, rows=ROWS, tokens=TOKENS, kind=case.kind) for s in range(STEPS)]  # type: ignore[arg-type]


def on_ranks(case: Case, fault: Callable[[], None] | None = None) -> Run:
    """Run the case on its ranks. Asserts that all ranks report the same results and hold equal copies of shared parts."""
    model, steps = build(case), batches(case)
    results = ranks.run(case.layout.world, _work, case, model, steps, fault)
    run, _ = results[0]
    for rank, (other, _) in enumerate(results):
        assert (other.losses, other.norms, other.evaluation) == (run.losses, run.norms, run.evaluation), f"rank {rank}"
    copies: dict[Any, tuple[int, str]] = {}
    for rank, (_, digests) in enumerate(results):
        for key, digest in digests.items():
            first, expected = copies.setdefault(key, (rank, digest))
            assert digest == expected, f"{key} differs between rank {first} and rank {rank}"
    return run


def _work(case: Case, model: Any, steps: list[dict[str, Tensor]], fault: Callable[[], None] | None) -> tuple[Run, Any]:
    if fault is not None:
        fault()
    engine = MeshEngine(
        model,
        MeshPlan(case.layout, case.recompute, compute_dtype="fp64"),
        optim=AdamW(learning_rate=LEARNING_RATE, max_grad_norm=CLIP, eps=EPS),
        debug=Fp32MeansFp64,
    )
    engine.backward(steps[0])
    gradients = dict(engine.named_gradients())
    losses, norms, evaluation = [], [], None
    for number, batch in enumerate(steps):
        result = engine.train_step(batch)
        assert result.skipped is None
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if case.evaluate and number == 0:
            found = engine.eval_step(steps[2])
            evaluation = found.loss_sum / found.tokens
    run = Run(losses, norms, gradients, dict(engine.named_parameters()), evaluation)
    return run, digests(engine)


def digests(engine: MeshEngine) -> dict[Any, str]:
    """A hash of every local part, by its owner's name and its box."""
    found = {}
    for name, parameter, box, _ in engine.gradients.all():
        key = (engine.structure.tied.get(name, name), box.offsets, box.sizes)
        found[key] = hashlib.sha256(local(parameter).detach().contiguous().numpy().tobytes()).hexdigest()
    return found


@functools.lru_cache(maxsize=64)
def _plain(family: str, layers: int, tied: bool, kind: str, evaluate: bool, heads: tuple[int, int] | None) -> Run:
    case = Case(family, Layout(), layers, tied, kind, heads=heads)
    model, steps = build(case), batches(case)
    with Fp32MeansFp64():
        first = reference_loss_and_grads(model, steps[0])
        trainer = ReferenceTrainer(model, learning_rate=LEARNING_RATE, max_grad_norm=CLIP, eps=EPS)
        losses, norms, evaluation = [], [], None
        for number, batch in enumerate(steps):
            loss, norm = trainer.step(batch)
            losses.append(loss)
            norms.append(norm)
            if evaluate and number == 0:
                model.eval()
                evaluation = reference_loss(model, steps[2]).loss
                model.train()
    gradients = {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(model.named_parameters(), first.gradients.values(), strict=True)
    }
    return Run(losses, norms, gradients, {n: p.detach().clone() for n, p in model.named_parameters()}, evaluation)


def plain(case: Case) -> Run:
    return _plain(case.family, case.layers, case.tied, case.kind, case.evaluate, case.heads)


def differences(got: Run, want: Run, tolerance: float = TOLERANCE) -> list[str]:
    """All differences between two runs beyond the tolerance."""
    found = []
    for what, a, b in (("loss", got.losses, want.losses), ("norm", got.norms, want.norms)):
        for step, (x, y) in enumerate(zip(a, b, strict=True)):
            if not abs(x - y) <= tolerance * abs(y):
                found.append(f"{what} of step {step}: {x!r} instead of {y!r}")
    if set(got.gradients) != set(want.gradients) or set(got.weights) != set(want.weights):
        found.append(f"names: {set(got.weights) ^ set(want.weights)}")
        return found
    error, name = gradient_error(got.gradients, want.gradients)
    if not error <= tolerance:
        found.append(f"gradient of {name} off by {error:.1e}")
    for name, weight in want.weights.items():
        error = ((got.weights[name] - weight).norm() / weight.norm()).item()
        if not error <= tolerance:
            found.append(f"weight {name} off by {error:.1e}")
    if want.evaluation is not None:
        assert got.evaluation is not None
        if not abs(got.evaluation - want.evaluation) <= tolerance * want.evaluation:
            found.append(f"evaluation {got.evaluation!r} instead of {want.evaluation!r}")
    return found
