"""Recovery from device OOM: discard the step, switch to the next cheaper plan (`ExecutionPlan.reduced`), retry.

Weights change only after a step's gradients are complete, so a step that ran out of memory can be dropped and computed again.
The reduced plan stays for the rest of the run, resumed or not, and is logged as config lines to paste.
"""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from megatrain.engine.host.buffers import DeviceBuffers
from megatrain.engine.host.gradients import Route
from megatrain.engine.plan import ExecutionPlan, Shortage, StepShape
from megatrain.errors import PlanRefused
from megatrain.host_memory.available import available_host_bytes
from megatrain.units import GIB, size_lines

logger = logging.getLogger(__name__)

T = TypeVar("T")
HOST_RESERVE_BYTES = GIB
"""Host memory that a reduced plan must leave free."""
REDUCIBLE = (
    ("weight_slots", "weight_slots", "memory.weight_slots", None),
    ("activations", "recompute", "activations.policy", "recompute"),
    ("mlp_chunk_tokens", "mlp_tokens", "activations.mlp_chunk_tokens", None),
    ("offload_input", "offload", "activations.offload_input", "on"),
    ("microbatch_rows", "chunk_rows", "batch.microbatch_rows", None),
    ("head_chunk_tokens", "head_tokens", "batch.head_chunk_tokens", None),
    ("accumulation_steps", "windows", "batch.accumulation_steps", None),
)
"""Field of the plan, its key under `ladder` in a checkpoint, its config setting, and the setting's value (None: the field's)."""


@dataclass(frozen=True)
class Failure:
    """A failed allocation.

    Attributes:
        message: The allocator's own message.
        where: Phase and layer.
        held: Bytes by purpose at that moment.
    """

    message: str
    where: str
    held: Mapping[str, int]

    def __str__(self) -> str:
        lines = size_lines(self.held, smallest_bytes=1)
        return "\n".join([f"out of device memory in {self.where}: {self.message}", *lines])


