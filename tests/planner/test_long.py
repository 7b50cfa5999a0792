"""Plans of very long rows: attention is kept, MLPs run in chunks, and state and inputs share host and device memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatrain.config.schema import ActivationsConfig
from megatrain.errors import PlanRefused
from megatrain.machine.machine import Machine
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Choice, Options, Plan, PlanRequest, Policy, StepSize
from megatrain.planner.run import caps_for, plan_of, plan_step
from megatrain.planner.timeline import recomputed_flops, simulate

Shapes = Callable[..., ModelShape]
Machines = Callable[..., Machine]


def planned(shape: Shapes, machine: Machines, tokens: int, **options: Any) -> Plan:
    return plan_step(shape("qwen3-8b"), machine("h200"), StepSize(1, tokens), options=Options(**options))


def test_short_rows_need_no_chunks(shape: Shapes, machine: Machines) -> None:
    made = planned(shape, machine, 4096)
    assert made.choice.mlp_chunk_tokens is None
    assert "keep_attention" not in made.choice.policies


def test_a_long_row_keeps_attention_and_runs_its_mlps_in_chunks(shape: Shapes, machine: Machines) -> None:
    made = planned(shape, machine, 131072)
    assert made.choice.policies == ("keep_attention",) * 36
    assert made.choice.mlp_chunk_tokens == 16384
    assert made.execution.activations == dict.fromkeys(range(36), "keep_attention")
    assert made.execution.mlp_chunk_tokens == 16384
    recomputed = planned(shape, machine, 131072, policy="recompute")
    assert recomputed.seconds > 1.15 * made.seconds, "attention's forward is most of the recompute"


def test_the_longest_rows_offload_inputs(shape: Shapes, machine: Machines) -> None:
    made = planned(shape, machine, 262144)
    assert made.host_bytes <= made.caps.host_bytes and made.device_bytes <= made.caps.device_bytes
    assert set(made.choice.policies) <= {"keep_attention", "recompute"}
    large = replace(machine("h200"), host_gib=400.0)
    longest = plan_step(shape("qwen3-8b"), large, StepSize(1, 524288))
    assert longest.choice.offloaded > 0
    with pytest.raises(PlanRefused, match="device memory"):
        planned(shape, machine, 1 << 21)


def test_a_larger_host_lets_the_device_keep_more_attention(shape: Shapes, machine: Machines) -> None:
    found = []
    for host_gib in (135.0, 200.0, 400.0):
        made = plan_step(shape("qwen3-8b"), replace(machine("h200"), host_gib=host_gib), StepSize(1, 393216))
        found.append((made.seconds, made.choice.policies.count("keep_attention")))
    assert found[0][1] < found[1][1], "a larger host takes inputs, which makes room for attention on the device"
    assert found[0][0] > found[1][0] >= found[2][0]


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({}, "auto"),
        ({"policy": "selective"}, "selective"),
        ({"attention": "keep"}, "keep_attention"),
        ({"policy": "recompute", "attention": "keep"}, "keep_attention"),
        ({"attention": "keep", "mlp": "recompute"}, "keep_attention"),
        ({"attention": "recompute", "mlp": "keep"}, "keep_mlp"),
        ({"attention": "keep", "mlp": "keep"}, "keep"),
        ({"attention": "recompute"}, "recompute"),
        ({"segment": 4}, "recompute"),
    ],
)
def test_the_config_s_settings_resolve_to_one_policy(given: dict[str, Any], policy: Policy) -> None:
    assert ActivationsConfig(**given).layer_policy == policy


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"policy": "keep", "attention": "recompute"},
            "policy: keep applies to whole layers: leave attention at auto",
        ),
        ({"segment": 4, "attention": "keep"}, "segment keeps only inputs: leave attention at auto"),
    ],
)
def test_contradictory_settings_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActivationsConfig(**given)


def test_time_of_each_policy(shape: Shapes, machine: Machines) -> None:
    """At 131,072 tokens keeping attention saves its forward, keeping the MLP saves far less, and chunks cost an MLP's forward."""
    model, step = shape("qwen3-8b"), StepSize(1, 131072)

    def seconds(policy: Policy, chunk: int | None = None) -> float:
        choice = Choice(0, False, False, (policy,) * model.depth, 0, 1, 1, 4096, chunk)
        return simulate(model, machine("h200"), step, Options(), choice).step

    attention_s = (
        36 * model.cost(0).attention_flops.at(step.tokens) * step.tokens / machine("h200").attention_rate(131072)
    )
    assert seconds("recompute") - seconds("keep_attention") == pytest.approx(attention_s, rel=0.01)
    assert seconds("keep") < seconds("keep_mlp") < seconds("recompute")
    assert seconds("recompute", 16384) > seconds("recompute")
    assert seconds("keep_attention", 16384) == pytest.approx(seconds("keep_attention"))


def test_recomputed_flops(shape: Shapes) -> None:
    model, step = shape("qwen3-8b"), StepSize(1, 131072)
    cost = model.cost(0)
    products, attention, mlp = (
        line.at(step.tokens) for line in (cost.product_flops, cost.attention_flops, cost.token_wise_flops)
    )

    def again(policy: Policy, chunk: int | None = None) -> float:
        return recomputed_flops(model, step, Choice(0, False, False, (policy,) * 36, 0, 1, 1, 4096, chunk)) / 36

    assert again("keep") == again("selective") == 0
    assert again("recompute") == pytest.approx(products + attention)
    assert again("recompute", 16384) == pytest.approx(products + attention + mlp)
    assert again("keep_attention", 16384) == pytest.approx(products)
    assert again("keep_mlp") == pytest.approx(products - mlp + attention)


def test_the_attention_rate_passes_through_both_measured_lengths(machine: Machines) -> None:
    measured = replace(machine("h200"), attention_tflops=327.0, attention_long_tflops=500.0)
    assert measured.attention_rate(1024) == pytest.approx(327e12)
    assert measured.attention_rate(32768) == pytest.approx(500e12)
    assert 500e12 < measured.attention_rate(1 << 19) < 520e12
    unknown = replace(measured, attention_long_tflops=None)
    assert unknown.attention_rate(1 << 19) == pytest.approx(327e12), "as in short rows"


def test_mlps_that_are_not_token_wise_are_computed_whole(shape: Shapes, machine: Machines) -> None:
    model = shape("qwen3-8b")
    whole = replace(
        model, costs=tuple(replace(cost, token_wise_parameters=0) for cost in model.costs), norm_in_chunks=False
    )
    made = plan_step(whole, machine("h200"), StepSize(1, 65536))
    assert made.choice.mlp_chunk_tokens is None
    request = PlanRequest(whole, machine("h200"), StepSize(1, 65536), caps_for(machine("h200")), Options())
    assert plan_of(request, made.choice).device_bytes <= request.caps.device_bytes
