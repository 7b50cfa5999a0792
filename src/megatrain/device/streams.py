"""The three streams of a device, and the events between them. On a CPU the same calls do nothing.

[Note: streams and events]
compute  The device's current stream. HF's code, autograd and the squared norms run here, in program order.
h2d      Weight copies, host to device. A copy into a slot waits for the slot's `free` event (the last kernel that read it);
         compute waits for the slot's `ready` event (the copy).
d2h      Gradient copies, device to host. A copy waits for the `written` event of its staging buffer (the backward that filled
         it); compute waits for the staging buffer's `free` event (the copy) before it writes there again. A host thread that
         reads the gradient waits for `arrived` (the same copy).
Where several ranks share the state, h2d also gathers weights and d2h sums gradients: [Note: collectives of a step] in shards.py.

Nothing else synchronises: timing events are read only after the host has waited for the step anyway (device/meter.py). The host
thread blocks in three places only: for a unit's optimizer update (before its weights are copied), for a free gradient slab, and
once at the end of a step for the loss and the norm.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol

import torch

from megatrain.device.meter import SpanRecorder
from megatrain.metrics.spans import Row, Wait


class Event(Protocol):
    """The part of torch.cuda.Event that is used."""

    def record(self, stream: Any = ...) -> None: ...
    def synchronize(self) -> None: ...


class _NoEvent:
    """An event on a CPU: everything before it in program order has already happened."""

    def record(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None: ...


class Timestamp:
    """The current end of the compute stream, for measuring: a timed event on a GPU, the clock on a CPU."""

    def __init__(self, stream: torch.cuda.Stream | None):
        self._event, self._clock_s = None, time.perf_counter()
        if stream is not None:
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(stream)

    def seconds_until(self, later: Timestamp) -> float:
        """Elapsed seconds. The device must have passed both points."""
        if self._event is not None and later._event is not None:
            return self._event.elapsed_time(later._event) / 1e3
        return later._clock_s - self._clock_s


Direction = Literal["h2d", "d2h"]
_NOTHING = contextlib.nullcontext()


class Streams:
    """Owns the compute, h2d and d2h streams of one device. See [Note: streams and events].

    Args:
        disturb: Called with the name of a stream after work was queued on it; tests use it to delay streams at random.
        collectives: The copy streams also run kernels, which must not queue behind those of compute: they get priority.

    Attributes:
        spans: Times of copies and waits; off by default.
    """

    def __init__(
        self, device: torch.device, disturb: Callable[[str, Streams], None] | None = None, collectives: bool = False
    ):
        self.device = device
        self.cuda = device.type == "cuda"
        self._disturb = disturb or (lambda name, streams: None)
        self.compute = torch.cuda.current_stream(device) if self.cuda else None
        priority = -1 if collectives else 0
        self.h2d, self.d2h = (torch.cuda.Stream(device, priority) if self.cuda else None for _ in range(2))
        self.spans = SpanRecorder(device, self.compute)

    def event(self) -> Event:
        """A new event to `record` on one of these streams. A host thread that waits for it sleeps instead of polling."""
        return torch.cuda.Event(blocking=True) if self.cuda else _NoEvent()

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a small CPU tensor to the device, for kernels launched on compute from now on. Asynchronous.

        From pageable memory, the copy would block the host until compute is idle. torch's pinned-memory allocator keeps the
        pinned copy alive until the device has read it.
        """
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.cuda else tensor.to(self.device)

    @contextlib.contextmanager
    def copying(
        self, direction: Direction, after: Event, done: Event, what: str = "", nbytes: int = 0
    ) -> Iterator[None]:
        """Queue the work inside on the stream `direction`: it starts after `after`, and `done` marks its end. Asynchronous.

        `what` and `nbytes` name the copy in the recorded spans.
        """
        stream: torch.cuda.Stream | None = getattr(self, direction)
        if stream is not None:
            stream.wait_event(after)  # type: ignore[arg-type]
            self._disturb(direction, self)
        with torch.cuda.stream(stream) if stream is not None else _NOTHING:
            start = self.spans.mark(stream)
            yield
            self.spans.end(direction, what, start, stream, nbytes)
        if stream is not None:
            done.record(stream)
        else:  # on a CPU the computing thread does the copy, so it waits for it
            self.spans.end("wait", "weights" if direction == "h2d" else "gradients", start, None)

    def h2d_waits(self, event: Event) -> None:
        """Make copies queued on h2d from now on start after `event`. Asynchronous."""
        if self.h2d is not None:
            self.h2d.wait_event(event)  # type: ignore[arg-type]

    def compute_waits(self, event: Event, why: Wait) -> None:
        """Make kernels launched on compute from now on start after `event`. Asynchronous."""
        start = self.spans.mark(self.compute)
        if self.compute is not None:
            self.compute.wait_event(event)  # type: ignore[arg-type]
        self.spans.end("wait", why, start, self.compute)

    def host_waits(self, why: Wait) -> contextlib.AbstractContextManager[None]:
        """Record how long the device is idle because the host blocks inside and launches nothing."""
        return self._span("wait", why)

    def traced(self, what: str, layer: int | None = None) -> contextlib.AbstractContextManager[None]:
        """Show the work queued on compute inside by name in a trace. Free while no trace is taken."""
        if not self.spans.tracing:
            return _NOTHING
        return self._span("compute", what if layer is None else f"{what} layer {layer}")

    @contextlib.contextmanager
    def _span(self, row: Row, name: str) -> Iterator[None]:
        start = self.spans.mark(self.compute)
        yield
        self.spans.end(row, name, start, self.compute)

    def mark_compute(self, event: Event) -> None:
        """Record `event` after everything launched on compute so far."""
        event.record(self.compute)
        self._disturb("compute", self)

    def synchronize(self) -> None:
        """Block the host until all three streams are idle."""
        if self.cuda:
            torch.cuda.synchronize(self.device)
