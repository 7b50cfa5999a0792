"""Alerts: rules over the records of a run's steps. A pure function of a record, and the little that must be remembered.

An alert names what was seen, the cause, and the setting to change. A rule speaks when `steps` records in a row break it, once,
and again only after as many in a row have kept it: a save that follows an alert may well interrupt what it was about. The
first `WARM_UP` steps of a process compile and fill buffers; they are not judged.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatrain.metrics.record import PipelineRecord, StepRecord

Rule = Literal["link_share", "gpu_busy", "speed", "device_memory", "slab_wait", "optimizer_wait", "data_wait"]

WARM_UP = 5
MEDIAN_STEPS = 50
LEAST_MEDIAN_STEPS = 20
WAITS_SHARE = 0.05
"""A GPU that waits for copies for less of a step than this does not wait."""
LARGE_COPY_BYTES = 4 << 20
"""Smaller copies than this, on average, do not reach the link's rate on any machine."""


@dataclass(frozen=True)
class Alert:
    """Attributes: `rule` that was broken; `text` for people: what was seen, why, and what to change."""

    rule: Rule
    text: str


def broken(
    record: StepRecord, limits: Mapping[Rule, float], device_fraction: float, usual_tokens_per_s: float | None
) -> dict[Rule, str]:
    """The rules that a record breaks, each with its text. Rules about the GPU are silent where there is none.

    Args:
        record: Of a step that was taken.
        limits: Threshold of each rule that is on.
        device_fraction: Share of the device's memory that a plan may fill.
        usual_tokens_per_s: The run's own median; None while it is not known.
    """
    found: dict[Rule, str] = {}
    pipeline, step_s = record.pipeline, record.step_s
    if "data_wait" in limits and record.data_wait_s > limits["data_wait"] * step_s:
        found["data_wait"] = (
            f"data-bound: {record.data_wait_s / step_s:.0%} of a step is spent waiting for the batch\n"
            "  -> tokenise once: let data.cache_dir lie on a local disk; a larger batch.tokens_per_step does not help"
        )
    if pipeline is not None:
        found |= _of_the_pipeline(record, pipeline, limits, device_fraction)
    if (
        "speed" in limits
        and usual_tokens_per_s
        and record.processed_tokens_per_s < limits["speed"] * usual_tokens_per_s
    ):
        found["speed"] = (
            f"{record.processed_tokens_per_s:,.0f} tokens/s, {record.processed_tokens_per_s / usual_tokens_per_s:.0%} of this "
            f"run's median of {usual_tokens_per_s:,.0f}; {_largest_part(record)}\n"
            "  -> look for another process on this machine, a hot GPU, or a save in progress (checkpoint.every_steps); "
            "megatrain doctor measures what is left of the machine"
        )
    return found


