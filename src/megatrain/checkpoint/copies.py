"""Host memory for the copies of a save, ready before the save begins.

[Note: memory that nobody has touched]
The system provides a page when it is first touched, and zeroes it first; in a virtual machine the host below does the same once
more, at a few GB/s. A copy into such memory is several times slower than a copy, and the updates of the first step behind a
save wait for it. So whoever knows that a save is near has the memory mapped and touched while nobody waits.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Sequence

import torch

from megatrain.errors import PlanRefused
from megatrain.host_memory.arena import PAGE_BYTES, Arena
from megatrain.host_memory.available import available_host_bytes

logger = logging.getLogger(__name__)

LEFT_BYTES = 1 << 30
"""Host memory that copies leave free, whatever their bound: a run whose state fills the host must not end because it is saved."""
PIECE_BYTES = 64 << 20
"""Touched at a time; between two pieces a thread looks whether it should end."""


class CopyMemory:
    """A mapping of its own for each plane that is copied, so that it goes back to the system with the copy.

    From the heap, memory that changing threads have used would stay with the process. All methods may be called by any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready: dict[int, list[Arena]] = {}
        self._toucher: threading.Thread | None = None
        self._ends = threading.Event()

    @property
    def ready_bytes(self) -> int:
        """Mapped, touched, and not yet taken."""
        with self._lock:
            return sum(size * len(arenas) for size, arenas in self._ready.items())

    def prepare(self, sizes: Sequence[int]) -> None:
        """Make memory ready for planes of these sizes [bytes], in this order, as far as the host has it. Returns at once.

        What is ready already counts. See [Note: memory that nobody has touched].
        """
        if self._toucher is not None and self._toucher.is_alive():
            return
        with self._lock:
            ready = Counter({size: len(arenas) for size, arenas in self._ready.items()})
        missing = []
        for size in sizes:
            if ready[size] > 0:
                ready[size] -= 1
            else:
                missing.append(size)
        if not missing:  # before a save that is near this is called after every step
            return
        self._ends.clear()
        self._toucher = threading.Thread(target=self._touch, args=(missing,), name="checkpoint-memory", daemon=True)
        self._toucher.start()

    def missing_bytes(self, planes: Sequence[torch.Tensor]) -> int:
        """Of these planes' sizes: what the system would still have to give."""
        with self._lock:
            ready = {size: len(arenas) for size, arenas in self._ready.items()}
        missing = 0
        for plane in planes:
            if ready.get(plane.nbytes, 0) > 0:
                ready[plane.nbytes] -= 1
            else:
                missing += plane.nbytes
        return missing

    def like(self, plane: torch.Tensor) -> torch.Tensor:
        """Uninitialised host memory of the plane's shape (n,) and type.

        Raises:
            PlanRefused, OSError: The system has no memory for it.
        """
        with self._lock:
            arenas = self._ready.get(plane.nbytes)
            arena = arenas.pop() if arenas else None
        if arena is None:
            arena = Arena(plane.nbytes)
        return arena.tensor(0, plane.numel(), plane.dtype)

    def give_back(self) -> None:
        """What nobody has taken goes back to the system."""
        self._ends.set()
        if self._toucher is not None:
            self._toucher.join()
            self._toucher = None
        with self._lock:
            self._ready.clear()

    def _touch(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            if size + LEFT_BYTES > available_host_bytes():
                return
            try:
                arena = Arena(size)
            except PlanRefused as error:
                logger.debug("memory for copies is not made ready: %s", error)
                return
            pages = arena.tensor(0, size, torch.uint8)[::PAGE_BYTES]
            for piece in pages.split(PIECE_BYTES // PAGE_BYTES):
                if self._ends.is_set():
                    return
                piece.zero_()
            with self._lock:
                self._ready.setdefault(size, []).append(arena)
