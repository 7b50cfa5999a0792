"""Tests of the parity tests' own foundation: families, batches and the plain reference."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from families import (
    BY_NAME,
    CORE,
    FAMILIES,
    KINDS,
    NO_TARGET,
    PAD,
    ROUTER_BIASES,
    UNUSUAL,
    VOCAB,
    Family,
    batch,
    build,
)
from reference import (
    ReferenceTrainer,
    accepts_positions,
    decayed_parameters,
    document_spans,
    forward_loss_sum,
    gradient_error,
    packing_error,
    reference_loss,
    reference_loss_and_grads,
    separate_documents_loss,
)

ALL = FAMILIES + UNUSUAL


def having(tag: str) -> list[Family]:
    found = [family for family in ALL if tag in family.tags]
    assert found, tag
    return found


# Trainable parameters whose gradient transformers leaves out, or makes exactly zero, by name.
WITHOUT_GRADIENT = {
    "deepseek_v32": ".indexer.",  # the choice of keys is not differentiable
    "phimoe": ".mlp.router.weight",  # without jitter only the best expert has a weight, always one
}


@pytest.mark.parametrize("family", ALL, ids=str)
def test_every_parameter_matters(family: Family) -> None:
    model, rows = build(family, seed=0), batch(family, seed=1, rows=3, tokens=23, kind="padded")
    got = reference_loss_and_grads(model, rows)
    assert 5.0 < got.loss < 9.0 and got.tokens == int((rows["labels"][:, 1:] != NO_TARGET).sum())
    unreached, frozen = set(), set()
    for name, parameter in model.named_parameters():
        gradient = got.gradients[name]
        if not parameter.requires_grad:
            frozen.add(name)
        elif gradient is None or not gradient.any():
            unreached.add(name)
        else:
            assert gradient.isfinite().all(), name
    assert bool(frozen) == ("frozen" in family.tags), frozen
    expected = WITHOUT_GRADIENT.get(family.name)
    assert bool(unreached) == (expected is not None), unreached
    assert all(expected in name for name in unreached if expected), unreached


@pytest.mark.parametrize("family", ALL, ids=str)
def test_transformers_own_loss_is_the_reference_loss_and_right_padding_is_invisible(family: Family) -> None:
    model, losses = build(family, seed=0), {}
    for kind in ("padded", "masked"):
        rows = batch(family, seed=1, rows=3, tokens=23, kind=kind)
        losses[kind] = reference_loss(model, rows).loss
        with torch.no_grad():
            assert losses[kind] == pytest.approx(model(**rows, use_cache=False).loss.item(), rel=1e-6), kind
    assert losses["padded"] == pytest.approx(losses["masked"], rel=1e-5)


@pytest.mark.parametrize("family", ALL, ids=str)
def test_packable_is_what_transformers_does(family: Family) -> None:
    model, rows = build(family, seed=0), batch(family, seed=2, rows=2, tokens=23, kind="packed")
    error = packing_error(model, rows)
    assert error < 1e-5 or error > 1e-2, "neither isolated nor mixed"
    if "packing_varies" not in family.tags:
        assert family.packable == (error < 1e-5), error
    if family.packable:
        packed, separate = reference_loss(model, rows), separate_documents_loss(model, rows)
        assert packed.tokens == separate.tokens
        assert packed.loss == pytest.approx(separate.loss, rel=1e-5)


@pytest.mark.parametrize("family", ALL, ids=str)
def test_ties_are_honoured(family: Family) -> None:
    for tie in family.ties:
        model = build(family, seed=0, tie=tie)
        assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == tie


def test_a_tie_that_the_family_does_not_honour_is_refused() -> None:
    with pytest.raises(AssertionError, match="nemotron_h does not honour tie_word_embeddings=True"):
        build(BY_NAME["nemotron_h"], seed=0, tie=True)


@pytest.mark.parametrize("family", having("idle_expert"), ids=str)
def test_idle_expert_gets_no_gradient_and_the_others_do(family: Family) -> None:
    model, rows = build(family, seed=0), batch(family, seed=1, rows=3, tokens=23)
    biases = [name for name in model.state_dict() if name.endswith(ROUTER_BIASES)]
    assert biases
    experts = {n: g for n, g in reference_loss_and_grads(model, rows).gradients.items() if "experts." in n}
    stacked = {name: gradient for name, gradient in experts.items() if gradient is not None and gradient.ndim == 3}
    assert stacked
    for name, gradient in stacked.items():
        assert not gradient[0].any() and sum(bool(g.any()) for g in gradient) >= 2, name


@pytest.mark.parametrize("family", having("dropout"), ids=str)
def test_dropout_acts_only_when_asked_for(family: Family) -> None:
    rows = batch(family, seed=1, rows=2, tokens=16)
    still, noisy = build(family, seed=0), build(family, seed=0, dropout=0.1)
    assert reference_loss(still, rows).loss == reference_loss(still, rows).loss
    assert reference_loss(noisy, rows).loss != reference_loss(noisy, rows).loss


@pytest.mark.parametrize("family", having("jitter"), ids=str)
def test_jitter_acts_only_when_asked_for(family: Family) -> None:
    rows = batch(family, seed=1, rows=2, tokens=16)
    still, noisy = build(family, seed=0), build(family, seed=0, jitter=0.3)
    assert reference_loss(still, rows).loss == reference_loss(still, rows).loss
    assert reference_loss(noisy, rows).loss != reference_loss(noisy, rows).loss


@pytest.mark.parametrize("family", CORE, ids=str)
def test_build_is_a_function_of_its_arguments(family: Family) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    one, same, other = (build(family, seed=seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_dtype_leaves_rotary_tables_alone() -> None:
    model = build(BY_NAME["llama"], seed=0, dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in model.buffers()} == {torch.float32}


def test_there_are_enough_families_of_every_kind() -> None:
    assert len({family.model_type for family in FAMILIES}) >= 40
    for tag in ("dense", "moe", "sliding", "nope", "absolute", "alibi", "softcap", "multiplier", "linear", "frozen"):
        assert any(tag in family.tags for family in CORE), f"{tag} is missing from CORE"
    assert not any(family.tags & {"shared_weights", "shared_kv", "no_stack"} for family in FAMILIES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(20))
def test_batches(kind: str, seed: int) -> None:
    rows, tokens = 1 + seed % 4, 8 + seed
    one, same = (batch(BY_NAME["llama"], seed, rows, tokens, kind) for _ in range(2))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert {(t.shape, t.dtype) for t in one.values()} == {((rows, tokens), torch.int64)}
    ids, labels = one["input_ids"], one["labels"]
    assert int(ids.min()) >= 0 and int(ids.max()) < VOCAB
    has_target = labels != NO_TARGET
    assert has_target[:, 1:].any() and not has_target.all()
    assert torch.equal(labels[has_target], ids[has_target])
    assert not has_target[ids == PAD].any()
    assert ("attention_mask" in one) == (kind == "masked") and ("document_ids" in one) == (kind == "packed")
    if kind == "masked":
        assert torch.equal(one["attention_mask"], (ids != PAD).long())
    if kind in ("padded", "masked"):
        assert (ids[0] != PAD).all() and (rows == 1 or (ids[1:] == PAD).any(1).all())
    if kind == "packed":
        check_packing(one)


def check_packing(packed: dict[str, Tensor]) -> None:
    spans, (rows, tokens) = document_spans(packed), packed["input_ids"].shape
    assert sum(stop - start for _, start, stop in spans) == rows * tokens
    assert len(spans) >= 2 * rows
    for row, start, stop in spans:
        assert packed["position_ids"][row, start:stop].tolist() == list(range(stop - start))
        assert packed["document_ids"][row, start:stop].unique().numel() == 1
        assert packed["labels"][row, start] == NO_TARGET
    tails = [packed["input_ids"][row, start:stop] for row, start, stop in spans if stop == tokens]
    assert len(tails) == rows and all((tail == PAD).all() for tail in tails)


def test_separate_documents_share_no_target() -> None:
    """Every target of the packed rows is a target of exactly one document."""
    family = BY_NAME["llama"]
    rows = batch(family, seed=3, rows=3, tokens=40, kind="packed")
    separate = separate_documents_loss(build(family, seed=0), rows)
    assert separate.tokens == int((rows["labels"][:, 1:] != NO_TARGET).sum())


def test_a_model_without_positions_refuses_packed_rows() -> None:
    family = BY_NAME["bloom"]
    model = build(family, seed=0)
    assert not accepts_positions(model)
    with pytest.raises(ValueError, match=r"BloomForCausalLM\.forward has no position_ids"):
        forward_loss_sum(model, batch(family, seed=0, rows=1, tokens=16, kind="packed"))


def test_gradient_error() -> None:
    generator = torch.Generator().manual_seed(0)
    want = {name: torch.randn(4, 5, generator=generator) for name in "ab"} | {"zero": torch.zeros(7), "none": None}
    assert gradient_error(dict(want), want) == (0.0, "")
    assert gradient_error(want | {"none": torch.zeros(3), "zero": None}, want)[0] == 0.0
    error, name = gradient_error(want | {"b": want["b"] * 1.01, "a": want["a"] * 1.001}, want)
    assert name == "b" and error == pytest.approx(0.01, rel=1e-4)
    assert gradient_error(want | {"a": None}, want) == (pytest.approx(1.0), "a")
    assert gradient_error(want | {"zero": torch.full((7,), 1e-3)}, want)[1] == "zero"
    assert gradient_error(want | {"zero": torch.full((7,), 1e-3)}, want)[0] > 1e-3
    assert math.isnan(gradient_error(want | {"a": torch.full((4, 5), math.nan)}, want)[0])


def test_gradient_error_of_rounding_alone_is_small() -> None:
    """Rows one by one against all at once: the difference that any engine with microbatches must be allowed. `opt` and `ctrl`
    have gradients that are zero in exact arithmetic."""
    for name in ("llama", "opt", "ctrl", "qwen3_next", "gpt_oss"):
        model, rows = build(BY_NAME[name], seed=0), batch(BY_NAME[name], seed=1, rows=3, tokens=23)
        whole, total = reference_loss_and_grads(model, rows), {}
        for row in range(3):
            part = reference_loss_and_grads(model, {key: t[row : row + 1] for key, t in rows.items()})
            for key, gradient in part.gradients.items():
                total[key] = total.get(key, 0.0) + gradient * (part.tokens / whole.tokens)
        assert gradient_error(total, whole.gradients)[0] < 1e-5, name


def test_trainer_takes_adamw_steps_with_two_groups_and_a_clip() -> None:
    """Against AdamW's formula; `ernie4_5_moe` has frozen parameters, `deepseek_v32` unreached ones."""
    betas, eps, decay, rate = (0.8, 0.9), 1e-6, 0.1, 1e-2
    for name in ("ernie4_5_moe", "deepseek_v32"):
        family = BY_NAME[name]
        model = build(family, seed=0)
        want = {key: p.detach().double().clone() for key, p in model.named_parameters()}
        m, v = ({key: torch.zeros_like(p) for key, p in want.items()} for _ in range(2))
        trainer = ReferenceTrainer(
            model, learning_rate=rate, betas=betas, eps=eps, weight_decay=decay, max_grad_norm=0.5
        )
        decayed = decayed_parameters(model)
        for step in (1, 2):
            rows = batch(family, seed=step, rows=2, tokens=16)
            result = reference_loss_and_grads(model, rows)
            norm = math.sqrt(sum(g.double().square().sum().item() for g in result.gradients.values() if g is not None))
            loss, got_norm = trainer.step(rows)
            assert loss == result.loss and got_norm == pytest.approx(norm, rel=1e-5) and norm > 0.5
            for key, p in model.named_parameters():
                if not p.requires_grad:
                    continue
                g = result.gradients[key]
                g = torch.zeros_like(want[key]) if g is None else g.double() * (0.5 / norm)
                m[key] = betas[0] * m[key] + (1 - betas[0]) * g
                v[key] = betas[1] * v[key] + (1 - betas[1]) * g * g
                update = m[key] / (1 - betas[0] ** step) / ((v[key] / (1 - betas[1] ** step)).sqrt() + eps)
                want[key] = want[key] * (1 - rate * (decay if key in decayed else 0.0)) - rate * update
        for key, p in model.named_parameters():
            torch.testing.assert_close(p.detach().double(), want[key], rtol=1e-4, atol=1e-5, msg=key)


def test_trainer_follows_the_learning_rate_of_the_step_and_can_leave_the_norm_alone() -> None:
    family = BY_NAME["qwen3"]
    rows = batch(family, seed=0, rows=2, tokens=16)
    still, moved = build(family, seed=0), build(family, seed=0)
    before = {name: p.detach().clone() for name, p in still.named_parameters()}
    ReferenceTrainer(still, learning_rate=1.0).step(rows, learning_rate=0.0)
    assert all(torch.equal(p, before[name]) for name, p in still.named_parameters())
    _, norm = ReferenceTrainer(moved, learning_rate=1e-3, max_grad_norm=None, eps=1e6, weight_decay=0.0).step(rows)
    # with such an eps AdamW's first step is lr * g / eps: the gradients themselves, unclipped
    assert norm > 1.0
    gradients = reference_loss_and_grads(still, rows).gradients
    moved_by = max((p - before[name]).abs().max().item() for name, p in moved.named_parameters())
    largest = max(g.abs().max().item() for g in gradients.values())
    assert moved_by <= 1e-3 * largest / 1e6 * 1.01 + 1e-7