class OomRecovery:
    """Runs steps so that they fit the device.

    Args:
        buffers: The device side.
        plan: The plan to start with, resolved.
        config: The model's config.
        device_bytes: Device memory that may be used, 0 on a CPU.
        rearrange: Brings the engine to rest and remakes the device buffers for another plan.
        close: Ends the engine where a step cannot be dropped.
        alone: Whether this process trains alone. A step of several ranks cannot be dropped: its error is raised.

    Attributes:
        planned: The plan that the run started with.
        plan: The plan in effect.
    """

    def __init__(
        self,
        buffers: DeviceBuffers,
        plan: ExecutionPlan,
        config: Any,
        device_bytes: int,
        rearrange: Callable[[ExecutionPlan], None],
        close: Callable[[], None],
        alone: bool = True,
    ):
        self._alone = alone
        self.planned = self.plan = plan
        self.device_bytes = device_bytes
        self._device_fraction: float | None = None
        self._buffers, self._config = buffers, config
        self._store, self._streams = buffers.store, buffers.streams
        self._rearrange, self._close = rearrange, close

    @property
    def changes(self) -> tuple[str, ...]:
        """Differences to the plan that the run started with, as `section.key: value`."""
        return _flat(config_changes(self.planned, self.plan, self._device_fraction))

    def shape(self, batch_BT: Sequence[int]) -> StepShape:
        """How a step on a batch of this shape is cut."""
        rows, tokens = batch_BT
        shape, planned = self.plan.step_shape(rows, tokens), self.planned.step_shape(rows, tokens)
        # Rows that were reduced for short rows are no reason to compute more of a long row's tokens together.
        return replace(shape, microbatch_rows=min(shape.microbatch_rows, planned.microbatch_rows))

    def until_it_fits(self, batch_BT: Sequence[int], compute: Callable[[StepShape], T], training: bool) -> T:
        """Run `compute`; on CUDA OOM drop what it has built, reduce the plan for good, and try again.

        Args:
            batch_BT: Shape of the batch.
            compute: A step, cut as it is told; it changes no weight.
            training: Whether the step has a backward.

        Raises:
            PlanRefused: No plan needs less memory.
        """
        while True:
            shape = self.shape(batch_BT)
            try:
                return compute(shape)
            except BaseException as error:
                failure = self._abandon(error)
                if failure is None:
                    raise
            # Out here, where no traceback keeps the step's tensors alive any more.
            self._reduce(shape, batch_BT, failure, training)

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint stores under `ladder`: bounds that recovery has found, None or False for those it has not changed."""
        plan, planned = self.plan, self.planned
        bounds: dict[str, Any] = {key: False if word else None for _, key, _, word in REDUCIBLE}
        for field, key, _, word in REDUCIBLE:
            if getattr(plan, field) != getattr(planned, field):
                bounds[key] = bool(word) or getattr(plan, field)
        resident = None if plan.placement == planned.placement else len(plan.resident)
        fraction = self._device_fraction
        return {**bounds, "resident": resident, "device_fraction": fraction, "device_bytes": self.device_bytes}

    def restore(self, ladder: Mapping[str, Any]) -> None:
        """Apply the bounds stored in a checkpoint, unless this device has more memory. Reductions since then stay."""
        if self._buffers.route is Route.FUSED_UPDATE or (ladder.get("device_bytes") or 0) < self.device_bytes:
            return
        plan = _bounded(self.plan, ladder)
        fraction = _least(self._device_fraction, ladder.get("device_fraction"))
        if (plan, fraction) == (self.plan, self._device_fraction):
            return
        self._device_fraction = fraction
        self.adopt(plan)
        logger.info("reduced as before this checkpoint: %s (the device ran out of memory)", ", ".join(self.changes))

    def adopt(self, plan: ExecutionPlan) -> None:
        """Switch to a reduced plan; no step is in progress."""
        before, self.plan = self.plan, plan
        if plan.mlp_chunk_tokens is not None and plan.mlp_chunk_tokens != before.mlp_chunk_tokens:
            self._buffers.shell.compute_in_chunks(plan.mlp_chunk_tokens)
        buffers = [(each.accumulation_steps, each.resident, each.weight_slots) for each in (before, plan)]
        if buffers[0] != buffers[1]:
            self._rearrange(plan)
        else:
            self._buffers.follow(plan)

    def _abandon(self, error: BaseException) -> Failure | None:
        """Drop everything the step has built; weights are as before the step.

        Returns:
            The failed allocation; None after another error, on one of several ranks, or where the engine had to be closed.
        """
        if not self._alone:  # the other ranks wait in collectives that this one cannot enter again
            return None
        if self._buffers.route is Route.FUSED_UPDATE:
            logger.error("a step failed after some units may have been updated; the engine is closed")
            self._close()
            return None
        failure = self._failure_of(error) if isinstance(error, torch.OutOfMemoryError) else None
        self._buffers.runner.abandon()
        return failure

    def _failure_of(self, error: torch.OutOfMemoryError) -> Failure:
        """Described while the failed step's memory is still held."""
        held = self._buffers.memory()
        if self._streams.cuda:
            held["allocated now"] = torch.cuda.memory_allocated(self._streams.device)
            held["reserved by the allocator"] = torch.cuda.memory_reserved(self._streams.device)
            held["free on the device"] = torch.cuda.mem_get_info(self._streams.device)[0]
        return Failure(str(error).splitlines()[0], self._buffers.runner.where(), held)

    def _reduce(self, shape: StepShape, batch_BT: Sequence[int], failure: Failure, training: bool) -> None:
        """Switch to the next cheaper plan, or refuse with the memory breakdown where there is none."""
        rows, tokens = batch_BT
        shortage = Shortage(
            shape=shape,
            rows=rows,
            tokens=tokens,
            training=training,
            inputs_fit_host=training and self._inputs_fit_host(batch_BT, shape.accumulation_steps),
            sums_fit_host=training and self._sums_fit_host(),
            mlps_in_chunks=self._buffers.shell.can_chunk_mlps,
        )
        before, plan = self.plan, self.plan.reduced(shortage)
        if plan is None:
            raise PlanRefused(
                f"{failure}\n  no plan needs less device memory\n  -> use shorter rows, or a device with more memory"
            )
        if plan.resident != before.resident:
            self._device_fraction = self._fraction_without(before.resident[len(plan.resident) :])
            step = f"{len(plan.resident)} units on the device (memory.device_fraction: {self._device_fraction})"
        else:
            step = ", ".join(_flat(config_changes(before, plan)))
        self.adopt(plan)
        if self._streams.cuda:
            torch.cuda.empty_cache()
        logger.warning(
            "%s\n  step dropped, nothing was updated; retrying with %s\n"
            "  kept for this run; for the next one, put into its config:\n%s",
            failure,
            step,
            textwrap.indent(as_yaml(config_changes(self.planned, plan, self._device_fraction)), "    "),
        )

    def _fraction_without(self, leaving: Sequence[str]) -> float:
        """`memory.device_fraction` with which the planner places all but these units. Two digits, rounded down."""
        freed = sum(plane.nbytes for name in leaving for plane in self._store.units[name].state().values())
        peak = torch.cuda.max_memory_allocated(self._streams.device) if self._streams.cuda else freed
        return math.floor(100 * max(0.01, (peak - freed) / max(1, self.device_bytes))) / 100

    def _inputs_fit_host(self, batch_BT: Sequence[int], accumulation_steps: int) -> bool:
        """Whether the host has room for the inputs of all layers in one accumulation step."""
        rows, hidden = -(-batch_BT[0] // accumulation_steps), self._config.get_text_config().hidden_size
        layers, itemsize = len(self._buffers.structure.layers), self.plan.compute.itemsize
        needed = layers * rows * batch_BT[1] * hidden * itemsize
        return needed + HOST_RESERVE_BYTES < available_host_bytes()

    def _sums_fit_host(self) -> bool:
        """Whether gradients can be summed over more accumulation steps: it takes a gradient plane, in fp32."""
        dtype = self._store.grad_dtype
        if dtype is None:
            return False
        wider = (4 - dtype.itemsize) * sum(unit.layout.numel for unit in self._buffers.structure.units)
        return wider == 0 or wider + HOST_RESERVE_BYTES < available_host_bytes()


def limit_device(device: torch.device, device_gib: float | None) -> int:
    """Limit this process to `device_gib` of the device's memory. Returns the bytes it may use, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    total = torch.cuda.get_device_properties(device).total_memory
    if device_gib is None:
        return total
    torch.cuda.set_per_process_memory_fraction(min(1.0, device_gib * GIB / total), device)
    return min(total, int(device_gib * GIB))


def config_changes(before: ExecutionPlan, after: ExecutionPlan, device_fraction: float | None = None) -> dict[str, Any]:
    """The config settings, as `section.key`, that lead from one resolved plan to a reduced one."""
    changes = {
        setting: word or getattr(after, field)
        for field, _, setting, word in REDUCIBLE
        if getattr(after, field) != getattr(before, field)
    }
    return changes if device_fraction is None else {**changes, "memory.device_fraction": device_fraction}


def as_yaml(changes: Mapping[str, Any]) -> str:
    """Lines to paste into a config."""
    lines: list[str] = []
    for setting, value in changes.items():
        section, _, key = setting.partition(".")
        lines += [] if f"{section}:" in lines else [f"{section}:"]
        lines.append(f"  {key}: {value}")
    return "\n".join(lines)


def _flat(changes: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{setting}: {value}" for setting, value in changes.items())


def _bounded(plan: ExecutionPlan, ladder: Mapping[str, Any]) -> ExecutionPlan:
    """The plan within the bounds of `OomRecovery.as_dict`. Keys of a newer version are ignored."""
    if ladder.get("recompute"):
        assert isinstance(plan.activations, Mapping)
        plan = replace(plan, activations=dict.fromkeys(plan.activations, "recompute"))
    if ladder.get("offload") and plan.segment == 1:  # a segment drops the inputs that would be offloaded
        assert isinstance(plan.activations, Mapping)
        plan = replace(plan, offload_input=frozenset(plan.activations))
    if ladder.get("resident") is not None:
        plan = plan.with_resident(ladder["resident"])
    return replace(
        plan,
        microbatch_rows=_least(plan.microbatch_rows, ladder.get("chunk_rows")),
        head_chunk_tokens=_least(plan.head_chunk_tokens, ladder.get("head_tokens")),
        weight_slots=2 if ladder.get("weight_slots") else plan.weight_slots,
        mlp_chunk_tokens=_least(plan.mlp_chunk_tokens, ladder.get("mlp_tokens")),
        accumulation_steps=max(plan.accumulation_steps, ladder.get("windows") or 1),
    )


N = TypeVar("N", int, float)


def _least(*bounds: N | None) -> N | None:
    return min((bound for bound in bounds if bound is not None), default=None)
