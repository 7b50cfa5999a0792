"""Copies from planes to slots: straight from pinned memory, or packed into staging buffers by a thread."""

from __future__ import annotations

import threading

import pytest
import torch

from megatrain.device.ring import DirectCopier, Slot, StagedCopier
from megatrain.device.streams import Streams
from traced import TracedStreams


def source(seed: int, numel: int = 100) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_a_direct_copy_is_queued_between_its_events() -> None:
    streams, target = TracedStreams(), torch.zeros(100)
    after, done = streams.event(), streams.event()
    streams.name(after=after, done=done)
    assert DirectCopier(streams).copy(target, source(0), after, done) is None
    assert streams.taken() == ["h2d waits for after", "h2d records done"]
    assert torch.equal(target, source(0))


def test_staged_copies_of_any_number_and_size_arrive() -> None:
    streams = Streams(torch.device("cpu"))
    copier = StagedCopier(streams, 400)
    targets = [torch.zeros(20 * (i % 5) + 20) for i in range(12)]
    jobs = [
        copier.copy(t, source(i, t.numel()), after=streams.event(), done=streams.event()) for i, t in enumerate(targets)
    ]
    for job in jobs:
        job.result(timeout=10)
    for i, target in enumerate(targets):
        assert torch.equal(target, source(i, target.numel())), i
    copier.close()


def test_a_staging_buffer_is_packed_again_only_after_its_own_copy() -> None:
    streams = TracedStreams()
    copier = StagedCopier(streams, 400)
    streams.name(sent_0=copier._sent[0], sent_1=copier._sent[1])
    for i in range(3):
        after, done = streams.event(), streams.event()
        streams.name(after=after, done=done)
        copier.copy(torch.zeros(100), source(i), after, done).result(timeout=10)
        sent = f"sent_{i % 2}"
        assert streams.taken() == [
            f"host waits for {sent}",
            "h2d waits for after",
            "h2d records done",
            f"record {sent}",
        ]
    copier.close()


class HeldEvent:
    """An event that happens when the test releases it."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        assert self.released.wait(10)


def test_a_load_through_a_busy_staging_buffer_does_not_block_the_caller() -> None:
    """The packing thread waits for the buffer; the host thread waits only when it acquires the weights."""
    streams = Streams(torch.device("cpu"))
    copier, busy = StagedCopier(streams, 400), HeldEvent()
    copier._sent[0] = busy
    slot = Slot(streams, copier, 100, torch.float32, torch.float32)
    slot.load("layer.0", source(0))
    assert not slot.buffer(100).any(), "the load has returned before its copy"
    busy.released.set()
    assert torch.equal(slot.acquire(100), source(0))
    copier.close()


def test_acquire_raises_the_error_of_a_unit_larger_than_the_staging_buffer() -> None:
    streams = Streams(torch.device("cpu"))
    copier = StagedCopier(streams, 100)
    slot = Slot(streams, copier, 2000, torch.float32, torch.float32)
    slot.load("layer.0", source(0, 2000))
    with pytest.raises(AssertionError):
        slot.acquire(2000)
    copier.close()


def test_pinned_bytes_are_two_buffers_or_none_without_a_gpu() -> None:
    copier = StagedCopier(Streams(torch.device("cpu")), 400)
    assert copier.pinned_bytes in (0, 2 * 4096)
    copier.close()
