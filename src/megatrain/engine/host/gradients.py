"""Gradients: from a unit's backward to the memory where AdamW reads them.

[Note: gradient routes]
Gradients of resident units stay in a plane on the device. For all others, clipping makes AdamW wait for the global norm, so they
wait in the unit's *gradient plane* on the host:
    COPY          one accumulation step, pinned planes: copied from the staging buffer straight into the plane;
    ACCUMULATE    several accumulation steps: copied into a slab, and added to the (fp32) plane by a background job, because the
                  sum must be exact to fp32; also with one step if the planes are not pinned (memory.pin: staged).
Without clipping and without a plane:
    FUSED_UPDATE  copied into a slab, from which AdamW reads it at once, in backward order.
Microbatches of one accumulation step are summed on the device in fp32 before anything is rounded to the transport type.
Where several ranks share the state, each route carries this rank's shard, made by `ReducedStaging`: the fp32 sum over the ranks,
rounded to the transport type. The planes of resident shards take it on the device.

[Note: the norm is of what AdamW reads]
The squared norm of each unit is taken on the device after rounding to the transport type, so that clipping is exact for the
gradients that are applied. Sums over accumulation steps are made on the host, so their norm is taken there, from the planes.
Of a shard, each rank takes the norm after the sum over the ranks, on d2h; the squares are added at the end of the step.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from megatrain.device.shards import ALONE, Shards
from megatrain.device.slabs import ReducedStaging, Slab, SlabPool, Staging
from megatrain.device.streams import Event, Streams
from megatrain.engine.host.weights import stays
from megatrain.host_memory.store import HostStore
from megatrain.models.structure import Unit


class Route(enum.Enum):
    """See [Note: gradient routes]."""

    COPY = "into the plane"
    ACCUMULATE = "into a slab, then added to the plane"
    FUSED_UPDATE = "into a slab, then read by AdamW"


class SlabJobs(Protocol):
    """Background jobs that consume slabs. A job waits for `arrived` first; its future ends when the slab is free."""

    def add(self, unit: Unit, slab: torch.Tensor, first: bool, arrived: Event) -> Future[None]: ...
    def update_from(self, unit: Unit, slab: torch.Tensor, arrived: Event) -> Future[None]: ...


class UnitSum:
    """The gradient of one unit on the device, summed over the microbatches of an accumulation step.

    Args:
        unit: The unit.
        flat: (layout.numel,) device memory.
        fresh: Whether the first microbatch overwrites the memory instead of adding to it.
        views: Views of `flat` by layout name, if they exist already.
    """

    def __init__(self, unit: Unit, flat: torch.Tensor, fresh: bool, views: dict[str, torch.Tensor] | None = None):
        self.unit = unit
        self.flat = flat
        self._views = unit.layout.trained.views(flat) if views is None else views
        self._fresh = fresh

    def add(self, gradients: Mapping[str, torch.Tensor | None]) -> None:
        """Add one microbatch's gradients by layout name. A parameter without a gradient contributes zeros at its own place."""
        if self._fresh:
            self._fresh = False
            for start, end in self.unit.layout.trained.gaps:
                self.flat[start:end].zero_()
            found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
            if found:  # a frozen layer has none
                torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
                    [self._views[name] for name in found], list(found.values())
                )
            for name in self._views.keys() - found.keys():
                self._views[name].zero_()
            return
        for name, gradient in gradients.items():
            if gradient is not None:
                self._views[name].add_(gradient)


class EdgeSum:
    """Gradients of embedding and head, which arrive in parts: from chunks of the head, the final norm, the embedding.

    Both gradients of a tied tensor are summed here, into one.
    """

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, gradient: torch.Tensor | None) -> None:
        """Add a part of the gradient of the parameter with this full name. A single part keeps its type, sums are fp32."""
        if gradient is None:
            return
        held = self._sums.get(name)
        if held is None:
            self._sums[name] = gradient
        elif held.dtype == torch.float32:
            held.add_(gradient)
        else:
            self._sums[name] = held.float().add_(gradient)

    def take(self, unit: Unit, dtype: torch.dtype, device: torch.device, numel: int | None = None) -> torch.Tensor:
        """Remove and return the unit's flat gradient in transport dtype: of its trained elements, and zeros behind them up to
        `numel`."""
        trained = unit.layout.trained
        flat = torch.zeros(numel or trained.numel, dtype=dtype, device=device)
        for name, view in trained.views(flat[: trained.numel]).items():
            gradient = self._sums.pop(unit.prefix + name, None)
            if gradient is not None:
                view.copy_(gradient)
        return flat


