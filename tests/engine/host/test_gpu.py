"""Streams and memory on a real GPU: streaming changes no result."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch

from engines import host_engine
from families import BY_NAME, CORE, Family, batch, build
from megatrain.device.streams import Streams
from megatrain.host_memory.layout import FlatLayout
from megatrain.host_memory.store import UnitPlanes, split_
from megatrain.optim.adamw import AdamW
from megatrain.optim.spec import segments_of
from reference import ReferenceTrainer, gradient_error, reference_loss_and_grads

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _exact_matrix_products() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def random_delays(seed: int) -> Any:
    """Delays a stream by up to about a millisecond, at random, after work was queued on it."""
    generator = random.Random(seed)

    def disturb(name: str, streams: Streams) -> None:
        if generator.random() < 0.3:
            stream = getattr(streams, name)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(generator.randrange(1, 2_000_000))

    return disturb


def trained(family: Family, steps: int, **options: Any) -> tuple[list[float | None], dict[str, torch.Tensor]]:
    """Losses and final weights of a run on the GPU."""
    options = {"compute_dtype": "bf16", "optim": AdamW(learning_rate=1e-3), "compile": "off", **options}
    losses = []
    with host_engine(build(family, seed=0), device="cuda", verify="never", threads=4, **options) as engine:
        for step in range(steps):
            losses.append(engine.train_step(batch(family, seed=step, rows=4, tokens=32, kind="padded")).loss)
        return losses, dict(engine.named_parameters())


def assert_same_bits(one: Any, other: Any) -> None:
    assert one[0] == other[0], "losses differ"
    for name, weight in one[1].items():
        assert torch.equal(weight, other[1][name]), name


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral"])
def test_streaming_with_random_delays_and_poisoned_buffers_equals_everything_resident(name: str) -> None:
    """Fifty steps, bit for bit."""
    family = BY_NAME[name]
    resident = trained(family, 50, weight_slots=64)
    streamed = trained(family, 50, weight_slots=2, disturb=random_delays(1), poison=True)
    assert_same_bits(resident, streamed)


@pytest.mark.parametrize(
    "options",
    [
        {"pin": "staged"},
        {"microbatch_rows": 1},
        {"accumulation_steps": 2},
        {"accumulation_steps": 2, "pin": "staged"},
        {"segment": 2},
    ],
    ids=str,
)
def test_delays_are_invisible_on_every_route(options: dict[str, Any]) -> None:
    family = BY_NAME["qwen3"]
    calm = trained(family, 20, weight_slots=64, **options)
    assert_same_bits(calm, trained(family, 20, disturb=random_delays(2), poison=True, **options))


def test_a_fused_update_equals_one_from_a_gradient_plane() -> None:
    family, optim = BY_NAME["qwen3"], AdamW(learning_rate=1e-3, max_grad_norm=None)
    kept = trained(family, 20, optim=optim)
    fused = trained(
        family, 20, optim=optim, gradient_plane=False, gradient_slabs=2, disturb=random_delays(3), poison=True
    )
    assert_same_bits(kept, fused)


@pytest.mark.parametrize(
    "options",
    [
        {"resident": "all"},
        {"resident": ("embedding", "layer.0", "layer.2")},
        {"resident": ("head", "layer.1"), "accumulation_steps": 2},
        {"keep": "all"},
        {"keep": (0, 3), "resident": ("layer.3",)},
        {"offload_input": "all"},
        {"offload_input": (1, 2), "keep": (0,), "selective": (3,), "accumulation_steps": 2},
    ],
    ids=str,
)
def test_placement_and_kept_activations_do_not_change_a_bit(options: dict[str, Any]) -> None:
    family = BY_NAME["qwen3"]
    accumulation_steps = options.get("accumulation_steps", 1)
    plain = trained(family, 20, accumulation_steps=accumulation_steps)
    assert_same_bits(plain, trained(family, 20, disturb=random_delays(4), poison=True, **options))


@pytest.mark.parametrize("options", [{}, {"selective": "all", "selective_budget": 0.5, "microbatch_rows": 2}], ids=str)
def test_compiled_layers_follow_eager_ones(options: dict[str, Any]) -> None:
    family = BY_NAME["qwen3"]
    eager, _ = trained(family, 10)
    compiled, _ = trained(family, 10, compile="on", disturb=random_delays(5), poison=True, **options)
    for a, b in zip(eager, compiled, strict=True):
        assert a == pytest.approx(b, rel=2e-3)


@pytest.mark.parametrize("options", [{}, {"microbatch_rows": 2, "selective": "all"}], ids=str)
def test_packed_rows_use_block_masks_and_follow_plain_hugging_face(options: dict[str, Any]) -> None:
    family = BY_NAME["qwen3"]
    model = build(family, seed=0).cuda()
    rows = batch(family, seed=1, rows=4, tokens=300, kind="packed")
    want = reference_loss_and_grads(copy.deepcopy(model), {name: t.cuda() for name, t in rows.items()})
    with host_engine(model, device="cuda", compute_dtype="fp32", verify="never", compile="on", **options) as engine:
        engine.backward(rows)
        result = engine.backward(rows)
        assert engine.structure.model.config._attn_implementation == "flex_attention"
        got = dict(engine.named_gradients())
    assert result.loss == pytest.approx(want.loss, rel=1e-4)
    expected = {n: g.cpu() if g is not None else torch.zeros_like(got[n]) for n, g in want.gradients.items()}
    error, name = gradient_error(got, expected)
    assert error < 1e-3, f"{name}: {error:.1e}"


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("gradient", [torch.bfloat16, torch.float32])
def test_the_gpu_update_has_the_bits_of_the_cpu_update(split: bool, gradient: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    numel = 100_003
    master = torch.randn(numel, generator=generator)
    grad = (torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-12, 3, (numel,), generator=generator)).to(
        gradient
    )
    grad[::7] = 0
    hi, lo = (
        (torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)) if split else (master, None)
    )
    if lo is not None:
        split_(master, hi, lo)
    optim = AdamW(learning_rate=1e-3, weight_decay=0.1)
    segments = segments_of([("w", (7, 11), 3, 90_000), ("b", (10_000,), 90_003, 10_000)], optim)
    layout, states = FlatLayout((), numel), {"m": torch.zeros(numel), "v": torch.zeros(numel)}
    host = UnitPlanes("layer.0", layout, hi, lo, states)
    device = UnitPlanes.of("layer.0", layout, {kind: plane.cuda() for kind, plane in host.state().items()})
    for step in range(1, 30):
        coefficients = optim.coefficients(step, 1e-3, 0.37)
        optim.update_unit_(host, grad, segments, coefficients)
        optim.update_on_device(device, grad.cuda(), segments, coefficients)
    for kind, plane in host.state().items():
        assert torch.equal(plane.view(torch.uint8), device.state()[kind].cpu().view(torch.uint8))


@pytest.mark.parametrize("family", CORE, ids=str)
def test_gradients_equal_plain_hugging_face_on_the_gpu(family: Family) -> None:
    model = build(family, seed=0).cuda()
    rows = batch(family, seed=1, rows=3, tokens=24, kind="padded")
    want = reference_loss_and_grads(copy.deepcopy(model), {name: t.cuda() for name, t in rows.items()})
    with host_engine(
        model, device="cuda", compute_dtype="fp32", microbatch_rows=2, verify="never", compile="off"
    ) as engine:
        result = engine.backward(rows)
        got = dict(engine.named_gradients())
    assert result.loss == pytest.approx(want.loss, rel=1e-5)
    expected = {n: g.cpu() if g is not None else torch.zeros_like(got[n]) for n, g in want.gradients.items()}
    error, name = gradient_error(got, expected)
    assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_low_precision_follows_the_fp32_run(compute: str) -> None:
    family = BY_NAME["qwen3"]
    reference = ReferenceTrainer(build(family, seed=0), learning_rate=1e-3)
    losses, _ = trained(family, 20, compute_dtype=compute)
    for step, loss in enumerate(losses):
        want, _ = reference.step(batch(family, seed=step, rows=4, tokens=32, kind="padded"))
        assert loss == pytest.approx(want, rel=2e-2)


def test_memory_is_what_the_formula_says_and_nothing_is_pinned_after_the_first_step() -> None:
    family = BY_NAME["qwen3"]
    with host_engine(
        build(family, seed=0), device="cuda", compute_dtype="bf16", verify="never", compile="off"
    ) as engine:
        numel = sum(unit.layout.numel for unit in engine.structure.units)
        units = len(engine.structure.units)
        memory = engine.memory()
        asked = 4 * numel  # hi and gradients, bf16
        assert asked <= memory["host_pinned"] <= 1.03 * asked + 2 * 4096 * (units + 1)
        for step in range(3):
            engine.train_step(batch(family, seed=step, rows=2, tokens=16))
            assert engine.memory()["host_pinned"] == memory["host_pinned"]


def test_an_evaluation_holds_no_logits() -> None:
    """Its peak device memory is far below the size of all its logits."""
    vocabulary = 16384
    family = BY_NAME["qwen3"]
    family = dataclasses.replace(family, overrides={**family.overrides, "vocab_size": vocabulary})
    data = batch(family, seed=0, rows=64, tokens=64)
    with host_engine(
        build(family, seed=0), device="cuda", compute_dtype="bf16", verify="never", compile="off", head_chunk_tokens=64
    ) as engine:
        engine.eval_step(data)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine.eval_step(data)
        peak = torch.cuda.max_memory_allocated() - before
    assert peak < 64 * 64 * vocabulary * 4 / 8, "all logits in fp32 would take eight times this"
