"""Spans (what ran where, from when to when), the intervals they cover, and traces that Chrome and Perfetto read.

All times are seconds on the clock of `time.perf_counter`, those of device work included ([Note: device times] in
device/meter.py). Rows:
    step         a whole step, from its first launch until its loss and norm are known
    compute      one layer or the head at work; recorded only while a trace is taken
    wait         the compute stream is idle; the span's name says what it waits for
    h2d, d2h     a copy; `size` is in bytes
    adamw        the update of a unit by host threads; `size` is its number of parameters
    add, norm    other passes of the same threads over a unit
    data         a batch is being built
    checkpoint   a checkpoint is being written

[Note: trace file]
JSON in the trace event format (https://ui.perfetto.dev, chrome://tracing): a complete event (`ph: X`) per span with `ts` and
`dur` in microseconds, and names of rows (`ph: M`). On the compute row a wait lies inside the layer that waits, and everything
lies inside its step. Each rank is a process of the trace (`pid`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megatrain.errors import UserError

Row = Literal["step", "compute", "wait", "h2d", "d2h", "adamw", "add", "norm", "data", "checkpoint"]
Wait = Literal["weights", "inputs", "gradients", "slabs", "optimizer", "data"]
"""What the device waits for: a layer's weights; an offloaded input; the copy of an earlier gradient out of the staging buffer;
a free gradient slab, or the sum in it; AdamW of a unit; the batch."""
Interval = tuple[float, float]
"""(start, end) in seconds."""

TRACE_ROWS = {
    "compute": ("step", "compute", "wait"), "H2D": ("h2d",), "D2H": ("d2h",),
    "AdamW": ("adamw", "add", "norm"), "data": ("data",), "checkpoint": ("checkpoint",),
}  # fmt: skip
"""Rows of a trace from top to bottom -> rows of the spans in each."""
ERROR_S = 20e-6
"""Measurement error of a device time, in steps of a minute or less."""
_COLOURS = {
    "step": "#e8e8e8", "forward": "#4c9f70", "backward": "#3b6fb5", "recompute": "#8ab6d6", "head": "#8e6bbf", "wait": "#d9534f",
    "H2D": "#e0a030", "D2H": "#b8860b", "AdamW": "#a05a2c", "data": "#5f9ea0", "checkpoint": "#808080",
}  # fmt: skip


class Span(NamedTuple):
    row: Row
    name: str
    start_s: float
    end_s: float
    size: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Disjoint intervals, in order, that cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Total seconds of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def gaps(inside: Interval, taken: Sequence[Interval]) -> list[Interval]:
    """The parts of `inside` that `taken` (disjoint, in order) does not cover."""
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
    """Seconds covered by both of two lists of disjoint intervals, each in order."""
    seconds, i, j = 0.0, 0, 0
    while i < len(ones) and j < len(others):
        start, end = max(ones[i][0], others[j][0]), min(ones[i][1], others[j][1])
        seconds += max(0.0, end - start)
        if ones[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return seconds


# ---------------------------------------------------------------- traces


def chrome_trace(spans: Sequence[Span], title: str, *others: Sequence[Span]) -> dict[str, Any]:
    """The spans of a process (at least one) as a trace whose process is called `title`; see [Note: trace file].

    Args:
        spans: Of the process; of several ranks, those of rank 0.
        title: The trace's title.
        others: The spans of ranks 1, 2, ... of the same host, whose clock is the same.
    """
    origin = min(span.start_s for mine in (spans, *others) for span in mine)
    if not others:
        events = _process(spans, title, 0, origin)
    else:
        events = [
            event
            for rank, mine in enumerate((spans, *others))
            for event in _process(mine, f"rank {rank}: {title}", rank, origin)
        ]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _process(spans: Sequence[Span], title: str, rank: int, origin: float) -> list[dict[str, Any]]:
    """The events of one process, which has the number `rank` + 1."""
    events = [_metadata("process_name", 0, name=title), _metadata("process_sort_index", 0, sort_index=rank)]
    line = 0
    for name, rows in TRACE_ROWS.items():
        found = [span for span in spans if span.row in rows]
        for number, lane in enumerate([found] if name == "compute" else _lanes(found) or [[]]):
            line += 1
            events.append(_metadata("thread_name", line, name=name if number == 0 else f"{name} {number + 1}"))
            events.append(_metadata("thread_sort_index", line, sort_index=line))
            events += [_event(span, line, origin) for span in (_nested(lane) if name == "compute" else lane)]
    return [{**event, "pid": rank + 1} for event in events]


def _metadata(kind: str, line: int, **values: object) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": line, "name": kind, "args": values}


def _event(span: Span, line: int, origin: float) -> dict[str, Any]:
    name = f"wait for {span.name}" if span.row == "wait" else span.name
    event: dict[str, Any] = {"ph": "X", "pid": 1, "tid": line, "name": name, "cat": span.row}
    event |= {"ts": round((span.start_s - origin) * 1e6, 3), "dur": round(span.seconds * 1e6, 3)}
    if span.size and span.seconds > 0:
        key, unit = ("GB/s", "bytes") if span.row in ("h2d", "d2h") else ("1e9 parameters/s", "parameters")
        event["args"] = {unit: span.size, key: round(span.size / span.seconds / 1e9, 3)}
    return event


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spread overlapping spans over lines, so that each line is a sequence.

    An overlap of no more than `ERROR_S` is cut off instead: copies on one stream run one after the other.
    """
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: one.start_s):
        free = next((lane for lane in lanes if lane[-1].end_s <= span.start_s + ERROR_S), None)
        if free is None:
            lanes.append([span])
        else:
            free[-1] = free[-1]._replace(end_s=min(free[-1].end_s, span.start_s))
            free.append(span)
    return lanes


