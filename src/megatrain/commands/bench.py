"""`megatrain bench`: training steps of a shape with random weights and tokens, compared with the plan and with two bounds.

[Note: formulas]
model FLOPs   3 x (products + causal attention of a forward), counted from the layer's code, without recompute
MFU           model FLOPs / (seconds x matrix peak measured on this machine)
recompute     FLOPs of forwards that are computed again
PCIe          bytes of weights and gradients moved / seconds; share: of the measured rate of both directions together
overlap       1 - (step - policy bound) / (seconds that copies and CPU AdamW would take alone), between 0 and 1
phases        forward, head, backward: device time, stalls included
other stall   step - policy bound - waits for AdamW and slabs: waits for copies, launches, the GPU's own AdamW
work          seconds of a rank's phases without its waits; ranks that are fast wait in the collectives

On several ranks, tokens/s and host memory are those of all, rates and MFU those of one GPU, times and copies those of rank 0, and
the bounds those of a rank's rows.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from megatrain.commands.bounds import Bounds, release
from megatrain.commands.work import Work, planned, random_batch
from megatrain.engine.base import StepResult
from megatrain.engine.plan import ExecutionPlan
from megatrain.machine.machine import Machine
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Plan, StepSize
from megatrain.planner.timeline import recomputed_flops
from megatrain.run.ranks import gathered
from megatrain.units import abbreviated, gibs

LEAST_WARMUP = 2
"""The first AdamW update touches its moments for the first time (and may compile), which shows in the second step."""


@dataclass
class Report:
    """The result of a benchmark; its fields are the JSON. See [Note: formulas]."""

    model: str
    rows: int
    tokens: int  # of a row
    parameters: int
    device: str
    options: dict[str, Any] = field(default_factory=dict)  # the plan that was followed
    seconds: dict[str, float] = field(default_factory=dict)  # medians of `step`, its parts and `data`
    tokens_per_second: float = 0.0  # tokens of the rows; all but one of a row are targets
    tflops: float | None = None  # this and the next two: None without a GPU
    mfu: float | None = None
    recompute_tflops: float | None = None
    pcie: dict[str, float] = field(default_factory=dict)  # bytes per step and GB/s each way, share of the link, overlap
    device_peak: int = 0  # bytes; the largest of all ranks
    host_peak: int = 0  # bytes, resident set sizes of all processes
    gpus: int = 1
    by_rank: list[dict[str, float]] = field(default_factory=list)  # seconds of `step` and `work`, bytes of both peaks
    bound: float | None = None  # seconds; see [Note: the bounds] in bounds.py
    policy_bound: float | None = None
    plan: dict[str, Any] | None = None  # prediction and measurement
    steps: list[float] = field(default_factory=list)  # seconds of every step


def bench(work: Work, *, steps: int = 6, warmup: int = 2, bounds: bool = True) -> Report:
    """Measure `steps` steps after `warmup` (at least `LEAST_WARMUP`) others, and the bounds; prints results as they come.

    Raises:
        UserError: The shape is unknown.
        PlanRefused: The step does not fit.
    """
    say = work.say
    with tempfile.TemporaryDirectory() as scratch:
        folder, structure, model, machine, made = planned(work, Path(scratch))
        followed = work.followed(made)
        report = Report(
            work.shape, work.rows, work.tokens, structure.param_count, work.device, followed.as_dict(), gpus=work.ranks
        )
        _measure_steps(report, work, folder, followed, steps, warmup)
        if bounds:
            share = StepSize(-(-work.rows // work.ranks), work.tokens)
            of_rank = None if made is None else replace(made, step=share)
            mine = replace(work, rows=share.rows)
            found = Bounds(mine, structure, model, torch.device(report.device), followed, of_rank)
            found.measure()
            report.bound, report.policy_bound = found.bound, found.policy_bound
        _conclude(report, model, made, machine if work.on_gpu else None)
        say(report_text(report))
        return report


def _measure_steps(report: Report, work: Work, folder: Path, followed: ExecutionPlan, steps: int, warmup: int) -> None:
    say = work.say
    if warmup < LEAST_WARMUP:
        why = "the first update touches its memory in the second step"
        say(f"warm-up: {LEAST_WARMUP} steps instead of {warmup}: {why}")
        warmup = LEAST_WARMUP
    process = psutil.Process(os.getpid())
    started = time.perf_counter()
    engine = work.engine(folder, followed)
    try:
        report.device = str(engine.device)
        say(f"engine made in {time.perf_counter() - started:.1f} s, {abbreviated(report.parameters)} parameters")
        vocabulary = engine.config.get_text_config().vocab_size
        found: list[dict[str, float]] = []
        own_work: list[float] = []
        for step in range(warmup + steps):
            if step == warmup and engine.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(engine.device)
            began = time.perf_counter()
            batch = random_batch(vocabulary, report.rows, report.tokens, step)
            data = time.perf_counter() - began
            result = engine.train_step(batch)
            counters = engine.counters()
            moved = {"loaded_bytes": counters["weight_bytes"], "sent_bytes": counters["gradient_bytes"]}
            report.host_peak = max(report.host_peak, process.memory_info().rss)
            split = ", ".join(f"{name} {value:.3f}" for name, value in result.seconds.items())
            note = " (warm-up)" if step < warmup else ""
            loss, norm = result.loss or float("nan"), result.grad_norm or float("nan")
            say(f"step {step}{note}: loss {loss:.4f} norm {norm:.3f} [{split}]")
            if step >= warmup:
                own_work.append(_own_work_s(result))
                found.append({**result.seconds, "data": data, **{name: float(size) for name, size in moved.items()}})
        memory = engine.memory()
    finally:
        engine.close()
        del engine
        release()
    report.steps = [one["step"] for one in found]
    medians = {name: statistics.median(one.get(name, 0.0) for one in found) for name in found[-1]}
    report.pcie = {name: medians.pop(name) for name in ("loaded_bytes", "sent_bytes")}
    report.seconds = medians
    mine = {"step_s": medians["step"], "work_s": statistics.median(own_work)}
    mine |= {"device_peak": memory["device_peak"], "host_peak": report.host_peak}
    report.by_rank = gathered(mine)
    report.device_peak = int(max(rank["device_peak"] for rank in report.by_rank))
    report.host_peak = int(sum(rank["host_peak"] for rank in report.by_rank))
    report.tokens_per_second = report.rows * report.tokens / medians["step"]
    device, host = gibs(report.device_peak, report.host_peak)
    say(
        f"median {medians['step']:.3f} s a step, {report.tokens_per_second:,.0f} tokens/s, peak HBM {device}, RSS {host}"
    )


def _own_work_s(result: StepResult) -> float:
    phases = sum(result.seconds.get(phase, 0.0) for phase in ("forward", "head", "backward"))
    waits = sum(result.pipeline.waited_s.values()) if result.pipeline is not None else 0.0
    return max(0.0, phases - waits)


def _conclude(report: Report, model: ModelShape, made: Plan | None, machine: Machine | None) -> None:
    """Derive figures from the measurements; `machine` is None on a CPU. See [Note: formulas]."""
    step = report.seconds["step"]
    tokens = report.rows * report.tokens / report.gpus
    if report.policy_bound is not None:
        waits = report.seconds.get("update_wait", 0.0) + report.seconds.get("slab_wait", 0.0)
        report.seconds["other_stall"] = max(0.0, step - report.policy_bound - waits)
    if machine is not None:
        report.tflops = 3 * model.forward_flops(report.tokens) * tokens / step / 1e12
        report.mfu = report.tflops / machine.matrix_tflops
        moved = report.pcie["loaded_bytes"] + report.pcie["sent_bytes"]
        report.pcie["gbps"] = moved / step / 1e9
        report.pcie["share_of_link"] = report.pcie["gbps"] / (2 * machine.both_gbps)
    if made is None:
        return
    if machine is not None:
        report.recompute_tflops = recomputed_flops(model, made.step, made.choice) * tokens / step / 1e12
        alone = sum(seconds for name, seconds in made.timeline.busy.items() if name != "gpu")
        if report.policy_bound is not None and alone > 0:
            report.pcie["overlap"] = min(1.0, max(0.0, 1 - (step - report.policy_bound) / alone))

    def compared(planned: float, measured: float) -> dict[str, float]:
        return {"planned": planned, "measured": measured, "ratio": measured / planned if planned else 0.0}

    report.plan = {
        "step": compared(made.seconds, step),
        "device_bytes": compared(made.device_bytes, report.device_peak),
        "host_bytes": compared(report.gpus * made.host_bytes, report.host_peak),
        "details": made.as_dict(),
    }


def report_text(report: Report) -> str:
    """The report as lines of text."""
    seconds, pcie, step = report.seconds, report.pcie, report.seconds["step"]
    where = report.device if report.gpus == 1 else f"{report.gpus} ranks"
    work = f"{abbreviated(report.parameters)} parameters, {report.rows} x {report.tokens} tokens on {where}"
    parts = ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in seconds.items() if name != "step")
    lines = [
        f"{report.model}, {work}",
        f"  {step:.3f} s a step (median of {len(report.steps)}), {report.tokens_per_second:,.0f} tokens/s",
        f"  seconds: {parts}",
    ]
    if report.tflops is not None and report.mfu is not None:
        again = f", and {report.recompute_tflops:.0f} of recompute" if report.recompute_tflops else ""
        lines.append(f"  {report.tflops:.0f} TFLOP/s of the model, MFU {report.mfu:.1%}{again}")
    if "gbps" in pcie:
        overlap = f", {pcie['overlap']:.0%} hidden (with CPU AdamW)" if "overlap" in pcie else ""
        lines.append(
            f"  PCIe: {pcie['loaded_bytes'] / 1e9:.1f} GB in, {pcie['sent_bytes'] / 1e9:.1f} GB out a step, "
            f"{pcie['gbps']:.1f} GB/s, {pcie['share_of_link']:.0%} of the link{overlap}"
        )
    lines += _text_of_ranks(report)
    for name, bound in (("bound", report.bound), ("policy bound", report.policy_bound)):
        if bound is not None:
            lines.append(f"  {name} {bound:.3f} s: the step reaches {bound / step:.3f} of it")
    if report.plan is not None:
        lines.append("  plan and measurement:")
        for name, key in (("step", "step"), ("device memory", "device_bytes"), ("host memory", "host_bytes")):
            pair = report.plan[key]
            both = pair["planned"], pair["measured"]
            planned, measured = gibs(*both) if key != "step" else (f"{seconds:.3f} s" for seconds in both)
            lines.append(f"    {name:14} planned {planned:>11}, measured {measured:>11} ({pair['ratio'] - 1:+.1%})")
    return "\n".join(lines)


def _text_of_ranks(report: Report) -> list[str]:
    """A line for each of several ranks, and the slowest one."""
    if report.gpus == 1:
        return []
    lines = []
    for number, rank in enumerate(report.by_rank):
        device, host = gibs(int(rank["device_peak"]), int(rank["host_peak"]))
        lines.append(f"  rank {number}: {rank['work_s']:.3f} s of own work a step, peak HBM {device}, RSS {host}")
    work = [rank["work_s"] for rank in report.by_rank]
    slowest = max(range(len(work)), key=work.__getitem__)
    excess = work[slowest] / max(statistics.median(work), 1e-9) - 1.0
    return [*lines, f"  slowest: rank {slowest}, {excess:.1%} above the median"]
