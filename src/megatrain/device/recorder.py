"""`SpanRecorder`: when work on the device's streams ran, without waiting for any of it.

[Note: device times]
A mark is a timed event on a stream (on a CPU, the clock). Two marks are a span, and cost two event records; they are read when
the step is over and its end was waited for anyway. Spans whose end has not been reached then (gradients on their way home) stay
for the next reading. An event knows only its distance to other events, so at the end of every step, when compute is idle, one
event is recorded beside a look at the clock: the anchor. The time of a mark is the anchor's clock plus its distance from the
anchor, to some microseconds, and one clock serves device and threads.
"""

from __future__ import annotations

import collections
import time
from typing import Any

import torch

from megatrain.metrics.spans import Row, Span

Mark = Any
"""A recorded torch.cuda.Event, or seconds on a CPU; None where nothing is recorded."""


class SpanRecorder:
    """Collects spans of one device; see [Note: device times]. Any thread may add to it.

    Args:
        device: What computes.
        compute: Its compute stream, None on a CPU.

    Attributes:
        on: Whether anything is recorded.
        tracing: Whether visits of layers are, too.
        paused: Whether the device's work is left out for a while: it belongs to no step.
    """

    def __init__(self, device: torch.device, compute: torch.cuda.Stream | None):
        self.on, self.tracing, self.paused = False, False, False
        self._device, self._compute = device, compute
        self._free: collections.deque[torch.cuda.Event] = collections.deque()
        self._open: collections.deque[tuple[Any, Row, str, Mark, Mark, int]] = collections.deque()
        self._ended: collections.deque[Span] = collections.deque()
        self._anchor: tuple[Mark, float] = (None, 0.0)

    def mark(self, stream: torch.cuda.Stream | None) -> Mark:
        """This moment in a stream."""
        if not self.on or self.paused:
            return None
        if stream is None:
            return time.perf_counter()
        try:
            event = self._free.pop()
        except IndexError:
            event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def end(self, row: Row, name: str, start: Mark, stream: torch.cuda.Stream | None, size: int = 0) -> None:
        """The work since `start` has been put on `stream`. Asynchronous."""
        if start is not None:
            self._open.append((self._anchor, row, name, start, self.mark(stream), size))

    def add(self, span: Span) -> None:
        """Something that a thread of the host has done."""
        if self.on:
            self._ended.append(span)

    def anchor(self, idle: bool = True) -> None:
        """Tie the device's times to the clock. Compute must be idle; it is waited for if `idle` is False."""
        if self.on and self._compute is not None:
            if not idle:
                torch.cuda.synchronize(self._device)
            event = torch.cuda.Event(enable_timing=True)
            event.record(self._compute)
            self._anchor = (event, time.perf_counter())

    @property
    def anchored(self) -> bool:
        return self._compute is None or self._anchor[0] is not None

    def take(self) -> list[Span]:
        """Spans that have ended since the last call. Steps and waits must have: compute was waited for behind them."""
        found = [self._ended.popleft() for _ in range(len(self._ended))]
        for _ in range(len(self._open)):
            item = self._open.popleft()
            anchor, row, name, start, end, size = item
            if self._compute is None:
                found.append(Span(row, name, start, end, size))
            elif row not in ("step", "wait") and not end.query():
                self._open.append(item)
            else:
                end.synchronize()  # recorded behind the step's own wait, a moment ago
                event, clock_s = anchor
                start_s = clock_s + event.elapsed_time(start) / 1e3
                found.append(Span(row, name, start_s, start_s + start.elapsed_time(end) / 1e3, size))
                self._free += (start, end)
        return found

    def drop(self) -> None:
        """After an error in the middle of a step: its spans mean nothing. The device must be idle."""
        self._open.clear()
