"""Weights on the device: layers stream through the ring, the edges (embedding, head) stay for the step.

[Note: when a unit's weights may be copied]
AdamW of step n runs under the forward of step n + 1. A unit's copy must not start before its own update has ended, so
every load waits for that unit's update, and for no other. The host plane then rests until the next update of the same unit,
which is launched only after the backward that read it.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch

from megatrain.device.ring import Slot, WeightRing
from megatrain.errors import UserError
from megatrain.host_memory.store import HostStore
from megatrain.models.structure import Unit


class UpdateGate:
    """What the weight stream asks of the optimizer."""

    def __init__(self, finished: Callable[[str], bool], wait: Callable[[str], None]):
        self.finished = finished
        self.wait = wait


class WeightStream:
    """Fetches layers in the order of a visit list and prefetches what the list says comes next.

    Args:
        store: The host planes.
        layers: The layer units, in order.
        ring: Slots for the layers.
        edges: (unit, its own slot) of embedding and head; they are loaded once per update and stay. A resident one has no slot.
        gate: See [Note: when a unit's weights may be copied].
    """

    def __init__(
        self,
        store: HostStore,
        layers: Sequence[Unit],
        ring: WeightRing,
        edges: Sequence[tuple[Unit, Slot | None]],
        gate: UpdateGate,
    ):
        self._store = store
        self._layers = list(layers)
        self._ring = ring
        self._edges = list(edges)
        self._gate = gate
        self._visits: list[int] = []
        self._position = 0
        self._streamed: collections.deque[tuple[int, int]] = collections.deque()
        """(position, layer) of the visits ahead that need a slot."""
        self.update_wait_s = 0.0
        self.loaded_bytes = 0

    def follow(self, visits: list[int]) -> None:
        """Start a new list of visits; the last one must have been finished or abandoned."""
        assert self._position == len(self._visits), f"{len(self._visits) - self._position} visits left"
        self._visits, self._position = visits, 0
        self._streamed = collections.deque((i, layer) for i, layer in enumerate(visits) if not self.stays(layer))

    def fetch(self, layer: int) -> torch.Tensor:
        """The flat weights (numel,) of `layer` in compute dtype, for kernels launched before `release`.

        Blocks the host while the layer's update is still running; the copy itself is asynchronous.
        """
        if self._position >= len(self._visits) or self._visits[self._position] != layer:
            expected = self._visits[self._position : self._position + 1]
            raise UserError(
                f"the model called layer {layer} where layer {expected} was expected",
                remedy="a family that skips, repeats or reorders its layers is not supported by the host engine",
            )
        self._position += 1
        unit = self._layers[layer]
        if self.stays(layer):
            self._prefetch()
            return self._store.units[unit.name].hi
        slot = self._ring.holding(unit.name)
        if slot is None:
            slot = self._ring.victim(self._next_use, before=-1)
            assert slot is not None, "every weight slot is in use"
            self._load(slot, unit)
        return slot.acquire(unit.layout.numel)

    @property
    def visited(self) -> int | None:
        """The layer that was fetched last; None before the first of a list."""
        return self._visits[self._position - 1] if self._position else None

    def stays(self, layer: int) -> bool:
        """Whether the layer is resident: its weights have the same address in every visit, and no slot."""
        return self._store.units[self._layers[layer].name].resident

    def release(self, layer: int) -> None:
        """All kernels that read `layer` in this visit have been launched; prefetch what comes next. Asynchronous."""
        if not self.stays(layer):
            slot = self._ring.holding(self._layers[layer].name)
            assert slot is not None, f"layer {layer} holds no slot"
            slot.release()
        self._prefetch()

    def _prefetch(self) -> None:
        """Load what the visit list says comes next, as far as there are slots and finished updates. Asynchronous."""
        while self._streamed and self._streamed[0][0] < self._position:
            self._streamed.popleft()
        for position, following in itertools.islice(self._streamed, len(self._ring.slots)):
            unit = self._layers[following]
            if self._ring.holding(unit.name) is not None:
                continue
            if not self._gate.finished(unit.name):
                return  # not worth blocking for: fetch will
            slot = self._ring.victim(self._next_use, before=position)
            if slot is None:
                return
            self._load(slot, unit)

    def edge_weights(self, index: int) -> torch.Tensor:
        """The flat weights of the embedding (0) or the head (1), loaded if stale, for kernels launched from now on."""
        unit, slot = self._edges[index]
        if slot is None:
            return self._store.units[unit.name].hi
        if slot.owner is None:
            self._load(slot, unit)
        weights = slot.acquire(unit.layout.numel)
        slot.release()
        return weights

    def edge_buffer(self, index: int) -> torch.Tensor:
        """The same memory as `edge_weights`, without loading: for views that are bound before the copy is queued."""
        unit, slot = self._edges[index]
        return self._store.units[unit.name].hi if slot is None else slot.buffer(unit.layout.numel)

    def edges_in_use(self) -> None:
        """All kernels that read the edges in this step have been launched."""
        for _, slot in self._edges:
            if slot is not None and slot.owner is not None:
                slot.acquire(0)
                slot.release()

    def drop_all(self) -> None:
        """The masters have changed: nothing on the device is valid any more."""
        for slot in self._all_slots():
            slot.drop()

    def abandon(self) -> None:
        """After an error in the middle of a step: no slot is in use, no visit is due."""
        self._visits, self._position = [], 0
        self._streamed.clear()
        for slot in self._all_slots():
            slot.abandon()

    @property
    def slots(self) -> int:
        """Slots that layers stream through."""
        return len(self._ring.slots)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self._all_slots())

    def _all_slots(self) -> list[Slot]:
        return [*self._ring.slots, *(slot for _, slot in self._edges if slot is not None)]

    def _next_use(self, owner: str) -> float:
        """Position of the next visit of `owner`, infinity if there is none."""
        layer = int(owner.removeprefix("layer."))
        try:
            return self._visits.index(layer, self._position)
        except ValueError:
            return math.inf

    def _load(self, slot: Slot, unit: Unit) -> None:
        started = time.perf_counter()
        self._gate.wait(unit.name)
        self.update_wait_s += time.perf_counter() - started
        hi = self._store.units[unit.name].hi
        slot.load(unit.name, hi)
        self.loaded_bytes += hi.nbytes
