"""Weight slots: the device buffers that layers stream through.

[Note: weight slot lifetime]
A slot is one flat device buffer. It is EMPTY, or it holds the weights of one owner unit:
    EMPTY   --load-->     LOADED   an h2d copy is queued; the owner's weights are valid behind the `ready` event
    LOADED  --load-->     LOADED   another owner; the copy waits for `free`, the last kernel that read the old one
    LOADED  --acquire-->  IN_USE   compute has been made to wait for `ready`; kernels reading the slot are being launched
    IN_USE  --release-->  LOADED   `free` is recorded behind those kernels; the weights stay valid and can be acquired again
    LOADED  --drop-->     EMPTY    the owner's master has changed (AdamW), the copy is stale
Any other transition is a bug and raises at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from concurrent.futures import Future

import torch

from megatrain.device.copier import Copier
from megatrain.device.streams import Streams


class SlotState(enum.Enum):
    """What a slot's memory means."""

    EMPTY = "nothing of value"
    LOADED = "the owner's weights, valid behind `ready`"
    IN_USE = "the owner's weights, being read by kernels that are still being launched"


class Slot:
    """One flat device weight buffer with its owner, state and events. See [Note: weight slot lifetime].

    Args:
        streams: The streams copies and kernels run on.
        copier: Queues the copies.
        numel: Elements, those of the largest unit that will be loaded.
        plane_dtype: Type of the host plane (what is copied).
        compute_dtype: Type the layers compute in; where it differs from the plane's, acquire casts on the device.
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

    def buffer(self, numel: int) -> torch.Tensor:
        """The memory that `acquire` will return. Its contents mean nothing before that."""
        return (self._copied if self._cast is None else self._cast)[:numel]

    def load(self, owner: str, source: torch.Tensor) -> None:
        """Queue the copy of `source` (n,), a unit's hi plane. Asynchronous: `source` must not change before it is acquired."""
        self._expect(SlotState.EMPTY, SlotState.LOADED)
        target = self._copied[: source.numel()]
        self._queued = self._copier.copy(target, source, after=self._free, done=self._ready, what=owner)
        self.owner, self.state = owner, SlotState.LOADED

    def acquire(self, numel: int) -> torch.Tensor:
        """The owner's weights (numel,) in compute dtype, for kernels launched on compute before `release`."""
        self._expect(SlotState.LOADED)
        self._settle()
        self._streams.compute_waits(self._ready, "weights")
        self.state = SlotState.IN_USE
        if self._cast is not None:
            self._cast[:numel].copy_(self._copied[:numel])
        return self.buffer(numel)

    def release(self) -> None:
        """No more kernels that read the slot will be launched on behalf of the current acquire."""
        self._expect(SlotState.IN_USE)
        self._streams.mark_compute(self._free)
        self.state = SlotState.LOADED

    def drop(self) -> None:
        """Forget the owner: its weights are stale."""
        self._expect(SlotState.EMPTY, SlotState.LOADED)
        self._settle()
        self.owner, self.state = None, SlotState.EMPTY

    def abandon(self) -> None:
        """After an error in the middle of a step: whatever the state was, the slot is empty and the device idle with it."""
        if self.state is SlotState.IN_USE:
            self.release()
        self.drop()

    def poison(self) -> None:
        """Fill the buffer with NaN behind the last use (tests: whoever reads a slot that it should not have gets NaN)."""
        self._expect(SlotState.EMPTY)
        with self._streams.copying_in(after=self._free, done=self._ready):
            self._copied.fill_(float("nan"))

    def _settle(self) -> None:
        """Wait until the copy is in the stream (a packing thread may put it there); its errors surface here."""
        queued, self._queued = self._queued, None
        if queued is not None:
            queued.result()

    def _expect(self, *states: SlotState) -> None:
        assert self.state in states, f"slot of {self.owner} is {self.state.name}, not {[s.name for s in states]}"


class WeightRing:
    """The layers' slots: at least two, so that one loads while the other is read."""

    def __init__(self, slots: list[Slot]):
        assert len(slots) >= 2, f"{len(slots)} weight slots: one must load while another is read"
        self.slots = slots

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def holding(self, owner: str) -> Slot | None:
        """The slot that holds `owner`'s weights, if one does."""
        return next((slot for slot in self.slots if slot.owner == owner), None)

    def victim(self, next_use: Callable[[str], float], before: float) -> Slot | None:
        """The slot to load into: an empty one, else the one whose owner is needed latest, and later than `before`."""
        idle = [slot for slot in self.slots if slot.state is not SlotState.IN_USE]
        empty = [slot for slot in idle if slot.owner is None]
        if empty:
            return empty[0]
        latest = max(idle, key=lambda slot: next_use(slot.owner), default=None)  # type: ignore[arg-type]
        return latest if latest is not None and next_use(latest.owner) > before else None  # type: ignore[arg-type]
