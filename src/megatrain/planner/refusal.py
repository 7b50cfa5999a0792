"""Why a plan is refused: the ledger of what comes nearest, and the ways down, each of them tried. Pure.

A way down is something that a user can set. Some come in sizes (how many rows, how long they are): of these the mildest that fits
is said. Where no single way is enough, every two of them are tried together.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatrain.config.schema import RunConfig
from megatrain.machine.machine import Machine
from megatrain.planner.choice import Caps, Choice, Lines, Options, StepSize
from megatrain.planner.memory import PROCESS_BYTES, device_peak, host_lines
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.search import Search
from megatrain.units import abbreviated, counted, gib, size_lines

LEAST_ROW_TOKENS = 256
"""Rows are not offered shorter than this."""
MOST_PAIRS = 5


@dataclass(frozen=True)
class Asked:
    """What was asked of the planner; see `plan`."""

    shape: ModelShape
    machine: Machine
    step: StepSize
    caps: Caps
    options: Options

    def search(self) -> Search:
        return Search(self.shape, self.machine, self.step, self.caps, self.options)

    def with_(self, *changes: Change) -> Asked:
        options, step = self.options, self.step
        for change in changes:
            options = replace(options, **change.options)
            step = replace(step, **change.step)
        return replace(self, options=options, step=step)

    def fits_with(self, change: Change) -> bool:
        return self.with_(change).search().any_fits()


@dataclass(frozen=True)
class Change:
    """Something that can be set: its words, and what it replaces of the options and of the step."""

    words: str
    options: dict[str, object]
    step: dict[str, int]


@dataclass(frozen=True)
class Way:
    """A way down.

    Attributes:
        name: Its words where it does not matter which of the changes it is.
        changes: From the mildest to the strongest; one that is stronger needs no more memory.
        comment: What it costs or gives, for people.
    """

    name: str
    changes: Sequence[Change]
    comment: str = ""


@dataclass(frozen=True)
class Fit:
    """Changes with which the run fits, and its predicted speed then."""

    words: str
    tokens_per_s: float


def refusal(asked: Asked) -> str:
    """The ledger of the choice that comes nearest, and the ways down with what each comes to."""
    shape, step, caps, options = asked.shape, asked.step, asked.caps, asked.options
    choice = asked.search().leanest()
    host, device = host_lines(shape, step, options, choice), device_peak(shape, step, options, choice)
    resident = choice.resident_elements(shape)
    text = [
        f"{shape.name} ({abbreviated(shape.parameters)} parameters), {counted(step.rows, 'row')} x "
        f"{counted(step.tokens, 'token')} a step, does not fit {asked.machine.name}"
    ]
    for place, lines, allowed in (("host", host, caps.host_bytes), ("device", device.lines, caps.device_bytes)):
        needed = sum(lines.values())
        verdict = f"{gib(needed - allowed)} too much" if needed > allowed else "fits"
        # What is resident need not be: the host has too little room for it.
        used = "used" if place == "device" and resident else "needed at least"
        text.append(f"  {place} memory: {gib(needed)} {used}, {gib(allowed)} allowed: {verdict}")
        text += size_lines(lines)
    if resident:
        text.append(f"  ({abbreviated(resident)} parameters are on the device already)")
    too_much: set[Place] = {"host"} if sum(host.values()) > caps.host_bytes else set()
    # Offloaded inputs are on the host because the device is too small for them, and several windows have fp32 gradients there.
    several = choice.accumulation_steps > 1 and options.accumulation_steps is None
    if device.nbytes > caps.device_bytes or choice.offloaded > 0 or several:
        too_much.add("device")
    text.append("  ways down:")
    text += [f"    - {line}" for line in _ways_down(asked, choice, too_much)]
    return "\n".join(text)


def cpu_refusal(lines: Lines, allowed: int, run: RunConfig) -> str:
    """Why a run on the CPU does not fit: its memory by purpose, and how to reduce it."""
    needed = sum(lines.values())
    cap = "" if run.memory.host_gib == "auto" else f" (memory.host_gib: {run.memory.host_gib:g})"
    text = [f"not enough host memory: {gib(needed)} needed, {gib(allowed)} available{cap}", *size_lines(lines)]
    text.append("  how to reduce it:")
    if run.batch.accumulation_steps == 1:
        text.append("    - batch.accumulation_steps: 2 or more keeps fewer layer inputs at a time")
    if run.memory.gradient_plane:
        needs = "optim.max_grad_norm: null and batch.accumulation_steps: 1"
        text.append(f"    - memory.gradient_plane: false (needs {needs})")
    return "\n".join([*text, "    - shorter rows (data.max_tokens), a smaller model, or a machine with more memory"])


Place = Literal["host", "device"]


def _ways_down(asked: Asked, choice: Choice, too_much: set[Place]) -> list[str]:
    ways, lines, enough = _ways(asked, choice, too_much), [], False
    for way in ways:
        fit = _fit(asked, way)
        enough = enough or fit is not None
        verdict = f"then it fits, {fit.tokens_per_s:,.0f} tokens/s" if fit else "that alone is not enough"
        lines.append(f"{fit.words if fit else way.name}{way.comment}; {verdict}")
    if not enough:
        found = [fit for pair in itertools.combinations(ways, 2) if (fit := _fit(asked, *pair)) is not None]
        found.sort(key=lambda fit: -fit.tokens_per_s)
        lines += [
            f"together: {fit.words}; then it fits, {fit.tokens_per_s:,.0f} tokens/s" for fit in found[:MOST_PAIRS]
        ]
        if len(ways) > 1 and not found:
            lines.append("no two of these together are enough")
    if "device" in too_much:
        lines.append("a larger device, or a higher memory.device_gib")
    if "host" in too_much:
        lines += _of_the_host(asked, choice)
    return lines


def _fit(asked: Asked, *ways: Way) -> Fit | None:
    """The mildest changes, one of each way, with which the run fits."""
    *others, last = ways
    for first in itertools.product(*(way.changes for way in others)):
        partly = asked.with_(*first)
        number = bisect.bisect_left(last.changes, True, key=partly.fits_with)
        if number == len(last.changes):
            continue
        changes = (*first, last.changes[number])
        changed = partly.with_(changes[-1])
        best = changed.search().best()
        if best is not None:
            words = " with ".join(change.words for change in changes)
            return Fit(words + _new_step(asked.step, changed.step), changed.step.all_tokens / best.timeline.step)
    return None


def _new_step(old: StepSize, new: StepSize) -> str:
    """The keys of the config that say it."""
    keys = [f"data.max_tokens: {new.tokens}"] if new.tokens != old.tokens else []
    keys += [f"batch.tokens_per_step: {new.all_tokens}"] if new != old else []
    return f" ({', '.join(keys)})" if keys else ""


def _ways(asked: Asked, choice: Choice, too_much: set[Place]) -> list[Way]:
    """What can be set in the run's file. Those with many changes come last, where `_fit` looks for one in few tries."""
    step, options, ways = asked.step, asked.options, list[Way]()
    if options.gradient_plane and options.compute != "fp16" and "host" in too_much:
        width = options.gradient_bytes(choice.accumulation_steps)
        less = gib(width * (asked.shape.parameters - choice.resident_elements(asked.shape)))
        words = "without clipping (optim.max_grad_norm: null, memory.gradient_plane: false)"
        change = Change(words, {"gradient_plane": False, "accumulation_steps": 1}, {})
        ways.append(Way(words, [change], f": {width} bytes a parameter less, {less}"))
    if options.accumulation_steps is not None and options.accumulation_steps > 1 and "host" in too_much:
        words = "batch.accumulation_steps: 1"
        comment = f": gradients in {options.transport_bytes} bytes instead of 4"
        ways.append(Way(words, [Change(words, {"accumulation_steps": 1}, {})], comment))
    if "device" in too_much:
        if options.policy in ("keep", "selective"):
            words = "activations.policy: auto"
            ways.append(Way(words, [Change(words, {"policy": "auto"}, {})], ", which keeps what fits"))
        if options.segment == 1:
            words = "activations.segment: 4"
            change = Change(words, {"segment": 4, "policy": "recompute"}, {})
            ways.append(Way(words, [change], ", which keeps every 4th layer's input"))
        ways += _smaller_steps(step)
    return ways