def _nested(spans: Sequence[Span]) -> list[Span]:
    """Cut each span of a stream to the one around it: they nest or are disjoint, but times are exact to microseconds only."""
    order = {"step": 0, "compute": 1, "wait": 2}
    nested: list[Span] = []
    outer: list[Span] = []
    for span in sorted(spans, key=lambda one: (one.start_s, order[one.row], -one.end_s)):
        while outer and outer[-1].end_s <= span.start_s:
            outer.pop()
        if outer:
            span = span._replace(end_s=min(span.end_s, outer[-1].end_s))
        outer.append(span)
        nested.append(span)
    return nested


def draw_trace(trace: dict[str, Any], path: Path) -> None:
    """Write a picture of a trace as PNG: its rows, its steps side by side, and a legend; UserError if that fails."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    places = [(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"]
    line_of = {place: line for line, place in enumerate(places, 1)}
    titles = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    several, title = len(titles) > 1, titles[0].removeprefix("rank 0: ")
    rows = {line_of[e["pid"], e["tid"]]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    labels = [
        f"rank {pid - 1} {rows[line_of[pid, tid]]}" if several else rows[line_of[pid, tid]] for pid, tid in places
    ]
    figure = Figure(figsize=(15, 1.5 + 0.55 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    seen: dict[str, Any] = {}
    heights = {"step": (-0.45, 0.9), "compute": (-0.4, 0.8), "wait": (-0.2, 0.4)}
    for category in ("step", "compute", "wait", None):
        bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and (event["cat"] if event["cat"] in heights else None) == category:
                line = line_of[event["pid"], event["tid"]]
                place = (line, _colour_name(event, rows[line]))
                bars.setdefault(place, []).append((event["ts"] / 1e6, max(event["dur"], 1.0) / 1e6))
        for (line, colour), pieces in bars.items():
            low, height = heights.get(category or "", (-0.35, 0.7))
            face, at = _COLOURS[colour], (line + low, height)
            edge = "white" if category == "compute" else face  # a thin bar is nothing but its edge
            drawn = axes.broken_barh(pieces, at, facecolors=face, edgecolor=edge, linewidth=0.4)
            seen.setdefault(colour, drawn)
    axes.set_yticks(list(rows), labels)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    below: dict[str, Any] = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
    axes.legend(seen.values(), seen.keys(), **below, ncols=len(seen), frameon=False)
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", str(path), "give another place with --png") from None


def _colour_name(event: dict[str, Any], row: str) -> str:
    if event["cat"] == "compute":
        return event["name"].split()[0] if event["name"].split()[0] in _COLOURS else "head"
    if event["cat"] in ("step", "wait"):
        return event["cat"]
    return row.split()[0]
