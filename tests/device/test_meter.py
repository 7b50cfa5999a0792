"""Spans of copies and waits, and the driver's figures, which are optional."""

from __future__ import annotations

import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.device import meter as meter_module
from megatrain.device.meter import GpuFigures, GpuMeter, SpanRecorder
from megatrain.device.streams import Streams
from megatrain.metrics.spans import Row, Span

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


def recording() -> Streams:
    streams = Streams(CPU)
    streams.spans.on = True
    return streams


def test_a_copy_on_a_cpu_is_a_wait_too() -> None:
    streams = recording()
    before = time.perf_counter()
    with streams.copying("h2d", streams.event(), streams.event(), "layer.3", 64):
        time.sleep(0.01)
    copy, wait = streams.spans.take()
    assert (copy.row, copy.name, copy.size) == ("h2d", "layer.3", 64)
    assert (wait.row, wait.name, wait.start_s) == ("wait", "weights", copy.start_s)
    assert before <= copy.start_s <= copy.end_s - 0.01 <= time.perf_counter()
    assert streams.spans.take() == []


def test_waits_have_names() -> None:
    streams = recording()
    streams.compute_waits(streams.event(), "gradients")
    with streams.host_waits("optimizer"):
        time.sleep(0.01)
    gradients, optimizer = streams.spans.take()
    assert (gradients.name, optimizer.name) == ("gradients", "optimizer")
    assert optimizer.seconds >= 0.01 > gradients.seconds


def test_layers_are_recorded_only_in_a_trace() -> None:
    streams = recording()
    with streams.traced("forward", 0):
        pass
    assert streams.spans.take() == []
    streams.spans.tracing = True
    with streams.traced("forward", 1), streams.traced("head"):
        pass
    assert [(span.row, span.name) for span in streams.spans.take()] == [
        ("compute", "head"),
        ("compute", "forward layer 1"),
    ]


def test_nothing_is_recorded_when_off() -> None:
    streams = Streams(CPU)
    streams.compute_waits(streams.event(), "weights")
    with streams.copying("d2h", streams.event(), streams.event(), "layer.0", 8):
        pass
    assert streams.spans.take() == []


def test_spans_of_a_failed_step_are_dropped() -> None:
    streams = recording()
    streams.compute_waits(streams.event(), "weights")
    streams.spans.drop()
    assert streams.spans.take() == []


# ------------------------------------------------------------------ a simulated device


class Clock:
    """The device's time in milliseconds since it was switched on."""

    now_ms = 0.0


class TimedEvent:
    """A torch.cuda.Event of a device whose work happens when the test says so."""

    made = 0

    def __init__(self, enable_timing: bool = False):
        assert enable_timing
        TimedEvent.made += 1
        self.at_ms: float | None = None
        self.reached = True

    def record(self, stream: object) -> None:
        self.at_ms, self.reached = Clock.now_ms, stream != "behind"

    def query(self) -> bool:
        return self.reached

    def synchronize(self) -> None:
        assert self.reached, "the host would wait for the device"

    def elapsed_time(self, other: TimedEvent) -> float:
        assert self.at_ms is not None
        assert other.at_ms is not None
        assert self.reached
        assert other.reached
        return other.at_ms - self.at_ms


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SpanRecorder:
    """A recorder on the simulated device, anchored at 100 s on the clock and 5,000 ms on the device."""
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(meter_module.time, "perf_counter", lambda: 95.0 + Clock.now_ms / 1e3)
    TimedEvent.made, Clock.now_ms = 0, 5000.0
    recorder = SpanRecorder(torch.device("cuda"), "compute")  # type: ignore[arg-type]
    recorder.on = True
    recorder.anchor(idle=False)
    return recorder


def span_on(recorder: SpanRecorder, row: Row, start_ms: float, end_ms: float, stream: Any = "compute") -> None:
    Clock.now_ms = start_ms
    start = recorder.mark(stream)
    Clock.now_ms = end_ms
    recorder.end(row, row, start, stream)


def test_device_times_are_converted_to_the_host_clock(device: SpanRecorder) -> None:
    span_on(device, "wait", 6000.0, 6500.0)
    (span,) = device.take()
    assert (span.start_s, span.end_s) == pytest.approx((101.0, 101.5))


def test_a_copy_in_flight_stays_for_the_next_reading_and_keeps_its_anchor(device: SpanRecorder) -> None:
    span_on(device, "wait", 6000.0, 6500.0)
    span_on(device, "d2h", 6500.0, 7000.0, "behind")
    Clock.now_ms = 9000.0
    device.anchor()
    assert [span.row for span in device.take()] == ["wait"]
    assert device.take() == []
    device._open[0][4].reached = True  # type: ignore[attr-defined]
    device._open[0][3].reached = True  # type: ignore[attr-defined]
    (copy,) = device.take()
    assert (copy.start_s, copy.end_s) == pytest.approx((101.5, 102.0))


def test_events_are_reused(device: SpanRecorder) -> None:
    for step in range(5):
        span_on(device, "wait", 6000.0 + step, 6000.5 + step)
        assert len(device.take()) == 1
    assert TimedEvent.made == 3, "the anchor and one pair"


def test_a_paused_recorder_ignores_device_work(device: SpanRecorder) -> None:
    device.paused = True
    span_on(device, "h2d", 6000.0, 6500.0)
    device.add(Span("adamw", "layer.0", 1.0, 2.0))
    assert [span.row for span in device.take()] == ["adamw"]


# ------------------------------------------------------------------ the driver's figures


class NvmlError(Exception):
    pass


class Nvml:
    """The part of pynvml that is used."""

    NVMLError = NvmlError

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.uuids: list[str] = []

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.broken:
            raise NvmlError(f"{name} is not supported")
        return value

    def nvmlInit(self) -> None:
        self._answer("init", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.uuids.append(uuid)
        return self._answer("handle", "handle")

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return self._answer("memory", SimpleNamespace(used=123))

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return self._answer("utilisation", SimpleNamespace(gpu=87))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """NVML of a simulated GPU, without the limit of one call a second."""
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1-2-3"))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 77)
    monkeypatch.setattr(meter_module, "POLL_INTERVAL_S", 0.0)
    return nvml


def test_figures_are_those_of_the_device_with_that_uuid(nvml: Nvml) -> None:
    assert GpuMeter(GPU).read() == GpuFigures(0.87, 123, 77)
    assert nvml.uuids == ["GPU-1-2-3"]


def test_the_driver_is_asked_at_most_once_a_second(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter_module, "POLL_INTERVAL_S", 60.0)
    meter = GpuMeter(GPU)
    first = meter.read()
    nvml.broken.add("memory")
    assert meter.read() == first


@pytest.mark.parametrize("broken", ["init", "handle", "memory", "utilisation"])
def test_a_driver_error_is_logged_once(broken: str, nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    nvml.broken.add(broken)
    with caplog.at_level(logging.DEBUG):
        meter = GpuMeter(GPU)
        assert [meter.read() for _ in range(3)] == [GpuFigures(None, None, 77)] * 3
    assert caplog.text.count("is not supported") == 1


def test_without_the_package_the_allocator_is_still_read(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert GpuMeter(GPU).read() == GpuFigures(None, None, 77)


def test_a_cpu_has_no_figures() -> None:
    assert GpuMeter(CPU).read() == GpuFigures()
