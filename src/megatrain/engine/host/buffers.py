"""`DeviceBuffers`: streams weights in, gradients out and layer inputs both ways, with the step runner between them.

All of it can be closed and remade around the same planes, which is how OOM recovery (oom.py) changes what lives where.
"""

from __future__ import annotations

import logging

import torch

from megatrain.device.offload import InputStore
from megatrain.device.ring import Copier, DirectCopier, Slot, StagedCopier, WeightRing
from megatrain.device.shards import Shards
from megatrain.device.slabs import Slab, SlabPool
from megatrain.device.streams import Streams
from megatrain.engine.host.gradients import GradientFlow, Route
from megatrain.engine.host.layer import StepAborter
from megatrain.engine.host.optimizer import HostOptimizer
from megatrain.engine.host.step import StepRunner
from megatrain.engine.host.weights import UpdateGate, WeightStream, stays
from megatrain.engine.objective import Objective
from megatrain.engine.plan import ExecutionPlan
from megatrain.errors import UserError
from megatrain.host_memory.arena import PinRefused
from megatrain.host_memory.store import HostStore
from megatrain.models.routers import RouterLoss
from megatrain.models.shell import Shell
from megatrain.models.structure import Unit

logger = logging.getLogger(__name__)


class DeviceBuffers:
    """The device side of an engine.

    Args:
        store: The planes.
        streams: The device's streams.
        optimizer: Updates the planes behind the buffers; it stays when they are remade.
        shell: Hugging Face's code around the layers, whose layers call `runner.layers`; it stays, too.
        objective: The loss.
        aborter: Checked before each layer.
        plan: Resolved for the model.
        poison: Fill buffers with NaN after their use (tests).
        shards: The ranks that share the state.
        router_loss: The auxiliary loss of the routers, if the model is trained with it.

    Attributes:
        route: How gradients of streamed units reach AdamW.
        weights, gradients, inputs, runner: See their classes; replaced by `rearrange`.
    """

    def __init__(
        self,
        store: HostStore,
        streams: Streams,
        optimizer: HostOptimizer,
        shell: Shell,
        objective: Objective,
        aborter: StepAborter,
        plan: ExecutionPlan,
        poison: bool,
        shards: Shards,
        router_loss: RouterLoss | None = None,
    ):
        self._shards, self._router_loss = shards, router_loss
        self.structure, self.store, self.streams, self.shell = shell.structure, store, streams, shell
        self._optimizer, self._objective, self._aborter, self._poison = optimizer, objective, aborter, poison
        self._make(plan)

    def _make(self, plan: ExecutionPlan) -> None:
        pinned = self._pin_planes(plan.pin)
        self._copier = self._make_copier(pinned)
        self.weights = self._make_weight_stream(plan)
        direct = pinned and plan.accumulation_steps == 1
        self.route = Route.FUSED_UPDATE if not plan.gradient_plane else Route.COPY if direct else Route.ACCUMULATE
        self.slabs: SlabPool | None = None
        self._edge_slabs: dict[str, Slab] = {}
        if self.route is not Route.COPY:
            self._make_slabs(plan)
        self.gradients = GradientFlow(
            self.streams,
            self.store,
            self.structure.units,
            self.route,
            plan.transport,
            self.slabs,
            self._edge_slabs,
            self._optimizer,
            self._poison,
            self._shards,
        )
        self.inputs = InputStore(self.streams, ())
        self.follow(plan)
        flows = (self.streams, self.weights, self.gradients, self.inputs)
        self.runner = StepRunner(
            self.shell, *flows, self._objective, plan.compiled, self._aborter, self._router_loss, self._shards
        )

    def follow(self, plan: ExecutionPlan) -> None:
        """Use a plan that needs no other buffers from the next step on."""
        assert isinstance(plan.offload_input, frozenset)
        self.inputs.layers = plan.offload_input

    def rearrange(self, plan: ExecutionPlan) -> None:
        """Remake the buffers for a plan with more accumulation steps or fewer resident units. The planes must be at rest.

        After an error nothing here can be used any more.
        """
        self.close()
        # Device memory is freed before its successor is allocated.
        del self.runner, self.weights, self.gradients, self.inputs
        for name, planes in self.store.units.items():
            if planes.resident and name not in plan.resident:
                self.store.move_to_host(name)
        if plan.accumulation_steps > 1:
            self.store.widen_gradients()
        if self.streams.cuda:
            torch.cuda.empty_cache()
        self._make(plan)

    def close(self) -> None:
        """Free all buffers. Nothing uses them any more."""
        self._copier.close()
        self.inputs.close()
        self.runner.close()
        for slab in self._all_slabs():
            slab.close()

    # ---------------------------------------------------------------- construction

    def _pin_planes(self, pin: str) -> bool:
        """Pin the planes that copies touch. Returns whether they are pinned (on a CPU nothing needs to be)."""
        if not self.streams.cuda:
            return True
        if pin == "staged":
            return False
        try:
            self.store.pin()
        except PinRefused as refusal:
            if pin == "all":
                remedy = "use memory.pin: staged, or raise the limit"
                raise UserError(str(refusal), "memory.pin: all", remedy) from refusal
            logger.warning("%s; memory.pin: auto falls back to memory.pin: staged (slower copies)", refusal)
            return False
        return True

    def _make_copier(self, pinned: bool) -> Copier:
        """Copies straight from pinned planes, or through staging buffers of the largest streamed unit's size."""
        if pinned:
            return DirectCopier(self.streams, self._shards)
        streamed = [planes.hi.nbytes for planes in self.store.units.values() if not planes.resident]
        return StagedCopier(self.streams, max(streamed, default=0), self._shards)

    def _make_weight_stream(self, plan: ExecutionPlan) -> WeightStream:
        """The ring of the layers that pass through slots, and a slot for each edge that does."""

        def slot(numel: int) -> Slot:
            return Slot(self.streams, self._copier, numel, self.store.dtypes["hi"], plan.compute)

        def moves(unit: Unit) -> bool:
            return not stays(self.store.units[unit.name], self._shards)

        assert isinstance(plan.weight_slots, int), "not resolved for a model"
        layers = [unit for unit in self.structure.layers if moves(unit)]
        widest = max((unit.layout.numel for unit in layers), default=0)
        ring = WeightRing([slot(widest) for _ in range(min(plan.weight_slots, max(2, len(layers))))])
        edges = [
            (unit, slot(unit.layout.numel) if moves(unit) else None)
            for unit in (self.structure.embedding, self.structure.head)
        ]
        gate = UpdateGate(self._optimizer.finished, self._wait_for_update)
        return WeightStream(self.store, self.structure.layers, ring, edges, gate, self.streams, self._shards)

    def _make_slabs(self, plan: ExecutionPlan) -> None:
        """The pool for the streamed layers' gradients, and one slab for each streamed edge."""
        layers = self._streamed(self.structure.layers)
        widest = max((self.store.units[unit.name].trained_numel for unit in layers), default=0)
        self.slabs = SlabPool(self.streams, max(1, min(plan.gradient_slabs, len(layers))), widest, plan.transport)
        edges = self._streamed((self.structure.embedding, self.structure.head))
        self._edge_slabs = {
            unit.name: Slab(self.streams, self.store.units[unit.name].trained_numel, plan.transport) for unit in edges
        }

    def _streamed(self, units: tuple[Unit, ...]) -> list[Unit]:
        return [unit for unit in units if not self.store.units[unit.name].resident]

    # ---------------------------------------------------------------- figures

    def reset_counters(self) -> None:
        """Start counting for a new step."""
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

    def counters(self) -> dict[str, int | float | str]:
        """See `HostEngine.counters`."""
        return {
            "weight_bytes": self.weights.loaded_bytes,
            "gradient_bytes": self.gradients.sent_bytes,
            "weight_slots": self.weights.slots,
            "fetches_left": self.weights.fetches_left,
            "compiled_layers": sum(self.shell.compiled(layer) for layer in range(len(self.structure.layers))),
            "route": self.route.name,
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
        """Bytes of pinned host memory, planes included."""
        staged = self._copier.pinned_bytes if isinstance(self._copier, StagedCopier) else 0
        slabs = sum(slab.pinned_bytes for slab in self._all_slabs())
        return self.store.pinned_bytes + slabs + staged + self.inputs.pinned_bytes

    def _all_slabs(self) -> list[Slab]:
        return [*(self.slabs.slabs if self.slabs else []), *self._edge_slabs.values()]

    def _wait_for_update(self, unit: str) -> None:
        """Wait for a unit's update, and record the wait if there is one. A finished update may still have an error to raise."""
        if self._optimizer.finished(unit):
            self._optimizer.wait(unit)
            return
        with self.streams.host_waits("optimizer"):
            self._optimizer.wait(unit)
