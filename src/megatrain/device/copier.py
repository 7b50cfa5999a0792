"""Copiers of planes to device slots: straight from pinned memory, or through pinned staging buffers. And `HostReader` back.

Both copiers queue the copy on the h2d stream after the event `after`, mark its end with `done`, and return at once.
"""

from __future__ import annotations

import concurrent.futures
import threading

import torch

from megatrain.device.streams import Event, Streams
from megatrain.host_memory.arena import Arena


class DirectCopier:
    """One DMA straight from the plane in pinned host memory; on a CPU device, an ordinary copy."""

    def __init__(self, streams: Streams):
        self._streams = streams

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Event, done: Event, what: str = "") -> None:
        """Queue target.copy_(source). `what` names the copy in the recorded spans."""
        with self._streams.copying("h2d", after, done, what, source.nbytes):
            target.copy_(source, non_blocking=True)

    def close(self) -> None:
        pass


def _two_pinned(nbytes: int) -> list[Arena]:
    arenas = [Arena(max(nbytes, 1)) for _ in range(2)]
    for arena in arenas:
        arena.register([0, arena.nbytes])
    return arenas


class StagedCopier:
    """Copies planes from pageable memory through two pinned staging buffers of the largest unit's size.

    A thread packs one buffer while the DMA of the other is in flight. A buffer is packed again only after its own DMA has ended
    (event `sent`).
    """

    def __init__(self, streams: Streams, nbytes: int):
        self._streams = streams
        self._arenas = _two_pinned(nbytes)
        self._sent = [streams.event(), streams.event()]
        self._turn = 0
        self._packer = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="pack")

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena in self._arenas)

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, after: Event, done: Event, what: str = ""
    ) -> concurrent.futures.Future[None]:
        """Queue target.copy_(source). Wait for the future first, then for `done`."""
        return self._packer.submit(self._pack_and_send, target, source, after, done, what)

    def _pack_and_send(self, target: torch.Tensor, source: torch.Tensor, after: Event, done: Event, what: str) -> None:
        turn, self._turn = self._turn, 1 - self._turn
        self._sent[turn].synchronize()
        staging = self._arenas[turn].tensor(0, source.numel(), source.dtype)
        staging.copy_(source)
        with self._streams.copying("h2d", after, done, what, staging.nbytes):
            target.copy_(staging, non_blocking=True)
        self._sent[turn].record(self._streams.h2d)

    def close(self) -> None:
        self._packer.shutdown()
        for arena in self._arenas:
            arena.close()


Copier = DirectCopier | StagedCopier


class HostReader:
    """Copies device memory to pageable host memory through two pinned buffers: a DMA fills one while CPU cores empty the other.

    This is faster than the driver's own copy to pageable memory, and it runs on a separate stream. Threads that share a reader
    take turns.

    Args:
        device: Holds the sources; on a CPU, copies are ordinary.
        nbytes: Size of a buffer.
    """

    def __init__(self, device: torch.device, nbytes: int = 64 << 20):
        self._lock = threading.Lock()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._arenas = _two_pinned(nbytes) if self._stream is not None else []
        self._filled = [torch.cuda.Event(blocking=True) for _ in self._arenas]

    def read(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """target.copy_(source), both (n,) of one dtype; blocks until done.

        Kernels that write `source` must have ended: compute's queue is not waited for. Nothing may write to it meanwhile.
        """
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
