"""Alerts: rules over the records of a run's steps.

An alert names the symptom, the cause, and the setting to change. A rule speaks when enough records in a row break it, once, and
again only after enough in a row have kept it: the save that an alert triggers may well interrupt the symptom. Records that do not
have a rule's figure do not count for it.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatrain.metrics.record import MeshRecord, PipelineRecord, StepRecord
from megatrain.units import counted, gib

PipelineRule = Literal[
    "link_share",
    "gpu_busy",
    "speed",
    "device_memory",
    "slab_wait",
    "optimizer_wait",
    "data_wait",
    "allocation_retries",
    "expert_share",
    "expert_idle",
]
"""Rules with a threshold and an action in the config's `alerts`."""
RankRule = Literal["mfu_floor", "imbalance", "straggler"]
"""Rules over all ranks of the mesh engine."""
Rule = PipelineRule | RankRule
PIPELINE_RULES: tuple[PipelineRule, ...] = get_args(PipelineRule)

WARM_UP = 5
"""The first steps of a process compile and fill buffers: pipeline rules do not judge them."""
MEDIAN_STEPS = 50
LEAST_MEDIAN_STEPS = 20
WAITS_SHARE = 0.05
"""A GPU that waits for copies for less than this share of a step is not waiting."""
LARGE_COPY_BYTES = 4 << 20
"""Copies smaller than this, on average, do not reach the link's rate on any machine."""
LEAST_ROUTED_TOKENS = 4096
"""In smaller steps experts may well be without tokens."""
RANK_LIMITS: dict[RankRule, float] = {"imbalance": 0.2, "straggler": 0.2}
"""imbalance: excess of the busiest stage over the mean; straggler: excess of a rank's own work over the median of its peers'."""
RANK_STEPS = 5
"""Records in a row that must break a rank rule; one that keeps it is enough to arm it again."""


@dataclass(frozen=True)
class Alert:
    """A broken rule, and the text for the user: symptom, cause, and what to change."""

    rule: Rule
    text: str


def broken(
    record: StepRecord, limits: Mapping[Rule, float], device_fraction: float, usual_tokens_per_s: float | None
) -> dict[Rule, str]:
    """The pipeline rules that a record breaks, each with its text. Rules about the GPU are silent where there is none.

    `limits`: the threshold of each rule that is on; `device_fraction`: the share of the device's memory that a plan may fill;
    `usual_tokens_per_s`: the run's median, None while it is unknown.
    """
    found: dict[Rule, str] = {}
    pipeline, step_s = record.pipeline, record.step_s
    if "data_wait" in limits and record.data_wait_s > limits["data_wait"] * step_s:
        found["data_wait"] = (
            f"data-bound: waiting for the batch takes {record.data_wait_s / step_s:.0%} of a step\n"
            "  -> tokenise once: put data.cache_dir on a local disk; a larger batch.tokens_per_step does not help"
        )
    remedy = (
        "  -> model.router_aux_loss: true, or a larger coefficient; a lower learning rate, of all parameters or of the routers "
        "(optim.groups: lr_scale); an earlier checkpoint if it began suddenly"
    )
    if "expert_share" in limits and (share := record.expert_max_share or 0.0) > limits["expert_share"]:
        found["expert_share"] = f"routing collapses: one expert of a layer gets {share:.0%} of all tokens\n{remedy}"
    idle = (record.expert_idle or 0.0) if record.processed_tokens >= LEAST_ROUTED_TOKENS else 0.0
    if "expert_idle" in limits and idle > limits["expert_idle"]:
        found["expert_idle"] = f"routing collapses: {idle:.0%} of the experts get no token\n{remedy}"
    if pipeline is not None:
        found |= _broken_in_pipeline(record, pipeline, limits, device_fraction)
    speed = record.processed_tokens_per_s
    if "speed" in limits and usual_tokens_per_s and speed < limits["speed"] * usual_tokens_per_s:
        found["speed"] = (
            f"{speed:,.0f} tokens/s, {speed / usual_tokens_per_s:.0%} of this run's median of {usual_tokens_per_s:,.0f}; "
            f"{_largest_part(record)}\n"
            "  -> look for another process on this machine, a hot GPU, or a save in progress (checkpoint.every_steps); "
            "megatrain doctor measures the machine"
        )
    return found


