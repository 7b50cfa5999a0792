"""Gradient buffers: staging buffers on the device, and pinned slabs on the host.

[Note: gradient staging lifetime]
A layer's gradients are written into one of two staging buffers on the device, then copied to the host on d2h:
    FREE     --begin-->  FILLING  compute waits for `free` (the previous copy to the host); the backward writes
    FILLING  --send-->   FREE     `written` is recorded; the copy to the host waits for it and records `free`
There are two buffers so that the next layer's backward can write while the previous gradients are being copied.
Where several ranks share the state, `send` first sums the buffer over the ranks, also on d2h, and copies this rank's shard.

[Note: gradient slab lifetime]
Gradients that cannot be copied straight into a pinned gradient plane go to a slab, which a background job on the host reads:
    FREE      --fill-->       FILLING   a copy to the host is queued; `arrived` marks its end
    FILLING   --drain-->      DRAINING  the job waits for `arrived`, then adds the slab to the plane or feeds it to the optimizer
    DRAINING  --(job ends)--> FREE
If no slab is free, the host thread waits for the oldest job: the gradient stall.
"""

from __future__ import annotations

import collections
import enum
import time
from collections.abc import Callable
from concurrent.futures import Future

import torch

from megatrain.device.shards import Shards
from megatrain.device.streams import Event, Streams
from megatrain.host_memory.arena import Arena


class BufferState(enum.Enum):
    """What the memory of a gradient buffer contains."""

    FREE = "nothing of value"
    FILLING = "a gradient that is being written"
    DRAINING = "a gradient that the host reads"


class Staging:
    """A device gradient buffer. See [Note: gradient staging lifetime]."""

    def __init__(self, streams: Streams, numel: int, dtype: torch.dtype):
        self._streams = streams
        self.flat = torch.zeros(numel, dtype=dtype, device=streams.device)
        self.state = BufferState.FREE
        self._filled = numel  # elements since `begin`
        self._free, self._written = streams.event(), streams.event()

    @property
    def nbytes(self) -> int:
        """Device memory."""
        return self.flat.nbytes

    @classmethod
    def around(cls, streams: Streams, flat: torch.Tensor) -> Staging:
        """Wrap memory that the backward has already filled, for one `send`.

        The allocator is told that d2h reads the memory, so the caller may drop it right after `send`.
        """
        staging = cls(streams, 0, flat.dtype)
        staging.flat, staging.state = flat, BufferState.FILLING
        if streams.d2h is not None:
            flat.record_stream(streams.d2h)
        return staging

    def begin(self, numel: int) -> torch.Tensor:
        """The first `numel` elements; kernels on compute must write all of them."""
        assert self.state is BufferState.FREE, self.state
        self._streams.compute_waits(self._free, "gradients")
        self.state, self._filled = BufferState.FILLING, numel
        return self.flat[:numel]

    def send(self, destination: torch.Tensor, arrived: Event, poison: bool = False, what: str = "") -> None:
        """Queue the copy to `destination` (n,) in host memory. Asynchronous: the host may read it after `arrived`.

        `poison` fills the buffer with NaN afterwards (tests); `what` names the copy.
        """
        assert self.state is BufferState.FILLING, self.state
        self._streams.mark_compute(self._written)
        with self._streams.copying("d2h", self._written, arrived, what, destination.nbytes):
            self._move(destination)
            if poison:
                self.flat.fill_(float("nan"))
        self._free = arrived
        self.state = BufferState.FREE

    def _move(self, destination: torch.Tensor) -> None:
        """Queue the copy on the current stream."""
        destination.copy_(self.flat[: destination.numel()], non_blocking=True)

    def abandon(self) -> None:
        """Free the buffer after a failed step."""
        self.state = BufferState.FREE


