"""A user's objective in its own file (unlikelihood.py) has the gradients of plain Hugging Face, however a step is cut."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from families import BY_NAME, batch, build
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.mesh.engine import MeshEngine
from megatrain.engine.mesh.layout import Layout, MeshPlan
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import UserError
from megatrain.optim.adamw import AdamW
from reference import gradient_error
from unlikelihood import Unlikelihood

LLAMA = BY_NAME["llama"]
CUTS = {
    "whole": {"microbatch_rows": 6, "head_chunk_tokens": 1024},
    "chunks": {"microbatch_rows": 6, "head_chunk_tokens": 7},
    "microbatches": {"microbatch_rows": 2, "head_chunk_tokens": 16},
    "accumulation": {"accumulation_steps": 3, "microbatch_rows": 1, "head_chunk_tokens": 5},
    "resident": {"placement": "device", "head_chunk_tokens": 16},
}


def engine_of(model: nn.Module, **plan: Any) -> HostEngine:
    plan = {"compute_dtype": "fp32", "threads": 2, **plan}
    optim = AdamW(learning_rate=1e-2)
    return HostEngine(model, ExecutionPlan(**plan), optim=optim, objective=Unlikelihood(), device="cpu", verify="never")


def rows_of(seed: int) -> dict[str, torch.Tensor]:
    """Rows of unequal lengths in which about a third of the tokens are unlikely."""
    rows = batch(LLAMA, seed=seed, rows=6, tokens=16, kind="padded")
    generator = torch.Generator().manual_seed(seed)
    return {**rows, "unlikely": torch.rand(rows["labels"].shape, generator=generator) < 0.3}


def plain_losses(model: nn.Module, rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean of the unlikelihood loss, the part of unlikely tokens), by plain Hugging Face and autograd."""
    logits = model(input_ids=rows["input_ids"], use_cache=False).logits[:, :-1].float()
    labels, unlikely = rows["labels"][:, 1:], rows["unlikely"][:, 1:]
    target = labels != -100
    probabilities = logits.softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    losses = -torch.where(unlikely, 1 - probabilities, probabilities).log()
    return losses[target].sum() / target.sum(), losses[target & unlikely].sum() / target.sum()


@pytest.mark.parametrize("cut", CUTS)
def test_loss_and_gradients_equal_plain_hugging_face(cut: str) -> None:
    model, rows = build(LLAMA, seed=0), rows_of(seed=1)
    plain = copy.deepcopy(model)
    loss, part = plain_losses(plain, rows)
    loss.backward()
    want = {name: parameter.grad for name, parameter in plain.named_parameters()}
    with engine_of(model, **CUTS[cut]) as engine:
        result = engine.backward(rows)
        got = dict(engine.named_gradients())
    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["unlikelihood"] == pytest.approx(part.item(), rel=1e-5)
    error, name = gradient_error(got, want)
    assert error < 1e-5, f"{name}: {error:.1e}"


def test_training_lowers_it_and_an_evaluation_measures_it() -> None:
    rows = rows_of(seed=1)
    with engine_of(build(LLAMA, seed=0), head_chunk_tokens=16) as engine:
        before = engine.eval_step(rows)
        first = engine.train_step(rows)
        assert first.loss == pytest.approx(before.loss_sum / before.tokens, rel=1e-5)
        assert first.metrics["unlikelihood"] == pytest.approx(
            before.metric_sums["unlikelihood"] / before.tokens, rel=1e-5
        )
        for _ in range(5):
            last = engine.train_step(rows)
        assert last.loss is not None and first.loss is not None and last.loss < 0.9 * first.loss


def test_a_batch_without_its_key_or_with_another_shape_is_refused() -> None:
    rows = rows_of(seed=1)
    with engine_of(build(LLAMA, seed=0)) as engine:
        with pytest.raises(UserError, match=r"missing keys \['unlikely'\]"):
            engine.train_step({name: tensor for name, tensor in rows.items() if name != "unlikely"})
        with pytest.raises(UserError, match=r"(?s)batch\['unlikely'\].*give CPU tensors of one shape"):
            engine.train_step({**rows, "unlikely": rows["unlikely"][:, 1:]})
        assert engine.step == 0


def test_the_mesh_engine_refuses_it_by_name() -> None:
    plan = MeshPlan(Layout(shard=1), compute_dtype="fp32")
    with pytest.raises(UserError, match="computes cross entropy only, not Unlikelihood"):
        MeshEngine(build(LLAMA, seed=0), plan, objective=Unlikelihood(), device="cpu")
