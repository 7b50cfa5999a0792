"""A plan as text and as JSON; the text of a refused plan: memory of the closest choice, and remedies that were tried.

A remedy is a setting of the user. Some come in sizes (how many rows, how long they are): the mildest that fits is named. If no
single remedy is enough, all pairs are tried.
"""

from __future__ import annotations

import bisect
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatrain.engine.plan import Policy
from megatrain.optim.adamw import AdamW, Moments
from megatrain.planner.memory import PROCESS_BYTES, device_peak, host_lines
from megatrain.planner.plan import Choice, Lines, Plan, PlanRequest, StepSize, usable_device_bytes
from megatrain.planner.search import Search
from megatrain.units import GIB, abbreviated, counted, duration, gib, gibs, size_lines

LEAST_ROW_TOKENS = 256
"""Shorter rows are not suggested."""
MOST_PAIRS = 5
MOST_FRACTION = 0.98
"""A plan should not fill more of the device."""

Place = Literal["host", "device"]


@dataclass(frozen=True)
class Change:
    """A setting: its text, and what it replaces in the options and in the step."""

    text: str
    options: dict[str, object]
    step: dict[str, int]


@dataclass(frozen=True)
class Remedy:
    """A way to reduce memory.

    Attributes:
        name: Text for all its changes together.
        changes: From the mildest to the strongest; a stronger one needs no more memory than a milder one.
        comment: Its price or gain.
    """

    name: str
    changes: Sequence[Change]
    comment: str = ""


def refusal(request: PlanRequest) -> str:
    """The memory of the closest choice, and the remedies with their results."""
    shape, step, caps, options = request.shape, request.step, request.caps, request.options
    choice = Search(request).closest()
    host, device = host_lines(shape, step, options, choice), device_peak(shape, step, options, choice)
    resident = choice.resident_elements(shape)
    ranks, rows = options.ranks, request.all_rows or step.rows
    text = [
        f"{shape.name} ({abbreviated(shape.parameters)} parameters), {counted(rows, 'row')} x "
        f"{counted(step.tokens, 'token')} a step, does not fit {request.machine.name}"
        + (f"; memory of one of {ranks} processes, a GPU each:" if ranks > 1 else "")
    ]
    for place, lines, allowed in (("host", host, caps.host_bytes), ("device", device.lines, caps.device_bytes)):
        needed = sum(lines.values())
        needs, allows, excess = gibs(needed, allowed, max(0, needed - allowed))
        verdict = f"{excess} too much" if needed > allowed else "fits"
        # resident units could move to the host, if the host had room for them
        used = "used" if place == "device" and resident else "needed at least"
        text.append(f"  {place} memory: {needs} {used}, {allows} allowed: {verdict}")
        text += size_lines(lines)
    if resident:
        text.append(f"  ({abbreviated(resident)} parameters are on the device already)")
    too_small: set[Place] = {"host"} if sum(host.values()) > caps.host_bytes else set()
    # inputs are offloaded, and gradients of several accumulation steps are fp32, because the device is too small
    several = choice.accumulation_steps > 1 and options.accumulation_steps is None
    if device.nbytes > caps.device_bytes or choice.offloaded > 0 or several:
        too_small.add("device")
    text.append("  how to reduce it:")
    text += [f"    - {line}" for line in _reductions(request, choice, too_small)]
    return "\n".join(text)


def _reductions(request: PlanRequest, choice: Choice, too_small: set[Place]) -> list[str]:
    remedies = _remedies(request, choice, too_small)
    lines: list[str] = []
    fits = [_fit(request, remedy) for remedy in remedies]
    lines += _higher_limits(request, choice)
    for remedy, fit in zip(remedies, fits, strict=True):
        text, verdict = (fit[0], f"then it fits, {fit[1]:,.0f} tokens/s") if fit else (remedy.name, "not enough alone")
        lines.append(f"{text}{remedy.comment}; {verdict}")
    if not any(fits):
        pairs = [fit for pair in itertools.combinations(remedies, 2) if (fit := _fit(request, *pair)) is not None]
        pairs.sort(key=lambda fit: -fit[1])
        lines += [f"together: {text}; then it fits, {rate:,.0f} tokens/s" for text, rate in pairs[:MOST_PAIRS]]
        if len(remedies) > 1 and not pairs:
            lines.append("no two of these are enough together")
    if "device" in too_small:
        lines.append("a larger device")
    if "host" in too_small:
        lines += _host_needed(request, choice)
    return lines


