"""The three streams of a device, and the events between them. On a CPU the same calls do nothing.

[Note: streams and events]
compute  The device's current stream. HF's code, autograd and the squared norms run here, in program order.
h2d      Weight copies, host to device. Copies into a slot wait for the slot's `free` event (the last kernel that read it);
         compute waits for the slot's `ready` event (the copy).
d2h      Gradient copies, device to host. A copy waits for the `written` event of its staging buffer (the backward that filled
         it); compute waits for the staging buffer's `free` event (the copy) before it writes there again. A host thread that
         consumes the gradient waits for `arrived` (the same copy, waited for by the CPU).

Nothing else synchronises; what is recorded for the instruments is read when it has happened anyway (device/recorder.py).
The host thread blocks in three places only: for a unit's AdamW (before its weights are copied), for a free gradient slab, and
once at the end of a step for the loss and the norm.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch

from megatrain.device.recorder import Mark, SpanRecorder
from megatrain.metrics.spans import Wait


class Event(Protocol):
    """What is used of a torch.cuda.Event."""

    def record(self, stream: Any = ...) -> None: ...
    def synchronize(self) -> None: ...


class _NoEvent:
    """A CPU's event: everything before it in program order has already happened."""

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class Timestamp:
    """A moment in the compute stream: a timed event on a GPU, the clock on a CPU."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._event = torch.cuda.Event(enable_timing=True) if stream is not None else None
        self._clock = time.perf_counter()
        if self._event is not None:
            self._event.record(stream)

    def seconds_until(self, later: Timestamp) -> float:
        """Both moments must have passed on the device."""
        if self._event is not None and later._event is not None:
            return self._event.elapsed_time(later._event) / 1e3
        return later._clock - self._clock


_UNTRACED = contextlib.nullcontext()


class Streams:
    """Owner of the compute, h2d and d2h streams of one device. See [Note: streams and events].

    Args:
        device: `cpu` or a CUDA device.
        disturb: Called with the name of a stream after work was put on it. A test's way to delay streams at random.
    """

    def __init__(self, device: torch.device, disturb: Callable[[str, Streams], None] | None = None):
        self.device = device
        self.cuda = device.type == "cuda"
        self._disturb = disturb
        self.compute: torch.cuda.Stream | None = None
        self.h2d: torch.cuda.Stream | None = None
        self.d2h: torch.cuda.Stream | None = None
        if self.cuda:
            self.compute = torch.cuda.current_stream(device)
            self.h2d = torch.cuda.Stream(device)
            self.d2h = torch.cuda.Stream(device)
        self.spans = SpanRecorder(device, self.compute)
        """When copies and waits took place; off until somebody asks."""

    def event(self) -> Event:
        """A new event; `record` it on one of this object's streams. Waiting for it on the host does not burn a core."""
        return torch.cuda.Event(blocking=True) if self.cuda else _NoEvent()

    def timestamp(self) -> Timestamp:
        """The present end of the compute stream, for measuring."""
        return Timestamp(self.compute)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A small CPU tensor on the device, for kernels launched on compute from now on. Asynchronous.

        From pageable memory the copy would block the host until compute is idle. The pinned copy lives until the device has
        read it: torch's allocator of pinned memory waits for that.
        """
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.cuda else tensor.to(self.device)

    @contextlib.contextmanager
    def copying_in(self, after: Event, done: Event, what: str = "", nbytes: int = 0) -> Iterator[None]:
        """Work inside goes to h2d: it starts after `after`; `done` marks its end. Asynchronous. `what` is for the record."""
        with self._on("h2d", after, done):
            start = self.spans.mark(self.h2d)
            yield
            self._copied("h2d", what, start, nbytes)

    @contextlib.contextmanager
    def copying_out(self, after: Event, done: Event, what: str = "", nbytes: int = 0) -> Iterator[None]:
        """Work inside goes to d2h: it starts after `after`; `done` marks its end. Asynchronous. `what` is for the record."""
        with self._on("d2h", after, done):
            start = self.spans.mark(self.d2h)
            yield
            self._copied("d2h", what, start, nbytes)

    def compute_waits(self, event: Event, why: Wait) -> None:
        """Kernels launched on compute from now on start after `event`. Asynchronous."""
        start = self.spans.mark(self.compute)
        if self.compute is not None:
            self.compute.wait_event(event)  # type: ignore[arg-type]
        self.spans.end("wait", why, start, self.compute)

    @contextlib.contextmanager
    def host_waits(self, why: Wait) -> Iterator[None]:
        """The host blocks inside and launches nothing: what is recorded is how long the device has nothing to do for it."""
        start = self.spans.mark(self.compute)
        yield
        self.spans.end("wait", why, start, self.compute)

    def traced(self, what: str, layer: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Work inside goes to compute, and a trace shows it by name. While none is taken, it costs nothing."""
        if not self.spans.tracing:
            return _UNTRACED
        return self._traced(what if layer is None else f"{what} layer {layer}")

    def mark_compute(self, event: Event) -> None:
        """Record `event` behind everything launched on compute so far."""
        event.record(self.compute)
        self.disturbed("compute")

    def disturbed(self, name: str) -> None:
        if self._disturb is not None:
            self._disturb(name, self)

    def synchronize(self) -> None:
        """Block the host until all three streams are idle."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def _on(self, name: str, after: Event, done: Event) -> Iterator[None]:
        stream = getattr(self, name)
        if stream is None:
            yield
            return
        stream.wait_event(after)
        self.disturbed(name)
        with torch.cuda.stream(stream):
            yield
        done.record(stream)

    def _copied(self, name: Literal["h2d", "d2h"], what: str, start: Mark, nbytes: int) -> None:
        self.spans.end(name, what, start, getattr(self, name), nbytes)
        if not self.cuda:  # a CPU copies in the thread that computes, which so waits for it
            self.spans.end("wait", "weights" if name == "h2d" else "gradients", start, None)

    @contextlib.contextmanager
    def _traced(self, name: str) -> Iterator[None]:
        start = self.spans.mark(self.compute)
        yield
        self.spans.end("compute", name, start, self.compute)
