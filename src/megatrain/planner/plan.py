"""`plan`: from a model's shape, a machine, a step and caps to a `Plan`, or to a refusal with its ledger. Pure.

`Plan.execution` is what the engine follows; `report.py` prints a plan.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megatrain.engine.plan import ExecutionPlan, Place
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
        placement: Where each unit lives, in forward order.
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
    placement: Mapping[str, Place]
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

    @property
    def execution(self) -> ExecutionPlan:
        """What the engine follows."""
        choice, options = self.choice, self.options
        return ExecutionPlan(
            placement=self.placement,
            activations=dict(enumerate(choice.policies)),
            offload_input=frozenset(range(choice.offloaded)),
            selective_budget=SELECTIVE_BUDGET,
            mlp_chunk_tokens=choice.mlp_chunk_tokens,
            segment=options.segment,
            microbatch_rows=choice.microbatch_rows,
            accumulation_steps=choice.accumulation_steps,
            head_chunk_tokens=choice.head_chunk_tokens,
            weight_slots=options.weight_slots,
            gradient_slabs=options.gradient_slabs,
            gradient_plane=options.gradient_plane,
            compile="auto" if options.compiled else "off",
            threads=self.threads,
        )

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