def _smaller_steps(step: StepSize) -> list[Way]:
    """Shorter rows, then fewer of them."""
    halves = list(itertools.takewhile(lambda n: n >= LEAST_ROW_TOKENS, (step.tokens >> n for n in range(1, 64))))
    shorter = [Change(f"shorter rows: {step.rows} of {n:,} tokens", {}, {"tokens": n}) for n in halves]
    fewer = [Change(f"fewer rows: {counted(n, 'row')} a step", {}, {"rows": n}) for n in range(step.rows - 1, 0, -1)]
    return [
        *([Way("shorter rows", shorter, ", as long as fit")] if shorter else []),
        *([Way("fewer rows a step", fewer, ", as many as fit")] if fewer else []),
    ]


def _of_the_host(asked: Asked, choice: Choice) -> list[str]:
    """What it would take of the host, or of the model."""
    lines = host_lines(asked.shape, asked.step, asked.options, choice)
    width = asked.options.optim.bytes_per_parameter + asked.options.gradient_bytes(choice.accumulation_steps)
    other = PROCESS_BYTES + sum(size for name, size in lines.items() if "offloaded" in name or "slabs" in name)
    most = choice.resident_elements(asked.shape) + max(0, asked.caps.host_bytes - other) / width
    return [
        f"a host with {gib(sum(lines.values()))} for the run, or a higher memory.host_gib",
        f"a model of at most about {abbreviated(most)} parameters",
    ]
