"""Layer inputs that wait in host memory come back as they were."""

from __future__ import annotations

import torch

from megatrain.device.offload import InputStore
from megatrain.device.streams import Streams
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
    store.put(0, hidden(9, 40, 64))
    assert store.nbytes > first
    assert torch.equal(store.take(0), hidden(9, 40, 64))


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
