"""CPU streams that log queued work and waits in order.

A CPU runs everything at once, so results do not depend on the order of events; the log shows it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from megatrain.device.streams import Direction, Event, Streams


class TracedEvent:
    """An event that logs who records it and who waits for it."""

    def __init__(self, name: str, log: list[str]):
        self.name, self._log = name, log

    def record(self, stream: Any = None) -> None:
        self._log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self._log.append(f"host waits for {self.name}")

    def __str__(self) -> str:
        return self.name


class TracedStreams(Streams):
    """CPU streams with a log of events."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.log: list[str] = []
        self._made = 0

    def event(self) -> Event:
        self._made += 1
        return TracedEvent(f"event {self._made}", self.log)

    def name(self, **events: Any) -> None:
        for name, event in events.items():
            event.name = name

    def taken(self) -> list[str]:
        """The log since the last call."""
        log, self.log[:] = list(self.log), []
        return log

    def compute_waits(self, event: Event, why: str) -> None:
        self.log.append(f"compute waits for {event}")

    def mark_compute(self, event: Event) -> None:
        self.log.append(f"compute records {event}")

    @contextlib.contextmanager
    def copying(
        self, direction: Direction, after: Event, done: Event, what: str = "", nbytes: int = 0
    ) -> Iterator[None]:
        self.log.append(f"{direction} waits for {after}")
        with super().copying(direction, after, done, what, nbytes):
            yield
        self.log.append(f"{direction} records {done}")
