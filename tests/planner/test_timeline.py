"""Predicted times, compared with measurements on an H200, and properties that hold on any machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.machine.machine import Machine
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Choice, Cut, Options, StepSize
from megatrain.planner.timeline import head_seconds, layer_seconds, simulate

Shapes = Callable[..., ModelShape]
Machines = Callable[..., Machine]
STEP = StepSize(32, 1024)


def choice(shape: ModelShape, policy: str = "recompute", **changes: object) -> Choice:
    plain = Choice(0, False, False, (policy,) * shape.depth, 0, 1, 32, 4096)  # type: ignore[arg-type]
    return replace(plain, **changes)


@pytest.mark.parametrize(
    ("policy", "forward_ms", "both_ms"),
    [("keep", 20.9, 62.0), ("selective", 21.1, 65.4), ("recompute", 18.2, 18.2 + 62.0)],
)
def test_a_compiled_layer_as_measured(
    shape: Shapes, machine: Machines, policy: str, forward_ms: float, both_ms: float
) -> None:
    model = shape("qwen3-8b")
    cut = Cut.of(STEP, choice(model, policy))
    seconds = layer_seconds(model, machine(), STEP, Options(), cut, 0, policy)  # type: ignore[arg-type]
    assert seconds.forward * 1e3 == pytest.approx(forward_ms, rel=0.05)
    assert (seconds.forward + seconds.backward) * 1e3 == pytest.approx(both_ms, rel=0.05)


def test_the_head_as_measured(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    cut = Cut.of(STEP, choice(model, head_chunk_tokens=8192))
    assert head_seconds(model, machine(), Options(), cut) == pytest.approx(0.188, rel=0.12)


def test_an_all_host_eager_step_as_measured(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    played = simulate(
        model, machine(), STEP, Options(compiled=False), choice(model, microbatch_rows=16, head_chunk_tokens=2355)
    )
    assert played.step == pytest.approx(4.84, rel=0.15)
    assert played.phases["update_wait"] == pytest.approx(0.84, rel=0.15)
    assert played.phases["backward"] == pytest.approx(3.15, rel=0.15)
    assert "AdamW" in played.bottleneck


def test_phases_add_up_to_the_step(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    for accumulation_steps, resident in ((1, 0), (1, 20), (4, 0), (4, 36)):
        way = choice(model, accumulation_steps=accumulation_steps, microbatch_rows=8, resident_layers=resident)
        played = simulate(model, machine(), STEP, Options(), way)
        assert sum(played.phases.values()) == pytest.approx(played.step, abs=1e-4)
        assert played.compute <= played.step
        assert all(seconds >= 0 for seconds in played.phases.values())


def test_resident_layers_shorten_the_wait_for_adamw(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    waits = [
        simulate(model, machine(), STEP, Options(), choice(model, resident_layers=n, resident_embedding=True)).phases[
            "update_wait"
        ]
        for n in (0, 8, 16)
    ]
    assert waits[0] > waits[1] > waits[2]


def test_a_slow_link_is_named_as_the_bottleneck(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    slow = replace(
        machine(), h2d_gbps=4.0, d2h_gbps=4.0, both_gbps=4.0, adamw_gparams={16: 50.0}, adamw_streaming_gparams=None
    )
    played = simulate(model, slow, StepSize(8, 1024), Options(), choice(model, microbatch_rows=8))
    assert played.bottleneck.startswith("link: ")
    assert played.step > 2 * 14e9 / 4e9  # weights travel twice: for the forward and for the backward


def test_a_slow_cpu_is_named_as_the_bottleneck(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    slow = replace(machine(), adamw_gparams={2: 0.5}, adamw_streaming_gparams=None)
    played = simulate(model, slow, STEP, Options(), choice(model))
    assert "AdamW" in played.bottleneck
    assert played.step > model.parameters / 0.5e9


def test_segments_cost_a_third_forward(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    plain = simulate(model, machine(), STEP, Options(), choice(model))
    segments = simulate(model, machine(), STEP, Options(segment=4), choice(model))
    assert 1.1 < segments.step / plain.step < 1.3


def test_updates_fused_with_the_backward_leave_no_wait_in_the_forward(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    fused = simulate(model, machine(), STEP, Options(gradient_plane=False), choice(model))
    assert fused.phases["update_wait"] == 0