class ReducedStaging(Staging):
    """A staging buffer for the gradient of a whole unit, which `send` sums over the ranks before it leaves.

    What leaves is this rank's shard, in transport type. The sum is in the buffer's own type, fp32: rounding comes after it.

    Args:
        streams, shards: Of this rank.
        flat: (numel,) device memory.
        transport: Type of what leaves.
        note: Called on d2h with what leaves, before it does: takes its norm.
    """

    def __init__(
        self,
        streams: Streams,
        shards: Shards,
        flat: torch.Tensor,
        transport: torch.dtype,
        note: Callable[[torch.Tensor], object],
    ):
        super().__init__(streams, 0, flat.dtype)
        self._shards, self._note = shards, note
        self.flat, self._filled = flat, flat.numel()
        self._reduced = torch.empty(flat.numel() // shards.shard.count, dtype=flat.dtype, device=streams.device)
        self._rounded = self._reduced if transport == flat.dtype else torch.empty_like(self._reduced, dtype=transport)
        self._adds = False

    @classmethod
    def once(
        cls,
        streams: Streams,
        shards: Shards,
        flat: torch.Tensor,
        transport: torch.dtype,
        note: Callable[[torch.Tensor], object],
    ) -> ReducedStaging:
        """Like `Staging.around`: for one `send` of memory that is filled already; the caller may drop it afterwards."""
        staging = cls(streams, shards, flat, transport, note)
        staging.state = BufferState.FILLING
        if streams.d2h is not None:
            for memory in (flat, staging._reduced, staging._rounded):
                memory.record_stream(streams.d2h)
        return staging

    @property
    def nbytes(self) -> int:
        rounded = 0 if self._rounded is self._reduced else self._rounded.nbytes
        return self.flat.nbytes + self._reduced.nbytes + rounded

    def send_to_device(self, plane: torch.Tensor, arrived: Event, first: bool, poison: bool = False) -> None:
        """Like `send`, to this rank's shard of a resident gradient plane: overwrite it (`first`) or add to it."""
        self._adds = not first
        self.send(plane, arrived, poison)
        self._adds = False

    def _move(self, destination: torch.Tensor) -> None:
        reduced = self._reduced[: self._filled // self._shards.shard.count]
        self._shards.reduce(reduced, self.flat)
        reduced = reduced[: destination.numel()]  # what is trained
        rounded = self._rounded[: destination.numel()]
        if rounded.dtype != reduced.dtype:
            rounded.copy_(reduced)
        self._note(rounded)
        if self._adds:
            destination.add_(rounded)
        else:
            destination.copy_(rounded, non_blocking=True)


class Slab:
    """A host gradient buffer, pinned if there is a GPU. See [Note: gradient slab lifetime]."""

    def __init__(self, streams: Streams, numel: int, dtype: torch.dtype):
        self._arena = Arena(max(numel, 1) * dtype.itemsize)
        if streams.cuda:
            self._arena.register([0])
        self.flat = self._arena.tensor(0, numel, dtype)
        self.state = BufferState.FREE
        self.arrived = streams.event()
        self._job: Future[None] | None = None
        self.nbytes, self.pinned_bytes = self._arena.nbytes, self._arena.pinned_bytes

    @property
    def in_use(self) -> bool:
        """Whether a job still reads it."""
        return self._job is not None and not self._job.done()

    def fill(self, numel: int) -> torch.Tensor:
        """The destination (numel,) of a copy from the device. The slab must be free."""
        assert self.state is BufferState.FREE, self.state
        self.state = BufferState.FILLING
        return self.flat[:numel]

    def drain(self, job: Future[None]) -> None:
        """Hand the slab to `job`, which reads it; the slab is free when the job ends."""
        assert self.state is BufferState.FILLING, self.state
        self.state, self._job = BufferState.DRAINING, job

    def settle(self) -> None:
        """Wait until the slab is free; raises the error of the job that read it."""
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
    """Slabs of the largest layer's size, reused in the order in which they were taken."""

    def __init__(self, streams: Streams, count: int, numel: int, dtype: torch.dtype):
        assert count >= 1, count
        self._streams = streams
        self.slabs = collections.deque(Slab(streams, numel, dtype) for _ in range(count))
        self.reset_counters()

    def reset_counters(self) -> None:
        self.wait_s, self.waits = 0.0, 0  # for a free slab
        self.most_in_use = 0

    def take(self) -> Slab:
        """Return the slab that was taken longest ago; waits for its job."""
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

    def settle(self) -> None:
        for slab in self.slabs:
            slab.settle()
