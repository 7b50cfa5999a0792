"""How a host plane reaches a device slot: directly from pinned memory, or through pinned staging buffers. And the way back.

Both copiers queue the copy behind `after` and mark its end with `done`, on the h2d stream, and return at once.
"""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Protocol

import torch

from megatrain.device.streams import Event, Streams
from megatrain.host_memory.arena import Arena


class Copier(Protocol):
    """Queues host-to-device copies."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Event, done: Event, what: str = ""
    ) -> concurrent.futures.Future[None] | None:
        """Queue target.copy_(source). A future, if any, must be waited for before `done` is waited for. `what`: its name."""
        ...

    def close(self) -> None: ...


class DirectCopier:
    """One DMA straight from the plane (pinned host memory; on the CPU device an ordinary copy)."""

    def __init__(self, streams: Streams):
        self._streams = streams

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event, done: Event, what: str = "") -> None:
        with self._streams.copying_in(after, done, what, source.nbytes):
            target.copy_(source, non_blocking=True)

    def close(self) -> None:
        pass


class StagedCopier:
    """Planes in ordinary memory, two pinned staging buffers of the largest unit's size.

    A thread packs one buffer while the DMA of the other is in flight. A buffer is packed again only when its own DMA has
    ended (`sent`).
    """

    def __init__(self, streams: Streams, nbytes: int):
        self._streams = streams
        self._arenas = [Arena(max(nbytes, 1)) for _ in range(2)]
        for arena in self._arenas:
            arena.register([0, arena.nbytes])
        self._sent = [streams.event(), streams.event()]
        self._turn = 0
        self._packer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="pack")

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena in self._arenas)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Event, done: Event, what: str = ""
    ) -> concurrent.futures.Future[None]:
        return self._packer.submit(self._pack_and_send, target, source, after, done, what)

    def _pack_and_send(self, target: torch.Tensor, source: torch.Tensor, after: Event, done: Event, what: str) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        self._sent[turn].synchronize()
        staging = self._arenas[turn].tensor(0, source.numel(), source.dtype)
        staging.copy_(source)
        with self._streams.copying_in(after, done, what, staging.nbytes):
            target.copy_(staging, non_blocking=True)
        self._sent[turn].record(self._streams.h2d)

    def close(self) -> None:
        self._packer.shutdown()
        for arena in self._arenas:
            arena.close()


class HostReader:
    """Copies device memory into ordinary host memory, through two pinned buffers: a DMA fills one while the processor's cores
    empty the other. Faster than the driver's own way into memory that is not pinned, and on a stream of its own.

    Several threads may use one reader; their copies take turns.

    Args:
        device: Where the sources are; on a CPU the copy is an ordinary one.
        nbytes: Size of a buffer.
    """

    def __init__(self, device: torch.device, nbytes: int = 64 << 20):
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arenas = [Arena(nbytes) for _ in range(2)] if self._stream is not None else []
        for arena in self._arenas:
            arena.register([0, arena.nbytes])
        self._filled = [torch.cuda.Event(blocking=True) for _ in self._arenas]

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target.copy_(source), both (n,) of one type; returns when it is done. Nothing may write to `source` meanwhile, and
        what wrote it must have ended: kernels in the compute stream's queue are not waited for."""
        if self._stream is None:
            target.copy_(source)
            return
        piece = self._arenas[0].nbytes // source.itemsize
        starts = range(0, source.numel(), piece)
        with self._lock:
            for number, start in enumerate(starts):
                self._fill(number % 2, source[start : start + piece])
                if number > 0:
                    self._empty((number - 1) % 2, target[start - piece : start])
            if starts:
                self._empty((len(starts) - 1) % 2, target[starts[-1] :])

    def _fill(self, turn: int, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            self._arenas[turn].tensor(0, source.numel(), source.dtype).copy_(source, non_blocking=True)
        self._filled[turn].record(self._stream)

    def _empty(self, turn: int, target: torch.Tensor) -> None:
        self._filled[turn].synchronize()
        target.copy_(self._arenas[turn].tensor(0, target.numel(), target.dtype))

    def close(self) -> None:
        with self._lock:
            for arena in self._arenas:
                arena.close()
