"""What moves while a step computes: weights in, gradients out, inputs there and back, and the runner in the middle.

All of it can be closed and made again around the same planes. That is how the ladder (climb.py) changes what lives where.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from megatrain.device.copier import StagedCopier
from megatrain.device.offload import InputStore
from megatrain.device.slabs import Slab, SlabPool
from megatrain.device.streams import Streams
from megatrain.engine.host.assembly import make_copier, make_slabs, make_weight_stream, pin_planes
from megatrain.engine.host.gradients import GradientFlow, Route
from megatrain.engine.host.optimizer import HostOptimizer
from megatrain.engine.host.step import StepAborter, StepRunner
from megatrain.engine.host.weights import UpdateGate
from megatrain.host_memory.store import HostStore
from megatrain.models.shell import Shell


@dataclass(frozen=True)
class BufferSettings:
    """What the flows are made from, again when the ladder changes what lives where. See `HostEngine`."""

    compute: torch.dtype
    compiled: bool
    pin: Literal["auto", "all", "staged"]
    weight_slots: int
    gradient_plane: bool
    gradient_slabs: int
    transport: torch.dtype
    poison: bool


class DeviceBuffers:
    """The device side of an engine.

    Args:
        store: The planes.
        streams: The device's streams.
        optimizer: Updates the planes behind the flows; it stays when they are made again.
        shell: HF's code around the layers, whose layers call `runner`; it stays, too.
        interrupt: Looked at before each visit of a layer.
        settings: What the flows are made from.
        windows: Accumulation windows of a step.
        offloaded: Layers whose input waits in host memory.

    Attributes:
        route: The way of the gradients of units that are not resident.
        weights, gradients, inputs, runner: See their classes; others after `rearrange`.
    """

    def __init__(
        self,
        store: HostStore,
        streams: Streams,
        optimizer: HostOptimizer,
        shell: Shell,
        interrupt: StepAborter,
        settings: BufferSettings,
        accumulation_steps: int,
        offloaded: Collection[int],
    ):
        self.structure, self.store, self.streams, self.settings = shell.structure, store, streams, settings
        self.shell = shell
        self._optimizer, self._interrupt = optimizer, interrupt
        self.accumulation_steps = accumulation_steps
        self._make(offloaded)

    def _make(self, offloaded: Collection[int]) -> None:
        chosen = self.settings
        pinned = pin_planes(self.store, self.streams, chosen.pin)
        self._copier = make_copier(self.store, self.streams, pinned)
        gate = UpdateGate(self._optimizer.finished, self._wait_for_update)
        self.weights = make_weight_stream(
            self.structure, self.store, self.streams, self._copier, chosen.compute, chosen.weight_slots, gate
        )
        direct = pinned and self.accumulation_steps == 1
        self.route = Route.FUSED_UPDATE if not chosen.gradient_plane else Route.COPY if direct else Route.ACCUMULATE
        self.slabs: SlabPool | None = None
        self._edge_slabs: dict[str, Slab] = {}
        if self.route is not Route.COPY:
            self.slabs, self._edge_slabs = make_slabs(
                self.structure, self.store, self.streams, chosen.gradient_slabs, chosen.transport
            )
        self.gradients = GradientFlow(
            self.streams,
            self.store,
            self.structure.units,
            self.route,
            chosen.transport,
            self.slabs,
            self._edge_slabs,
            self._optimizer,
            chosen.poison,
        )
        self.inputs = InputStore(self.streams, offloaded)
        flows = (self.streams, self.weights, self.gradients, self.inputs)
        self.runner = StepRunner(self.shell, *flows, chosen.compiled, self._interrupt)

    def offload_all(self) -> None:
        """From the next step on the inputs of all layers wait in host memory."""
        self.inputs.layers = frozenset(range(len(self.structure.layers)))

    def rearrange(self, accumulation_steps: int, leaving: Sequence[str]) -> None:
        """Other buffers around the same state: more windows, units that leave the device. The planes must be at rest.

        After an error nothing here can be used any more.
        """
        self.close()
        offloaded = self.inputs.layers
        # What holds device memory goes before its successor comes.
        del self.runner, self.weights, self.gradients, self.inputs
        self.accumulation_steps = accumulation_steps
        for name in leaving:
            self.store.move_to_host(name)
        if accumulation_steps > 1:
            self.store.widen_gradients()
        if self.streams.cuda:
            torch.cuda.empty_cache()
        self._make(offloaded)

    def close(self) -> None:
        """Give all buffers back; nothing runs any more."""
        self._copier.close()
        self.inputs.close()
        self.runner.close()
        for slab in self._all_slabs():
            slab.close()

    # ---------------------------------------------------------------- figures

    def reset_counters(self) -> None:
        """Begin to count for a step."""
        self.weights.update_wait_s = 0.0
        self.weights.loaded_bytes = self.gradients.sent_bytes = 0
        self.inputs.out_bytes = self.inputs.back_bytes = 0
        if self.slabs:
            self.slabs.reset_counters()

    def moved_bytes(self) -> dict[str, int]:
        """See `StepResult.moved_bytes`."""
        return {
            "h2d": self.weights.loaded_bytes + self.inputs.back_bytes,
            "d2h": self.gradients.sent_bytes + self.inputs.out_bytes,
        }

    def seconds(self) -> dict[str, float]:
        """See `StepResult.seconds`, but for `step`."""
        seconds = {"update_wait": self.weights.update_wait_s, "slab_wait": self.slabs.wait_s if self.slabs else 0.0}
        return seconds | self.runner.phase_seconds()

    def memory(self) -> dict[str, int]:
        """See `HostEngine.memory`."""
        peak = torch.cuda.max_memory_allocated(self.streams.device) if self.streams.cuda else 0
        return {
            **{f"host_{kind}": size for kind, size in self.store.plane_bytes().items()},
            "host_inputs": self.inputs.nbytes,
            "host_slabs": sum(slab.nbytes for slab in self._all_slabs()),
            "host_pinned": self.pinned_bytes(),
            "device_resident": self.store.resident_bytes,
            "device_slots": self.weights.nbytes,
            "device_gradients": self.gradients.nbytes,
            "device_peak": peak,
        }

    def pinned_bytes(self) -> int:
        """Pinned host memory, planes included."""
        staged = self._copier.pinned_bytes if isinstance(self._copier, StagedCopier) else 0
        slabs = sum(slab.pinned_bytes for slab in self._all_slabs())
        return self.store.pinned_bytes + slabs + staged + self.inputs.pinned_bytes

    def _all_slabs(self) -> list[Slab]:
        return [*(self.slabs.slabs if self.slabs else []), *self._edge_slabs.values()]

    def _wait_for_update(self, unit: str) -> None:
        """The device is kept waiting only where the update has not ended yet; an ended one may have an error to raise."""
        if self._optimizer.finished(unit):
            self._optimizer.wait(unit)
            return
        with self.streams.host_waits("optimizer"):
            self._optimizer.wait(unit)