def _changed(request: PlanRequest, *changes: Change) -> PlanRequest:
    for change in changes:
        request = replace(
            request, options=replace(request.options, **change.options), step=replace(request.step, **change.step)
        )
    return request


def _fit(request: PlanRequest, *remedies: Remedy) -> tuple[str, float] | None:
    """The mildest changes, one of each remedy, with which the run fits: (text, predicted tokens/s then)."""
    *others, last = remedies
    for first in itertools.product(*(remedy.changes for remedy in others)):
        partly = _changed(request, *first)
        number = bisect.bisect_left(
            last.changes, True, key=lambda change, start=partly: Search(_changed(start, change)).any_fits()
        )
        if number == len(last.changes):
            continue
        changes = (*first, last.changes[number])
        changed = _changed(request, *changes)
        best = Search(changed).best()
        if best is not None:
            text = " with ".join(change.text for change in changes)
            ranks = request.options.ranks
            rate = ranks * changed.step.all_tokens / best.seconds
            return text + _new_step(request.step, changed.step, ranks), rate
    return None


def _new_step(old: StepSize, new: StepSize, ranks: int) -> str:
    """The config keys of a changed step, of which each rank has its share."""
    keys = [f"data.max_tokens: {new.tokens}, now {old.tokens}"] if new.tokens != old.tokens else []
    keys += [f"batch.tokens_per_step: {ranks * new.all_tokens}, now {ranks * old.all_tokens}"] if new != old else []
    return f" ({'; '.join(keys)})" if keys else ""


def _remedies(request: PlanRequest, choice: Choice, too_small: set[Place]) -> list[Remedy]:
    """Settings of the run's file that may help. Those with many sizes come last, where `_fit` needs few trials."""
    options, found = request.options, list[Remedy]()

    def add(text: str, options: dict[str, object], comment: str) -> None:
        found.append(Remedy(text, [Change(text, options, {})], comment))

    if options.gradient_plane and options.compute != "fp16" and "host" in too_small:
        width = options.gradient_bytes(choice.accumulation_steps)
        less = gib(width * (request.shape.parameters - choice.resident_elements(request.shape)))
        text = "without clipping (optim.max_grad_norm: null, memory.gradient_plane: false)"
        changes = {"gradient_plane": False, "accumulation_steps": 1}
        add(text, changes, f": {width} bytes a parameter less, {less}")
    if isinstance(options.optim, AdamW) and options.ranks >= 1:
        kinds: tuple[Moments, ...] = ("fp32", "bf16", "int8")
        for moments in kinds[kinds.index(options.optim.moments) + 1 :]:
            small = replace(options.optim, moments=moments)
            less = round(options.optim.bytes_per_parameter - small.bytes_per_parameter)
            comment = f": {less} bytes a parameter less, with stochastic rounding"
            add(f"optim.moments: {moments} (now {options.optim.moments})", {"optim": small}, comment)
    if options.accumulation_steps is not None and options.accumulation_steps > 1 and "host" in too_small:
        comment = f": gradients in {options.transport_bytes} bytes instead of 4"
        add(f"batch.accumulation_steps: 1 (now {options.accumulation_steps})", {"accumulation_steps": 1}, comment)
    if "device" in too_small:
        if options.policy in ("keep", "selective"):
            add(f"activations.policy: auto (now {options.policy})", {"policy": "auto"}, ", which keeps what fits")
        if options.segment == 1:
            changes = {"segment": 4, "policy": "recompute"}
            add("activations.segment: 4 (now null)", changes, ", which keeps every 4th layer's input")
        found += _smaller_steps(request.step)
    return found


def _higher_limits(request: PlanRequest, choice: Choice) -> Iterator[str]:
    """Settings of the config's section `memory` that keep the run from memory that the machine has, with values that fit."""
    if (limits := request.limits) is None:
        return
    host_gib = sum(host_lines(request.shape, request.step, request.options, choice).values()) / GIB
    device = device_peak(request.shape, request.step, request.options, choice).nbytes
    there_gib, free_gib = limits.host_bytes / GIB, limits.device_bytes / GIB
    wanted: list[tuple[str, float, bool]] = []  # name, value, whether it is an improvement that the machine allows
    if (reserve := limits.host_reserve_gib) > 0:
        value = math.floor(100 * (there_gib - host_gib)) / 100
        wanted.append(("host_reserve_gib", value, 0 <= value < reserve))
    if limits.host_gib != "auto":
        value = math.ceil(100 * host_gib) / 100
        wanted.append(("host_gib", value, limits.host_gib < value <= there_gib))
    if limits.device_gib != "auto":
        share = usable_device_bytes(limits.device_bytes, limits.device_fraction) / limits.device_bytes
        value = math.ceil(4 * device / GIB / share + 0.5) / 4  # small devices leave a larger share free
        wanted.append(("device_gib", value, limits.device_gib < value <= free_gib))
    if limits.device_fraction != "auto":
        value = math.ceil(100 * device / replace(limits, device_fraction=1.0).caps.device_bytes) / 100
        wanted.append(("device_fraction", value, limits.device_fraction < value <= MOST_FRACTION))
    for name, value, useful in wanted:
        higher = replace(limits, **{name: value})
        if useful and Search(replace(request, caps=higher.caps, limits=higher)).any_fits():
            yield f"memory.{name}: {value:g} (now {getattr(limits, name):g}); then it fits"


