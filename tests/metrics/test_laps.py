"""Laps add up to the time that has passed."""

from __future__ import annotations

import time

import pytest

from megatrain.metrics.laps import Laps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_laps_of_one_name_add_up_and_the_text_has_those_that_count(clock: list[float]) -> None:
    laps = Laps()
    for name, seconds in (("memory", 2.0), ("weights", 3.5), ("memory", 0.25), ("nothing", 0.01)):
        clock[0] += seconds
        laps.end(name)
    assert laps.seconds == pytest.approx({"memory": 2.25, "weights": 3.5, "nothing": 0.01})
    assert str(laps) == "5.8 s: memory 2.2, weights 3.5"


def test_the_known_parts_of_a_lap_are_not_counted_twice(clock: list[float]) -> None:
    laps = Laps()
    clock[0] += 10.0
    laps.split({"memory": 4.0, "compilation": 5.0}, rest="other")
    assert laps.seconds == pytest.approx({"memory": 4.0, "compilation": 5.0, "other": 1.0})
    assert sum(laps.seconds.values()) == pytest.approx(10.0)


def test_a_process_began_before_its_laps() -> None:
    assert Laps.of_process().seconds["process"] > 0
