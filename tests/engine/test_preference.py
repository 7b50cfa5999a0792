"""Each preference loss against plain Hugging Face and its paper's formula: loss, metrics, gradients and weights.

A step may be cut in any way, and sequences may share rows or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mesh_ranks
import plain_preference as plain
from families import BY_NAME, build
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.objective import Objective
from megatrain.engine.plan import ExecutionPlan
from megatrain.engine.preference import DPO, IPO, KTO, ORPO, SimPO
from megatrain.errors import UserError
from megatrain.optim.adamw import AdamW
from reference import decayed_parameters, gradient_error

LLAMA = BY_NAME["llama"]
KINDS: dict[str, tuple[Objective, Callable[..., Any]]] = {
    "dpo": (DPO(0.3), plain.pair_loss(plain.dpo(0.3))),
    "dpo-smoothed-sft": (DPO(0.3, 0.2, sft_weight=0.5), plain.pair_loss(plain.dpo(0.3, 0.2), 0.5)),
    "ipo": (IPO(0.2), plain.pair_loss(plain.ipo(0.2))),
    "orpo": (ORPO(0.4), plain.pair_loss(plain.orpo(0.4), 1.0)),
    "simpo": (SimPO(2.0, 0.7), plain.pair_loss(plain.simpo(2.0, 0.7))),
    "kto": (KTO(0.3, 1.0, 1.5), plain.kto(0.3, 1.0, 1.5)),
}
LAYOUTS = {"packed": plain.packed, "paired": plain.paired}
CUTS = {
    "whole": {"microbatch_rows": 12, "head_chunk_tokens": 1024},
    "microbatches": {"microbatch_rows": 1, "head_chunk_tokens": 7},
    "accumulation": {"accumulation_steps": 3, "microbatch_rows": 1, "head_chunk_tokens": 16},
}


def groups_of(seed: int) -> list[plain.Group]:
    made = plain.groups(6, seed)
    if seed == 0:
        assert {one.good for one, _ in made} == {True, False}, "both kinds of labels"
    return made


def engine_of(objective: Objective, model: Any = None, group: Any = None, **plan: Any) -> HostEngine:
    plan = {"compute_dtype": "fp32", "threads": 1, **plan}
    optim = AdamW(learning_rate=1e-3, max_grad_norm=1.0, eps=1e-6)
    model = build(LLAMA, seed=0) if model is None else model
    return HostEngine(
        model, ExecutionPlan(**plan), optim=optim, objective=objective, device="cpu", verify="never", group=group
    )


def batch_of(kind: str, layout: str, seed: int = 0) -> dict[str, torch.Tensor]:
    return plain.of_objective(LAYOUTS[layout](groups_of(seed)), KINDS[kind][0])


@pytest.mark.parametrize(
    ("cut", "layout"), [("whole", "packed"), ("microbatches", "paired"), ("accumulation", "packed")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_metrics_and_gradients_equal_the_formula(kind: str, cut: str, layout: str) -> None:
    objective, formula = KINDS[kind]
    model = build(LLAMA, seed=0)
    loss, metrics = formula(model, groups_of(0))
    loss.backward()
    want = {name: parameter.grad for name, parameter in model.named_parameters()}
    with engine_of(objective, **CUTS[cut]) as engine:
        result = engine.backward(batch_of(kind, layout))
        got = dict(engine.named_gradients())
        evaluated = engine.eval_step(batch_of(kind, layout))
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, value in metrics.items():
        assert result.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    error, name = gradient_error(got, want)
    assert error < 1e-5, f"{name}: {error:.1e}"
    mean, means = objective.means(evaluated.loss_sum, evaluated.metric_sums, evaluated.counts)
    assert mean == pytest.approx(loss.item(), rel=1e-5)
    assert means == pytest.approx(result.metrics, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_give_the_weights_of_torch_and_plain_hugging_face(kind: str) -> None:
    objective, formula = KINDS[kind]
    model = build(LLAMA, seed=0)
    with engine_of(objective, copy.deepcopy(model), accumulation_steps=2, microbatch_rows=1) as engine:
        for step in range(5):
            engine.train_step(batch_of(kind, "packed", seed=step))
        got = dict(engine.named_parameters())
    named = dict(model.named_parameters())
    decayed = decayed_parameters(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameter for name, parameter in named.items() if name in decayed]},
            {"params": [parameter for name, parameter in named.items() if name not in decayed], "weight_decay": 0.0},
        ],
        lr=1e-3,
        weight_decay=0.01,
        eps=1e-6,
    )
    for step in range(5):
        optimizer.zero_grad()
        formula(model, groups_of(step))[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(got[name], parameter.detach(), rtol=1e-5, atol=1e-5, msg=name)


def _on_rank(kind: str, layout: str, plan: dict[str, Any]) -> tuple[Any, ...]:
    group = dist.group.WORLD if dist.is_initialized() else None
    with engine_of(KINDS[kind][0], group=group, **plan) as engine:
        logprobs = engine.sequence_logprobs(_sequences(batch_of(kind, layout)))
        found = engine.backward(batch_of(kind, layout))
        gradients = {name: grad.clone() for name, grad in engine.named_gradients()}
        evaluated = engine.eval_step(batch_of(kind, layout))
        stepped = engine.train_step(batch_of(kind, layout))
        return found.loss, found.metrics, gradients, evaluated.metric_sums, stepped.grad_norm, logprobs


def _sequences(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in batch.items() if name not in ("reference_logprobs", "desirable")}


@pytest.mark.parametrize(
    ("kind", "layout", "world"), [("dpo", "packed", 2), ("orpo", "paired", 3), ("kto", "paired", 2)]
)
def test_ranks_compute_what_one_process_computes(kind: str, layout: str, world: int) -> None:
    """Six pairs of rows on three ranks, or rows of a few pairs on two; each rank in two accumulation steps."""
    plan = {"accumulation_steps": 2, "microbatch_rows": 2}
    loss, metrics, gradients, sums, norm, logprobs = _on_rank(kind, layout, plan)
    for found in mesh_ranks.run(world, _on_rank, kind, layout, plan):
        assert found[0] == pytest.approx(loss, rel=1e-5)
        assert found[1] == pytest.approx(metrics, rel=1e-5, abs=1e-5)
        assert found[3] == pytest.approx(sums, rel=1e-5, abs=1e-5)
        assert found[4] == pytest.approx(norm, rel=1e-5)
        error, name = gradient_error(found[2], gradients)
        assert error < 1e-5, f"{name}: {error:.1e}"
        torch.testing.assert_close(found[5], logprobs, rtol=1e-5, atol=1e-5)


def test_log_probabilities_of_sequences_equal_plain_hugging_face() -> None:
    made, model = groups_of(0), build(LLAMA, seed=0)
    want = torch.stack([plain.logprob(model, one).sum() for group in made for one in group]).float()
    with engine_of(SimPO(), head_chunk_tokens=7) as engine:
        for layout in LAYOUTS.values():
            got = engine.sequence_logprobs(_sequences(layout(made)))
            torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)


def test_at_the_reference_dpo_is_the_logarithm_of_two() -> None:
    batch = batch_of("dpo", "packed")
    with engine_of(DPO()) as engine:
        logprobs = engine.sequence_logprobs(_sequences(batch))
        batch["reference_logprobs"] = logprobs[batch["sequence_ids"]]
        result = engine.backward(batch)
    assert result.loss == pytest.approx(0.6931472, abs=1e-6)
    assert result.metrics["rewards/margins"] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids: ids.masked_fill(ids == 3, 2), r"sequence 3 of 12 has no target token"),
        (lambda ids: ids.masked_fill(ids == 11, 10), r"numbers 11 sequences, which make no pairs"),
        (lambda ids: ids - 1, r"is negative at a target token"),
    ],
)
def test_sequence_ids_that_make_no_pairs_are_refused(change: Callable[..., torch.Tensor], message: str) -> None:
    batch = batch_of("dpo", "paired")
    batch["sequence_ids"] = change(batch["sequence_ids"])
    with engine_of(DPO()) as engine, pytest.raises(UserError, match=message):
        engine.train_step(batch)


def test_a_pair_that_is_separated_by_other_rows_is_refused() -> None:
    batch = batch_of("simpo", "paired")
    order = torch.tensor([0, 2, 1, 3, *range(4, 12)])
    with engine_of(SimPO()) as engine, pytest.raises(UserError, match="pair 0 lie in rows 0 and 2"):
        engine.train_step({name: tensor[order] for name, tensor in batch.items()})
