"""Pictures of runs: `loss.png`, one run as it trains; `megatrain plot`, several runs as a PNG and a self-contained HTML page."""

from __future__ import annotations

import html
import io
import logging
import re
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from megatrain.errors import UserError
from megatrain.metrics.record import StepRecord, read_records
from megatrain.text import one_line
from megatrain.units import number_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

Axis = Literal["step", "tokens", "hours"]
AXES: dict[Axis, str] = {"step": "step", "tokens": "processed tokens [millions]", "hours": "time in steps [hours]"}
MOST_POINTS = 1500
"""Points of a line; more than there are pixels only cost time."""
_SMOOTH_FROM = 20  # points; shorter lines are drawn as they are

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 72em; color: #222; background: #fff; }}
table {{ border-collapse: collapse; margin: 1em 0; }}
td, th {{ padding: .2em .9em; border-bottom: 1px solid #ddd; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }} svg {{ max-width: 100%; height: auto; }}
.dot {{ display: inline-block; width: .8em; height: .8em; border-radius: 50%; margin-right: .5em; }}
</style></head><body><h1>{title}</h1>
<table><tr>{head}</tr>
{rows}
</table>
{svg}
</body></html>
"""


class LossPlot:
    """Draws a run's picture at most every ten seconds, and for no more than 2% of the time."""

    def __init__(self, path: Path, title: str, *, interval_s: float = 10.0):
        self._path, self._title, self._interval_s = path, title, interval_s
        self._next_s = time.monotonic() + interval_s

    def update(self, records: Sequence[StepRecord]) -> None:
        if time.monotonic() >= self._next_s:
            self.draw(records)

    def draw(self, records: Sequence[StepRecord]) -> None:
        """Draw. A picture that cannot be written is a warning."""
        start = time.monotonic()
        try:
            draw_run(records, self._path, self._title)
        except OSError as error:
            logger.warning("%s: not drawn: %s", self._path, error)
        took_s = time.monotonic() - start
        self._next_s = time.monotonic() + max(self._interval_s, 50 * took_s)


def draw_run(records: Sequence[StepRecord], path: Path, title: str) -> None:
    """Write the picture of a run. The file is replaced as a whole, so that a viewer never reads half a picture."""
    figure, (loss, rate, norm, speed) = _panels((11, 7))
    figure.suptitle(one_line(title), parse_math=False)  # a name may have dollars
    trained = [record for record in records if record.step > 0]

    raw = points(trained, lambda record: record.loss)
    smoothed = len(raw[0]) > _SMOOTH_FROM
    loss.plot(*raw, color="tab:blue", alpha=0.35 if smoothed else 1.0, linewidth=1, label="training")
    if smoothed:
        loss.plot(raw[0], smooth(raw[1]), color="tab:blue", label="training, smoothed")
    held_out = points(records, lambda record: record.val_loss)
    if len(held_out[0]):
        loss.plot(*held_out, color="tab:orange", marker="o", markersize=4, label="validation")
    for record in trained:
        if record.skipped:
            loss.axvline(record.step, color="tab:red", linewidth=0.5, alpha=0.5)
    if loss.lines:
        loss.legend()
    rate.plot(*points(trained, lambda record: record.learning_rate), color="tab:green")
    norm.plot(*points(trained, lambda record: record.grad_norm), color="tab:red", linewidth=1)
    speed.plot(*points(trained, lambda record: record.processed_tokens_per_s), linewidth=1, label="processed")
    speed.plot(*points(trained, lambda record: record.trained_tokens_per_s), linewidth=1, label="trained")
    speed.set_ylim(bottom=0)
    speed.legend()
    _label(figure, "step", "loss [nats per token]", "learning rate", "gradient norm before clipping", "tokens/s")
    for axes in (loss, rate, norm, speed):
        axes.xaxis.get_major_locator().set_params(integer=True)
    temporary = path.with_name(path.name + ".new")
    figure.savefig(temporary, format="png", dpi=100)
    temporary.replace(path)


def _panels(inches: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure and its four axes."""
    # matplotlib takes half a second to import; a Figure without pyplot keeps no global state and needs no display
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=inches, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(2, 2).flat


def _label(figure: Figure, x: str, *titles: str) -> None:
    for axes, title in zip(figure.axes, titles, strict=True):
        axes.set_title(title)
        axes.set_xlabel(x)
        axes.grid(alpha=0.3)


def points(records: Sequence[StepRecord], value: Callable[[StepRecord], float | None]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, without those that are None; averaged in equal bins beyond `MOST_POINTS`."""
    pairs = [(record.step, found) for record in records if (found := value(record)) is not None]
    table = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    if len(table) > MOST_POINTS:
        table = np.stack([part.mean(axis=0) for part in np.array_split(table, MOST_POINTS)])
    return table[:, 0], table[:, 1]


def smooth(values: np.ndarray) -> np.ndarray:
    """Bias-corrected exponential moving average (the weights of each average sum to one)."""
    keep = 0.9
    smoothed, total, weight = np.empty_like(values), 0.0, 0.0
    for position, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        smoothed[position] = total / weight
    return smoothed


# ---------------------------------------------------------------- several runs


_Runs = Sequence[tuple[str, Sequence[StepRecord]]]
"""Names and records of runs."""


def plot_runs(runs: Sequence[Path], out: Path, axis: Axis = "step") -> tuple[Path, Path]:
    """Draw runs (their folders, or metrics.jsonl files) on top of each other into `out`.png and `out`.html, and return these.

    Raises:
        UserError: A run has no metrics, or a file cannot be written.
    """
    files = [_metrics_of(run) for run in runs]
    names = [file.parent.name for file in files]  # runs that share a folder name are named by their paths
    unique = [one_line(name if names.count(name) == 1 else str(f.parent)) for name, f in zip(names, files, strict=True)]
    histories = [(name, _records(file)) for name, file in zip(unique, files, strict=True)]
    figure = _figure(histories, axis)
    png, page = out.with_name(out.name + ".png"), out.with_name(out.name + ".html")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, format="png", dpi=110)
        page.write_text(_page(histories, figure), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot be written: {error.strerror}", str(out), "give another place: --out") from None
    return png, page


def _metrics_of(path: Path) -> Path:
    file = path / "metrics.jsonl" if path.is_dir() else path
    if file.is_file() and file.suffix == ".jsonl":
        return file
    missing = "holds no metrics.jsonl" if path.is_dir() else "does not exist"
    what = "is neither a run's folder nor its metrics.jsonl" if file.is_file() else missing
    raise UserError(what, str(path), "give the folder of a run (run.dir)")


def _records(file: Path) -> list[StepRecord]:
    if records := read_records(file):
        return records
    raise UserError("holds no step yet", str(file), "wait for the run's first step")


def x_values(records: Sequence[StepRecord], axis: Axis) -> dict[int, float]:
    """Step number -> x coordinate."""
    reached = {
        "step": (float(record.step) for record in records),
        "tokens": accumulate(record.processed_tokens / 1e6 for record in records),
        "hours": accumulate(record.step_s / 3600 for record in records),
    }
    return {record.step: x for record, x in zip(records, reached[axis], strict=True)}


def _figure(runs: _Runs, axis: Axis) -> Figure:
    figure, (loss, val, norm, speed) = _panels((12, 8))
    curves = []
    for number, (_, all_records) in enumerate(runs):
        colour, x_of = f"C{number}", x_values(all_records, axis)
        trained = [record for record in all_records if record.step > 0]

        def line(
            value: Callable[[StepRecord], float | None], records: Sequence[StepRecord], x_of: dict[int, float] = x_of
        ) -> tuple[np.ndarray, np.ndarray]:
            steps, values = points(records, value)
            return np.interp(steps, list(x_of), list(x_of.values())), values

        x, y = line(lambda record: record.loss, trained)
        if len(x) > _SMOOTH_FROM:
            loss.plot(x, y, color=colour, alpha=0.25, linewidth=0.8)
            y = smooth(y)
        (named,) = loss.plot(x, y, color=colour)
        curves.append(named)
        val.plot(*line(lambda record: record.val_loss, all_records), color=colour, marker="o", markersize=3)
        norm.plot(*line(lambda record: record.grad_norm, trained), color=colour, linewidth=0.8)
        speed.plot(*line(lambda record: record.processed_tokens_per_s, trained), color=colour, linewidth=0.8)
    titles = ("training loss [nats per token], smoothed", "validation loss [nats per token]")
    _label(figure, AXES[axis], *titles, "gradient norm before clipping", "processed tokens/s")
    speed.set_ylim(bottom=0)
    legend = loss.legend(curves, [name for name, _ in runs])  # by itself it would leave out names that begin with _
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _page(runs: _Runs, figure: Figure) -> str:
    from matplotlib.colors import to_hex

    names = ("run", "steps", "first loss", "last loss", "validation", "lowest validation", "tokens/s", "skipped")
    rows = []
    for number, (name, records) in enumerate(runs):
        dot = f'<span class="dot" style="background:{to_hex(f"C{number}")}"></span>'
        cells = [f"{dot}{html.escape(name)}", *map(html.escape, _summary(records))]
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    svg = io.StringIO()
    figure.savefig(svg, format="svg")
    element = svg.getvalue()[svg.getvalue().index("<svg") :]  # without the XML header; below without links
    return _PAGE.format(
        title=html.escape(", ".join(name for name, _ in runs)),
        head="".join(f"<th>{name}</th>" for name in names),
        rows="\n".join(rows),
        svg=re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL),
    )


def _summary(records: Sequence[StepRecord]) -> list[str]:
    trained = [record for record in records if record.step > 0]
    losses = [record.loss for record in trained if record.loss is not None]
    val = [record.val_loss for record in records if record.val_loss is not None]
    seconds = sum(record.step_s for record in trained)
    tokens = sum(record.processed_tokens for record in trained)
    return [
        f"{records[-1].step:,}",
        number_text(losses[0] if losses else None, ".4f"),
        number_text(losses[-1] if losses else None, ".4f"),
        number_text(val[-1] if val else None, ".4f"),
        number_text(min(val, default=None), ".4f"),
        number_text(tokens / seconds if seconds else None, ",.0f"),
        f"{records[-1].skipped_steps:,}",
    ]