def _broken_in_pipeline(
    record: StepRecord, pipeline: PipelineRecord, limits: Mapping[Rule, float], device_fraction: float
) -> dict[Rule, str]:
    found: dict[Rule, str] = {}
    step_s, waited = record.step_s, pipeline.waited_s
    if "slab_wait" in limits and (share := waited.get("slabs", 0.0) / step_s) > limits["slab_wait"]:
        found["slab_wait"] = (
            f"short of gradient slabs: waiting for one takes {share:.0%} of a step ({pipeline.slab_waits} times, "
            f"{pipeline.slabs_in_use} of {pipeline.slabs} in use): host threads do not empty them fast enough\n"
            "  -> memory.gradient_slabs: a larger number, run.threads: more, or batch.accumulation_steps: 1 where memory allows"
        )
    total = pipeline.device_total_bytes
    if total is None:
        return found
    share = (record.device_peak_bytes or 0) / total
    if "device_memory" in limits and share > max(limits["device_memory"], device_fraction):
        found["device_memory"] = (
            f"peak device memory is {share:.0%} of the device's, above what the plan may fill "
            f"(memory.device_fraction: {device_fraction:g})\n"
            "  -> a lower memory.device_fraction, or smaller batch.microbatch_rows, before a longer row runs out of memory"
        )
    if "allocation_retries" in limits and pipeline.allocation_retries > limits["allocation_retries"]:
        gaps = f", {gib(pipeline.device_gap_bytes)} of it in gaps" if pipeline.device_gap_bytes else ""
        found["allocation_retries"] = (
            f"device memory is short or fragmented: {counted(pipeline.allocation_retries, 'allocation')} of a step failed at "
            f"first, and each stops the GPU{gaps}\n"
            f"  -> a lower memory.device_fraction ({device_fraction:g} now) or smaller batch.microbatch_rows; if "
            "PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF is set, unset it"
        )
    if "optimizer_wait" in limits and (share := waited.get("optimizer", 0.0) / step_s) > limits["optimizer_wait"]:
        rate = pipeline.adamw_share
        found["optimizer_wait"] = (
            f"optimizer-bound: the GPU waits for AdamW on the host for {share:.0%} of a step"
            + (f"; it reaches {rate:.0%} of the host memory's bandwidth" if rate is not None else "")
            + "\n  -> batch.tokens_per_step: a larger number gives it more time to hide in"
            + ("; run.threads: more" if rate is not None and rate < 0.6 else "")
        )
    copies = sum(waited.get(name, 0.0) for name in ("weights", "inputs", "gradients")) / step_s
    for name, link in (("in", pipeline.h2d), ("out", pipeline.d2h)):
        if link is None or link.share is None or link.bytes < LARGE_COPY_BYTES * link.copies:
            continue
        if link.share < limits.get("link_share", 0.0) and copies > WAITS_SHARE:
            found["link_share"] = (
                f"link-bound, below the link's rate: copies {name} run at {link.gbps:.1f} GB/s, {link.share:.0%} of the measured "
                f"rate, and the GPU waits for copies for {copies:.0%} of a step\n"
                "  -> memory.pin: all if planes are not pinned; otherwise something shares the link or the host's memory: "
                "megatrain doctor; a larger batch.tokens_per_step needs fewer copies per token"
            )
    busy = min(pipeline.computed_s / step_s, 1.0 if pipeline.gpu_utilisation is None else pipeline.gpu_utilisation)
    if busy < limits.get("gpu_busy", 0.0) and not found:
        found["gpu_busy"] = (
            f"the GPU works for {busy:.0%} of a step; {_largest_part(record)}\n"
            "  -> batch.tokens_per_step: a larger number; activations.compile: auto and larger batch.microbatch_rows where "
            "it waits for launches"
        )
    return found


def _largest_part(record: StepRecord) -> str:
    """What takes most of the time in which the device is idle."""
    if record.pipeline is None:
        return f"waiting for the batch takes {record.data_wait_s:.3f} s of {record.step_s:.3f} s"
    waits = {f"waiting for {name}": seconds for name, seconds in record.pipeline.waited_s.items()}
    between = record.step_s - record.pipeline.computed_s - sum(waits.values())
    waits["the host's own work and launches"] = max(0.0, between)
    name = max(waits, key=lambda one: waits[one])
    return f"most of the rest is {name}: {waits[name]:.3f} s of {record.step_s:.3f} s"


