"""The plan of a checkpoint at a resume: kept as a whole where it fits, else in its cut, and what changes is named.

[Note: the cut and the bits]
How a step is cut (accumulation steps, microbatches, head chunks, chunks of the MLP) decides in which order sums are rounded, so
another cut gives results that differ in their last bits. What the planner chooses follows the memory that happens to be free.
So a checkpoint holds the choice, and a resumed run takes it instead of searching again. A setting that the user has changed since
then wins. Where the choice no longer fits, the search is free to move units and activations, but keeps the cut; only if nothing
fits with it, everything is planned again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from megatrain.config.schema import RunConfig
from megatrain.planner.memory import device_peak, host_lines
from megatrain.planner.plan import Choice, PlanRequest
from megatrain.planner.search import Search
from megatrain.units import gibs

CUT = {
    "accumulation_steps": "batch.accumulation_steps",
    "microbatch_rows": "batch.microbatch_rows",
    "head_chunk_tokens": "batch.head_chunk_tokens",
    "mlp_chunk_tokens": "activations.mlp_chunk_tokens",
}
"""Field of the choice -> its config key."""
OTHERS = (
    "activations.policy", "activations.attention", "activations.mlp", "activations.offload_input", "activations.segment",
    "activations.compile", "memory.gradient_plane", "memory.weight_slots", "memory.gradient_slabs", "precision.grad_transport",
    "precision.compute_dtype", "model.attn_implementation", "run.deterministic", "batch.tokens_per_step", "data.max_tokens",
)  # fmt: skip
"""Further keys that decide how a step is computed."""
WHOLE = ("batch.tokens_per_step", "data.max_tokens", "precision.compute_dtype", "activations.compile")
"""With another value of these the old cut means nothing."""
SLACK = 0.01
"""Free memory changes a little from one start to the next: a plan that exceeds what it may fill by this share still fits."""
_choices = TypeAdapter(Choice)


def plan_settings(run: RunConfig) -> dict[str, Any]:
    """The config keys that decide how a step is computed, as a checkpoint remembers them."""
    plain = run.model_dump(mode="json")
    return {key: plain[key.partition(".")[0]][key.partition(".")[2]] for key in (*CUT.values(), *OTHERS)}


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """In words, what both have by name and with another value."""
    return [f"{key} was {_text(then[key])} and is {_text(now[key])}" for key in changed_keys(then, now)]


def changed_keys(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Names that both have, with another value."""
    return [key for key in now if key in then and then[key] != now[key]]


@dataclass(frozen=True)
class Kept:
    """What a resumed run takes from its checkpoint.

    Attributes:
        choice: The planner's choice; None if nothing fits any more that resembles the checkpoint's.
        remarks: What differs from the checkpoint.
        old: The checkpoint's choice, None if it has none for this model.
    """

    choice: Choice | None
    remarks: tuple[str, ...]
    old: Choice | None = None


def keep(request: PlanRequest, run: RunConfig, then: Mapping[str, Any]) -> Kept:
    """The choice of a resumed run. See [Note: the cut and the bits].

    Args:
        request: What would be planned now.
        run: The config.
        then: What the checkpoint remembers of its plan: `settings`, and `choice` as plain data.
    """
    settings = then.get("settings", {}), plan_settings(run)
    changed, remarks = set(changed_keys(*settings)), differing(*settings)
    old = choice_from(then.get("choice"), request)
    if old is None:
        return Kept(None, tuple(remarks))
    if changed & set(WHOLE):
        return Kept(None, tuple(remarks), old)
    given = {field: getattr(request.options, field) for field, key in CUT.items() if key in changed}
    if "memory.weight_slots" in changed:
        old = replace(old, replicated=request.options.weight_slots == "all")
    wanted = replace(old, **{field: value for field, value in given.items() if value is not None})
    searched = changed - {*CUT.values(), "memory.weight_slots", "memory.gradient_slabs"}
    if not searched and None not in given.values():
        if fits(request, wanted):
            return Kept(wanted, tuple(remarks), old)
        if wanted == old:
            remarks.append(_too_large(request, old))
    cut = {field: getattr(old, field) for field, key in CUT.items() if key not in changed}
    if not request.options.gradient_plane:
        cut.pop("accumulation_steps", None)
    best = Search(replace(request, options=replace(request.options, **cut))).best()
    if best is None:
        return Kept(None, tuple(remarks), old)
    return Kept(best.choice, (*remarks, *differences(old, best.choice)), old)


def fits(request: PlanRequest, choice: Choice) -> bool:
    """Whether a step as chosen fits the caps, with some slack."""
    host, device = _needed(request, choice)
    caps = request.caps
    return host <= (1 + SLACK) * caps.host_bytes and device <= (1 + SLACK) * caps.device_bytes


def _needed(request: PlanRequest, choice: Choice) -> tuple[int, int]:
    shape, step, options = request.shape, request.step, request.options
    return sum(host_lines(shape, step, options, choice).values()), device_peak(shape, step, options, choice).nbytes


def _too_large(request: PlanRequest, choice: Choice) -> str:
    needed, caps = _needed(request, choice), request.caps
    parts = []
    for place, size, allowed in zip(("host", "device"), needed, (caps.host_bytes, caps.device_bytes), strict=True):
        if size > (1 + SLACK) * allowed:
            needs, may = gibs(size, allowed)
            parts.append(f"{needs} of {place} memory, {may} may be filled now")
    return f"the checkpoint's plan does not fit: it needs {' and '.join(parts)}"


def choice_from(plain: Any, request: PlanRequest) -> Choice | None:
    """A choice from its plain data; None if it is none for this model."""
    try:
        return (
            _choices.validate_python({**plain, "policies": tuple(plain["policies"])})
            if _is_of(plain, request)
            else None
        )
    except (ValidationError, KeyError, TypeError):
        return None


def _is_of(plain: Any, request: PlanRequest) -> bool:
    depth = request.shape.depth
    return len(plain["policies"]) == depth and plain["resident_layers"] in range(depth + 1)


def differences(old: Choice, new: Choice) -> list[str]:
    """What differs between two choices, by config key where there is one."""
    found = [
        f"{key}: {_text(getattr(old, field))} -> {_text(getattr(new, field))}"
        for field, key in CUT.items()
        if getattr(old, field) != getattr(new, field)
    ]
    if moved := sum(a != b for a, b in zip(old.policies, new.policies, strict=True)):
        found.append(f"activations: other policies for {moved} of {len(old.policies)} layers")
    if old.offloaded != new.offloaded:
        found.append(f"offloaded inputs: {old.offloaded} -> {new.offloaded} layers")
    if old.replicated != new.replicated:
        found.append(f"weight slots for all layers: {_text(old.replicated)} -> {_text(new.replicated)}")
    resident = [(c.resident_layers, c.resident_embedding, c.resident_head) for c in (old, new)]
    if resident[0] != resident[1]:
        found.append(f"resident layers: {old.resident_layers} -> {new.resident_layers}")
    return found


def plain_choice(choice: Choice) -> dict[str, Any]:
    """A choice as JSON data."""
    return {**asdict(choice), "policies": list(choice.policies)}


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
