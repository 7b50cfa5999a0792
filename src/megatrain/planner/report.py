"""A plan as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from megatrain.engine.plan import Policy
from megatrain.planner.plan import Lines, Plan
from megatrain.units import abbreviated, counted, duration, gib, size_lines

POLICIES: tuple[Policy, ...] = ("recompute", "keep_attention", "keep_mlp", "selective", "keep")


def plan_text(plan: Plan) -> str:
    """Decisions, memory and time of a plan."""
    return "\n".join(_lines(plan))


def plan_json(plan: Plan) -> str:
    return json.dumps(plan.as_dict(), indent=1)


def _lines(plan: Plan) -> Iterator[str]:
    choice, timeline, step = plan.choice, plan.timeline, plan.step
    yield f"plan for {plan.model}, {abbreviated(plan.parameters)} parameters, on {plan.machine}"
    yield (
        f"  a step: {counted(step.rows, 'row')} x {counted(step.tokens, 'token')} in "
        f"{counted(choice.accumulation_steps, 'accumulation step')}; microbatches of "
        f"{counted(choice.microbatch_rows, 'row')}, head chunks of {counted(choice.head_chunk_tokens, 'token')}"
    )
    yield from (f"  warning: {warning}" for warning in plan.warnings)
    yield f"  placement: {_placement(plan)}"
    yield f"  activations: {_activations(plan)}"
    yield f"  AdamW on the host: {counted(plan.threads, 'thread')}"
    yield from _table("host memory", plan.host, plan.caps.host_bytes)
    yield from _table(f"device memory, worst in the {plan.device_moment}", plan.device, plan.caps.device_bytes)
    yield from _table("disk, one checkpoint", plan.disk, None)
    yield f"  seconds of a step: {timeline.step:.3f}, of which"
    for name, seconds in timeline.phases.items():
        if seconds >= 5e-4:
            yield f"    {seconds:>11.3f}  {name.replace('_', ' ')}"
    busy = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timeline.busy.items())
    yield f"  busy in a step, hidden or not: {busy}"
    yield f"  bottleneck: {timeline.bottleneck}"
    yield f"  {plan.tokens_per_s:,.0f} tokens/s, {_length(plan)}"


def _table(title: str, lines: Lines, allowed: int | None) -> list[str]:
    of = f" of {gib(allowed)}" if allowed is not None else ""
    return [f"  {title}: {gib(sum(lines.values()))}{of}", *size_lines(lines)]


def _placement(plan: Plan) -> str:
    if plan.all_resident:
        return "all units in device memory; AdamW runs on the GPU"
    resident = [name for name, place in plan.placement.items() if place == "device"]
    if not resident:
        return "all units in host memory; AdamW runs on the CPU under the next forward"
    layers = sum(name.startswith("layer.") for name in resident)
    edges = [name for name in resident if not name.startswith("layer.")]
    units = [*edges, *([f"the first {counted(layers, 'layer')}"] if layers else [])]
    return f"{' and '.join(units)} in device memory; the rest in host memory"


def _activations(plan: Plan) -> str:
    parts = [f"{_ranges(layers)}: {policy}" for policy in POLICIES if (layers := plan.layers_with(policy))]
    if plan.choice.offloaded:
        parts.append(f"inputs of {_ranges(range(plan.choice.offloaded))} offloaded to host memory")
    if plan.choice.mlp_chunk_tokens is not None:
        parts.append(f"MLPs in chunks of {plan.choice.mlp_chunk_tokens:,} tokens")
    return "; ".join(parts)


def _ranges(layers: Sequence[int]) -> str:
    first, last = layers[0], layers[-1]
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def _length(plan: Plan) -> str:
    if plan.total_seconds is not None:
        return f"{duration(plan.total_seconds)} for {counted(plan.steps or 0, 'step')}"
    return f"{duration(1000 * plan.seconds)} for 1,000 steps"
