"""Spans as a trace that Chrome and Perfetto read (https://ui.perfetto.dev, or chrome://tracing), and as a picture.

The file is JSON in the trace event format: a complete event (`ph: X`) for each span, with `ts` and `dur` in microseconds, and
names of rows (`ph: M`). On the row of compute a wait lies inside the layer's visit that waits, and everything inside its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatrain.errors import UserError
from megatrain.metrics.spans import Span

ROWS = {
    "compute": ("step", "compute", "wait"),
    "H2D": ("h2d",),
    "D2H": ("d2h",),
    "AdamW": ("adamw", "add", "norm"),
    "data": ("data",),
    "checkpoint": ("checkpoint",),
}
"""Rows of the trace, from top to bottom, and the spans in each."""
_COLOURS = {
    "step": "#e8e8e8", "forward": "#4c9f70", "backward": "#3b6fb5", "recompute": "#8ab6d6", "head": "#8e6bbf", "wait": "#d9534f",
    "H2D": "#e0a030", "D2H": "#b8860b", "AdamW": "#a05a2c", "data": "#5f9ea0", "checkpoint": "#808080",
}  # fmt: skip


def chrome_trace(spans: Sequence[Span], title: str) -> dict[str, Any]:
    """The trace of some steps.

    Args:
        spans: In any order, one at least.
        title: Name of the process.
    """
    origin = min(span.start_s for span in spans)
    events: list[dict[str, Any]] = [_named("process_name", 0, title)]
    line = 0
    for name, kinds in ROWS.items():
        found = [span for span in spans if span.row in kinds]
        for number, lane in enumerate([found] if name == "compute" else _lanes(found) or [[]]):
            line += 1
            events.append(_named("thread_name", line, name if number == 0 else f"{name} {number + 1}"))
            events.append({"ph": "M", "pid": 1, "tid": line, "name": "thread_sort_index", "args": {"sort_index": line}})
            events += [_event(span, line, origin) for span in (_nested(lane) if name == "compute" else lane)]
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(kind: str, line: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": line, "name": kind, "args": {"name": name}}


def _event(span: Span, line: int, origin: float) -> dict[str, Any]:
    name = f"wait for {span.name}" if span.row == "wait" else span.name
    event: dict[str, Any] = {"ph": "X", "pid": 1, "tid": line, "name": name, "cat": span.row}
    event |= {"ts": round((span.start_s - origin) * 1e6, 3), "dur": round(span.seconds * 1e6, 3)}
    if span.size and span.seconds > 0:
        key, unit = ("GB/s", "bytes") if span.row in ("h2d", "d2h") else ("1e9 parameters/s", "parameters")
        event["args"] = {unit: span.size, key: round(span.size / span.seconds / 1e9, 3)}
    return event


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans that overlap on lines of their own, so that each line is a sequence."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: one.start_s):
        free = next((lane for lane in lanes if lane[-1].end_s <= span.start_s), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def _nested(spans: Sequence[Span]) -> list[Span]:
    """Spans of one stream lie inside each other or apart. Times are measured to some microseconds only, so an inner span is cut
    to its outer one."""
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
    """A picture of a trace: its rows, steps side by side, and what each colour is.

    Raises:
        UserError: It cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    title = next(e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name")
    figure = Figure(figsize=(15, 1.5 + 0.55 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    seen: dict[str, Any] = {}
    heights = {"step": (-0.45, 0.9), "compute": (-0.4, 0.8), "wait": (-0.2, 0.4)}
    for category in ("step", "compute", "wait", None):
        bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
        for event in trace["traceEvents"]:
            if event["ph"] == "X" and (event["cat"] if event["cat"] in heights else None) == category:
                place = (event["tid"], _colour_name(event, rows))
                bars.setdefault(place, []).append((event["ts"] / 1e6, max(event["dur"], 1.0) / 1e6))
        for (line, colour), pieces in bars.items():
            low, height = heights.get(category or "", (-0.35, 0.7))
            drawn = axes.broken_barh(
                pieces, (line + low, height), facecolors=_COLOURS[colour], edgecolor="white", linewidth=0.3
            )
            seen.setdefault(colour, drawn)
    axes.set_yticks(list(rows), list(rows.values()))
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title(title)
    axes.legend(
        seen.values(), seen.keys(), loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(seen), frameon=False
    )
    try:
        figure.savefig(path, format="png", dpi=110)
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", str(path), "give another place with --png") from None


def _colour_name(event: dict[str, Any], rows: dict[int, str]) -> str:
    if event["cat"] == "compute":
        return event["name"].split()[0] if event["name"].split()[0] in _COLOURS else "head"
    if event["cat"] in ("step", "wait"):
        return event["cat"]
    return rows[event["tid"]].split()[0]
