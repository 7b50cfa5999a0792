"""Layer inputs that wait in host memory come back as they were."""

from __future__ import annotations

import pytest
import torch

from megatrain.device.offload import InputStore
from megatrain.device.streams import Streams
from megatrain.host_memory.arena import Arena, PinRefused, page_ceil
from traced import TracedStreams


def hidden(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_inputs_come_back_in_their_shape_prefetched_or_not() -> None:
    store = InputStore(Streams(torch.device("cpu")), range(3))
    for layer in range(3):
        store.put(layer, hidden(layer, 2, 5, 4))
    store.prefetch(1)
    for layer in reversed(range(3)):
        assert torch.equal(store.take(layer), hidden(layer, 2, 5, 4)), layer
    assert store.out_bytes + store.back_bytes == 2 * 3 * 2 * 5 * 4 * 4
    store.close()


def test_memory_is_made_once_and_again_only_for_larger_inputs() -> None:
    store = InputStore(Streams(torch.device("cpu")), range(2))
    store.put(0, hidden(0, 2, 5, 4))
    first = store.nbytes
    assert first == 4096
    for seed in range(3):
        store.put(0, hidden(seed, 1, 5, 4))
        assert torch.equal(store.take(0), hidden(seed, 1, 5, 4))
    assert store.nbytes == first
    for rows in (40, 80, 120):
        store.put(0, hidden(9, rows, 64))
        assert store.nbytes == page_ceil(rows * 64 * 4) > first, "what was too small is given back"
        assert torch.equal(store.take(0), hidden(9, rows, 64))


def test_where_the_system_refuses_to_pin_inputs_wait_in_plain_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    def refuse(arena: Arena, cuts: list[int]) -> None:
        asked.append(arena)
        raise PinRefused(0, arena.nbytes, 2, "out of memory")

    monkeypatch.setattr(Arena, "register", refuse)
    streams = Streams(torch.device("cpu"))
    streams.cuda = True
    store = InputStore(streams, range(2))
    assert [store._home(layer, hidden(layer, 2, 5)).numel() for layer in range(2)] == [10, 10]
    assert len(asked) == 1
    assert caplog.text.count("not pinned") == 1


def test_what_a_window_put_does_not_change_when_the_tensor_does() -> None:
    store = InputStore(Streams(torch.device("cpu")), [0])
    tensor = hidden(0, 3, 4)
    store.put(0, tensor)
    tensor.zero_()
    taken = store.take(0)
    store.put(0, hidden(1, 3, 4))
    assert torch.equal(taken, hidden(0, 3, 4))


def test_after_an_abandoned_step_nothing_waits() -> None:
    store = InputStore(Streams(torch.device("cpu")), [0])
    store.put(0, hidden(0, 3, 4))
    store.abandon()
    store.prefetch(0)
    store.put(0, hidden(1, 3, 4))
    assert torch.equal(store.take(0), hidden(1, 3, 4))


def test_each_copy_waits_for_who_wrote_its_source() -> None:
    """[Note: offloaded input lifetime], event by event."""
    streams = TracedStreams()
    store = InputStore(streams, [0])
    store.put(0, hidden(0, 3, 4))
    place = store._places[0]
    log = streams.taken()
    written = log[0].removeprefix("compute records ")
    assert log == [f"compute records {written}", f"d2h waits for {written}", f"d2h records {place.out}"]
    store.prefetch(0)
    log = streams.taken()
    allocated = log[0].removeprefix("compute records ")
    assert log == [f"compute records {allocated}", f"h2d waits for {allocated}", f"h2d records {place.back}"]
    store.prefetch(0)
    assert streams.taken() == [], "it is on its way"
    store.take(0)
    assert streams.taken() == [f"compute waits for {place.back}"]
