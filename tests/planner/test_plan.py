"""Plans: their decisions, that they fit, and refusals, which come before anything is allocated."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from megatrain.errors import PlanRefused
from megatrain.machine.machine import Machine
from megatrain.optim.adamw import AdamW, Moments
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Options, Plan, StepSize
from megatrain.planner.report import plan_json, plan_text
from megatrain.planner.run import caps_for, plan_step
from megatrain.planner.timeline import CODES_RATE
from megatrain.units import GIB

Shapes = Callable[..., ModelShape]
Machines = Callable[..., Machine]


def assert_fits(made: Plan) -> None:
    assert made.host_bytes <= made.caps.host_bytes
    assert made.device_bytes <= made.caps.device_bytes


def test_8b_on_an_h200_reaches_the_compute_bound(shape: Shapes, machine: Machines) -> None:
    made = plan_step(shape("qwen3-8b"), machine(), StepSize(32, 1024))
    assert_fits(made)
    assert made.tokens_per_s > 11_900
    assert made.placement["embedding"] == "device"  # the first unit that the forward waits for
    layers = [made.placement[f"layer.{i}"] for i in range(36)]
    assert layers == sorted(layers)  # `device` before `host`: early layers give the CPU a head start
    assert made.timeline.bottleneck.startswith("gpu")


def test_caps_simulate_a_smaller_card(shape: Shapes, machine: Machines) -> None:
    made = plan_step(shape("qwen3-8b"), machine(), StepSize(64, 1024), caps_for(machine(), device_gib=24))
    assert_fits(made)
    assert made.device_bytes <= 24 * GIB
    assert made.choice.offloaded > 0
    assert set(made.choice.policies) == {"recompute"}


def test_14b_needs_both_memories(shape: Shapes, machine: Machines) -> None:
    made = plan_step(shape("qwen3-14b"), machine(), StepSize(32, 1024))
    assert_fits(made)
    assert 12 * made.parameters > max(machine().host_gib, machine().device_gib) * GIB
    assert made.tokens_per_s > 5_000


def test_17b_still_trains(shape: Shapes, machine: Machines) -> None:
    made = plan_step(shape("qwen3-17b"), machine(), StepSize(32, 1024))
    assert_fits(made)
    assert made.parameters >= 17e9


def test_a_small_model_is_all_resident(shape: Shapes, machine: Machines) -> None:
    made = plan_step(shape("qwen3-0.6b"), machine(), StepSize(32, 1024))
    assert made.all_resident
    assert set(made.choice.policies) == {"keep"}
    assert "all units in device memory" in plan_text(made)


def test_20b_needs_smaller_moments_which_the_refusal_says_and_the_plan_follows(
    shape: Shapes, machine: Machines
) -> None:
    with pytest.raises(PlanRefused, match=r"optim\.moments: bf16 \(now fp32\): 4 bytes a parameter less.*then it fits"):
        plan_step(shape("qwen3-20b"), machine(), StepSize(32, 1024))
    small = Options(optim=AdamW(moments="bf16"))
    made = plan_step(shape("qwen3-20b"), machine(), StepSize(32, 1024), options=small)
    assert_fits(made)
    assert "m: first moment (2)" in plan_text(made)
    assert "already" not in plan_text(made)


def test_smaller_moments_are_updated_faster_as_far_as_the_arithmetic_keeps_up(shape: Shapes, machine: Machines) -> None:
    def adamw_s(moments: Moments, threads: int | None, name: str = "qwen3-14b", on: str = "h200") -> float:
        options = Options(optim=AdamW(moments=moments), threads=threads)
        made = plan_step(shape(name), machine(on), StepSize(32, 1024), options=options)
        host = sum(n for unit, n in shape(name).unit_elements.items() if made.placement[unit] == "host")
        return made.timeline.busy["cpu adamw"] / host

    assert adamw_s("fp32", None) / adamw_s("bf16", None) == pytest.approx(26 / 18, rel=0.02)
    assert adamw_s("fp32", 1) == pytest.approx(adamw_s("bf16", 1)), "one thread computes as fast as it can"
    large = ("qwen3-32b", "h200-1536gib")
    assert adamw_s("int8", 1, *large) == pytest.approx(adamw_s("fp32", 1, *large) / CODES_RATE), "codes take arithmetic"


def test_32b_on_a_large_host(shape: Shapes, machine: Machines) -> None:
    made = plan_step(shape("qwen3-32b"), machine("h200-1536gib"), StepSize(64, 1024))
    assert_fits(made)
    assert made.tokens_per_s > 2_000


def test_120b_on_an_h200_with_1536_gib_needs_resident_units(shape: Shapes, machine: Machines) -> None:
    large, host = shape("dense-120b"), machine("h200-1536gib")
    assert large.parameters > 120e9
    assert 14 * large.parameters > host.host_gib * GIB
    made = plan_step(large, host, StepSize(16, 1024))
    assert_fits(made)
    assert "device" in made.placement.values()


def test_32b_on_a_workstation_is_refused_with_its_memory_and_remedies(shape: Shapes, machine: Machines) -> None:
    with pytest.raises(PlanRefused) as refusal:
        plan_step(shape("qwen3-32b"), machine("rtx4090-256gib"), StepSize(64, 1024))
    text = str(refusal.value)
    assert refusal.value.exit_code == 3
    assert "248.0 GiB allowed" in text
    assert "m: first moment (4)" in text
    assert "without clipping" in text
    assert "not enough alone" in text
    assert "a model of at most about" in text


def test_following_a_remedy_works(shape: Shapes, machine: Machines) -> None:
    """14 bytes per parameter do not fit, 12 do."""
    small = caps_for(machine(), host_gib=102, device_gib=12)
    with pytest.raises(
        PlanRefused, match=r"memory.gradient_plane: false.*2 bytes a parameter less.*then it fits"
    ) as refusal:
        plan_step(shape("qwen3-8b"), machine(), StepSize(8, 1024), small)
    assert "device memory: 11.0 GiB used, 11.0 GiB allowed: fits" in str(refusal.value), (
        "resident units could move to the host"
    )
    assert "together" not in str(refusal.value)
    made = plan_step(shape("qwen3-8b"), machine(), StepSize(8, 1024), small, Options(gradient_plane=False))
    assert_fits(made)
    assert "device" not in made.placement.values()  # resident units need their gradient plane


def test_pairs_of_remedies_are_tried_if_none_is_enough(shape: Shapes, machine: Machines) -> None:
    """And the pair names the largest number of rows that fits."""
    small, moments = caps_for(machine(), host_gib=71, device_gib=12), AdamW(moments="bf16")
    with pytest.raises(PlanRefused) as refusal:
        plan_step(shape("qwen3-8b"), machine(), StepSize(64, 1024), small, Options(optim=moments))
    text = str(refusal.value)
    assert "fewer rows a step, the most that fit; not enough alone" in text
    found = re.search(
        r"together: without clipping .* with fewer rows: (\d+) rows a step \(batch.tokens_per_step: (\d+), now 65536\); "
        r"then it fits, ([\d,]+) tokens/s",
        text,
    )
    assert found is not None, text
    rows, without_plane = int(found[1]), Options(optim=moments, gradient_plane=False, accumulation_steps=1)
    assert int(found[2]) == rows * 1024
    made = plan_step(shape("qwen3-8b"), machine(), StepSize(rows, 1024), small, without_plane)
    assert f"{made.tokens_per_s:,.0f}" == found[3]
    with pytest.raises(PlanRefused):
        plan_step(shape("qwen3-8b"), machine(), StepSize(rows + 1, 1024), small, without_plane)


def test_a_device_that_is_too_small_is_refused(shape: Shapes, machine: Machines) -> None:
    with pytest.raises(PlanRefused, match=r"device memory: .* too much"):
        plan_step(shape("qwen3-14b"), machine(), StepSize(1, 131072), caps_for(machine(), device_gib=10))


@pytest.mark.parametrize("policy", ["keep", "selective", "recompute"])
def test_a_policy_of_the_user_holds_for_all_layers(shape: Shapes, machine: Machines, policy: str) -> None:
    made = plan_step(shape("qwen3-4b"), machine(), StepSize(8, 1024), None, Options(policy=policy))  # type: ignore[arg-type]
    assert set(made.choice.policies) == {policy}


def test_settings_of_the_user_are_kept(shape: Shapes, machine: Machines) -> None:
    fixed = Options(
        accumulation_steps=2, microbatch_rows=4, head_chunk_tokens=1024, threads=3, segment=4, policy="recompute"
    )
    made = plan_step(shape("qwen3-8b"), machine(), StepSize(32, 1024), None, fixed)
    assert (made.choice.accumulation_steps, made.choice.microbatch_rows, made.choice.head_chunk_tokens) == (2, 4, 1024)
    assert made.execution.segment == 4
    assert made.execution.threads == 3


def test_eager_layers_are_never_selective(shape: Shapes, machine: Machines) -> None:
    made = plan_step(shape("qwen3-8b"), machine(), StepSize(32, 1024), None, Options(compiled=False))
    assert "selective" not in made.choice.policies
    assert made.execution.compile == "off"


def test_more_memory_is_never_slower(shape: Shapes, machine: Machines) -> None:
    """Within the margin of equally fast plans."""
    seconds = [
        plan_step(shape("qwen3-8b"), machine(), StepSize(32, 1024), caps_for(machine(), device_gib=gib)).seconds
        for gib in (24, 48, 80, 138)
    ]
    assert all(more <= 1.01 * less for less, more in zip(seconds, seconds[1:], strict=False))


def test_the_engine_follows_what_was_planned(shape: Shapes, machine: Machines) -> None:
    for caps in (None, caps_for(machine(), device_gib=24)):
        made = plan_step(shape("qwen3-8b"), machine(), StepSize(64, 1024), caps)
        followed, choice = made.execution, made.choice
        assert followed.placement == made.placement
        assert followed.activations == dict(enumerate(choice.policies))
        assert followed.offload_input == frozenset(range(choice.offloaded))
        assert (followed.microbatch_rows, followed.accumulation_steps, followed.head_chunk_tokens) == (
            choice.microbatch_rows, choice.accumulation_steps, choice.head_chunk_tokens
        )  # fmt: skip


def test_a_plan_is_json_and_text(shape: Shapes, machine: Machines) -> None:
    made = plan_step(shape("qwen3-8b"), machine(), StepSize(32, 1024), steps=1000)
    data = json.loads(plan_json(made))
    assert data["device_bytes"]["total"] == made.device_bytes
    assert data["total_seconds"] == pytest.approx(1000 * made.seconds)
    text = plan_text(made)
    for part in ("host memory", "device memory, worst in the", "disk, one checkpoint", "bottleneck", "for 1,000 steps"):
        assert part in text


def test_a_machine_without_a_gpu_is_not_planned_for(shape: Shapes, machine: Machines) -> None:
    with pytest.raises(AssertionError, match="no GPU"):
        plan_step(shape("qwen3-0.6b"), replace(machine(), device_gib=0.0), StepSize(1, 128))
