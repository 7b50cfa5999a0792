"""Spans: what ran where, from when to when. Plain data, and what can be computed of it.

All times are seconds of `time.perf_counter`, those of device work too (see [Note: device times] in device/recorder.py).
Rows:
    step         a whole step, from its first launch to the moment its loss and norm are known
    compute      a visit of a layer or of the head; recorded only while a trace is taken
    wait         the compute stream has nothing to do until something has come; the span's name says what it waits for
    h2d, d2h     a copy; `size` are its bytes
    adamw        the update of a unit by host threads; `size` are its parameters
    add, norm    other passes of the same threads over a unit
    data         a batch is being made
    checkpoint   a save is being written
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

Row = Literal["step", "compute", "wait", "h2d", "d2h", "adamw", "add", "norm", "data", "checkpoint"]
Wait = Literal["weights", "inputs", "gradients", "slabs", "optimizer", "data"]
"""What the device waits for: a layer's weights; an offloaded input; the copy of an earlier gradient out of the staging buffer;
a free gradient slab, or the sum in it; AdamW of a unit; the batch."""
Interval = tuple[float, float]


class Span(NamedTuple):
    """See the rows above. Times in seconds."""

    row: Row
    name: str
    start_s: float
    end_s: float
    size: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time covered by disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def gaps(inside: Interval, taken: Sequence[Interval]) -> list[Interval]:
    """What `taken` (disjoint, in order) leaves of `inside`."""
    left: list[Interval] = []
    at, end = inside
    for start, stop in taken:
        if start > at:
            left.append((at, min(start, end)))
        at = max(at, stop)
        if at >= end:
            return left
    return [*left, (at, end)]


def common(ones: Sequence[Interval], others: Sequence[Interval]) -> float:
    """Seconds that two lists of disjoint intervals, each in order, have in common."""
    seconds, i, j = 0.0, 0, 0
    while i < len(ones) and j < len(others):
        start, end = max(ones[i][0], others[j][0]), min(ones[i][1], others[j][1])
        seconds += max(0.0, end - start)
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return seconds