def judged_over_ranks(mfu: float | None, ranks: MeshRecord, limits: Mapping[Rule, float]) -> dict[Rule, str | None]:
    """The rank rules whose figure is known: the text of each that is broken, None for each that is kept."""
    found: dict[Rule, str | None] = {}
    if mfu is not None and (floor := limits.get("mfu_floor")) is not None:
        text = f"MFU under {floor:.1%} (watchdog.mfu_floor) for {RANK_STEPS} steps, {mfu:.1%} now"
        found["mfu_floor"] = text if mfu < floor else None
    if (excess := ranks.imbalance) is not None and (limit := limits.get("imbalance")) is not None:
        better = ranks.better_stage_layers
        remedy = f"try parallel.stage_layers: {list(better)}" if better else "no other split of the layers is better"
        text = (
            f"the busiest stage takes {excess:.0%} more than the mean for {RANK_STEPS} steps (layers {list(ranks.stage_layers)})"
            f"\n  -> {remedy}"
        )
        found["imbalance"] = text if excess > limit else None
    if (excess := ranks.slowest_excess) is not None and (limit := limits.get("straggler")) is not None:
        text = (
            f"rank {ranks.slowest_rank} does {excess:.0%} more own work than its peers for {RANK_STEPS} measured steps\n"
            "  -> look at its machine (clocks, other processes)"
        )
        found["straggler"] = text if excess > limit else None
    return found


class AlertWatch:
    """Judges every record of a process. A rule whose limit is missing or None is off.

    `steps`: records in a row that must break a pipeline rule, and that must keep it before it may speak again.
    """

    def __init__(self, limits: Mapping[Rule, float | None], steps: int, device_fraction: float):
        self._limits: dict[Rule, float] = {rule: limit for rule, limit in limits.items() if limit is not None}
        self._steps, self._device_fraction = steps, device_fraction
        self._speeds: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._broken: Counter[Rule] = Counter()  # records in a row that broke a rule
        self._kept: Counter[Rule] = Counter()  # and that kept it
        self._said: set[Rule] = set()
        self._seen = 0

    def check(self, record: StepRecord, ranks: MeshRecord | None = None) -> list[Alert]:
        """The alerts that this record completes; `ranks`: the same step over all ranks. A skipped step is not judged."""
        if record.skipped is not None or record.step_s <= 0:
            return []
        judged: dict[Rule, str | None] = {}
        self._seen += 1
        if self._seen > WARM_UP:
            usual = statistics.median(self._speeds) if len(self._speeds) >= LEAST_MEDIAN_STEPS else None
            found = broken(record, self._limits, self._device_fraction, usual)
            if "speed" not in found:  # a slow stretch must not become the usual speed
                self._speeds.append(record.processed_tokens_per_s)
            judged = {rule: found.get(rule) for rule in PIPELINE_RULES if rule in self._limits}
        if ranks is not None:
            judged |= judged_over_ranks(None if ranks.sampled else record.mfu, ranks, self._limits)
        return [Alert(rule, text) for rule, text in judged.items() if self._speaks(rule, text) and text is not None]

    def as_dict(self, rules: Collection[Rule]) -> dict[str, Any]:
        """The state of some rules as JSON data for a checkpoint. The warm-up is left out: it is the process's."""
        counts = {"broken": self._broken, "kept": self._kept}
        return {
            **{name: {rule: of[rule] for rule in rules if of[rule]} for name, of in counts.items()},
            "said": [rule for rule in rules if rule in self._said],
            "speeds": list(self._speeds) if "speed" in rules else [],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint, so that a resumed run speaks where the undisturbed one does."""
        rules: tuple[Rule, ...] = (*PIPELINE_RULES, *get_args(RankRule))
        for counts, saved in ((self._broken, state.get("broken", {})), (self._kept, state.get("kept", {}))):
            counts.clear()
            counts.update({rule: int(saved[rule]) for rule in rules if rule in saved})
        self._said = {rule for rule in rules if rule in state.get("said", ())}
        self._speeds.clear()
        self._speeds.extend(map(float, state.get("speeds", ())))

    def _speaks(self, rule: Rule, text: str | None) -> bool:
        """Count a record for a rule; whether the rule speaks now."""
        rearm_after, needed = (self._steps, self._steps) if rule in PIPELINE_RULES else (1, RANK_STEPS)
        now, before = (self._kept, self._broken) if text is None else (self._broken, self._kept)
        now[rule] += 1
        before[rule] = 0
        if self._kept[rule] >= rearm_after:
            self._said.discard(rule)
        if self._broken[rule] < needed or rule in self._said:
            return False
        self._said.add(rule)
        return True
