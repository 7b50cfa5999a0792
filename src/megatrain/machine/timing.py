"""Seconds of a call: wall time, or time of the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from megatrain.device.attention import elapsed_ms


def seconds_of(run: Callable[[], object], repeat: int = 3) -> float:
    """Median wall time of a call, after one warm-up call."""

    def timed() -> float:
        started = time.perf_counter()
        run()
        return time.perf_counter() - started

    run()
    return statistics.median(timed() for _ in range(repeat))


def device_seconds(run: Callable[[], object], device: torch.device, repeat: int = 5) -> float:
    """Median seconds that a call takes on the device's current stream, after two warm-up calls. Wall time on a CPU."""
    if device.type != "cuda":
        return seconds_of(run, repeat)
    run()
    run()
    return statistics.median(elapsed_ms(run) for _ in range(repeat)) / 1e3


def sustained_seconds(run: Callable[[], object], device: torch.device, times: int) -> float:
    """Mean seconds of a call made `times` times back to back, after two warm-up calls.

    This sees the clock rate that the device can sustain; `device_seconds` sees that of a short burst.
    """

    def all_of_them() -> None:
        for _ in range(times):
            run()

    run()
    run()
    return (elapsed_ms(all_of_them) / 1e3 if device.type == "cuda" else seconds_of(all_of_them, 1)) / times
