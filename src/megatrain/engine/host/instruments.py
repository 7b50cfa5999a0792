"""Instruments of an engine: when a step begins and ends, and its figures.

Spans are recorded where the work happens: copies and waits by `Streams`, passes over units by `CpuUpdater`. Here they become a
`PipelineRecord`; see [Note: which work a record is about] in metrics/record.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from megatrain.device.allocator import allocator_figures
from megatrain.device.compiler import compilations
from megatrain.device.meter import GpuMeter
from megatrain.device.streams import Streams
from megatrain.engine.host.buffers import DeviceBuffers
from megatrain.host_memory.layout import elements_per_value
from megatrain.host_memory.store import HostStore
from megatrain.metrics.record import PipelineRecord, pipeline_of
from megatrain.metrics.spans import Span


@dataclass(frozen=True)
class Debug:
    """Settings of an engine for tests and measurements.

    Attributes:
        instruments: Whether copies, waits and updates are timed; see `StepResult.pipeline`.
        disturb: Called with a stream's name and the streams before work is queued, to delay it at random.
        poison: Fill buffers with NaN after their use.
    """

    instruments: bool = True
    disturb: Callable[[str, Streams], None] | None = None
    poison: bool = False


class Instruments:
    """Reads the recorder once a step. Nothing here waits for the device.

    Args:
        streams: Where spans are recorded.
        store: Tells the bytes that an update moves.
        on: Whether anything is recorded; otherwise `record` returns None.
    """

    def __init__(self, streams: Streams, store: HostStore, on: bool):
        self._streams, self._spans, self._store = streams, streams.spans, store
        self._spans.on = on
        self._meter = GpuMeter(streams.device)
        self._total = torch.cuda.get_device_properties(streams.device).total_memory if streams.cuda else None
        self._traced: list[Span] = []
        self._retries, self._compiled = allocator_figures(streams.device).retries, compilations()

    @property
    def on(self) -> bool:
        """Whether anything is recorded. May be changed between steps."""
        return self._spans.on

    @on.setter
    def on(self, on: bool) -> None:
        self._spans.on = on

    def begin_trace(self) -> None:
        """Record layer fetches, too, and keep all spans until `end_trace`."""
        self._spans.on = self._spans.tracing = True
        self._traced = []

    def end_trace(self) -> list[Span]:
        """All spans since `begin_trace`. The device must be idle."""
        self._spans.tracing = False
        spans, self._traced = [*self._traced, *self._spans.take()], []
        return spans

    @contextlib.contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record a step: its launches, and the wait for its loss and norm. The compute stream is idle at the end."""
        if not self._spans.anchored:
            self._spans.anchor(idle=False)
        start = self._spans.mark(self._streams.compute)
        yield
        self._spans.end("step", f"step {number}", start, self._streams.compute)
        self._spans.anchor()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count device work inside to any training step."""
        self._spans.paused = True
        try:
            yield
        finally:
            self._spans.paused = False

    def record(self, buffers: DeviceBuffers, policy: str, ladder: tuple[str, ...]) -> PipelineRecord | None:
        """The figures of the step that has just ended, and of background work that has ended since the last call.

        Args:
            buffers: The device side.
            policy: How the step was computed; `ExecutionPlan.summary`.
            ladder: What OOM recovery has changed; `OomRecovery.changes`.
        """
        if not self._spans.on:
            return None
        spans = self._spans.take()
        if self._spans.tracing:
            self._traced += spans
        gpu, slabs, allocator = self._meter.read(), buffers.slabs, allocator_figures(self._streams.device)
        new_retries, self._retries = allocator.retries - self._retries, allocator.retries
        compiled = compilations()
        newly_compiled, self._compiled = compiled - self._compiled, compiled
        return replace(
            pipeline_of(spans, adamw_bytes=self._adamw_bytes()),
            slabs=len(slabs.slabs) if slabs else 0,
            slabs_in_use=slabs.most_in_use if slabs else 0,
            slab_waits=slabs.waits if slabs else 0,
            gpu_utilisation=gpu.utilisation,
            device_used_bytes=gpu.used_bytes,
            device_reserved_bytes=gpu.reserved_bytes,
            device_total_bytes=self._total,
            host_pinned_bytes=buffers.pinned_bytes(),
            allocation_retries=new_retries,
            device_gap_bytes=allocator.gap_bytes,
            compilations=newly_compiled,
            policy=policy,
            ladder=ladder,
        )

    def _adamw_bytes(self) -> int:
        """Bytes of host memory that an update moves for one parameter: planes are read and written, the gradient is read."""
        gradient = self._store.dtypes.get("grad", torch.bfloat16).itemsize
        planes = [t.itemsize / elements_per_value(kind) for kind, t in self._store.dtypes.items() if kind != "grad"]
        return round(gradient + 2 * sum(planes))
