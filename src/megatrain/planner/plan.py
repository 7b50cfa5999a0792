"""`plan`: from a model's shape, a machine, a step and caps to a `Plan`, or to a refusal with its ledger. Pure.

What the engine does with a plan is `engine_options`; how people read it is `report.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.errors import PlanRefused
from megatrain.machine.machine import Machine
from megatrain.planner.choice import SELECTIVE_BUDGET, Caps, Choice, Lines, Options, Policy, StepSize
from megatrain.planner.memory import device_peak, disk_lines, host_lines
from megatrain.planner.model_cost import ModelShape
from megatrain.planner.refusal import Asked, refusal
from megatrain.planner.search import Search
from megatrain.planner.timeline import Timeline, simulate
from megatrain.units import GIB

DEVICE_FRACTION = 0.92
"""Of the device's memory, unless `memory.device_fraction` says otherwise; the rest is for the allocator's gaps and for what the
formulas do not see."""


@dataclass(frozen=True)
class Plan:
    """How a run's steps are computed, and what that takes.

    Attributes:
        model, machine: Names, for people.
        parameters: Of the model.
        step: The step that was planned.
        options: What the user had decided.
        choice: What the plan decided.
        threads: Of AdamW.
        placement: `device` or `host` for each unit, in forward order.
        host, device, disk: Bytes by plane and buffer; the device's at its worst moment, the disk's of one checkpoint.
        device_moment: When the device's worst moment is.
        caps: What was allowed.
        timeline: Predicted seconds.
        steps: Length of the run, None where it is not known.
        warnings: Of what can be planned and not run, for people.
    """

    model: str
    machine: str
    parameters: int
    step: StepSize
    options: Options
    choice: Choice
    threads: int
    placement: Mapping[str, str]
    host: Lines
    device: Lines
    disk: Lines
    device_moment: str
    caps: Caps
    timeline: Timeline
    steps: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def host_bytes(self) -> int:
        return sum(self.host.values())

    @property
    def device_bytes(self) -> int:
        return sum(self.device.values())

    @property
    def all_resident(self) -> bool:
        return set(self.placement.values()) == {"device"}

    @property
    def seconds(self) -> float:
        """Of a step."""
        return self.timeline.step

    @property
    def tokens_per_s(self) -> float:
        return self.step.all_tokens / self.timeline.step

    @property
    def total_seconds(self) -> float | None:
        return None if self.steps is None else self.steps * self.timeline.step

    def layers_with(self, policy: Policy) -> tuple[int, ...]:
        return tuple(i for i, p in enumerate(self.choice.policies) if p == policy)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            **{name: getattr(self, name) for name in ("model", "machine", "parameters", "threads", "steps")},
            "rows": self.step.rows,
            "tokens_per_row": self.step.tokens,
            "placement": dict(self.placement),
            "policies": list(self.choice.policies),
            "offloaded_layers": self.choice.offloaded,
            "accumulation_steps": self.choice.accumulation_steps,
            "microbatch_rows": self.choice.microbatch_rows,
            "head_chunk_tokens": self.choice.head_chunk_tokens,
            "mlp_chunk_tokens": self.choice.mlp_chunk_tokens,
            "gradient_slabs": self.options.gradient_slabs,
            "weight_slots": self.options.weight_slots,
            "host_bytes": {**self.host, "total": self.host_bytes, "allowed": self.caps.host_bytes},
            "device_bytes": {
                **self.device, "total": self.device_bytes, "allowed": self.caps.device_bytes, "moment": self.device_moment
            },
            "disk_bytes": {**self.disk, "total": sum(self.disk.values())},
            "seconds": {"step": self.seconds, **self.timeline.phases, "gpu_compute": self.timeline.compute},
            "busy_seconds": self.timeline.busy,
            "bottleneck": self.timeline.bottleneck,
            "tokens_per_second": self.tokens_per_s,
            "total_seconds": self.total_seconds,
            "options": asdict(self.options),
            "warnings": list(self.warnings),
        }  # fmt: skip


def caps_for(
    machine: Machine,
    *,
    host_gib: float | None = None,
    device_gib: float | None = None,
    device_fraction: float = DEVICE_FRACTION,
) -> Caps:
    """What a run may use: what the machine has or the user's caps, whichever is less; `device_fraction` of the device."""
    host = machine.host_gib if host_gib is None else min(machine.host_gib, host_gib)
    device = machine.device_gib if device_gib is None else min(machine.device_gib, device_gib)
    return Caps(int(host * GIB), int(device * GIB * device_fraction))


