"""A resumed run keeps the plan of its checkpoint where it fits, else its cut, and names what changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.load import load_config
from megatrain.config.schema import RunConfig
from megatrain.machine.machine import Machine
from megatrain.planner.keep import CUT, fits, keep, plain_choice, plan_settings
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Caps, Choice, PlanRequest, StepSize
from megatrain.planner.run import _resumed, caps_for, options_of
from megatrain.planner.search import Search
from tiny_run import config

Shapes = Callable[..., ModelShape]
Machines = Callable[..., Machine]
STEP = ("data.max_tokens=1024", "batch.tokens_per_step=32768")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunConfig]:
    return lambda *words: load_config(config(tmp_path), [*STEP, *words])


@pytest.fixture
def request_of(shape: Shapes, machine: Machines) -> Callable[..., PlanRequest]:
    """An 8B model on a device with some GiB, by a run's config."""

    def make(run: RunConfig, device_gib: float = 24.0, host_gib: float = 300.0) -> PlanRequest:
        caps = Caps(int(host_gib * (1 << 30)), caps_for(machine(), device_gib=device_gib).device_bytes)
        options = options_of(run, "bf16")
        return PlanRequest(
            shape("qwen3-8b"), machine(), StepSize(run.rows_per_step, run.data.max_tokens), caps, options
        )

    return make


def record_of(run: RunConfig, choice: Choice) -> dict[str, Any]:
    """What a checkpoint remembers, through JSON."""
    return json.loads(json.dumps({"settings": plan_settings(run), "choice": plain_choice(choice)}))


def best(request: PlanRequest) -> Choice:
    found = Search(request).best()
    assert found is not None
    return found.choice


def cut(choice: Choice) -> list[object]:
    return [getattr(choice, field) for field in CUT]


def test_a_plan_that_fits_is_kept_although_another_would_be_made_now(
    run: Callable[..., RunConfig], request_of: Callable[..., PlanRequest]
) -> None:
    old = best(request_of(run(), device_gib=24))
    more = request_of(run(), device_gib=80)
    assert best(more) != old
    assert keep(more, run(), record_of(run(), old)).choice == old
    made = _resumed(more, run(), record_of(run(), old), steps=10)
    assert (made.choice, made.remarks) == (old, ())


def test_a_little_less_free_memory_changes_nothing(
    run: Callable[..., RunConfig], request_of: Callable[..., PlanRequest]
) -> None:
    old = best(request_of(run(), device_gib=80))
    kept = keep(request_of(run(), device_gib=80 * 0.995), run(), record_of(run(), old))
    assert (kept.choice, kept.remarks) == (old, ())


def test_where_the_plan_does_not_fit_the_cut_is_kept_and_the_rest_is_named(
    run: Callable[..., RunConfig], request_of: Callable[..., PlanRequest]
) -> None:
    old, less = best(request_of(run(), device_gib=80)), request_of(run(), device_gib=40)
    kept = keep(less, run(), record_of(run(), old))
    assert kept.choice is not None and kept.choice != old and cut(kept.choice) == cut(old)
    assert fits(less, kept.choice)
    said = "; ".join(kept.remarks)
    assert "the checkpoint's plan does not fit: it needs " in said and "of device memory, " in said
    assert "resident layers: " in said or "activations: other policies" in said


def test_where_nothing_fits_with_the_cut_everything_is_planned_again_and_named(
    run: Callable[..., RunConfig], request_of: Callable[..., PlanRequest]
) -> None:
    old = replace(best(request_of(run(), device_gib=140)), microbatch_rows=32, head_chunk_tokens=32768)
    small = request_of(run(), device_gib=9)
    assert keep(small, run(), record_of(run(), old)).choice is None
    made = _resumed(small, run(), record_of(run(), old), steps=None)
    assert made.choice == best(small)
    said = "; ".join(made.remarks)
    assert f"batch.microbatch_rows: 32 -> {made.choice.microbatch_rows}" in said
    assert f"batch.head_chunk_tokens: 32768 -> {made.choice.head_chunk_tokens}" in said


def test_a_setting_that_the_user_has_changed_wins_and_is_said(
    run: Callable[..., RunConfig], request_of: Callable[..., PlanRequest]
) -> None:
    old, now = best(request_of(run())), run("batch.microbatch_rows=3")
    kept = keep(request_of(now), now, record_of(run(), old))
    assert kept.choice == replace(old, microbatch_rows=3), "nothing else changes"
    assert kept.remarks == ("batch.microbatch_rows was null and is 3",)
    policy = run("activations.policy=recompute", "activations.offload_input=on")
    kept = keep(request_of(policy), policy, record_of(run(), old))
    assert kept.choice is not None and set(kept.choice.policies) == {"recompute"} and cut(kept.choice) == cut(old)
    assert "activations.policy was auto and is recompute" in kept.remarks


def test_a_setting_given_back_to_the_planner_is_planned_again(
    run: Callable[..., RunConfig], request_of: Callable[..., PlanRequest]
) -> None:
    then = run("batch.microbatch_rows=1")
    old = best(request_of(then))
    kept = keep(request_of(run()), run(), record_of(then, old))
    assert kept.choice is not None and kept.choice.microbatch_rows > 1
    assert kept.remarks[0] == "batch.microbatch_rows was 1 and is null"


def test_another_step_is_planned_from_scratch(
    run: Callable[..., RunConfig], request_of: Callable[..., PlanRequest]
) -> None:
    old, now = best(request_of(run())), run("batch.tokens_per_step=65536")
    made = _resumed(request_of(now), now, record_of(run(), old), steps=None)
    assert made.choice == best(request_of(now))
    assert "batch.tokens_per_step was 32768 and is 65536" in made.remarks


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.pop("microbatch_rows"),
        lambda plain: plain.update(microbatch_rows="many"),
        lambda plain: plain.update(policies=["recompute"]),
        lambda plain: plain.update(policies=["forget"] * 36),
        lambda plain: plain.update(policies=None),
        lambda plain: plain.update(resident_layers=99),
    ],
)
def test_a_plan_that_is_none_is_ignored(
    run: Callable[..., RunConfig],
    request_of: Callable[..., PlanRequest],
    damage: Callable[[dict[str, Any]], object],
) -> None:
    record = record_of(run(), best(request_of(run())))
    damage(record["choice"])
    assert keep(request_of(run()), run(), record).choice is None
    assert keep(request_of(run()), run(), {"choice": [1]}).choice is None
