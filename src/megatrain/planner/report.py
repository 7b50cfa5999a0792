"""A plan as text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from megatrain.planner.choice import Lines
from megatrain.planner.plan import Plan
from megatrain.units import abbreviated, counted, duration, gib, size_lines

POLICY_WORDS = {
    "keep_attention": "recompute all but the attention of", "keep_mlp": "recompute all but the MLP's products of"
}  # fmt: skip


def plan_text(plan: Plan) -> str:
    """The whole plan for people: decisions, ledger, seconds."""
    choice, timeline = plan.choice, plan.timeline
    out = [
        f"plan for {plan.model}, {abbreviated(plan.parameters)} parameters, on {plan.machine}",
        f"  a step: {counted(plan.step.rows, 'row')} x {counted(plan.step.tokens, 'token')} in "
        f"{counted(choice.accumulation_steps, 'accumulation step')}; "
        f"layers compute {counted(choice.microbatch_rows, 'row')} together, the head "
        f"{counted(choice.head_chunk_tokens, 'token')}",
        *(f"  warning: {warning}" for warning in plan.warnings),
        f"  placement: {_placement(plan)}",
        f"  activations: {_policies(plan)}",
        f"  AdamW on the host: {counted(plan.threads, 'thread')}",
        *_table("host memory", plan.host, plan.caps.host_bytes),
        *_table(f"device memory, worst in the {plan.device_moment}", plan.device, plan.caps.device_bytes),
        *_table("disk, one checkpoint", plan.disk, None),
        f"  seconds of a step: {timeline.step:.3f}, of which",
        *(
            f"    {seconds:>11.3f}  {name.replace('_', ' ')}"
            for name, seconds in timeline.phases.items()
            if seconds >= 5e-4
        ),
        "  work of a step, hidden or not: "
        + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timeline.busy.items()),
        f"  bottleneck: {timeline.bottleneck}",
        f"  {plan.tokens_per_s:,.0f} tokens/s, {_length(plan)}",
    ]
    return "\n".join(out)


def plan_json(plan: Plan) -> str:
    """The whole plan for programs."""
    return json.dumps(plan.as_dict(), indent=1)


def _table(title: str, lines: Lines, allowed: int | None) -> list[str]:
    of = f" of {gib(allowed)}" if allowed is not None else ""
    return [
        f"  {title}: {gib(sum(lines.values()))}{of}",
        *size_lines(lines),
    ]


def _placement(plan: Plan) -> str:
    if plan.all_resident:
        return "everything fits into device memory and stays there; AdamW runs on the GPU"
    resident = [name for name, place in plan.placement.items() if place == "device"]
    if not resident:
        return "all units in host memory; AdamW runs on the CPU under the next forward"
    layers = sum(name.startswith("layer.") for name in resident)
    edges = [name for name in resident if not name.startswith("layer.")]
    what = [*edges, *([f"the first {counted(layers, 'layer')}"] if layers else [])]
    return f"on the device {' and '.join(what)}; the rest in host memory"


def _policies(plan: Plan) -> str:
    choice = plan.choice
    parts = [
        f"{POLICY_WORDS.get(policy, policy)} {_ranges(layers)}"
        for policy in ("recompute", "keep_attention", "keep_mlp", "selective", "keep")
        if (layers := plan.layers_with(policy))
    ]
    offloaded = choice.offloaded
    if offloaded:
        parts.append(f"inputs of {_ranges(range(offloaded))} wait in host memory")
    if choice.mlp_chunk_tokens is not None:
        parts.append(f"MLPs in chunks of {choice.mlp_chunk_tokens:,} tokens")
    return "; ".join(parts)


def _ranges(layers: Sequence[int]) -> str:
    first, last = layers[0], layers[-1]
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _length(plan: Plan) -> str:
    if plan.total_seconds is not None:
        return f"{duration(plan.total_seconds)} for {counted(plan.steps or 0, 'step')}"
    return f"{duration(1000 * plan.seconds)} for 1,000 steps"