def plan(
    shape: ModelShape,
    machine: Machine,
    step: StepSize,
    caps: Caps | None = None,
    options: Options | None = None,
    *,
    steps: int | None = None,
) -> Plan:
    """The fastest way to run a step within the caps.

    Args:
        shape: The model; see `shape_of`.
        machine: Its figures; it must have a GPU.
        step: Rows and tokens of an optimizer step.
        caps: Bytes that may be used, by default all that the machine has.
        options: What is decided already.
        steps: Length of the run, for the total time.

    Raises:
        PlanRefused: Nothing fits. The message is the ledger of what comes nearest, with the ways down.
    """
    assert machine.device_gib > 0, f"{machine.name} has no GPU to plan for"
    caps, options = caps or caps_for(machine), options or Options()
    best = Search(shape, machine, step, caps, options).best()
    if best is None:
        raise PlanRefused(refusal(Asked(shape, machine, step, caps, options)))
    return _made(shape, machine, step, caps, options, best.choice, steps)


def plan_of(
    shape: ModelShape, machine: Machine, step: StepSize, choice: Choice, options: Options | None = None
) -> Plan:
    """The plan of a given choice, whether or not it fits: for comparing with measurements."""
    return _made(shape, machine, step, caps_for(machine), options or Options(), choice, None)


def _made(
    shape: ModelShape, machine: Machine, step: StepSize, caps: Caps, options: Options, choice: Choice, steps: int | None
) -> Plan:
    device = device_peak(shape, step, options, choice)
    return Plan(
        model=shape.name,
        machine=machine.name,
        parameters=shape.parameters,
        step=step,
        options=options,
        choice=choice,
        threads=options.threads or machine.threads,
        placement={name: "device" if choice.is_resident(name) else "host" for name in shape.unit_elements},
        host=host_lines(shape, step, options, choice),
        device=device.lines,
        disk=disk_lines(shape, options.optim),
        device_moment=device.moment,
        caps=caps,
        timeline=simulate(shape, machine, step, options, choice),
        steps=steps,
    )


def engine_options(plan: Plan) -> dict[str, Any]:
    """A plan as keyword arguments of `HostEngine`. What a plan does not use is left at the engine's default."""
    choice, options = plan.choice, plan.options
    arguments: dict[str, Any] = {
        "resident": tuple(name for name, place in plan.placement.items() if place == "device"),
        "kept": plan.layers_with("keep"),
        "selective": plan.layers_with("selective"),
        "keep_attention": plan.layers_with("attention"),
        "keep_mlp": plan.layers_with("mlp"),
        "mlp_chunk_tokens": choice.mlp_chunk_tokens,
        "budget": SELECTIVE_BUDGET,
        "offloaded": tuple(range(choice.offloaded)),
        "compile": "auto" if options.compiled else "off",
        "weight_slots": options.weight_slots,
        "gradient_slabs": options.gradient_slabs,
        "gradient_plane": options.gradient_plane,
        "microbatch_rows": choice.microbatch_rows,
        "accumulation_steps": choice.accumulation_steps,
        "head_chunk_tokens": choice.head_chunk_tokens,
        "segment": None if options.segment == 1 else options.segment,
        "threads": plan.threads,
    }
    unused = {
        "selective": (), "offloaded": (), "segment": None,
        "keep_attention": (), "keep_mlp": (), "mlp_chunk_tokens": None,
    }  # fmt: skip
    return {name: value for name, value in arguments.items() if name not in unused or value != unused[name]}
