"""Gradient buffers: states, events, and how a pool waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from megatrain.device.slabs import BufferState, Slab, SlabPool, Staging
from megatrain.device.streams import Streams
from traced import TracedStreams

CPU = torch.device("cpu")
GRADIENT = torch.arange(4.0)


def staging_of(streams: Streams | None = None) -> Staging:
    return Staging(streams or Streams(CPU), 6, torch.float32)


def done() -> Future[None]:
    job: Future[None] = Future()
    job.set_result(None)
    return job


# ------------------------------------------------------------------ staging


def test_a_gradient_goes_through_staging_to_the_host() -> None:
    streams = Streams(CPU)
    staging, home = staging_of(streams), torch.full((4,), 7.0)
    staging.begin(4).copy_(GRADIENT)
    assert staging.state is BufferState.FILLING
    staging.send(home, streams.event())
    assert staging.state is BufferState.FREE
    assert torch.equal(home, GRADIENT)


def test_staging_refuses_a_second_writer_and_a_send_without_a_gradient() -> None:
    streams = Streams(CPU)
    staging = staging_of(streams)
    with pytest.raises(AssertionError, match="FREE"):
        staging.send(torch.zeros(4), streams.event())
    staging.begin(4)
    with pytest.raises(AssertionError, match="FILLING"):
        staging.begin(4)
    staging.abandon()
    staging.begin(4)


def test_the_copy_waits_for_the_backward_and_the_next_backward_waits_for_the_copy() -> None:
    """[Note: gradient staging lifetime], event by event."""
    streams = TracedStreams()
    staging, arrived = staging_of(streams), streams.event()
    streams.name(free=staging._free, written=staging._written, arrived=arrived)
    staging.begin(4)
    assert streams.taken() == ["compute waits for free"]
    staging.send(torch.zeros(4), arrived)
    assert streams.taken() == ["compute records written", "d2h waits for written", "d2h records arrived"]
    staging.begin(4)
    assert streams.taken() == ["compute waits for arrived"]


def test_poison_comes_after_the_copy() -> None:
    streams, home = Streams(CPU), torch.zeros(4)
    staging = staging_of(streams)
    staging.begin(4).copy_(GRADIENT)
    staging.send(home, streams.event(), poison=True)
    assert torch.equal(home, GRADIENT)
    assert staging.flat.isnan().all()


def test_staging_around_filled_memory_sends_it_once() -> None:
    streams, home = Streams(CPU), torch.zeros(4)
    staging = Staging.around(streams, GRADIENT)
    staging.send(home, streams.event())
    assert torch.equal(home, GRADIENT)
    with pytest.raises(AssertionError, match="FREE"):
        staging.send(home, streams.event())


# ------------------------------------------------------------------ slabs


def slab_in(state: BufferState) -> Slab:
    slab = Slab(Streams(CPU), 6, torch.float32)
    if state is not BufferState.FREE:
        slab.fill(4)
    if state is BufferState.DRAINING:
        slab.drain(done())
    assert slab.state is state
    return slab


SLAB_ACTIONS: dict[str, Callable[[Slab], object]] = {
    "fill": lambda slab: slab.fill(4),
    "drain": lambda slab: slab.drain(done()),
    "settle": Slab.settle,
}
SLAB_ALLOWED = {
    (BufferState.FREE, "fill"): BufferState.FILLING,
    (BufferState.FILLING, "drain"): BufferState.DRAINING,
    **{(state, "settle"): BufferState.FREE for state in BufferState},
}


@pytest.mark.parametrize("action", SLAB_ACTIONS)
@pytest.mark.parametrize("state", BufferState, ids=lambda s: s.name)
def test_a_slab_allows_valid_transitions_and_raises_on_others(state: BufferState, action: str) -> None:
    slab, after = slab_in(state), SLAB_ALLOWED.get((state, action))
    if after is None:
        with pytest.raises(AssertionError, match=state.name):
            SLAB_ACTIONS[action](slab)
    else:
        SLAB_ACTIONS[action](slab)
    assert slab.state is (after or state)


def test_settle_raises_the_error_of_the_job_and_frees_the_slab() -> None:
    slab = slab_in(BufferState.FILLING)
    job: Future[None] = Future()
    job.set_exception(OSError("no room"))
    slab.drain(job)
    with pytest.raises(OSError, match="no room"):
        slab.settle()
    assert slab.state is BufferState.FREE
    slab.settle()


def test_slab_bytes_are_whole_pages() -> None:
    slab = Slab(Streams(CPU), 6, torch.float32)
    assert slab.nbytes == 4096
    assert slab.pinned_bytes == 0, "a CPU needs no pinned memory"
    slab.close()


# ------------------------------------------------------------------ the pool


def test_slabs_are_reused_in_the_order_they_were_taken() -> None:
    pool = SlabPool(Streams(CPU), 3, 4, torch.bfloat16)
    taken = [pool.take() for _ in range(6)]
    assert taken[:3] == taken[3:]
    assert len(set(map(id, taken))) == 3
    assert sum(slab.nbytes for slab in pool.slabs) == 3 * 4096


def test_a_pool_without_a_free_slab_waits_for_the_oldest_job_only() -> None:
    """The second slab's job has not ended: waiting for it would hang."""
    pool = SlabPool(Streams(CPU), 2, 4, torch.float32)
    asked, oldest, newest = threading.Event(), Future[None](), Future[None]()
    for job in (oldest, newest):
        slab = pool.take()
        slab.fill(4)
        slab.drain(job)

    def take() -> Slab:
        asked.set()
        return pool.take()

    with ThreadPoolExecutor(1) as other:
        wanted = other.submit(take)
        assert asked.wait(10)
        assert not wanted.done()
        oldest.set_result(None)
        assert wanted.result(timeout=10).state is BufferState.FREE
    assert pool.wait_s > 0
    newest.set_result(None)
    pool.settle()
    assert all(slab.state is BufferState.FREE for slab in pool.slabs)


def test_a_pool_needs_at_least_one_slab() -> None:
    with pytest.raises(AssertionError):
        SlabPool(Streams(CPU), 0, 4, torch.float32)
