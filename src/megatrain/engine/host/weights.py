"""Weights on the device: layers stream through the ring of slots, the edges (embedding, head) stay for the step.

[Note: when a unit's weights may be copied]
AdamW of step n runs under the forward of step n + 1. The copy of a unit's weights must not start before the unit's own update
has finished, so each load waits for that update, and for no other. The host plane is not written again until the next update
of the same unit, which is launched after the backward that read it.

[Note: fetch order]
Which layers a step fetches, in which order, is a list that is known before the step starts. Prefetching follows the list, and so
does the choice of the slot to evict. An evaluation fetches each layer once, in order. Training does so for the forward; its
backward goes through the segments from last to first, and each segment is first recomputed up to the input of its last layer.

[Note: all ranks load alike]
Where several ranks share the state, a load is a collective (device/shards.py), so all ranks must load the same units in the same
order. Whether an update has finished differs between ranks, so a prefetch may not ask. It loads a resident unit, which no host
thread updates, or a unit that a load has waited for since the last update; any other unit only as the very next fetch and only
at a release, where it blocks for the update: the next fetch, which the host thread launches right after, would do the same.
Resident units are shards in device memory, and pass through slots like all others. With a slot for each layer they are gathered
once after an update, ahead of the forward: then every rank holds a replica of the weights, and a shard of everything else.
"""

from __future__ import annotations

import collections
import itertools
import math
import time
from collections.abc import Callable, Sequence

import torch

from megatrain.device.ring import Slot, WeightRing
from megatrain.device.shards import ALONE, Shards
from megatrain.device.streams import Event, Streams
from megatrain.errors import UserError
from megatrain.host_memory.store import HostStore, UnitPlanes
from megatrain.models.structure import Unit


def forward_fetch_order(layers: int) -> list[int]:
    """Fetch order of an evaluation."""
    return list(range(layers))


def backward_fetch_order(layers: int, segment: int, first: int = 0) -> list[int]:
    """Fetch order of a backward. With `segment` 1 every layer's input was kept, and the list is just reversed.

    `first`: the first layer that has a backward.
    """
    order: list[int] = []
    for start in reversed(range(0, layers, segment)):
        start, end = max(start, first), min(start + segment, layers)
        order += range(start, end - 1)
        order += reversed(range(start, end))
    return order


def training_fetch_order(layers: int, segment: int, accumulation_steps: int, first: int = 0) -> list[int]:
    """Fetch order of a training step: forward and backward, once per accumulation step."""
    return (forward_fetch_order(layers) + backward_fetch_order(layers, segment, first)) * accumulation_steps


class UpdateGate:
    """What the weight stream needs from the optimizer: `finished(unit)`, and `wait(unit)`, which blocks until it is."""

    def __init__(self, finished: Callable[[str], bool], wait: Callable[[str], None]):
        self.finished = finished
        self.wait = wait


