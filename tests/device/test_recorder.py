"""Spans of copies and waits, from the clock on a CPU."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from megatrain.device import recorder as recorder_module
from megatrain.device.recorder import SpanRecorder
from megatrain.device.streams import Streams
from megatrain.metrics.spans import Row, Span

CPU = torch.device("cpu")


def recording() -> Streams:
    streams = Streams(CPU)
    streams.spans.on = True
    return streams


def test_a_copy_on_a_cpu_is_waited_for() -> None:
    streams = recording()
    before = time.perf_counter()
    with streams.copying_in(streams.event(), streams.event(), "layer.3", 64):
        time.sleep(0.01)
    copy, wait = streams.spans.take()
    assert (copy.row, copy.name, copy.size) == ("h2d", "layer.3", 64)
    assert (wait.row, wait.name, wait.start_s) == ("wait", "weights", copy.start_s)
    assert before <= copy.start_s <= copy.end_s - 0.01 <= time.perf_counter()
    assert streams.spans.take() == []


def test_waits_are_named() -> None:
    streams = recording()
    streams.compute_waits(streams.event(), "gradients")
    with streams.host_waits("optimizer"):
        time.sleep(0.01)
    gradients, optimizer = streams.spans.take()
    assert (gradients.name, optimizer.name) == ("gradients", "optimizer")
    assert optimizer.seconds >= 0.01 > gradients.seconds


def test_visits_are_recorded_only_while_a_trace_is_taken() -> None:
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


def test_off_means_nothing() -> None:
    streams = Streams(CPU)
    streams.compute_waits(streams.event(), "weights")
    with streams.copying_out(streams.event(), streams.event(), "layer.0", 8):
        pass
    assert streams.spans.take() == []


def test_what_an_abandoned_step_has_recorded_is_dropped() -> None:
    streams = recording()
    streams.compute_waits(streams.event(), "weights")
    streams.spans.drop()
    assert streams.spans.take() == []


# ------------------------------------------------------------------ a device that does not exist


class Clock:
    """The time of a device, in milliseconds since it was switched on."""

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
    """A recorder of that device, anchored when the clock showed 100 s and the device 5,000 ms."""
    monkeypatch.setattr(torch.cuda, "Event", TimedEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(recorder_module.time, "perf_counter", lambda: 95.0 + Clock.now_ms / 1e3)
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


def test_device_times_are_told_on_the_clock_of_the_host(device: SpanRecorder) -> None:
    span_on(device, "wait", 6000.0, 6500.0)
    (span,) = device.take()
    assert (span.start_s, span.end_s) == pytest.approx((101.0, 101.5))


def test_a_copy_that_is_under_way_stays_for_the_next_reading_and_keeps_its_anchor(device: SpanRecorder) -> None:
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


def test_events_are_used_again(device: SpanRecorder) -> None:
    for step in range(5):
        span_on(device, "wait", 6000.0 + step, 6000.5 + step)
        assert len(device.take()) == 1
    assert TimedEvent.made == 3, "the anchor and one pair"


def test_a_pause_records_nothing_of_the_device(device: SpanRecorder) -> None:
    device.paused = True
    span_on(device, "h2d", 6000.0, 6500.0)
    device.add(Span("adamw", "layer.0", 1.0, 2.0))
    assert [span.row for span in device.take()] == ["adamw"]
