"""Device instruments: `SpanRecorder` times work on the streams, `GpuMeter` reads the driver's figures.

[Note: device times]
A mark is a timed event on a stream (on a CPU, the clock). Two marks make a span and cost two event records. Spans are read at the
end of the step, which the host waits for anyway. Spans that have not ended by then (gradients still being copied) stay for the
next reading. CUDA only measures the time between two events, so at the end of every step, when compute is idle, one event is
recorded together with a reading of the clock: the anchor. A mark's time is the anchor's clock plus its distance from the anchor,
accurate to some microseconds, so device and threads share one clock.
"""

from __future__ import annotations

import collections
import importlib
import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatrain.metrics.spans import Row, Span

logger = logging.getLogger(__name__)

Mark = Any
"""A recorded torch.cuda.Event, or seconds on a CPU; None if nothing is recorded."""
POLL_INTERVAL_S = 1.0
"""A call to the driver takes a good part of a millisecond, and its figures are averages over about a second."""


class SpanRecorder:
    """Collects the spans of one device; see [Note: device times]. Thread-safe. `compute` is None on a CPU."""

    def __init__(self, device: torch.device, compute: torch.cuda.Stream | None):
        self.on = False
        self.tracing = False  # also records the work of each layer
        self.paused = False  # device work belongs to no step and is ignored
        self._device, self._compute = device, compute
        self._free: collections.deque[torch.cuda.Event] = collections.deque()
        self._open: collections.deque[tuple[Any, Row, str, Mark, Mark, int]] = collections.deque()
        self._ended: collections.deque[Span] = collections.deque()
        self._anchor: tuple[Mark, float] = (None, 0.0)

    def mark(self, stream: torch.cuda.Stream | None) -> Mark:
        """Mark the current end of a stream. Asynchronous."""
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
        """Record everything queued on `stream` since `start` as one span. Asynchronous."""
        if start is not None:
            self._open.append((self._anchor, row, name, start, self.mark(stream), size))

    def add(self, span: Span) -> None:
        """Add a span of work by a host thread."""
        if self.on:
            self._ended.append(span)

    def anchor(self, idle: bool = True) -> None:
        """Tie device times to the clock. Compute must be idle; with `idle=False` this waits for the device."""
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
        """Return the spans that have ended since the last call. Steps and waits must have ended: the host waited for compute."""
        found = [self._ended.popleft() for _ in range(len(self._ended))]
        for _ in range(len(self._open)):
            item = self._open.popleft()
            (event, clock_s), row, name, start, end, size = item
            if self._compute is None:
                found.append(Span(row, name, start, end, size))
            elif row not in ("step", "wait") and not end.query():
                self._open.append(item)
            else:
                end.synchronize()  # recorded just after the event that the step waited for
                start_s = clock_s + event.elapsed_time(start) / 1e3
                found.append(Span(row, name, start_s, start_s + start.elapsed_time(end) / 1e3, size))
                self._free += (start, end)
        return found

    def drop(self) -> None:
        """Discard the spans of a failed step. The device must be idle."""
        self._open.clear()


@dataclass(frozen=True)
class GpuFigures:
    """Figures of a GPU; None if unknown."""

    utilisation: float | None = None  # fraction of the last second in which a kernel was running
    used_bytes: int | None = None  # by all processes
    reserved_bytes: int | None = None  # by this process's allocator


class GpuMeter:
    """Reads driver (NVML, package nvidia-ml-py) and allocator, at most once a second.

    Without NVML, or after an error of it, the driver's figures are None. A CPU has no figures.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._handle: Any = None
        self._nvml: Any = None
        self._next_s = 0.0
        self._figures = GpuFigures()
        if device.type == "cuda":
            self._open()

    def read(self) -> GpuFigures:
        """The figures, at most one second old."""
        now = time.monotonic()
        if self._device.type == "cuda" and now >= self._next_s:
            self._next_s = now + POLL_INTERVAL_S
            figures = GpuFigures(reserved_bytes=torch.cuda.memory_reserved(self._device))
            try:
                if self._handle is not None:
                    used = int(self._nvml.nvmlDeviceGetMemoryInfo(self._handle).used)
                    utilisation = self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0
                    figures = replace(figures, utilisation=utilisation, used_bytes=used)
            except self._nvml.NVMLError as error:
                self._disable(error)
            self._figures = figures
        return self._figures

    def _open(self) -> None:
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            logger.debug("nvidia-ml-py is not installed: no GPU utilisation in the metrics")
            return
        try:
            self._nvml.nvmlInit()
            # By UUID, because CUDA may number devices differently than the driver (CUDA_VISIBLE_DEVICES).
            uuid = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        logger.debug("NVML error (%s): no GPU utilisation in the metrics", error)
        self._handle = None
