"""On a CPU the streams do nothing, in the right order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatrain.device.streams import Streams, Timestamp

CPU = torch.device("cpu")


def test_a_cpu_has_no_streams_and_its_events_do_nothing() -> None:
    streams = Streams(CPU)
    assert not streams.cuda
    assert (streams.compute, streams.h2d, streams.d2h) == (None, None, None)
    event = streams.event()
    streams.compute_waits(event, "weights")
    streams.mark_compute(event)
    event.synchronize()
    streams.synchronize()


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_a_copy_on_a_cpu_runs_at_once_and_raises_its_error(direction: Any) -> None:
    streams, target = Streams(CPU), torch.zeros(3)
    with streams.copying(direction, after=streams.event(), done=streams.event()):
        target.copy_(torch.ones(3))
    assert target.tolist() == [1, 1, 1]
    with pytest.raises(ZeroDivisionError), streams.copying(direction, after=streams.event(), done=streams.event()):
        raise ZeroDivisionError


def test_timestamps_measure_the_time_between_them() -> None:
    streams = Streams(CPU)
    first, second, third = (Timestamp(streams.compute) for _ in range(3))
    assert first.seconds_until(second) >= 0
    assert first.seconds_until(third) == pytest.approx(first.seconds_until(second) + second.seconds_until(third))


def test_a_test_can_disturb_the_compute_stream() -> None:
    disturbed: list[str] = []
    streams = Streams(CPU, lambda name, _: disturbed.append(name))
    streams.mark_compute(streams.event())
    assert disturbed == ["compute"]
