"""`Laps`: where the time of a long beginning goes."""

from __future__ import annotations

import time

import psutil


class Laps:
    """Seconds by name, each lap from the end of the one before. Laps of the same name add up.

    Attributes:
        seconds: The laps so far.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._end_s = time.perf_counter()

    @classmethod
    def of_process(cls) -> Laps:
        """Laps whose first, `process` (its imports, mostly), began with this process."""
        laps = cls()
        laps.seconds["process"] = max(0.0, time.time() - psutil.Process().create_time())
        return laps

    def end(self, name: str) -> None:
        """End a lap, and begin the next one."""
        now_s = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._end_s
        self._end_s = now_s

    def split(self, parts: dict[str, float], rest: str) -> None:
        """End a lap of which some parts are known; the remainder counts as `rest`."""
        before = self.seconds.get(rest, 0.0)
        self.end(rest)
        for name, seconds in parts.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.seconds[rest] = max(before, self.seconds[rest] - sum(parts.values()))

    def __str__(self) -> str:
        """The laps that count, in order."""
        shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items() if seconds >= 0.05)
        return f"{sum(self.seconds.values()):.1f} s: {shown}"
