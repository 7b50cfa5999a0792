"""What the engine promises an objective: which tokens it gets, that it may couple them, and how its sums are divided."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from families import BY_NAME, batch, build
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.objective import CrossEntropy, Objective, Targets, find_targets, token_logprobs
from megatrain.engine.plan import ExecutionPlan
from reference import gradient_error, reference_loss_and_grads

LLAMA = BY_NAME["llama"]


def gradients_of(
    objective: Objective, rows: Mapping[str, torch.Tensor], **plan: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    plan = {"compute_dtype": "fp32", "threads": 2, **plan}
    with HostEngine(
        build(LLAMA, seed=0), ExecutionPlan(**plan), objective=objective, device="cpu", verify="never"
    ) as engine:
        return engine.backward(rows), dict(engine.named_gradients())


def rows_of(seed: int = 0, rows: int = 4) -> dict[str, torch.Tensor]:
    return batch(LLAMA, seed=seed, rows=rows, tokens=16, kind="padded")


class TwoPasses(Objective):
    """Cross entropy, but the engine does not know that it is linear."""

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        return -logprobs_N.sum(), {}


class Weighted(Objective):
    """Cross entropy with a weight per token, in one pass."""

    linear = True
    batch_keys = ("weight",)

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        losses_N = -logprobs_N * targets.values["weight"]
        return losses_N.sum(), {"weight": targets.values["weight"].sum()}


class RowSquares(Objective):
    """Sum of the squares of the rows' log-likelihoods: couples all tokens of a row, across chunks and microbatches."""

    def loss(self, logprobs_N: torch.Tensor, targets: Targets) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        rows = torch.zeros(int(targets.rows.max()) + 1, device=logprobs_N.device)
        return rows.index_add(0, targets.rows, logprobs_N).square().sum(), {}


def test_values_are_taken_beside_the_label_that_they_belong_to() -> None:
    labels = torch.tensor([[5, 6, -100, 7], [-100, 8, 9, -100]])
    flags = torch.arange(8).view(2, 4)
    targets = find_targets(labels, {"flag": flags})
    assert targets.labels.tolist() == [6, 7, 8, 9]
    assert targets.values["flag"].tolist() == [1, 3, 5, 6]
    assert targets.positions.tolist() == [0, 2, 4, 5] and targets.rows.tolist() == [0, 0, 1, 1]
    assert (targets.row_tokens, targets.step_tokens) == (4, 4)
    second = targets.part(slice(2, 4), row=1)
    assert second.rows.tolist() == [0, 0] and second.values["flag"].tolist() == [5, 6] and second.step_tokens == 4


def test_log_probabilities_of_ignored_labels_are_zero() -> None:
    logits = torch.randn(3, 7)
    found = token_logprobs(logits, torch.tensor([2, -100, 6]))
    assert found[1] == 0
    assert torch.allclose(found[[0, 2]], F.log_softmax(logits, -1)[[0, 2], [2, 6]])


@pytest.mark.parametrize("plan", [{"head_chunk_tokens": 7}, {"accumulation_steps": 2, "head_chunk_tokens": 7}])
def test_two_passes_of_the_head_give_the_gradients_of_one(plan: dict[str, Any]) -> None:
    once, want = gradients_of(CrossEntropy(), rows_of(), **plan)
    twice, got = gradients_of(TwoPasses(), rows_of(), **plan)
    assert twice.loss == pytest.approx(once.loss, rel=1e-6)
    assert gradient_error(got, want)[0] < 1e-6


def test_weights_per_token_need_one_pass_and_their_sums_are_divided_by_the_tokens_of_the_step() -> None:
    rows = rows_of(rows=6)
    ones = {**rows, "weight": torch.ones(rows["labels"].shape)}
    want = reference_loss_and_grads(build(LLAMA, seed=0), rows)
    result, got = gradients_of(Weighted(), ones, accumulation_steps=3, head_chunk_tokens=8)
    assert gradient_error(got, want.gradients)[0] < 1e-5
    assert result.loss == pytest.approx(want.loss, rel=1e-5) and result.metrics == {"weight": pytest.approx(1.0)}
    half, got = gradients_of(Weighted(), {**rows, "weight": 0.5 * ones["weight"]}, head_chunk_tokens=8)
    assert half.loss == pytest.approx(0.5 * want.loss, rel=1e-5) and half.metrics == {"weight": pytest.approx(0.5)}
    assert gradient_error({name: 2 * gradient for name, gradient in got.items()}, want.gradients)[0] < 1e-5


@pytest.mark.parametrize(
    "plan",
    [{"head_chunk_tokens": 5, "microbatch_rows": 1}, {"accumulation_steps": 2, "head_chunk_tokens": 5}],
    ids=["chunks", "accumulation"],
)
def test_an_objective_may_couple_the_tokens_of_a_row(plan: dict[str, Any]) -> None:
    rows, model = rows_of(), build(LLAMA, seed=0)
    plain = copy.deepcopy(model)
    logits = plain(input_ids=rows["input_ids"], use_cache=False).logits[:, :-1]
    labels = rows["labels"][:, 1:]
    logprobs = -F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    loss = logprobs.sum(1).square().sum() / (labels != -100).sum()
    loss.backward()
    result, got = gradients_of(RowSquares(), rows, **plan)
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert gradient_error(got, {name: p.grad for name, p in plain.named_parameters()})[0] < 1e-5
