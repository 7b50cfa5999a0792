"""Every rule speaks when it is broken, names the setting to change, and is silent on a healthy run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatrain.config.schema import AlertsConfig
from megatrain.metrics.alerts import PIPELINE_RULES, WARM_UP, AlertWatch, Rule
from megatrain.metrics.record import Link, PipelineRecord, StepRecord
from megatrain.units import GIB
from step_records import record as step_record

DEFAULTS = AlertsConfig()
HEALTHY = step_record(
    1,
    data_wait_s=0.01,
    device_peak_bytes=125 * GIB,  # of 140: what a plan may fill by default
    pipeline=PipelineRecord(
        computed_s=1.85,
        waited_s={"weights": 0.02, "optimizer": 0.08, "slabs": 0.01},
        h2d=Link(bytes=40 * GIB, copies=100, busy_s=1.0, gbps=40.0, share=0.75),
        d2h=Link(bytes=10 * GIB, copies=50, busy_s=0.5, gbps=20.0, share=0.4),
        overlap=0.95,
        slabs=12,
        slabs_in_use=4,
        gpu_utilisation=0.97,
        device_total_bytes=140 * GIB,
        adamw_share=0.8,
    ),
)


def watch(**limits: float | None) -> AlertWatch:
    chosen: dict[Rule, float | None] = {r: limits.get(r, getattr(DEFAULTS, r)) for r in PIPELINE_RULES}
    return AlertWatch(chosen, DEFAULTS.steps, device_fraction=0.92)


def record(waits: dict[str, float] | None = None, link: dict[str, Any] | None = None, **changes: Any) -> StepRecord:
    pipeline = HEALTHY.pipeline
    assert pipeline is not None
    assert pipeline.h2d is not None
    parts = {name: changes.pop(name) for name in list(changes) if name in PipelineRecord.__dataclass_fields__}
    pipeline = replace(
        pipeline,
        waited_s={**pipeline.waited_s, **(waits or {})},
        h2d=replace(pipeline.h2d, **(link or {})),
        **parts,
    )
    return replace(HEALTHY, pipeline=pipeline, **changes)


SICK: dict[Rule, tuple[StepRecord, str]] = {
    "link_share": (record({"weights": 0.3}, {"gbps": 20.0, "share": 0.4}), "memory.pin"),
    "gpu_busy": (record(computed_s=1.2), "batch.tokens_per_step"),
    "speed": (record(processed_tokens_per_s=1200.0), "another process"),
    "device_memory": (record(device_peak_bytes=135 * GIB), "memory.device_fraction"),
    "allocation_retries": (record(allocation_retries=2, device_gap_bytes=3 * GIB), "PYTORCH_CUDA_ALLOC_CONF"),
    "slab_wait": (record({"slabs": 0.2}, slabs_in_use=12, slab_waits=9), "memory.gradient_slabs"),
    "optimizer_wait": (record({"optimizer": 0.6}), "batch.tokens_per_step"),
    "data_wait": (record(data_wait_s=0.5), "data.cache_dir"),
    "expert_share": (record(expert_max_share=0.95), "model.router_aux_loss"),
    "expert_idle": (record(expert_idle=0.6, processed_tokens=8192), "model.router_aux_loss"),
}


def rules_of(watcher: AlertWatch, records: list[StepRecord]) -> list[str]:
    return [alert.rule for one in records for alert in watcher.check(one)]


def test_every_rule_is_provoked_below() -> None:
    assert set(SICK) == set(PIPELINE_RULES)


@pytest.mark.parametrize("rule", SICK)
def test_a_rule_speaks_once_and_names_what_to_change(rule: Rule) -> None:
    watcher, (sick, setting) = watch(), SICK[rule]
    assert rules_of(watcher, [HEALTHY] * 40) == []
    alerts = [alert for _ in range(DEFAULTS.steps + 5) for alert in watcher.check(sick)]
    assert [alert.rule for alert in alerts] == [rule]
    assert setting in alerts[0].text
    assert "->" in alerts[0].text
    assert rules_of(watcher, [HEALTHY, *[sick] * DEFAULTS.steps]) == [], "one good step is no end"
    assert rules_of(watcher, [HEALTHY] * DEFAULTS.steps) == []
    assert rules_of(watcher, [sick] * DEFAULTS.steps) == [rule], "again, after it was over"


@pytest.mark.parametrize("rule", SICK)
def test_a_rule_that_is_off_or_broken_for_a_few_steps_only_is_silent(rule: Rule) -> None:
    sick = SICK[rule][0]
    off = watch(**{rule: None, "gpu_busy": None})
    assert rule not in rules_of(off, [HEALTHY] * 40 + [sick] * 20)
    assert rules_of(watch(), ([HEALTHY] * 40 + [sick] * (DEFAULTS.steps - 1)) * 3) == []


def test_the_first_steps_are_not_judged() -> None:
    sick = SICK["data_wait"][0]
    assert rules_of(watch(), [sick] * (WARM_UP + DEFAULTS.steps - 1)) == []
    assert rules_of(watch(), [sick] * (WARM_UP + DEFAULTS.steps)) == ["data_wait"]


def test_a_gpu_that_waits_is_one_alert_with_the_cause_and_not_two() -> None:
    sick = record({"optimizer": 0.9}, computed_s=1.0)
    assert rules_of(watch(), [HEALTHY] * 10 + [sick] * 20) == ["optimizer_wait"]


def test_low_utilisation_counts_as_idle() -> None:
    assert rules_of(watch(), [HEALTHY] * 10 + [record(gpu_utilisation=0.5)] * 20) == ["gpu_busy"]


def test_a_slow_link_that_nobody_waits_for_is_no_alert() -> None:
    assert rules_of(watch(), [record(link={"share": 0.2})] * 40) == []


def test_small_copies_are_slow_everywhere() -> None:
    sick, _ = SICK["link_share"]
    assert sick.pipeline is not None
    assert sick.pipeline.h2d is not None
    assert sick.pipeline.d2h is not None
    links = {name: replace(getattr(sick.pipeline, name), copies=100_000) for name in ("h2d", "d2h")}
    assert rules_of(watch(), [replace(sick, pipeline=replace(sick.pipeline, **links))] * 40) == []


def test_a_cpu_has_no_rules_about_a_gpu() -> None:
    sick = record({"optimizer": 1.5, "weights": 0.4}, {"share": 0.1}, computed_s=0.1, device_total_bytes=None)
    assert rules_of(watch(), [sick] * 40) == []


def test_records_without_figures_keep_the_rules_that_need_none() -> None:
    plain = replace(HEALTHY, pipeline=None)
    slow = replace(plain, processed_tokens_per_s=600.0)
    assert rules_of(watch(), [plain] * 40 + [slow] * 20) == ["speed"]


def test_skipped_steps_are_not_judged() -> None:
    sick = replace(SICK["data_wait"][0], skipped="loss is not finite")
    assert rules_of(watch(), [sick] * 40) == []
