"""Gradient buffers: device staging buffers, and pinned host slabs.

[Note: gradient staging lifetime]
A layer's gradients are written into one of two staging buffers on the device, then copied to the host on d2h:
    FREE     --begin-->  FILLING  compute has been made to wait for `free` (the previous copy out); the backward writes
    FILLING  --send-->   FREE     `written` is recorded; the copy out waits for it and records `free`
Two buffers, so that the backward of the next layer writes while the previous one is being copied.

[Note: gradient slab lifetime]
Where gradients cannot go straight into a pinned gradient plane they land in a slab, which the host then consumes:
    FREE      --fill-->   FILLING   a copy out is queued; `arrived` marks its end
    FILLING   --drain-->  DRAINING  a background job that waits for `arrived` adds it to the plane or feeds it to AdamW
    DRAINING  --(job ends)-->  FREE
When no slab is free, the host thread waits for the oldest job: the gradient stall.
"""

from __future__ import annotations

import collections
import enum
import time
from concurrent.futures import Future

import torch

from megatrain.device.streams import Event, Streams
from megatrain.host_memory.arena import Arena


class BufferState(enum.Enum):
    """What a gradient buffer's memory means."""

    FREE = "nothing of value"
    FILLING = "being written"
    DRAINING = "being read by the host"


class Staging:
    """A device gradient buffer. See [Note: gradient staging lifetime]."""

    def __init__(self, streams: Streams, numel: int, dtype: torch.dtype):
        self._streams = streams
        self.flat = torch.zeros(numel, dtype=dtype, device=streams.device)
        self.state = BufferState.FREE
        self._free, self._written = streams.event(), streams.event()

    @classmethod
    def around(cls, streams: Streams, flat: torch.Tensor) -> Staging:
        """A staging buffer for one use around memory that the backward has filled already.

        The allocator is told that d2h reads the memory, so it may be let go right after `send`.
        """
        staging = cls(streams, 0, flat.dtype)
        staging.flat, staging.state = flat, BufferState.FILLING
        if streams.d2h is not None:
            flat.record_stream(streams.d2h)
        return staging

    def begin(self, numel: int) -> torch.Tensor:
        """The first `numel` elements, for kernels on compute to write gradients into: every one of them."""
        assert self.state is BufferState.FREE, self.state
        self._streams.compute_waits(self._free, "gradients")
        self.state = BufferState.FILLING
        return self.flat[:numel]

    def send(self, destination: torch.Tensor, arrived: Event, poison: bool = False, what: str = "") -> None:
        """Queue the copy out to `destination` (n,) host memory. Asynchronous; the host may read behind `arrived`.
        `what`: whose gradient it is."""
        assert self.state is BufferState.FILLING, self.state
        self._streams.mark_compute(self._written)
        with self._streams.copying_out(self._written, arrived, what, destination.nbytes):
            destination.copy_(self.flat[: destination.numel()], non_blocking=True)
            if poison:
                self.flat.fill_(float("nan"))
        self._free = arrived
        self.state = BufferState.FREE

    def abandon(self) -> None:
        """After an error in the middle of a step."""
        self.state = BufferState.FREE


class Slab:
    """A host gradient buffer, pinned where there is a GPU. See [Note: gradient slab lifetime]."""

    def __init__(self, streams: Streams, numel: int, dtype: torch.dtype):
        self._arena = Arena(max(numel, 1) * dtype.itemsize)
        if streams.cuda:
            self._arena.register([0])
        self.flat = self._arena.tensor(0, numel, dtype)
        self.state = BufferState.FREE
        self.arrived = streams.event()
        self._job: Future[None] | None = None

    @property
    def pinned_bytes(self) -> int:
        return self._arena.pinned_bytes

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes

    @property
    def in_use(self) -> bool:
        """Whether a job still reads it."""
        return self._job is not None and not self._job.done()

    def fill(self, numel: int) -> torch.Tensor:
        """The destination of a copy out. The slab must be free."""
        assert self.state is BufferState.FREE, self.state
        self.state = BufferState.FILLING
        return self.flat[:numel]

    def drain(self, job: Future[None]) -> None:
        """`job` reads the slab; the slab is free when it ends."""
        assert self.state is BufferState.FILLING, self.state
        self.state, self._job = BufferState.DRAINING, job

    def settle(self) -> None:
        """Wait for the job that drains the slab, if there is one. Its error is raised here."""
        job, self._job = self._job, None
        try:
            if job is not None:
                job.result()
        finally:
            self.state = BufferState.FREE

    def close(self) -> None:
        del self.flat
        self._arena.close()


class SlabPool:
    """K slabs of the largest layer's size, reused in the order in which they were taken."""

    def __init__(self, streams: Streams, count: int, numel: int, dtype: torch.dtype):
        assert count >= 1, count
        self._streams = streams
        self.slabs = collections.deque(Slab(streams, numel, dtype) for _ in range(count))
        self.reset_counters()

    def take(self) -> Slab:
        """The slab that has been in use for longest; waits for its job."""
        slab = self.slabs.popleft()
        self.slabs.append(slab)
        self.most_in_use = max(self.most_in_use, 1 + sum(other.in_use for other in self.slabs if other is not slab))
        if slab.in_use:
            self.waits += 1
            started = time.perf_counter()
            with self._streams.host_waits("slabs"):
                slab.settle()
            self.wait_s += time.perf_counter() - started
        else:
            slab.settle()
        return slab

    def reset_counters(self) -> None:
        """`wait_s`: seconds without a free slab; `waits`: how often; `most_in_use`: slabs at once."""
        self.wait_s, self.waits, self.most_in_use = 0.0, 0, 0

    def settle(self) -> None:
        """Wait until every slab is free."""
        for slab in self.slabs:
            slab.settle()

    @property
    def nbytes(self) -> int:
        return sum(slab.nbytes for slab in self.slabs)

    @property
    def pinned_bytes(self) -> int:
        return sum(slab.pinned_bytes for slab in self.slabs)

    def close(self) -> None:
        for slab in self.slabs:
            slab.close()
