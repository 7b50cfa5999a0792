"""Weight slots: the device buffers that layers stream through, and the copiers that fill them.

[Note: weight slot lifetime]
A slot is one flat device buffer. It is EMPTY, or it holds the weights of one unit, its owner:
    EMPTY   --load-->     LOADED   an h2d copy (with several ranks: of this rank's shard, then an all-gather) is queued; the
                                   owner's weights are valid after the `ready` event
    LOADED  --load-->     LOADED   another owner; the copy waits for `free`, the last kernel that read the old weights
    LOADED  --acquire-->  IN_USE   compute waits for `ready`; kernels that read the slot are being launched
    IN_USE  --release-->  LOADED   `free` is recorded after those kernels; the weights stay valid and can be acquired again
    LOADED  --drop-->     EMPTY    the owner's master has changed (optimizer update), so the copy is stale
Any other transition is a bug and raises at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from megatrain.device.shards import ALONE, Shards
from megatrain.device.streams import Event, Streams
from megatrain.host_memory.arena import two_pinned


class DirectCopier:
    """One DMA straight from the plane in pinned host memory; on a CPU device, an ordinary copy.

    Both copiers queue the copy on h2d after the event `after`, mark its end with `done`, and return at once.
    """

    def __init__(self, streams: Streams, shards: Shards = ALONE):
        self._streams, self._shards = streams, shards

    def copy(self, target: Tensor, source: Tensor, after: Event, done: Event, what: str = "") -> None:
        """Queue `Shards.fill(target, source)`. `what` names the copy in the recorded spans."""
        with self._streams.copying("h2d", after, done, what, source.nbytes):
            self._shards.fill(target, source)

    def close(self) -> None:
        pass


class StagedCopier:
    """Copies planes from pageable memory through two pinned staging buffers of the largest unit's size.

    A thread packs one buffer while the DMA of the other is in flight; it packs a buffer again after the DMA's event `sent`.
    The thread queues planes on the device, too, which need no packing: all loads keep their order.
    """

    def __init__(self, streams: Streams, nbytes: int, shards: Shards = ALONE):
        self._streams, self._shards = streams, shards
        self._arenas = two_pinned(nbytes)
        self._sent = [streams.event(), streams.event()]
        self._turn = 0
        self._packer = ThreadPoolExecutor(1, thread_name_prefix="pack")

    @property
    def pinned_bytes(self) -> int:
        return sum(arena.pinned_bytes for arena in self._arenas)

    def copy(self, target: Tensor, source: Tensor, after: Event, done: Event, what: str = "") -> Future[None]:
        """Queue `Shards.fill(target, source)`. Wait for the future first, then for `done`."""
        return self._packer.submit(self._pack_and_send, target, source, after, done, what)

    def _pack_and_send(self, target: Tensor, source: Tensor, after: Event, done: Event, what: str) -> None:
        if source.device.type != "cpu":
            with self._streams.copying("h2d", after, done, what, source.nbytes):
                self._shards.fill(target, source)
            return
        turn, self._turn = self._turn, 1 - self._turn
        self._sent[turn].synchronize()
        staging = self._arenas[turn].tensor(0, source.numel(), source.dtype)
        staging.copy_(source)
        with self._streams.copying("h2d", after, done, what, staging.nbytes):
            self._shards.fill(target, staging)
        self._sent[turn].record(self._streams.h2d)

    def close(self) -> None:
        self._packer.shutdown()
        for arena in self._arenas:
            arena.close()


Copier = DirectCopier | StagedCopier


class SlotState(enum.Enum):
    """What the memory of a slot contains."""

    EMPTY = "nothing of value"
    LOADED = "the owner's weights, valid after `ready`"
    IN_USE = "the owner's weights; kernels that read them are being launched"


class Slot:
    """One flat device weight buffer with its owner, state and events. See [Note: weight slot lifetime].

    If the layers compute in another dtype than the host plane's, `acquire` casts on the device.
    """

    def __init__(
        self, streams: Streams, copier: Copier, numel: int, plane_dtype: torch.dtype, compute_dtype: torch.dtype
    ):
        self._streams = streams
        self._copier = copier
        self._queued: Future[None] | None = None
        self._copied = torch.zeros(numel, dtype=plane_dtype, device=streams.device)
        self._cast = None if plane_dtype == compute_dtype else torch.zeros_like(self._copied, dtype=compute_dtype)
        self.owner: str | None = None
        self.state = SlotState.EMPTY
        self._ready, self._free = streams.event(), streams.event()

    @property
    def nbytes(self) -> int:
        return self._copied.nbytes + (self._cast.nbytes if self._cast is not None else 0)

    def buffer(self, numel: int) -> Tensor:
        """The memory that `acquire` will return; undefined contents until then."""
        return (self._copied if self._cast is None else self._cast)[:numel]

    def load(self, owner: str, source: Tensor, written: Event | None = None) -> None:
        """Queue the copy of `source` (n,), a unit's hi plane. Asynchronous: `source` must not change before `acquire`.

        `written` comes after the kernels that wrote `source`, if it is on the device.
        """
        self._expect(SlotState.EMPTY, SlotState.LOADED)
        if written is not None:
            self._streams.h2d_waits(written)
        self._queued = self._copier.copy(self._copied, source, after=self._free, done=self._ready, what=owner)
        self.owner, self.state = owner, SlotState.LOADED

    def acquire(self, numel: int) -> Tensor:
        """Return the owner's weights (numel,) in compute dtype, for kernels launched on compute before `release`."""
        self._expect(SlotState.LOADED)
        self._settle()
        self._streams.compute_waits(self._ready, "weights")
        self.state = SlotState.IN_USE
        if self._cast is not None:
            self._cast[:numel].copy_(self._copied[:numel])
        return self.buffer(numel)

    def release(self) -> None:
        """End the current acquire: all kernels that read the slot have been launched."""
        self._expect(SlotState.IN_USE)
        self._streams.mark_compute(self._free)
        self.state = SlotState.LOADED

    def drop(self) -> None:
        """Forget the owner: its weights are stale."""
        self._expect(SlotState.EMPTY, SlotState.LOADED)
        self._settle()
        self.owner, self.state = None, SlotState.EMPTY

    def abandon(self) -> None:
        """Empty the slot after a failed step, from any state. The device must be idle."""
        if self.state is SlotState.IN_USE:
            self.release()
        self.drop()

    def poison(self) -> None:
        """Fill the buffer with NaN after its last use, so that a test sees a kernel that reads it wrongly."""
        self._expect(SlotState.EMPTY)
        with self._streams.copying("h2d", after=self._free, done=self._ready):
            self._copied.fill_(float("nan"))

    def _settle(self) -> None:
        """Wait until the copy is queued (possibly by a packing thread); raises its error."""
        queued, self._queued = self._queued, None
        if queued is not None:
            queued.result()

    def _expect(self, *states: SlotState) -> None:
        assert self.state in states, f"slot of {self.owner} is {self.state.name}, not {[s.name for s in states]}"


class WeightRing:
    """The layers' slots: at least two, so that one loads while another is read."""

    def __init__(self, slots: list[Slot]):
        assert len(slots) >= 2, f"{len(slots)} weight slots: one must load while another is read"
        self.slots = slots

    def holding(self, owner: str) -> Slot | None:
        """The slot that holds `owner`'s weights, if any."""
        return next((slot for slot in self.slots if slot.owner == owner), None)

    def victim(self, next_use: Callable[[str], float], before: float) -> Slot | None:
        """The slot to load into: an empty one, else the one whose owner is needed last, if it is needed later than `before`."""
        idle = [slot for slot in self.slots if slot.state is not SlotState.IN_USE]
        empty = [slot for slot in idle if slot.owner is None]
        if empty:
            return empty[0]
        latest = max(idle, key=lambda slot: next_use(slot.owner), default=None)  # type: ignore[arg-type]
        return latest if latest is not None and next_use(latest.owner) > before else None  # type: ignore[arg-type]
