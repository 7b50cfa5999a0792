"""Spans of copies and waits, from the clock on a CPU."""

from __future__ import annotations

import time

import torch

from megatrain.device.streams import Streams

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
