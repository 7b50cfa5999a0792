"""Layer inputs that wait for their backward in pinned host memory instead of on the device.

[Note: offloaded input lifetime]
    forward    `put` queues the copy out on d2h, behind the kernels that made the tensor; the device memory is free when it ends
    backward   `prefetch` queues the copy in on h2d, one layer ahead; `take` makes compute wait for it
Each layer has a place of its own in one arena, written once and read once per window: the copy in of a window's backward comes
after its copy out, and the next window's copy out waits for that copy in.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch

from megatrain.device.streams import Event, Streams
from megatrain.host_memory.arena import Arena, PinRefused, page_ceil

logger = logging.getLogger(__name__)


@dataclass
class _Place:
    """Where one layer's input waits. `home`: pinned host memory; `out` and `back`: ends of the copies."""

    home: torch.Tensor
    out: Event
    back: Event
    shape: torch.Size
    arrived: torch.Tensor | None = None


class InputStore:
    """Host memory for the inputs of some layers. See [Note: offloaded input lifetime].

    Args:
        streams: The device's streams.
        layers: Indices of the layers whose input is offloaded.
    """

    def __init__(self, streams: Streams, layers: Collection[int]):
        self._streams = streams
        self.layers = frozenset(layers)
        self._arenas: dict[int, Arena] = {}
        self._homes: dict[int, torch.Tensor] = {}
        self._places: dict[int, _Place] = {}
        self._pins = True  # until the system refuses
        self.out_bytes = self.back_bytes = 0

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena in self._arenas.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena in self._arenas.values())

    def put(self, layer: int, tensor: torch.Tensor) -> None:
        """Queue the copy of `tensor` to the host. Asynchronous; the caller may let go of it at once."""
        tensor = tensor.detach()  # copied with its graph, the home would keep the device memory alive
        home = self._home(layer, tensor)
        previous = self._places.get(layer)
        place = _Place(home, self._streams.event(), previous.back if previous else self._streams.event(), tensor.shape)
        written = self._streams.event()
        self._streams.mark_compute(written)
        with self._streams.copying_out(written, place.out, f"input {layer}", tensor.nbytes):
            home.copy_(tensor.reshape(-1), non_blocking=True)
        if self._streams.d2h is not None:
            tensor.record_stream(self._streams.d2h)
        self.out_bytes += tensor.nbytes
        self._places[layer] = place

    def prefetch(self, layer: int) -> None:
        """Queue the copy back, if the layer is offloaded and not on its way. Asynchronous."""
        place = self._places.get(layer)
        if place is None or place.arrived is not None:
            return
        place.arrived = torch.empty(place.home.numel(), dtype=place.home.dtype, device=self._streams.device)
        # The memory may have been let go by kernels that are still running: the copy starts behind them, too.
        allocated = self._streams.event()
        self._streams.mark_compute(allocated)
        with self._streams.copying_in(allocated, place.back, f"input {layer}", place.home.nbytes):
            if self._streams.h2d is not None:
                self._streams.h2d.wait_event(place.out)  # type: ignore[arg-type]
            place.arrived.copy_(place.home, non_blocking=True)
        self.back_bytes += place.home.nbytes

    def take(self, layer: int) -> torch.Tensor:
        """The tensor, back on the device, for kernels launched from now on."""
        self.prefetch(layer)
        place = self._places.pop(layer)
        assert place.arrived is not None
        self._streams.compute_waits(place.back, "inputs")
        if self._streams.h2d is not None:
            place.arrived.record_stream(self._streams.compute)  # type: ignore[arg-type]
        return place.arrived.view(place.shape)

    def abandon(self) -> None:
        """After an error in the middle of a step; the device must be idle."""
        self._places = {}

    def close(self) -> None:
        self._places, self._homes = {}, {}
        for arena in self._arenas.values():
            arena.close()
        self._arenas = {}

    def _home(self, layer: int, tensor: torch.Tensor) -> torch.Tensor:
        """The layer's host memory; made on first use, and again only for larger tensors."""
        home = self._homes.get(layer)
        if home is None or home.numel() < tensor.numel() or home.dtype != tensor.dtype:
            if layer in self._arenas:  # rows that get longer and longer must not leave all shorter ones' memory behind
                self._streams.synchronize()  # a copy from the old home may be on its way
                del self._homes[layer], home
                self._arenas.pop(layer).close()
            arena = self._arenas[layer] = Arena(page_ceil(tensor.nbytes))
            if self._streams.cuda and self._pins:
                self._pin(arena)
            home = self._homes[layer] = arena.tensor(0, tensor.numel(), tensor.dtype)
        return home[: tensor.numel()]

    def _pin(self, arena: Arena) -> None:
        try:
            arena.register([0])
        except PinRefused as refusal:  # copies are right from any memory
            self._pins = False
            logger.warning("%s; inputs of layers wait in memory that is not pinned (slower copies)", refusal)
