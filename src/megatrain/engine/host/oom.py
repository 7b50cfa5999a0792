"""The climb: a step that runs out of device memory is dropped and computed again, one rung of the ladder further.

ladder.py says which rung comes next; here the rung is taken, and holds for the rest of the run.
"""

from __future__ import annotations

import logging
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from megatrain.engine.host.buffers import DeviceBuffers
from megatrain.engine.host.gradients import Route
from megatrain.engine.host.ladder import Cut, Denser, Failure, Situation
from megatrain.engine.plan import StepShape
from megatrain.errors import PlanRefused
from megatrain.host_memory.available import available_host_bytes

logger = logging.getLogger(__name__)

T = TypeVar("T")
LADDER_RESERVE_BYTES = 1 << 30
"""Host memory that must be left beside what a rung of the ladder puts there."""


class OomRecovery:
    """Runs steps so that they fit the device.

    Args:
        flows: The device side.
        cut: How steps are cut as long as they fit.
        config: Of the model.
        device_bytes: Device memory that may be used, 0 on a CPU.
        rearrange: (windows, names of units that leave the device) brings the engine to rest and arranges the flows so.
        close: Ends the engine where a step cannot be dropped.

    Attributes:
        denser: What the ladder has changed so far.
    """

    def __init__(
        self,
        flows: DeviceBuffers,
        cut: Cut,
        config: Any,
        device_bytes: int,
        rearrange: Callable[[int, Sequence[str]], None],
        close: Callable[[], None],
    ):
        self.denser = Denser()
        self.device_bytes = device_bytes
        self._flows, self._cut, self._config = flows, cut, config
        self._store, self._streams = flows.store, flows.streams
        self._rearrange, self._close = rearrange, close

    def shape(self, batch_BT: Sequence[int]) -> StepShape:
        """How a step on a batch of this shape is cut."""
        rows, tokens = batch_BT
        return self.denser.applied_to(self._cut.shape(rows, tokens, self._flows.accumulation_steps))

    def until_it_fits(self, batch_BT: Sequence[int], compute: Callable[[StepShape], T], training: bool) -> T:
        """Run `compute`; on CUDA out of memory drop what it has built and try the next denser setting, for good.

        Args:
            batch_BT: Shape of the batch.
            compute: A step, cut as it is told; it changes no weight.
            training: Whether with a backward.

        Raises:
            PlanRefused: The densest setting does not fit either.
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
            self._climb(shape, batch_BT, failure, training)

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the ladder."""
        return {**self.denser.as_dict(), "device_bytes": self.device_bytes}

    def restore(self, ladder: dict[str, Any]) -> None:
        """What the ladder had chosen when a checkpoint was made holds again, unless this device has more memory. What it has
        chosen since, before the run went back to this checkpoint, stays."""
        denser, then = Denser.from_dict(ladder), ladder.get("device_bytes")
        if self._cut.segment > 1:  # it drops inputs that would wait in host memory
            denser = replace(denser, offload=False)
        denser = self.denser.joined(denser)
        if denser == self.denser or self._flows.route is Route.FUSED_UPDATE or (then or 0) < self.device_bytes:
            return
        self._adopt(denser)
        logger.info("as before this checkpoint: %s (the device ran out of memory)", ", ".join(denser.changes))

    def _abandon(self, error: BaseException) -> Failure | None:
        """Drop what a step has built, so that the engine can go on. Weights are as before the step.

        Returns:
            What is known of the memory that ran out; None after another error, or where the engine cannot go on.
        """
        if self._flows.route is Route.FUSED_UPDATE:
            logger.error("a step failed after some units may have been updated; the engine is closed")
            self._close()
            return None
        failure = self._failure_of(error) if isinstance(error, torch.OutOfMemoryError) else None
        self._flows.runner.abandon()
        return failure

    def _failure_of(self, error: torch.OutOfMemoryError) -> Failure:
        """What is known while the failed step's memory is still held."""
        ledger = self._flows.memory()
        if self._streams.cuda:
            ledger["allocated now"] = torch.cuda.memory_allocated(self._streams.device)
            ledger["reserved by the allocator"] = torch.cuda.memory_reserved(self._streams.device)
            ledger["free on the device"] = torch.cuda.mem_get_info(self._streams.device)[0]
        return Failure(str(error).splitlines()[0], self._flows.runner.where(), ledger)

    def _climb(self, shape: StepShape, batch_BT: Sequence[int], failure: Failure, training: bool) -> None:
        """Go on with the next rung of the ladder, or refuse with the ledger where there is none."""
        resident = self._resident()
        more_windows = training and self._room_for_windows()
        offload = training and self._room_for_inputs(batch_BT, shape.accumulation_steps)
        rows, tokens = batch_BT
        now = Situation(
            rows=rows,
            tokens=tokens,
            training=training,
            offload=offload,
            more_windows=more_windows,
            resident=len(resident),
            mlps=self._flows.shell.can_chunk_mlps,
            mlp_tokens=self._flows.shell.chunk_tokens,
        )
        denser = self.denser.next(shape, now)
        if denser is None:
            raise PlanRefused(
                f"{failure}\n  this is the densest setting\n  -> use shorter rows, or a device with more memory"
            )
        before = self.denser
        if denser.resident != self.denser.resident:
            denser = replace(denser, device_fraction=self._fraction_without(resident[denser.resident :]))
        self._adopt(denser)
        if self._streams.cuda:
            torch.cuda.empty_cache()
        logger.warning(
            "%s\n  the step is dropped, nothing was updated; it is computed again with %s\n"
            "  this run goes on so; for the next one put into its config:\n%s",
            failure,
            denser.step_from(before),
            textwrap.indent(denser.yaml, "    "),
        )

    def _adopt(self, denser: Denser) -> None:
        """Go on with what the ladder says; no step is in progress."""
        if denser.offload:
            self._flows.offload_all()
        shell = self._flows.shell
        if denser.mlp_tokens is not None and denser.mlp_tokens < (shell.chunk_tokens or math.inf):
            shell.compute_in_chunks(denser.mlp_tokens)
        accumulation_steps = max(self._flows.accumulation_steps, denser.accumulation_steps or 1)
        leaving = self._resident()[denser.resident :] if denser.resident is not None else []
        self.denser = denser
        if accumulation_steps != self._flows.accumulation_steps or leaving:
            self._rearrange(accumulation_steps, leaving)

    def _resident(self) -> list[str]:
        return [name for name, planes in self._store.units.items() if planes.resident]

    def _fraction_without(self, leaving: Sequence[str]) -> float:
        """`memory.device_fraction` with which a plan has room for all but these units. Two digits, rounded down."""
        freed = sum(plane.nbytes for name in leaving for plane in self._store.units[name].state().values())
        peak = torch.cuda.max_memory_allocated(self._streams.device) if self._streams.cuda else freed
        return math.floor(100 * max(0.01, (peak - freed) / max(1, self.device_bytes))) / 100

    def _room_for_inputs(self, batch_BT: Sequence[int], accumulation_steps: int) -> bool:
        """Whether the host can hold the inputs of all layers for a window."""
        rows, hidden = -(-batch_BT[0] // accumulation_steps), self._config.get_text_config().hidden_size
        layers, itemsize = len(self._flows.structure.layers), self._flows.settings.compute.itemsize
        needed = layers * rows * batch_BT[1] * hidden * itemsize
        return needed + LADDER_RESERVE_BYTES < available_host_bytes()

    def _room_for_windows(self) -> bool:
        """Whether gradients can be summed over more windows: it takes a gradient plane, in fp32."""
        dtype = self._store.grad_dtype
        if dtype is None:
            return False
        wider = (4 - dtype.itemsize) * sum(unit.layout.numel for unit in self._flows.structure.units)
        return wider == 0 or wider + LADDER_RESERVE_BYTES < available_host_bytes()
