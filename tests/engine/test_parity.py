"""The host engine equals plain Hugging Face + AdamW, family by family, in fp32 on the CPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from engines import host_engine
from families import CORE, FAMILIES, Family, batch, build
from megatrain.engine.host.engine import HostEngine
from megatrain.engine.parity_check import TESTED
from megatrain.optim.adamw import AdamW
from reference import ReferenceTrainer, gradient_error, reference_loss_and_grads

LOSS = 1e-6
GRADIENT = 1e-5
WEIGHT = 1e-6
LEARNING_RATE, MAX_NORM = 1e-4, 0.1
EPS = 1e-4
"""Of AdamW, on both sides. AdamW divides by the root of the second moment: with eps 1e-8 an element whose gradient is pure
rounding noise (a key bias, whose gradient is zero mathematically) moves by the whole learning rate in a random direction, on
either side."""


def engine_of(model: torch.nn.Module, **options: Any) -> HostEngine:
    return host_engine(model, device="cpu", compute_dtype="fp32", threads=1, verify="never", **options)


def assert_same_gradients(family: Family, kind: str, tie: bool | None = None, **options: Any) -> None:
    model = build(family, seed=0, tie=tie)
    rows = batch(family, seed=1, rows=3, tokens=24, kind=kind)
    want = reference_loss_and_grads(copy.deepcopy(model), rows)
    with engine_of(model, head_chunk_tokens=16, **options) as engine:
        result = engine.backward(rows)
        got = dict(engine.named_gradients())
    assert result.tokens == want.tokens
    assert result.loss == pytest.approx(want.loss, rel=LOSS)
    trained = {name: g if g is not None else torch.zeros_like(got[name]) for name, g in want.gradients.items()}
    error, name = gradient_error(got, trained)
    assert error < GRADIENT, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_loss_and_gradients_equal_plain_hugging_face(family: Family) -> None:
    """In two microbatches, so that every argument of every family is cut; padded; logits in chunks of tokens."""
    assert_same_gradients(family, "padded", microbatch_rows=2)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.packable], ids=str)
def test_packed_rows_equal_plain_hugging_face(family: Family) -> None:
    assert_same_gradients(family, "packed", microbatch_rows=2)


@pytest.mark.parametrize("family", CORE, ids=str)
@pytest.mark.parametrize("options", [{}, {"segment": 2}, {"accumulation_steps": 3}, {"weight_slots": 4}], ids=str)
def test_every_way_to_cut_a_step_gives_the_same_gradients(family: Family, options: dict[str, Any]) -> None:
    assert_same_gradients(family, "masked", **options)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("family", CORE, ids=str)
def test_tied_and_untied_embeddings_get_all_their_gradients(family: Family, tie: bool) -> None:
    if tie not in family.ties:
        pytest.xfail(f"{family.name} cannot be built with tie={tie}")
    assert_same_gradients(family, "plain", tie=tie)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_weights_after_five_clipped_steps_equal_adamw(family: Family) -> None:
    model = build(family, seed=0)
    reference = ReferenceTrainer(copy.deepcopy(model), learning_rate=LEARNING_RATE, eps=EPS, max_grad_norm=MAX_NORM)
    optim = AdamW(learning_rate=LEARNING_RATE, eps=EPS, max_grad_norm=MAX_NORM, weight_decay=0.01)
    with engine_of(model, optim=optim) as engine:
        for step in range(5):
            rows = batch(family, seed=step, rows=2, tokens=16, kind="padded")
            (want_loss, want_norm), got = reference.step(rows), engine.train_step(rows)
            assert got.loss == pytest.approx(want_loss, rel=1e-5)
            assert got.grad_norm == pytest.approx(want_norm, rel=1e-4)
            assert want_norm > MAX_NORM, "the clip must be active"
        weights = dict(engine.named_parameters())
    moved = 0.0
    for name, parameter in reference.model.named_parameters():
        error = float((weights[name] - parameter.detach()).norm() / parameter.detach().norm())
        assert error < WEIGHT, f"{name}: {error:.1e}"
        moved = max(moved, float((model.get_parameter(name) - parameter).detach().norm() / parameter.detach().norm()))
    assert moved > 100 * WEIGHT, "five steps must show"


def test_the_list_of_tested_families_is_what_is_tested() -> None:
    assert frozenset(family.model_type for family in FAMILIES) == TESTED
    assert len(TESTED) >= 30
