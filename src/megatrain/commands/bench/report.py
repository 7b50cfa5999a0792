"""What a benchmark found: figures, what follows from them, and how they are told.

[Note: formulas]
model FLOPs   3 x (products + causal attention of a forward), counted from the layer's code; recompute is not in it
MFU           model FLOPs / (seconds x matrix peak measured on this machine)
recompute     FLOPs of forwards that are done again, beside it
PCIe          bytes of weights and gradients that moved / seconds; share: of the measured rate both ways together
overlap       1 - (step - policy bound) / (seconds that copies and CPU AdamW would take alone), between 0 and 1
other stall   step - policy bound - waits for AdamW and slabs: waits for copies, launches, the GPU's own AdamW
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from megatrain.machine.machine import Machine
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.plan import Plan
from megatrain.planner.timeline import recomputed_flops
from megatrain.units import abbreviated, gib

Say = Callable[[str], None]
"""Takes a line of text for people."""


@dataclass
class Report:
    """What a benchmark found; its fields are the JSON.

    Attributes:
        model, rows, tokens, parameters, device: What was run.
        options: The plan that was followed.
        seconds: Median seconds of a step by part: `step`, `data` beside it, and in it `forward`, `head`, `backward` (device
            time, stalls included), `update_wait`, `slab_wait`, `other_stall`.
        tokens_per_second: Tokens of the rows, all of them targets but one a row.
        tflops, mfu, recompute_tflops: See [Note: formulas]; None where there is no GPU.
        pcie: Bytes a step and GB/s each way, share of the measured link, overlap.
        device_peak, host_peak: Bytes; resident set size of the process.
        bound, policy_bound: Seconds. See [Note: the bounds] in bounds.py.
        plan: Prediction beside measurement.
        steps: Every step's seconds.
    """

    model: str
    rows: int
    tokens: int
    parameters: int
    device: str
    options: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    tflops: float | None = None
    mfu: float | None = None
    recompute_tflops: float | None = None
    pcie: dict[str, float] = field(default_factory=dict)
    device_peak: int = 0
    host_peak: int = 0
    bound: float | None = None
    policy_bound: float | None = None
    plan: dict[str, Any] | None = None
    steps: list[float] = field(default_factory=list)


def conclude(report: Report, model: ModelShape, made: Plan | None, machine: Machine, on_gpu: bool) -> None:
    """Everything that follows from the measurements. See [Note: formulas]."""
    step = report.seconds["step"]
    tokens = report.rows * report.tokens
    if report.policy_bound is not None:
        waits = report.seconds.get("update_wait", 0.0) + report.seconds.get("slab_wait", 0.0)
        report.seconds["other_stall"] = max(0.0, step - report.policy_bound - waits)
    if on_gpu:
        report.tflops = 3 * model.forward_flops(report.tokens) * tokens / step / 1e12
        report.mfu = report.tflops / machine.matrix_tflops
        moved = report.pcie["loaded_bytes"] + report.pcie["sent_bytes"]
        report.pcie["gbps"] = moved / step / 1e9
        report.pcie["share_of_link"] = report.pcie["gbps"] / (2 * machine.both_gbps)
    if made is None:
        return
    flops = recomputed_flops(model, made.step, made.choice)
    if on_gpu:
        report.recompute_tflops = flops * tokens / step / 1e12
        alone = sum(seconds for name, seconds in made.timeline.busy.items() if name != "gpu")
        if report.policy_bound is not None and alone > 0:
            report.pcie["overlap"] = min(1.0, max(0.0, 1 - (step - report.policy_bound) / alone))
    report.plan = {
        "step": _beside(made.seconds, step),
        "device_bytes": _beside(made.device_bytes, report.device_peak),
        "host_bytes": _beside(made.host_bytes, report.host_peak),
        "details": made.as_dict(),
    }


def _beside(planned: float, measured: float) -> dict[str, float]:
    return {"planned": planned, "measured": measured, "ratio": measured / planned if planned else 0.0}


def report_text(report: Report) -> str:
    """The report for people."""
    seconds = report.seconds
    step = seconds["step"]
    lines = [
        f"{report.model}, {abbreviated(report.parameters)} parameters, {report.rows} x {report.tokens} tokens on {report.device}",
        f"  {step:.3f} s a step (median of {len(report.steps)}), {report.tokens_per_second:,.0f} tokens/s",
        "  seconds: "
        + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in seconds.items() if name != "step"),
    ]
    if report.tflops is not None and report.mfu is not None:
        again = f", and {report.recompute_tflops:.0f} of recompute" if report.recompute_tflops else ""
        lines.append(f"  {report.tflops:.0f} TFLOP/s of the model, MFU {report.mfu:.1%}{again}")
    if "gbps" in report.pcie:
        overlap = f", {report.pcie['overlap']:.0%} hidden (with CPU AdamW)" if "overlap" in report.pcie else ""
        lines.append(
            f"  PCIe: {report.pcie['loaded_bytes'] / 1e9:.1f} GB in, {report.pcie['sent_bytes'] / 1e9:.1f} GB out a step, "
            f"{report.pcie['gbps']:.1f} GB/s, {report.pcie['share_of_link']:.0%} of the link{overlap}"
        )
    for name, bound in (("bound", report.bound), ("policy bound", report.policy_bound)):
        if bound is not None:
            lines.append(f"  {name} {bound:.3f} s: the step reaches {bound / step:.3f} of it")
    if report.plan is not None:
        lines.append("  plan against measurement:")
        lines.append(_comparison("step", report.plan["step"], lambda s: f"{s:.3f} s"))
        for name in ("device_bytes", "host_bytes"):
            lines.append(_comparison(name.removesuffix("_bytes") + " memory", report.plan[name], gib))
    return "\n".join(lines)


def _comparison(name: str, pair: dict[str, float], text: Callable[[float], str]) -> str:
    return f"    {name:14} planned {text(pair['planned']):>11}, measured {text(pair['measured']):>11} ({pair['ratio'] - 1:+.1%})"


def report_json(report: Report) -> str:
    """The report as JSON."""
    return json.dumps(asdict(report), indent=1)
