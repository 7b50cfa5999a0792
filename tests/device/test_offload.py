"""Offloaded layer inputs come back unchanged."""

from __future__ import annotations

import weakref

import pytest
import torch

from megatrain.device.offload import InputStore
from megatrain.device.streams import Streams
from megatrain.host_memory.arena import Arena, PinRefused, page_ceil
from traced import TracedStreams


def hidden(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_inputs_come_back_in_their_shape_with_and_without_prefetch() -> None:
    store = InputStore(Streams(torch.device("cpu")), range(3))
    for layer in range(3):
        store.put(layer, hidden(layer, 2, 5, 4))
    store.prefetch(1)
    for layer in reversed(range(3)):
        assert torch.equal(store.take(layer), hidden(layer, 2, 5, 4)), layer
    assert store.out_bytes + store.back_bytes == 2 * 3 * 2 * 5 * 4 * 4
    store.close()


def test_memory_is_allocated_once_and_again_only_for_larger_inputs() -> None:
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
        assert store.nbytes == page_ceil(rows * 64 * 4) > first, "the smaller buffer is released"
        assert torch.equal(store.take(0), hidden(9, rows, 64))


def test_inputs_use_pageable_memory_if_pinning_is_refused(
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
    assert [store._buffer(layer, hidden(layer, 2, 5)).numel() for layer in range(2)] == [10, 10]
    assert len(asked) == 1
    assert caplog.text.count("not pinned") == 1


def test_an_offloaded_input_does_not_change_with_its_tensor() -> None:
    store = InputStore(Streams(torch.device("cpu")), [0])
    tensor = hidden(0, 3, 4)
    store.put(0, tensor)
    tensor.zero_()
    taken = store.take(0)
    store.put(0, hidden(1, 3, 4))
    assert torch.equal(taken, hidden(0, 3, 4))


def test_an_abandoned_step_leaves_no_inputs() -> None:
    store = InputStore(Streams(torch.device("cpu")), [0])
    store.put(0, hidden(0, 3, 4))
    store.abandon()
    store.prefetch(0)
    store.put(0, hidden(1, 3, 4))
    assert torch.equal(store.take(0), hidden(1, 3, 4))


def test_each_copy_waits_for_the_writer_of_its_source() -> None:
    """[Note: offloaded input lifetime], event by event."""
    streams = TracedStreams()
    store = InputStore(streams, [0])
    store.put(0, hidden(0, 3, 4))
    log = streams.taken()
    written, out = log[0].removeprefix("compute records "), log[2].removeprefix("d2h records ")
    assert log == [f"compute records {written}", f"d2h waits for {written}", f"d2h records {out}"]
    store.prefetch(0)
    log = streams.taken()
    allocated, back = log[0].removeprefix("compute records "), log[2].removeprefix("h2d records ")
    assert log == [f"compute records {allocated}", f"h2d waits for {allocated}", f"h2d records {back}"]
    assert len({written, out, allocated, back}) == 4
    store.prefetch(0)
    assert streams.taken() == [], "already queued"
    store.take(0)
    assert streams.taken() == [f"compute waits for {back}"]


def test_the_memory_of_an_input_is_free_behind_its_copy_when_two_more_follow() -> None:
    """However far the host runs ahead: at most two inputs are held for the link."""
    streams = TracedStreams()
    store = InputStore(streams, range(4))
    freed: list[int] = []
    for layer in range(4):
        memory = hidden(layer, 2, 8).numpy().copy()
        weakref.finalize(
            memory, lambda layer=layer: (freed.append(layer), streams.log.append(f"input {layer} is free"))
        )
        store.put(layer, torch.from_numpy(memory))
        del memory
        assert freed == list(range(max(0, layer - 1))), "of the last two, the copies may be running"
    waits = [line for line in streams.taken() if line.startswith("compute waits") or "is free" in line]
    assert len(waits) == 4, waits
    for wait, free in zip(waits[::2], waits[1::2], strict=True):
        assert wait.startswith("compute waits for"), waits
        assert free.endswith("is free"), waits
    store.end_forward()
    assert freed == [0, 1, 2, 3]
    for layer in reversed(range(4)):
        assert torch.equal(store.take(layer), hidden(layer, 2, 8))