class WeightStream:
    """Fetches layers in a given order, and prefetches the layers that come next.

    Args:
        store: The host planes.
        layers: The layer units, in order.
        ring: Slots for the layers.
        edges: Embedding and head, each with its slot; one that stays has none. They are loaded once per update.
        gate: See [Note: when a unit's weights may be copied].
        streams: The device's streams; needed only where ranks share the state.
        shards: The ranks that share the state.
    """

    def __init__(
        self,
        store: HostStore,
        layers: Sequence[Unit],
        ring: WeightRing,
        edges: Sequence[tuple[Unit, Slot | None]],
        gate: UpdateGate,
        streams: Streams | None = None,
        shards: Shards = ALONE,
    ):
        self._store = store
        self._layers = list(layers)
        self._ring = ring
        self._edges = list(edges)
        self._gate = gate
        self._order: list[int] = []
        self._position = 0
        self._streamed: collections.deque[tuple[int, int]] = collections.deque()
        """(position, layer) of the fetches ahead that need a slot."""
        self._streams, self._shards = streams, shards
        self._updated: Event | None = None  # after the latest updates of resident shards, on compute
        self._at_rest: set[str] = set()  # units that a load has waited for since the last update
        self.update_wait_s = 0.0
        self.loaded_bytes = 0

    def follow(self, order: list[int]) -> None:
        """Start a new fetch order. The previous one must be finished or abandoned."""
        assert self.fetches_left == 0, f"{self.fetches_left} fetches left"
        self._order, self._position = order, 0
        self._streamed = collections.deque((i, layer) for i, layer in enumerate(order) if not self.stays(layer))

    def fetch(self, layer: int) -> torch.Tensor:
        """The flat weights (numel,) of `layer` in compute dtype, for kernels launched before `release`.

        Blocks the host while the layer's update is still running; the copy itself is asynchronous.

        Raises:
            UserError: The model calls its layers in another order.
        """
        if self._position >= len(self._order) or self._order[self._position] != layer:
            expected = self._order[self._position : self._position + 1]
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
    def fetched(self) -> int | None:
        """The layer that was fetched last; None before the first fetch of an order."""
        return self._order[self._position - 1] if self._position else None

    @property
    def fetches_left(self) -> int:
        """Fetches that the current order still has to launch."""
        return len(self._order) - self._position

    def stays(self, layer: int) -> bool:
        """Whether the whole layer is resident: its weights never move, and it has no slot."""
        return stays(self._store.units[self._layers[layer].name], self._shards)

    def release(self, layer: int) -> None:
        """Call when all kernels that read this fetch of `layer` are launched. Prefetches what comes next. Asynchronous."""
        if not self.stays(layer):
            slot = self._ring.holding(self._layers[layer].name)
            assert slot is not None, f"layer {layer} holds no slot"
            slot.release()
        self._prefetch()

    def _prefetch(self) -> None:
        """Load the next layers of the order, as far as slots are free and updates have finished. Asynchronous."""
        while self._streamed and self._streamed[0][0] < self._position:
            self._streamed.popleft()
        held = {slot.owner for slot in self._ring.slots}
        for position, following in itertools.islice(self._streamed, len(self._ring.slots)):
            unit = self._layers[following]
            if unit.name in held:
                continue
            if not self._may_prefetch(unit, position):
                return
            slot = self._ring.victim(self._next_use, before=position)
            if slot is None:
                return
            held ^= {slot.owner, unit.name}
            self._load(slot, unit)

    def _may_prefetch(self, unit: Unit, position: int) -> bool:
        if not self._shards.many:
            return self._gate.finished(unit.name)  # otherwise not worth blocking for: fetch will
        at_rest = unit.name in self._at_rest or self._store.units[unit.name].resident
        return at_rest or position == self._position  # [Note: all ranks load alike]

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
        """The memory of `edge_weights`, without loading it: for views that are bound before the copy is queued."""
        unit, slot = self._edges[index]
        return self._store.units[unit.name].hi if slot is None else slot.buffer(unit.layout.numel)

    def edges_in_use(self) -> None:
        """Call when all kernels that read the edges in this step are launched."""
        for _, slot in self._edges:
            if slot is not None and slot.owner is not None:
                slot.acquire(0)
                slot.release()

    def drop_all(self) -> None:
        """Invalidate everything on the device: updates of the masters were launched."""
        self._at_rest.clear()
        if self._shards.many and self._streams is not None:
            self._updated = self._streams.event()
            self._streams.mark_compute(self._updated)
        for slot in self._all_slots():
            slot.drop()

    def abandon(self) -> None:
        """Reset after an error in the middle of a step: no slot is in use, no fetch is due."""
        self._order, self._position = [], 0
        self._streamed.clear()
        for slot in self._all_slots():
            slot.abandon()

    @property
    def slots(self) -> int:
        """Number of slots that layers stream through."""
        return len(self._ring.slots)

    @property
    def nbytes(self) -> int:
        """Device memory of all slots."""
        return sum(slot.nbytes for slot in self._all_slots())

    def _all_slots(self) -> list[Slot]:
        return [*self._ring.slots, *(slot for _, slot in self._edges if slot is not None)]

    def _next_use(self, owner: str) -> float:
        """Position of the next fetch of `owner`, infinity if there is none."""
        layer = int(owner.removeprefix("layer."))
        try:
            return self._order.index(layer, self._position)
        except ValueError:
            return math.inf

    def _load(self, slot: Slot, unit: Unit) -> None:
        started = time.perf_counter()
        self._gate.wait(unit.name)
        self.update_wait_s += time.perf_counter() - started
        self._at_rest.add(unit.name)
        planes = self._store.units[unit.name]
        slot.load(unit.name, planes.hi, self._updated if planes.resident else None)
        if not planes.resident:
            self.loaded_bytes += planes.hi.nbytes


def stays(planes: UnitPlanes, shards: Shards) -> bool:
    """Whether a unit is computed from its planes where they are: it is resident, and they hold all of it."""
    return planes.resident and not shards.many
