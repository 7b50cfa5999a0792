"""Activation offload: layer inputs stay in pinned host memory until their backward.

[Note: offloaded input lifetime]
    forward    `put` queues the copy to the host on d2h, after the kernels that made the tensor. Its device memory is held until
               the input after the next one is put: then compute waits for the copy, and its next kernels may use the memory. So
               at most `IN_FLIGHT` inputs wait for the link, however far the host runs ahead of the device
    backward   `prefetch` queues the copy back on h2d, one layer ahead; `take` makes compute wait for it
Each layer has one buffer in host memory, written and read once per accumulation step. A backward's copy back waits for the copy
to the host, and the next accumulation step's copy to the host waits for that copy back.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch

from megatrain.device.streams import Event, Streams
from megatrain.host_memory.arena import Arena, PinRefused, page_ceil

logger = logging.getLogger(__name__)

IN_FLIGHT = 2
"""Inputs on the device whose copy to the host may not have ended; the planner's formulas count them."""


@dataclass
class _Offloaded:
    """One layer's input. `host`: its copy in pinned memory; `out`, `back`: ends of the copies; `arrived`: back on the device."""

    host: torch.Tensor
    out: Event
    back: Event
    shape: torch.Size
    arrived: torch.Tensor | None = None


class InputStore:
    """Host memory for the inputs of the given layers. See [Note: offloaded input lifetime]."""

    def __init__(self, streams: Streams, layers: Collection[int]):
        self._streams = streams
        self.layers = frozenset(layers)
        self._buffers: dict[int, tuple[Arena, torch.Tensor]] = {}
        self._inputs: dict[int, _Offloaded] = {}
        self._leaving: collections.deque[tuple[torch.Tensor, Event]] = collections.deque()
        self._pins = True  # until the system refuses
        self.out_bytes = self.back_bytes = 0

    @property
    def nbytes(self) -> int:
        return sum(arena.nbytes for arena, _ in self._buffers.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena, _ in self._buffers.values())

    def put(self, layer: int, tensor: torch.Tensor) -> None:
        """Queue the copy of `tensor` to the host. Asynchronous; the caller may drop the tensor at once."""
        self._make_room()
        tensor = tensor.detach()  # a copy with autograd history would keep the device memory alive
        host = self._buffer(layer, tensor)
        previous, written = self._inputs.get(layer), self._streams.event()
        back = previous.back if previous else self._streams.event()
        offloaded = _Offloaded(host, self._streams.event(), back, tensor.shape)
        self._streams.mark_compute(written)
        with self._streams.copying("d2h", written, offloaded.out, f"input {layer}", tensor.nbytes):
            host.copy_(tensor.reshape(-1), non_blocking=True)
        self._leaving.append((tensor, offloaded.out))
        self.out_bytes += tensor.nbytes
        self._inputs[layer] = offloaded

    def _make_room(self) -> None:
        """Release the oldest inputs beyond `IN_FLIGHT` - 1; kernels launched from now on run behind their copies."""
        while len(self._leaving) >= IN_FLIGHT:
            tensor, out = self._leaving.popleft()
            self._streams.compute_waits(out, "inputs")
            del tensor  # not before the wait: its memory is free for the next kernel of compute

    def end_forward(self) -> None:
        """No input follows: the memory of the last ones is free when their copies end. Compute does not wait for them."""
        while self._leaving:
            tensor, _ = self._leaving.popleft()
            if self._streams.d2h is not None:
                tensor.record_stream(self._streams.d2h)

    def prefetch(self, layer: int) -> None:
        """Queue the copy back to the device unless it is queued already; ignores other layers. Asynchronous."""
        offloaded = self._inputs.get(layer)
        if offloaded is None or offloaded.arrived is not None:
            return
        host = offloaded.host
        offloaded.arrived = torch.empty(host.numel(), dtype=host.dtype, device=self._streams.device)
        # Kernels that are still running may have used this memory before: the copy must start after them, too.
        allocated = self._streams.event()
        self._streams.mark_compute(allocated)
        with self._streams.copying("h2d", allocated, offloaded.back, f"input {layer}", host.nbytes):
            if self._streams.h2d is not None:
                self._streams.h2d.wait_event(offloaded.out)  # type: ignore[arg-type]
            offloaded.arrived.copy_(host, non_blocking=True)
        self.back_bytes += host.nbytes

    def take(self, layer: int) -> torch.Tensor:
        """Return the tensor on the device, for kernels launched from now on."""
        self.prefetch(layer)
        offloaded = self._inputs.pop(layer)
        assert offloaded.arrived is not None
        self._streams.compute_waits(offloaded.back, "inputs")
        if self._streams.h2d is not None:
            offloaded.arrived.record_stream(self._streams.compute)  # type: ignore[arg-type]
        return offloaded.arrived.view(offloaded.shape)

    def abandon(self) -> None:
        """Drop the inputs of a failed step. The device must be idle."""
        self._inputs = {}
        self._leaving.clear()

    def close(self) -> None:
        arenas = [arena for arena, _ in self._buffers.values()]
        self._inputs, self._buffers = {}, {}
        self._leaving.clear()
        for arena in arenas:
            arena.close()

    def _buffer(self, layer: int, tensor: torch.Tensor) -> torch.Tensor:
        """The layer's host memory (numel,); allocated on first use, and again only for larger tensors."""
        arena, host = self._buffers.get(layer, (None, None))
        if host is None or host.numel() < tensor.numel() or host.dtype != tensor.dtype:
            if arena is not None:  # rows that keep growing must not leave the memory of shorter ones behind
                self._streams.synchronize()  # a copy from the old buffer may be in flight
                del self._buffers[layer], host
                arena.close()
            arena = Arena(page_ceil(tensor.nbytes))
            try:
                if self._streams.cuda and self._pins:
                    arena.register([0])
            except PinRefused as refusal:  # copies are correct from any memory
                self._pins = False
                logger.warning("%s; offloaded layer inputs use memory that is not pinned (slower copies)", refusal)
            host = arena.tensor(0, tensor.numel(), tensor.dtype)
            self._buffers[layer] = arena, host
        return host[: tensor.numel()]
