"""Weight slots: states, events, and which one is evicted."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.device.ring import DirectCopier, Slot, SlotState, WeightRing
from megatrain.device.streams import Streams
from traced import TracedStreams

WEIGHTS = torch.arange(6, dtype=torch.bfloat16)


def slot_of(streams: Streams | None = None, compute: torch.dtype = torch.bfloat16) -> Slot:
    streams = streams or Streams(torch.device("cpu"))
    return Slot(streams, DirectCopier(streams), 8, torch.bfloat16, compute)


def in_state(state: SlotState, streams: Streams | None = None) -> Slot:
    slot = slot_of(streams)
    if state is not SlotState.EMPTY:
        slot.load("layer.0", WEIGHTS)
    if state is SlotState.IN_USE:
        slot.acquire(6)
    assert slot.state is state
    return slot


ACTIONS: dict[str, Callable[[Slot], object]] = {
    "load": lambda slot: slot.load("layer.1", WEIGHTS),
    "acquire": lambda slot: slot.acquire(6),
    "release": Slot.release,
    "drop": Slot.drop,
    "poison": Slot.poison,
}
ALLOWED = {
    (SlotState.EMPTY, "load"): SlotState.LOADED,
    (SlotState.EMPTY, "drop"): SlotState.EMPTY,
    (SlotState.EMPTY, "poison"): SlotState.EMPTY,
    (SlotState.LOADED, "load"): SlotState.LOADED,
    (SlotState.LOADED, "acquire"): SlotState.IN_USE,
    (SlotState.LOADED, "drop"): SlotState.EMPTY,
    (SlotState.IN_USE, "release"): SlotState.LOADED,
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("state", SlotState, ids=lambda s: s.name)
def test_a_slot_allows_valid_transitions_and_raises_on_others(state: SlotState, action: str) -> None:
    slot, after = in_state(state), ALLOWED.get((state, action))
    if after is None:
        with pytest.raises(AssertionError, match=state.name):
            ACTIONS[action](slot)
        assert slot.state is state
    else:
        ACTIONS[action](slot)
        assert slot.state is after
        assert (slot.owner is None) == (after is SlotState.EMPTY)


@pytest.mark.parametrize("state", SlotState, ids=lambda s: s.name)
def test_an_abandoned_slot_is_empty_from_any_state(state: SlotState) -> None:
    slot = in_state(state)
    slot.abandon()
    assert (slot.state, slot.owner) == (SlotState.EMPTY, None)
    slot.load("layer.2", WEIGHTS)
    assert torch.equal(slot.acquire(6), WEIGHTS)


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float32])
def test_acquire_returns_the_weights_in_compute_dtype(compute: torch.dtype) -> None:
    slot = slot_of(compute=compute)
    bound_before = slot.buffer(6)
    slot.load("layer.0", WEIGHTS)
    weights = slot.acquire(6)
    assert weights.dtype == compute
    assert torch.equal(weights, WEIGHTS.to(compute))
    assert weights.data_ptr() == bound_before.data_ptr(), "views made before the copy must show it"


def test_a_second_buffer_exists_only_for_a_cast() -> None:
    assert slot_of().nbytes == 8 * 2
    assert slot_of(compute=torch.float32).nbytes == 8 * (2 + 4)


def test_copies_wait_for_the_last_reader_and_kernels_wait_for_the_copy() -> None:
    """[Note: weight slot lifetime], event by event."""
    streams = TracedStreams()
    slot = slot_of(streams)
    streams.name(ready=slot._ready, free=slot._free)
    slot.load("layer.0", WEIGHTS)
    assert streams.taken() == ["h2d waits for free", "h2d records ready"]
    slot.acquire(6)
    assert streams.taken() == ["compute waits for ready"]
    slot.release()
    assert streams.taken() == ["compute records free"]
    slot.load("layer.1", WEIGHTS)
    assert streams.taken() == ["h2d waits for free", "h2d records ready"]


def test_an_abandoned_slot_in_use_is_free_after_its_kernels() -> None:
    streams = TracedStreams()
    slot = in_state(SlotState.IN_USE, streams)
    streams.name(free=slot._free)
    streams.taken()
    slot.abandon()
    assert streams.taken() == ["compute records free"]


def test_a_wrong_reader_gets_nan_from_a_poisoned_slot_until_the_next_load() -> None:
    slot = slot_of()
    slot.poison()
    assert slot.buffer(8).isnan().all()
    slot.load("layer.0", WEIGHTS)
    assert torch.equal(slot.acquire(6), WEIGHTS)


class LateCopier:
    """A copier whose copies are queued later, by another thread."""

    def __init__(self) -> None:
        self.queued: Future[None] = Future()

    def copy(self, *_: object, **__: object) -> Future[None]:
        return self.queued

    def close(self) -> None:
        pass


@pytest.mark.parametrize("use", [lambda slot: slot.acquire(6), Slot.drop], ids=["acquire", "drop"])
def test_an_error_in_the_packing_thread_is_raised_by_the_slot(use: Callable[[Slot], object]) -> None:
    streams, copier = Streams(torch.device("cpu")), LateCopier()
    slot = Slot(streams, copier, 8, torch.bfloat16, torch.bfloat16)
    slot.load("layer.0", WEIGHTS)
    copier.queued.set_exception(OSError("the packer died"))
    with pytest.raises(OSError, match="the packer died"):
        use(slot)


# ------------------------------------------------------------------ the ring


def ring_of(*owners: str | None) -> WeightRing:
    ring = WeightRing([slot_of() for _ in owners])
    for slot, owner in zip(ring.slots, owners, strict=True):
        if owner is not None:
            slot.load(owner, WEIGHTS)
    return ring


def test_a_ring_needs_two_slots() -> None:
    with pytest.raises(AssertionError, match="1 weight slots"):
        ring_of(None)


def test_holding_finds_the_slot_of_an_owner() -> None:
    ring = ring_of("a", None)
    assert ring.holding("a") is ring.slots[0]
    assert ring.holding("b") is None


def test_an_empty_slot_is_used_first() -> None:
    ring = ring_of("a", None, "b")
    assert ring.victim(lambda owner: math.inf, before=-1) is ring.slots[1]


def test_the_owner_needed_last_is_evicted() -> None:
    ring = ring_of("a", "b", "c")
    assert ring.victim({"a": 4.0, "b": 9.0, "c": 6.0}.__getitem__, before=3) is ring.slots[1]
    assert ring.victim({"a": 4.0, "b": 9.0, "c": math.inf}.__getitem__, before=3) is ring.slots[2]


def test_no_owner_is_evicted_for_a_unit_that_is_needed_later() -> None:
    ring = ring_of("a", "b")
    next_use = {"a": 4.0, "b": 6.0}.__getitem__
    assert ring.victim(next_use, before=6) is None
    assert ring.victim(next_use, before=5) is ring.slots[1]


def test_a_slot_in_use_is_never_evicted() -> None:
    ring = ring_of("a", "b")
    ring.slots[1].acquire(6)
    assert ring.victim({"a": 1.0, "b": 9.0}.__getitem__, before=0) is ring.slots[0]
    ring.slots[0].acquire(6)
    assert ring.victim(lambda owner: math.inf, before=-1) is None


@given(fetches=st.lists(st.integers(0, 5), min_size=1, max_size=14), slots=st.integers(2, 4))
def test_loading_on_demand_needs_the_fewest_possible_loads(fetches: list[int], slots: int) -> None:
    """Belady's rule, compared with the minimum over all choices of victims."""
    ring, loads = ring_of(*[None] * slots), 0
    for position, unit in enumerate(fetches):

        def next_use(owner: str, position: int = position) -> float:
            rest = fetches[position:]
            return position + rest.index(int(owner)) if int(owner) in rest else math.inf

        slot = ring.holding(str(unit))
        if slot is None:
            slot = ring.victim(next_use, before=-1)
            assert slot is not None
            slot.load(str(unit), WEIGHTS)
            loads += 1
        slot.acquire(6)
        slot.release()
    assert loads == fewest_loads(fetches, slots)


def fewest_loads(fetches: list[int], slots: int) -> int:
    reached = {frozenset[int](): 0}
    for unit in fetches:
        following: dict[frozenset[int], int] = {}
        for held, loads in reached.items():
            if unit in held:
                options = [held]
            elif len(held) < slots:
                options = [held | {unit}]
            else:
                options = [held - {victim} | {unit} for victim in held]
            for option in options:
                cost = loads + (unit not in held)
                following[option] = min(following.get(option, cost), cost)
        reached = following
    return min(reached.values())