def _smaller_steps(step: StepSize) -> list[Remedy]:
    """Shorter rows, and fewer rows."""
    halves = list(itertools.takewhile(lambda n: n >= LEAST_ROW_TOKENS, (step.tokens >> n for n in range(1, 64))))
    shorter = [Change(f"shorter rows: {step.rows} of {n:,} tokens", {}, {"tokens": n}) for n in halves]
    fewer = [Change(f"fewer rows: {counted(n, 'row')} a step", {}, {"rows": n}) for n in range(step.rows - 1, 0, -1)]
    remedies = (
        Remedy("shorter rows", shorter, ", the longest that fit"),
        Remedy("fewer rows a step", fewer, ", the most that fit"),
    )
    return [remedy for remedy in remedies if remedy.changes]


def _host_needed(request: PlanRequest, choice: Choice) -> list[str]:
    """The host that the choice needs, and the largest model for this host."""
    lines = host_lines(request.shape, request.step, request.options, choice)
    width = request.options.optim.bytes_per_parameter + request.options.gradient_bytes(choice.accumulation_steps)
    other = PROCESS_BYTES + sum(size for name, size in lines.items() if "offloaded" in name or "slabs" in name)
    ranks = request.options.shards
    most = choice.resident_elements(request.shape) + ranks * max(0, request.caps.host_bytes - other) / width
    return [
        f"a host with {gib(request.options.local_ranks * sum(lines.values()))} for the run",
        f"a model of at most about {abbreviated(most)} parameters",
    ]


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
    if (ranks := plan.options.ranks) > 1:
        rows = counted(-(-step.rows // ranks), "row")
        hosts, shards = plan.options.hosts, plan.options.shards
        copies = (
            "" if hosts == 1 else "; a copy on each host" if plan.options.replicas > 1 else "; one copy on all hosts"
        )
        where = "" if hosts == 1 else f" of {hosts} hosts"
        yield f"  {ranks} GPUs{where}, one process each, with {rows} of the step and 1/{shards} of the state{copies}"
    yield from (f"  warning: {warning}" for warning in plan.warnings)
    yield f"  placement: {_placement(plan)}"
    yield f"  activations: {_activations(plan)}"
    each = " of a process" if ranks > 1 else ""
    yield f"  AdamW on the host: {counted(plan.threads, 'thread')}{each}"
    yield from _table(f"host memory{each}", plan.host, plan.caps.host_bytes)
    if ranks > 1:
        local = plan.options.local_ranks
        sizes = " of ".join(gibs(local * plan.host_bytes, local * plan.caps.host_bytes))
        yield f"  host memory of all processes{'' if plan.options.hosts == 1 else ' of a host'}: {sizes}"
    yield from _table(f"device memory{each}, worst in the {plan.device_moment}", plan.device, plan.caps.device_bytes)
    yield from _table("disk, one checkpoint", plan.disk, None)
    yield f"  seconds of a step: {timeline.step:.3f}, of which"
    for name, seconds in timeline.phases.items():
        if seconds >= 5e-4:
            yield f"    {seconds:>11.3f}  {name.replace('_', ' ')}"
    busy = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timeline.busy.items())
    yield f"  busy in a step, hidden or not: {busy}"
    yield f"  bottleneck: {timeline.bottleneck}"
    yield f"  {plan.tokens_per_s:,.0f} tokens/s, {_length(plan)}"
    if plan.scaling:
        rates = (f"{n}: {'does not fit' if rate is None else f'{rate:,.0f}'}" for n, rate in plan.scaling.items())
        yield f"  tokens/s by number of GPUs: {', '.join(rates)}"


def _table(title: str, lines: Lines, allowed: int | None) -> list[str]:
    total = sum(lines.values())
    of = gib(total) if allowed is None else " of ".join(gibs(total, allowed))
    return [f"  {title}: {of}", *size_lines(lines)]


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
