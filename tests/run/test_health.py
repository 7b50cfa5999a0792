"""The host-memory watermark reports low memory once, and its thread ends with the block."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from megatrain.run import health
from megatrain.run.health import HostWatermark


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATERMARK_EVERY_S", 0.001)


def falling(values: list[int]) -> Callable[[], int]:
    """The values one after the other, then the last for ever."""
    return lambda: values.pop(0) if len(values) > 1 else values[0]


def test_memory_below_the_reserve_is_reported_once() -> None:
    told: list[int] = []
    seen = threading.Event()
    with HostWatermark(100, lambda left: (told.append(left), seen.set()), falling([500, 100, 99, 10])):
        assert seen.wait(10)
    assert told == [99]


def test_enough_memory_is_not_reported_and_the_thread_ends() -> None:
    looked = threading.Event()

    def available() -> int:
        looked.set()
        return 101

    with HostWatermark(100, lambda left: pytest.fail(f"{left}"), available):
        assert looked.wait(10)
    assert not any(thread.name == "host-watermark" for thread in threading.enumerate())


def test_no_reserve_means_no_thread() -> None:
    with HostWatermark(0, lambda left: None, lambda: -1):
        assert not any(thread.name == "host-watermark" for thread in threading.enumerate())