def _of_the_pipeline(
    record: StepRecord, pipeline: PipelineRecord, limits: Mapping[Rule, float], device_fraction: float
) -> dict[Rule, str]:
    found: dict[Rule, str] = {}
    step_s, waited = record.step_s, pipeline.waited_s
    if "slab_wait" in limits and (share := waited.get("slabs", 0.0) / step_s) > limits["slab_wait"]:
        found["slab_wait"] = (
            f"gradient slabs are short: {share:.0%} of a step is spent waiting for one ({pipeline.slab_waits} times, "
            f"{pipeline.slabs_in_use} of {pipeline.slabs} in use): host threads do not empty them fast enough\n"
            "  -> memory.gradient_slabs: a larger number, run.threads: more, or batch.accumulation_steps: 1 where memory allows"
        )
    total = pipeline.device_total_bytes
    if total is None:
        return found
    if "device_memory" in limits and record.device_peak_bytes is not None:
        share = record.device_peak_bytes / total
        if share > max(limits["device_memory"], device_fraction):
            found["device_memory"] = (
                f"the peak takes {share:.0%} of the device's memory, more than the plan was to fill "
                f"(memory.device_fraction: {device_fraction:g})\n"
                "  -> a lower memory.device_fraction, or smaller batch.microbatch_rows, before a longer row runs out of memory"
            )
    if "optimizer_wait" in limits and (share := waited.get("optimizer", 0.0) / step_s) > limits["optimizer_wait"]:
        rate = pipeline.adamw_share
        found["optimizer_wait"] = (
            f"optimizer-bound: the GPU waits for AdamW on the host for {share:.0%} of a step"
            + (f"; it reaches {rate:.0%} of the host memory's bandwidth" if rate is not None else "")
            + "\n  -> batch.tokens_per_step: a larger number gives it more time to hide in"
            + ("; run.threads: more, it is short of them" if rate is not None and rate < 0.6 else "")
        )
    copies = sum(waited.get(name, 0.0) for name in ("weights", "inputs", "gradients")) / step_s
    for name, link in (("in", pipeline.h2d), ("out", pipeline.d2h)):
        if link is None or link.share is None or link.bytes < LARGE_COPY_BYTES * link.copies:
            continue
        if link.share < limits.get("link_share", 0.0) and copies > WAITS_SHARE:
            found["link_share"] = (
                f"link-bound below the link's rate: copies {name} run at {link.gbps:.1f} GB/s, {link.share:.0%} of what was "
                f"measured, and the GPU waits for copies for {copies:.0%} of a step\n"
                "  -> memory.pin: all if planes are not pinned; else something shares the link or the host's memory: "
                "megatrain doctor; a larger batch.tokens_per_step needs fewer copies a token"
            )
    if "gpu_busy" in limits and not found:
        busy = pipeline.computed_s / step_s
        if pipeline.gpu_utilisation is not None:
            busy = min(busy, pipeline.gpu_utilisation)
        if busy < limits["gpu_busy"]:
            found["gpu_busy"] = (
                f"the GPU works for {busy:.0%} of a step; {_largest_part(record)}\n"
                "  -> batch.tokens_per_step: a larger number; activations.compile: auto and larger batch.microbatch_rows where "
                "it waits for launches"
            )
    return found


def _largest_part(record: StepRecord) -> str:
    """What takes most of the time in which the device does not work."""
    if record.pipeline is None:
        return f"waiting for the batch takes {record.data_wait_s:.3f} s of {record.step_s:.3f} s"
    waits = {f"waiting for {name}": seconds for name, seconds in record.pipeline.waited_s.items()}
    between = record.step_s - record.pipeline.computed_s - sum(waits.values())
    waits["the host's own work and launches"] = max(0.0, between)
    name = max(waits, key=lambda one: waits[one])
    return f"most of the rest is {name}: {waits[name]:.3f} s of {record.step_s:.3f} s"


class AlertWatch:
    """Looks at every record of a process.

    Args:
        limits: Rule -> threshold; a rule that is missing or None is off.
        steps: So many records in a row must break a rule.
        device_fraction: As for `broken`.
    """

    def __init__(self, limits: Mapping[Rule, float | None], steps: int, device_fraction: float):
        self._limits: dict[Rule, float] = {rule: limit for rule, limit in limits.items() if limit is not None}
        self._steps, self._device_fraction = steps, device_fraction
        self._speeds: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._broken: Counter[Rule] = Counter()
        self._kept: Counter[Rule] = Counter()
        """Records in a row that broke, and that kept, a rule."""
        self._said: set[Rule] = set()
        self._seen = 0

    def look(self, record: StepRecord) -> list[Alert]:
        """The alerts that this record completes."""
        if record.skipped is not None or record.step_s <= 0:
            return []
        self._seen += 1
        if self._seen <= WARM_UP:
            return []
        usual = statistics.median(self._speeds) if len(self._speeds) >= LEAST_MEDIAN_STEPS else None
        found = broken(record, self._limits, self._device_fraction, usual)
        if "speed" not in found:  # a slow stretch must not become what is usual
            self._speeds.append(record.processed_tokens_per_s)
        for rule in self._limits:
            now, before = (self._broken, self._kept) if rule in found else (self._kept, self._broken)
            now[rule] += 1
            before[rule] = 0
            if self._kept[rule] >= self._steps:
                self._said.discard(rule)
        long_enough: set[Rule] = {rule for rule in self._limits if self._broken[rule] >= self._steps}
        new = [Alert(rule, text) for rule, text in found.items() if rule in long_enough - self._said]
        self._said |= long_enough
        return new