class GradientFlow:
    """Moves each unit's gradient to the host once per accumulation step. See the notes at the top.

    Args:
        streams: The device's streams.
        store: The host planes.
        units: All units.
        route: The route of units that are not resident.
        transport: bf16 or fp32.
        slabs: Pool of the layers' slabs; None with route COPY.
        edge_slabs: Slabs of embedding and head, by unit name; empty with route COPY.
        jobs: Consumers of slabs.
        poison: Fill buffers with NaN after their use (tests).
        shards: The ranks that share the state.

    Attributes:
        arrived: Unit name -> event behind the copy that fills the unit's gradient plane.
        edges: The sum for embedding and head.
        sent_bytes: Bytes sent to the host since the counter was reset.
    """

    def __init__(
        self,
        streams: Streams,
        store: HostStore,
        units: Sequence[Unit],
        route: Route,
        transport: torch.dtype,
        slabs: SlabPool | None,
        edge_slabs: Mapping[str, Slab],
        jobs: SlabJobs,
        poison: bool = False,
        shards: Shards = ALONE,
    ):
        self._streams = streams
        self._store = store
        self._shards = shards
        self.route = route
        self._transport = transport
        self._slabs = slabs
        self._edge_slabs = edge_slabs
        self._jobs = jobs
        self._poison = poison
        layers = [unit for unit in units if unit.layer is not None]
        layer_numel = max((unit.layout.trained_numel for unit in layers), default=0)
        sent = [self._sent_numel(unit) for unit in layers if not stays(store.units[unit.name], shards)]
        self._staging = [self._make_staging(max(sent, default=0)) for _ in range(2)]
        self._turn = 0
        self._chunk_sum: torch.Tensor | None = (
            None  # fp32 (layer_numel,), made when several microbatches are first summed
        )
        self._layer_numel = layer_numel
        self.arrived: dict[str, Event] = {unit.name: streams.event() for unit in units}
        self.edges = EdgeSum()
        self._norms: list[torch.Tensor] = []
        self._views: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
        self._sent_this_step: set[str] = set()
        self._last_arrived: Event | None = None  # of the step's sends so far
        self.sent_bytes = 0

    def _sent_numel(self, unit: Unit) -> int:
        """Elements of a unit's gradient that leave its backward: ranks sum whole shards, of which they keep what is trained."""
        layout = unit.layout
        return layout.numel if self._shards.many and layout.trained_numel else layout.trained_numel

    def _make_staging(self, numel: int) -> Staging:
        if not self._shards.many:
            return Staging(self._streams, numel, self._transport)
        flat = torch.zeros(numel, dtype=self._sum_dtype, device=self._streams.device)
        return ReducedStaging(self._streams, self._shards, flat, self._transport, self._note_square)

    @property
    def _sum_dtype(self) -> torch.dtype:
        """Type of sums over microbatches and ranks."""
        return torch.promote_types(self._transport, torch.float32)

    @property
    def nbytes(self) -> int:
        """Device memory held between steps."""
        chunk_sum = self._chunk_sum.nbytes if self._chunk_sum is not None else 0
        return chunk_sum + sum(staging.nbytes for staging in self._staging)

    def begin_step(self) -> None:
        """Forget the gradients of the previous step."""
        self._norms, self._sent_this_step, self._last_arrived = [], set(), None
        self.edges = EdgeSum()
        for planes in self._store.units.values():
            if planes.resident:
                planes.grad = None

    def begin_layer(self, unit: Unit, chunks: int) -> UnitSum:
        """Device memory for the sum of the layer's gradient over the `chunks` microbatches of this accumulation step.

        The layer has trained parameters.
        """
        numel = unit.layout.trained_numel
        planes = self._store.units[unit.name]
        if stays(planes, self._shards):
            first = planes.grad is None
            plane = self._resident_plane(unit)
            if (chunks == 1 and first) or plane.dtype == torch.float32:
                return UnitSum(unit, plane, fresh=first)
        else:
            staging = self._staging[self._turn].begin(self._sent_numel(unit))[:numel]
            if chunks == 1 or staging.dtype == self._sum_dtype:
                return UnitSum(unit, staging, True, self._staging_views(unit, staging))
        if self._chunk_sum is None:
            self._chunk_sum = torch.zeros(self._layer_numel, dtype=torch.float32, device=self._streams.device)
        return UnitSum(unit, self._chunk_sum[:numel], fresh=True)

    def send_layer(self, total: UnitSum) -> None:
        """Take the norm of the layer's gradient of this accumulation step and send it to the host. Asynchronous."""
        if stays(self._store.units[total.unit.name], self._shards):
            plane = self._resident_plane(total.unit)
            if total.flat.data_ptr() != plane.data_ptr():
                _ = plane.copy_(total.flat) if total.unit.name not in self._sent_this_step else plane.add_(total.flat)
            self._keep(total.unit, plane, False)
            return
        staging, self._turn = self._staging[self._turn], 1 - self._turn
        flat = staging.flat[: total.unit.layout.trained_numel]
        if total.flat.data_ptr() != flat.data_ptr():
            flat.copy_(total.flat)
        if not self._shards.many:
            self._note_square(flat)
        self._send(total.unit, staging)

    def send_edge(self, unit: Unit) -> None:
        """Like `send_layer`, for embedding or head. The device memory lives until the copy ends."""
        if unit.layout.trained_numel == 0:
            return
        if self._shards.many:
            flat = self.edges.take(unit, self._sum_dtype, self._streams.device, self._sent_numel(unit))
            self._send(unit, ReducedStaging.once(self._streams, self._shards, flat, self._transport, self._note_square))
            return
        flat = self.edges.take(unit, self._transport, self._streams.device)
        if self._store.units[unit.name].resident:
            first = self._store.units[unit.name].grad is None
            self._keep(unit, flat if first else self._resident_plane(unit).add_(flat), first)
            return
        self._note_square(flat)
        self._send(unit, Staging.around(self._streams, flat))

    def squared_norm(self) -> torch.Tensor:
        """Sum of the squares of everything sent since `begin_step`, of this rank's shards: a scalar on the device.

        Kernels launched on compute from now on find the gradients of resident shards.
        """
        if self._shards.many and self._last_arrived is not None:  # norms and resident shards come from d2h
            self._streams.compute_waits(self._last_arrived, "gradients")
        return torch.stack(self._norms).square().sum() if self._norms else torch.zeros(())

    def settle(self) -> None:
        """Block until no background job reads a slab. Raises their errors."""
        if self._slabs is not None:
            self._slabs.settle()
        for slab in self._edge_slabs.values():
            slab.settle()

    def abandon(self) -> None:
        """Reset after an error in the middle of a step: drop its gradients and free the buffers."""
        self.begin_step()
        for staging in self._staging:
            staging.abandon()
        self.settle()

    def _staging_views(self, unit: Unit, staging: torch.Tensor) -> dict[str, torch.Tensor]:
        """The unit's views of a staging buffer, made once: making many small views takes longer than copying a small layer."""
        key = (staging.data_ptr(), unit.name)
        if key not in self._views:
            self._views[key] = unit.layout.trained.views(staging)
        return self._views[key]

    def _resident_plane(self, unit: Unit) -> torch.Tensor:
        """The gradient plane of a resident unit: it exists from the first backward of a step until the update."""
        planes = self._store.units[unit.name]
        if planes.grad is None:
            dtype = self._store.dtypes["grad"]
            planes.grad = torch.empty(planes.trained_numel, dtype=dtype, device=self._streams.device)
        return planes.grad

    def _keep(self, unit: Unit, plane: torch.Tensor, adopt: bool) -> None:
        """Keep a resident unit's gradient on the device, in its plane (`adopt`: this memory becomes the plane)."""
        if adopt:
            self._store.units[unit.name].grad = plane.to(self._store.dtypes["grad"])
        if self.route is Route.COPY:
            self._note_square(plane)
        self._sent_this_step.add(unit.name)

    def _send(self, unit: Unit, staging: Staging) -> None:
        """Queue the copy of a gradient to where AdamW reads it: a host plane, a slab, or the plane of a resident shard."""
        planes, arrived = self._store.units[unit.name], self.arrived[unit.name]
        if planes.resident:
            assert isinstance(staging, ReducedStaging), unit.name
            first = planes.grad is None
            staging.send_to_device(self._resident_plane(unit), arrived, first, self._poison)
        elif self.route is Route.COPY:
            plane = self._plane(unit)
            staging.send(plane, arrived, self._poison, unit.name)
            self.sent_bytes += plane.nbytes
        else:
            arrived = self._through_slab(unit, self._free_slab(unit), staging)
        self._last_arrived = arrived

    def _free_slab(self, unit: Unit) -> Slab:
        """A slab to fill with a unit's gradient; waits for the job that reads it."""
        if unit.layer is not None:
            assert self._slabs is not None
            return self._slabs.take()
        slab = self._edge_slabs[unit.name]
        with self._streams.host_waits("slabs"):
            slab.settle()
        return slab

    def _through_slab(self, unit: Unit, slab: Slab, staging: Staging) -> Event:
        """Queue the copy to a slab and the job that reads it. Returns the event behind the copy."""
        destination = slab.fill(self._store.units[unit.name].trained_numel)
        arrived = slab.arrived
        staging.send(destination, arrived, self._poison, unit.name)
        self.sent_bytes += destination.nbytes
        if self.route is Route.FUSED_UPDATE:
            slab.drain(self._jobs.update_from(unit, destination, arrived))
        else:
            first = unit.name not in self._sent_this_step
            slab.drain(self._jobs.add(unit, destination, first, arrived))
        self._sent_this_step.add(unit.name)
        return arrived

    def _note_square(self, flat: torch.Tensor) -> None:
        # A GPU sums in a tree. A CPU sums one by one, where fp32 would lose the fourth digit of a large layer's norm.
        dtype = torch.float32 if flat.is_cuda else torch.float64
        self._norms.append(torch.linalg.vector_norm(flat, dtype=dtype))

    def _plane(self, unit: Unit) -> torch.Tensor:
        plane = self._store.units[unit.name].grad
        assert plane is not None, f"{unit.name} has no gradient plane"
        return plane
